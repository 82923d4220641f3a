"""An embeddings endpoint in OpenAI's protocol on loopback, with faults injected on request."""

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np


class FakeEmbeddings:
    """A context manager. A text's vector is drawn from its hash and is longer than one.

    faults: for each next request a status, "cut", "invalid", "short" (one vector too few), "shuffled" (in another
    order), "nan" or None. `requests`: the texts of each request, answered or not; `tokens`: counted over the answers.
    """

    def __init__(self, width: int = 8, key: str | None = None, faults: Iterator[int | str | None] = iter(())) -> None:
        self.width, self.key, self.faults = width, key, faults
        self.requests: list[list[str]] = []
        self.tokens = 0
        self._lock = threading.Lock()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                fake._answer(self)

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)

    def __enter__(self) -> "FakeEmbeddings":
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def vector(self, text: str) -> list[float]:
        seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
        return (3 * np.random.default_rng(seed).normal(size=self.width)).tolist()

    def _answer(self, handler: BaseHTTPRequestHandler) -> None:
        body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        with self._lock:
            self.requests.append(body["input"])
            fault = next(self.faults, None)
        authorization = handler.headers.get("Authorization", "")
        if self.key is not None and authorization != f"Bearer {self.key}":
            self._send(handler, {"error": {"message": f"Incorrect API key provided: {authorization}"}}, 401)
            return
        if handler.path != "/v1/embeddings" or body["encoding_format"] != "float":
            self._send(handler, {"error": {"message": f"no {handler.path}"}}, 404)
            return
        if isinstance(fault, int):
            self._send(handler, {"error": {"message": f"injected fault {fault}"}}, fault)
            return
        rows = [{"object": "embedding", "index": n, "embedding": self.vector(t)} for n, t in enumerate(body["input"])]
        if fault == "short":
            rows.pop()
        elif fault == "shuffled":
            rows.reverse()
        elif fault == "nan":
            rows[0]["embedding"][0] = float("nan")
        count = sum(len(text.split()) for text in body["input"])
        with self._lock:
            self.tokens += count
        usage = {"prompt_tokens": count, "total_tokens": count}
        self._send(handler, {"object": "list", "model": body["model"], "data": rows, "usage": usage}, 200, fault)

    def _send(self, handler: BaseHTTPRequestHandler, value: dict, status: int, fault: str | int | None = None) -> None:
        content = json.dumps(value).encode() if fault != "invalid" else b'{"data": ['
        handler.send_response(status)
        handler.send_header("Content-Type", "application/json")
        handler.send_header("Content-Length", str(len(content)))
        if status == 429:
            handler.send_header("Retry-After", "0.01")
        handler.end_headers()
        handler.wfile.write(content[: len(content) // 2] if fault == "cut" else content)
        if fault == "cut":
            handler.wfile.flush()
            handler.connection.close()
            handler.close_connection = True
