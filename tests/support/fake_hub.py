"""A dataset repository behind the Hub's HTTP interface, on loopback: what the real clients ask for, and no more."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit


class FakeHub:
    """Serves `folder` as the dataset `repo` at commit `revision`; everything else does not exist. A context manager.

    `requests`: every (method, path) asked for. `failing`: statuses to answer the next file requests with.
    """

    def __init__(self, folder: Path, repo: str, revision: str) -> None:
        self.folder, self.repo, self.revision = folder, repo, revision
        self.requests: list[tuple[str, str]] = []
        self.failing: list[int] = []
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
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _answer(self, handler: BaseHTTPRequestHandler) -> None:
        path = unquote(urlsplit(handler.path).path)
        body = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
        self.requests.append((handler.command, path))
        api, files = f"/api/datasets/{self.repo}", f"/datasets/{self.repo}/resolve/{self.revision}/"
        if path in (api, f"{api}/revision/{self.revision}"):
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
        return {"type": "file", "path": name, "size": (self.folder / name).stat().st_size, "oid": f"oid-{name}"}

    def _file(self, handler: BaseHTTPRequestHandler, name: str) -> None:
        path = self.folder / name
        if not path.is_file():
            self._json(handler, {"error": "Entry not found"}, 404, {"X-Error-Code": "EntryNotFound"})
            return
        if self.failing:
            self._json(handler, {"error": "try again"}, self.failing.pop(0))
            return
        content, status, headers = path.read_bytes(), 200, {}
        total = len(content)
        if wanted := handler.headers.get("Range"):
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            end = min(int(last) + 1 if last else total, total)
            content, status = content[int(first) : end], 206
            headers["Content-Range"] = f"bytes {first}-{end - 1}/{total}"
        headers |= {"ETag": f'"oid-{name}"', "X-Repo-Commit": self.revision, "Accept-Ranges": "bytes"}
        self._send(handler, content, status, "application/octet-stream", headers)

    def _json(
        self, handler: BaseHTTPRequestHandler, value: object, status: int = 200, headers: dict | None = None
    ) -> None:
        self._send(handler, json.dumps(value).encode(), status, "application/json", headers or {})

    def _send(
        self, handler: BaseHTTPRequestHandler, content: bytes, status: int, kind: str, headers: dict[str, str]
    ) -> None:
        handler.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(content)), **headers}.items():
            handler.send_header(name, value)
        handler.end_headers()
        if handler.command != "HEAD":
            handler.wfile.write(content)
