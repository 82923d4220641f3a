"""An embeddings endpoint in OpenAI's protocol on loopback, with faults injected on request."""

import hashlib
import threading
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from tests.support.servers.http_server import FakeServer, Request, Response, json_response


class FakeEmbeddings(FakeServer):
    """A context manager. A text's vector is drawn from its hash and is longer than one.

    faults: for each next request a status, "cut", "invalid", "short" (one vector too few), "shuffled" (in another
    order), "nan" or None. `requests`: the texts of each request, answered or not; `tokens`: counted over the answers.
    """

    base_path = "/v1"

    def __init__(self, width: int = 8, key: str | None = None, faults: Iterator[int | str | None] = iter(())) -> None:
        self.width, self.key, self.faults = width, key, faults
        self.requests: list[list[str]] = []
        self.tokens = 0
        self._lock = threading.Lock()

    def vector(self, text: str) -> list[float]:
        seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
        return (3 * np.random.default_rng(seed).normal(size=self.width)).tolist()

    def respond(self, request: Request) -> Response:
        body = request.json()
        with self._lock:
            self.requests.append(body["input"])
            fault = next(self.faults, None)
        authorization = request.headers.get("Authorization", "")
        if self.key is not None and authorization != f"Bearer {self.key}":
            return _error(401, f"Incorrect API key provided: {authorization}")
        if request.path != "/v1/embeddings" or body["encoding_format"] != "float":
            return _error(404, f"no {request.path}")
        if isinstance(fault, int):
            return _error(fault, f"injected fault {fault}")
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
        response = json_response({"object": "list", "model": body["model"], "data": rows, "usage": usage})
        if fault == "invalid":
            return replace(response, body=b'{"data": [')
        if fault == "cut":
            return replace(response, body=response.body[: len(response.body) // 2], length=len(response.body))
        return response


def _error(status: int, message: str) -> Response:
    return json_response({"error": {"message": message}}, status, {"Retry-After": "0.01"} if status == 429 else None)
