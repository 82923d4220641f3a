"""A repository behind the Hub's HTTP interface, on loopback: what the real clients ask for, and no more.

Files over a few hundred bytes are listed as large ones, by sha256, small ones by git's digest, as the Hub does. Faults
are injected into the answers to requests for files, in the order they come.
"""

import hashlib
import json
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Literal
from urllib.parse import unquote

from tests.support.servers.http_server import FakeServer, Request, Response, json_response

ACCEPTED = "hf_accepted"  # the token of a user who has accepted a gated repository's terms
LARGE = 300  # bytes
RETRY_AFTER = 3  # seconds

Fault = int | Literal["cut", "short", "altered", "hang up", "throttled", "held"]
# A status to answer with; the connection cut amid the body; a body that ends early but is called whole; bytes changed
# on the way; no answer at all; 429 with a Retry-After; an answer that waits until `released` is set.


class FakeHub(FakeServer):
    """Serves `folder` as the repository `repo` at commit `revision`; everything else does not exist. A context manager.

    `requests`: (method, path) of every request. `faults`: faults of the next answers to requests for content; `always`:
    the fault of every such answer, by the end of the path. `listing_faults`: those of the next answers to listings.
    `gated`: everyone sees the list of files, and only a user whose token is `ACCEPTED` their content. `kind`:
    "datasets" or "models"; of a model `main` is a name of the commit.
    """

    def __init__(self, folder: Path, repo: str, revision: str, *, gated: bool = False, kind: str = "datasets") -> None:
        self.folder, self.repo, self.revision, self.gated, self.kind = folder, repo, revision, gated, kind
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

    def __exit__(self, *exception: object) -> None:
        self.released.set()
        super().__exit__(*exception)

    def respond(self, request: Request) -> Response | None:
        path = request.path
        self.requests.append((request.method, path))
        self.request_times.append(time.monotonic())
        prefix = "" if self.kind == "models" else f"/{self.kind}"
        api, files = f"/api/{self.kind}/{self.repo}", f"{prefix}/{self.repo}/resolve/{self.revision}/"
        if path.startswith(api) and self.listing_faults:
            return self._fail(self.listing_faults.pop(0), None)
        named = {
            self.revision,
            *(["main"] if self.kind == "models" else []),
        }  # a data set is always asked for by its commit
        if path in (api, *(f"{api}/revision/{name}" for name in named)):
            siblings = [{"rfilename": name} for name in self._names()]
            return json_response({"id": self.repo, "sha": self.revision, "siblings": siblings, "tags": []})
        if path.startswith(f"{api}/revision/"):
            return json_response({"error": "Invalid rev id"}, 404, {"X-Error-Code": "RevisionNotFound"})
        if path.startswith(f"{api}/tree/{self.revision}"):
            inside = path.removeprefix(f"{api}/tree/{self.revision}").strip("/")
            return json_response(self._tree(self.folder / inside, "recursive=true" in request.query.lower()))
        if path == f"{api}/paths-info/{self.revision}":
            wanted = self._wanted(request.body)
            return json_response([self._entry(name) for name in self._names() if name in wanted])
        if path.startswith(files):
            if self.gated and request.headers.get("Authorization") != f"Bearer {ACCEPTED}":
                status = 403 if "Authorization" in request.headers else 401
                return json_response({"error": "restricted"}, status, {"X-Error-Code": "GatedRepo"})
            return self._file(request, path.removeprefix(files))
        return json_response({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})

    def _tree(self, folder: Path, recursive: bool) -> list[dict]:
        paths = sorted(folder.rglob("*") if recursive else folder.glob("*"))
        names = [(str(path.relative_to(self.folder)), path.is_dir()) for path in paths]
        return [{"type": "directory", "path": n, "oid": n} if is_dir else self._entry(n) for n, is_dir in names]

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

    def _file(self, request: Request, name: str) -> Response | None:
        path = self.folder / name
        if not path.is_file():
            return json_response({"error": "Entry not found"}, 404, {"X-Error-Code": "EntryNotFound"})
        entry = self._entry(name)
        etag = entry["lfs"]["oid"] if "lfs" in entry else entry["oid"]
        content, status = path.read_bytes(), 200
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": self.revision, "Accept-Ranges": "bytes"}
        if wanted := request.headers.get("Range"):
            self.ranges.append((name, wanted))
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            total = len(content)
            end = min(int(last) + 1 if last else total, total)
            content, status = content[int(first) : end], 206
            headers["Content-Range"] = f"bytes {first}-{end - 1}/{total}"
        response = Response(status, content, headers=headers)
        fault = self._fault(name, request.method)
        if fault == "held":
            self.held.add(name)
            self.released.wait()
        if fault is None or fault == "held":
            self.served[name] += request.method == "GET"
            return response
        return self._fail(fault, response)

    def _fault(self, name: str, command: str) -> Fault | None:
        """The fault of this request for content; a fault of the body waits for a request whose answer has one."""
        bodily = ("cut", "short", "altered", "held")
        with self._lock:
            lasting = next((fault for end, fault in self.always.items() if name.endswith(end)), None)
            if lasting is not None:
                return None if command == "HEAD" and lasting in bodily else lasting
            if name == "README.md" or not self.faults or (command == "HEAD" and self.faults[0] in bodily):
                return None
            return self.faults.pop(0)

    def _fail(self, fault: Fault, response: Response | None) -> Response | None:
        """The answer with the fault in it; `response` is the one without, None for a listing."""
        self.met[fault] += 1
        if isinstance(fault, int):
            return json_response({"error": "try again"}, fault)
        if fault == "throttled":
            self.throttled_at.append(time.monotonic())
            return json_response({"error": "slow down"}, 429, {"Retry-After": str(RETRY_AFTER)})
        if response is None or fault == "hang up":
            return None
        half = response.body[: len(response.body) // 2]
        if fault == "short":
            return replace(response, body=half)
        if fault == "altered":
            return replace(response, body=response.body[:-40] + bytes(255 - byte for byte in response.body[-40:]))
        return replace(response, body=half, length=len(response.body))


def _git(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\x00" % len(content) + content, usedforsecurity=False).hexdigest()
