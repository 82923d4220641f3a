"""A dataset repository behind the Hub's HTTP interface, on loopback: what the real clients ask for, and no more.

Files over a few hundred bytes are listed as large ones, by sha256, small ones by git's digest, as the Hub does. Faults
are injected into the answers to requests for files, in the order they come.
"""

import hashlib
import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Literal
from urllib.parse import unquote, urlsplit

LARGE = 300  # bytes
RETRY_AFTER = 3  # seconds

Fault = int | Literal["cut", "short", "altered", "hang up", "throttled", "held"]
# A status to answer with; the connection cut amid the body; a body that ends early but is called whole; bytes changed
# on the way; no answer at all; 429 with a Retry-After; an answer that waits until `released` is set.


class FakeHub:
    """Serves `folder` as the dataset `repo` at commit `revision`; everything else does not exist. A context manager.

    `requests`: (method, path) of every request. `faults`: faults of the next answers to requests for content; `always`:
    the fault of every such answer, by the end of the path. `listing_faults`: those of the next answers to listings.
    """

    def __init__(self, folder: Path, repo: str, revision: str) -> None:
        self.folder, self.repo, self.revision = folder, repo, revision
        self.requests: list[tuple[str, str]] = []
        self.request_times: list[float] = []  # monotonic seconds, one per request
        self.throttled_at: list[float] = []
        self.ranges: list[tuple[str, str]] = []  # (file, Range header) of the requests for a part
        self.faults: list[Fault] = []
        self.always: dict[str, Fault] = {}
        self.listing_faults: list[Fault] = []
        self.held: set[str] = set()  # files that wait
        self.released = threading.Event()
        self.met: Counter[Fault] = Counter()  # faults that took place
        self.served: Counter[str] = Counter()  # whole answers for content, by file
        self._lock = threading.Lock()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub._answer(self)

            do_HEAD = do_POST = do_GET

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)

    def __enter__(self) -> "FakeHub":
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.released.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _answer(self, handler: BaseHTTPRequestHandler) -> None:
        path = unquote(urlsplit(handler.path).path)
        body = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
        self.requests.append((handler.command, path))
        self.request_times.append(time.monotonic())
        api, files = f"/api/datasets/{self.repo}", f"/datasets/{self.repo}/resolve/{self.revision}/"
        if path.startswith(api) and self.listing_faults:
            self._fail(handler, self.listing_faults.pop(0))
        elif path in (api, f"{api}/revision/{self.revision}"):
            siblings = [{"rfilename": name} for name in self._names()]
            self._json(handler, {"id": self.repo, "sha": self.revision, "siblings": siblings, "tags": []})
        elif path.startswith(f"{api}/revision/"):
            self._json(handler, {"error": "Invalid rev id"}, 404, {"X-Error-Code": "RevisionNotFound"})
        elif path.startswith(f"{api}/tree/{self.revision}"):
            inside = path.removeprefix(f"{api}/tree/{self.revision}").strip("/")
            recursive = "recursive=true" in urlsplit(handler.path).query.lower()
            self._json(handler, self._tree(self.folder / inside, recursive))
        elif path == f"{api}/paths-info/{self.revision}":
            wanted = self._wanted(body)
            self._json(handler, [self._entry(name) for name in self._names() if name in wanted])
        elif path.startswith(files):
            self._file(handler, path.removeprefix(files))
        else:
            self._json(handler, {"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})

    def _tree(self, folder: Path, recursive: bool) -> list[dict]:
        found = sorted(folder.rglob("*") if recursive else folder.glob("*"))
        names = [(str(path.relative_to(self.folder)), path.is_dir()) for path in found]
        return [{"type": "directory", "path": n, "oid": n} if folder else self._entry(n) for n, folder in names]

    def _wanted(self, body: bytes) -> set[str]:
        try:
            return set(json.loads(body)["paths"])
        except ValueError:
            return {unquote(part.partition("=")[2].replace("+", " ")) for part in body.decode().split("&")}

    def _names(self) -> list[str]:
        return sorted(str(path.relative_to(self.folder)) for path in self.folder.rglob("*") if path.is_file())

    def _entry(self, name: str) -> dict:
        content = (self.folder / name).read_bytes()
        entry = {"type": "file", "path": name, "size": len(content), "oid": _git(content)}
        if len(content) > LARGE:
            sha256 = hashlib.sha256(content).hexdigest()
            entry["lfs"] = {"oid": sha256, "size": len(content), "pointerSize": 134}
        return entry

    def _file(self, handler: BaseHTTPRequestHandler, name: str) -> None:
        path = self.folder / name
        if not path.is_file():
            self._json(handler, {"error": "Entry not found"}, 404, {"X-Error-Code": "EntryNotFound"})
            return
        content, status, headers = path.read_bytes(), 200, {}
        total = len(content)
        if wanted := handler.headers.get("Range"):
            self.ranges.append((name, wanted))
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            end = min(int(last) + 1 if last else total, total)
            content, status = content[int(first) : end], 206
            headers["Content-Range"] = f"bytes {first}-{end - 1}/{total}"
        entry = self._entry(name)
        etag = entry["lfs"]["oid"] if "lfs" in entry else entry["oid"]
        headers |= {"ETag": f'"{etag}"', "X-Repo-Commit": self.revision, "Accept-Ranges": "bytes"}

        def send(body: bytes, length: int | None = None) -> None:
            self._send(handler, body, status, "application/octet-stream", headers, length)

        fault = self._fault(name, handler.command)
        if fault == "held":
            self.held.add(name)
            self.released.wait()
        if fault is None or fault == "held":
            self.served[name] += handler.command == "GET"
            send(content)
            return
        self._fail(handler, fault, send, content)

    def _fault(self, name: str, command: str) -> Fault | None:
        """What befalls this request for content; a fault of the body waits for a request that has one."""
        bodily = ("cut", "short", "altered", "held")
        with self._lock:
            lasting = next((fault for end, fault in self.always.items() if name.endswith(end)), None)
            if lasting is not None:
                return None if command == "HEAD" and lasting in bodily else lasting
            if name == "README.md" or not self.faults or (command == "HEAD" and self.faults[0] in bodily):
                return None
            return self.faults.pop(0)

    def _fail(
        self,
        handler: BaseHTTPRequestHandler,
        fault: Fault,
        send: Callable[..., None] = lambda body, length=None: None,
        content: bytes = b"",
    ) -> None:
        self.met[fault] += 1
        if isinstance(fault, int):
            self._json(handler, {"error": "try again"}, fault)
        elif fault == "throttled":
            self.throttled_at.append(time.monotonic())
            self._json(handler, {"error": "slow down"}, 429, {"Retry-After": str(RETRY_AFTER)})
        elif fault == "short":
            send(content[: len(content) // 2])
        elif fault == "altered":
            send(content[:-40] + bytes(255 - byte for byte in content[-40:]))
        else:  # "cut" amid the body, "hang up" before it
            handler.close_connection = True
            if fault == "cut":
                send(content[: len(content) // 2], len(content))

    def _json(
        self, handler: BaseHTTPRequestHandler, value: object, status: int = 200, headers: dict | None = None
    ) -> None:
        self._send(handler, json.dumps(value).encode(), status, "application/json", headers or {})

    def _send(
        self,
        handler: BaseHTTPRequestHandler,
        content: bytes,
        status: int,
        kind: str,
        headers: dict[str, str],
        length: int | None = None,
    ) -> None:
        handler.send_response(status)
        told = str(len(content) if length is None else length)
        for name, value in {"Content-Type": kind, "Content-Length": told, **headers}.items():
            handler.send_header(name, value)
        handler.end_headers()
        if handler.command != "HEAD":
            handler.wfile.write(content)


def _git(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\x00" % len(content) + content, usedforsecurity=False).hexdigest()
