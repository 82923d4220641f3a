"""The Hub's interface for uploads, on loopback: repositories with commits, large files by sha256, tokens with rights.

What was uploaded can be listed and downloaded again. Faults are injected into the answers by the name of the call.
"""

import base64
import hashlib
import json
import re
import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import parse_qs

import yaml

from tests.support.servers.http_server import FakeServer, Request, Response, json_response

LARGE = 300  # bytes: a larger file, or one that is no text, is stored by sha256

# A status; no answer; an answer that waits until `released` is set; the page of a proxy.
Fault = int | Literal["hang up", "held", "page"]
Kind = Literal["model", "dataset"]


@dataclass
class Repository:
    """`files`: content by path. `commits`: their hashes, the newest last."""

    private: bool
    files: dict[str, bytes] = field(default_factory=dict)
    commits: list[str] = field(default_factory=list)
    summaries: list[str] = field(default_factory=list)

    def commit(self, summary: str) -> str:
        state = [summary, *(f"{path}:{_git(content)}" for path, content in sorted(self.files.items())), *self.commits]
        self.commits.append(hashlib.sha1("\n".join(state).encode(), usedforsecurity=False).hexdigest())
        self.summaries.append(summary)
        return self.commits[-1]


class UploadHub(FakeServer):
    """A context manager. `writers`: token -> the namespaces it may write to; another token is refused with 401."""

    def __init__(self, writers: dict[str, set[str]]) -> None:
        self.writers = writers
        self.repositories: dict[tuple[Kind, str], Repository] = {}
        self.large: dict[str, bytes] = {}  # by sha256
        self.calls: list[str] = []  # names of the calls in order
        self.received: Counter[str] = Counter()  # whole uploads by sha256
        self.faults: dict[str, list[Fault]] = {}  # of the next calls of a name
        self.reached: dict[str, threading.Event] = {"commit": threading.Event()}
        self.released = threading.Event()
        self._lock = threading.Lock()

    def __exit__(self, *exception: object) -> None:
        self.released.set()
        super().__exit__(*exception)

    def count(self, name: str) -> int:
        """How often the call was made."""
        return self.calls.count(name)

    def respond(self, request: Request) -> Response | None:
        method = "GET" if request.method == "HEAD" else request.method
        matches = ((name, re.fullmatch(pattern, request.path)) for m, pattern, name in _CALLS if m == method)
        name, match = next((pair for pair in matches if pair[1]), ("", None))
        if match is None:
            return json_response({"error": f"no such call: {method} {request.path}"}, 404)
        with self._lock:
            self.calls.append(name)
            fault = self.faults[name].pop(0) if self.faults.get(name) else None
        if fault == "hang up":
            return None
        if fault == "page":
            return Response(502, b"<html>Bad gateway</html>", "text/html")
        if isinstance(fault, int):
            # A server may well repeat what it was sent.
            return json_response({"error": f"refused {request.headers.get('Authorization')}"}, fault)
        if fault == "held":
            self.reached[name].set()
            self.released.wait()
        if name in ("put", "verify"):
            return getattr(self, f"_{name}")(request, **match.groupdict())
        token = (request.headers.get("Authorization") or "").removeprefix("Bearer ")
        if token not in self.writers:
            return json_response({"error": "Invalid credentials in Authorization header"}, 401)
        return getattr(self, f"_{name}")(request, token, **match.groupdict())

    def _whoami(self, request: Request, token: str) -> Response:
        user = min(self.writers[token], default="reader")
        return json_response({"type": "user", "name": user, "auth": {"accessToken": {"role": "write"}}})

    def _create(self, request: Request, token: str) -> Response:
        wanted = request.json()
        name, kind = f"{wanted['organization']}/{wanted['name']}", wanted.get("type", "model")
        if wanted["organization"] not in self.writers[token]:
            return json_response({"error": "You don't have the rights to create a model under this namespace"}, 403)
        url = f"{self.url}/{'datasets/' if kind == 'dataset' else ''}{name}"
        if (kind, name) in self.repositories:
            return json_response({"error": "You already created this repo", "url": url}, 409)
        repository = Repository(wanted.get("visibility") == "private", {".gitattributes": b"*.bin filter=lfs\n"})
        repository.commit("initial commit")
        self.repositories[kind, name] = repository
        return json_response({"url": url})

    def _validate(self, request: Request, token: str) -> Response:
        wanted = request.json()
        errors = card_errors(wanted["content"], wanted["repoType"])
        return json_response(
            {"errors": [{"message": error} for error in errors], "warnings": []}, 400 if errors else 200
        )

    def _info(self, request: Request, token: str, kinds: str, repo: str, commit: str | None = None) -> Response:
        repository = self._find(kinds, repo, token)
        if repository is None:
            return _missing()
        siblings = [{"rfilename": path} for path in repository.files]
        about = {"id": repo, "sha": repository.commits[-1], "private": repository.private, "siblings": siblings}
        return json_response({**about, "tags": [], "downloads": 0, "likes": 0})

    def _tree(
        self, request: Request, token: str, kinds: str, repo: str, commit: str, folder: str | None = None
    ) -> Response:
        repository = self._find(kinds, repo, token)
        if repository is None:
            return _missing()
        start = f"{folder}/" if folder else ""
        inside = {path: content for path, content in sorted(repository.files.items()) if path.startswith(start)}
        if "recursive=true" in request.query.lower():
            return json_response([_entry(path, content) for path, content in inside.items()])
        names = {path.removeprefix(start).partition("/")[0]: path for path in inside}
        folders = [name for name, path in names.items() if start + name != path]
        listed = [_entry(path, inside[path]) for name, path in names.items() if start + name == path]
        return json_response([*({"type": "directory", "path": start + n, "oid": n} for n in folders), *listed])

    def _paths(self, request: Request, token: str, kinds: str, repo: str, commit: str) -> Response:
        repository = self._find(kinds, repo, token)
        if repository is None:
            return _missing()
        try:
            wanted = set(request.json()["paths"])
        except ValueError:  # some clients send a form
            wanted = set(parse_qs(request.body.decode())["paths"])
        return json_response([_entry(p, content) for p, content in repository.files.items() if p in wanted])

    def _preupload(self, request: Request, token: str, kinds: str, repo: str) -> Response:
        repository = self._find(kinds, repo, token)
        if repository is None:
            return _missing()
        files = []
        for wanted in request.json()["files"]:
            sample = base64.b64decode(wanted["sample"])
            known = repository.files.get(wanted["path"])
            mode = "lfs" if wanted["size"] > LARGE or b"\0" in sample else "regular"
            oid = None if known is None else (_sha256 if _is_large(known) else _git)(known)
            files.append({"path": wanted["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        return json_response({"files": files})

    def _batch(self, request: Request, token: str, repo: str) -> Response:
        objects = []
        for wanted in request.json()["objects"]:
            answer = {"oid": wanted["oid"], "size": wanted["size"]}
            if wanted["oid"] not in self.large:
                upload = {"href": f"{self.url}/lfs/{wanted['oid']}"}
                answer["actions"] = {"upload": upload, "verify": {"href": f"{self.url}/lfs-verify"}}
            objects.append(answer)
        return json_response({"transfer": "basic", "objects": objects})

    def _put(self, request: Request, oid: str) -> Response:
        if _sha256(request.body) != oid:
            return json_response({"error": "another digest"}, 400)
        self.large[oid] = request.body
        self.received[oid] += 1
        return Response()

    def _verify(self, request: Request) -> Response:
        wanted = request.json()
        whole = len(self.large.get(wanted["oid"], b"")) == wanted["size"]
        return json_response({}, 200 if whole else 404)

    def _commit(self, request: Request, token: str, kinds: str, repo: str) -> Response:
        repository = self._find(kinds, repo, token)
        if repository is None:
            return _missing()
        if repo.partition("/")[0] not in self.writers[token]:
            return json_response({"error": "Authorization error."}, 403)
        lines = [json.loads(line) for line in request.body.splitlines()]
        header = lines[0]["value"]
        if header.get("parentCommit") not in (None, repository.commits[-1]):
            return json_response({"error": "The expected parent commit does not match"}, 412)
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "file":
                repository.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile" and value["oid"] in self.large:
                repository.files[value["path"]] = self.large[value["oid"]]
            else:
                return json_response({"error": f"cannot commit {line['key']} {value}"}, 400)
        oid = repository.commit(header["summary"])
        return json_response({"success": True, "commitOid": oid, "commitUrl": f"{self.url}/{repo}/commit/{oid}"})

    def _resolve(self, request: Request, token: str, kinds: str | None, repo: str, commit: str, path: str) -> Response:
        repository = self._find(kinds or "models", repo, token)
        if repository is None:
            return _missing()
        if path not in repository.files:
            return json_response({"error": "Entry not found"}, 404, {"X-Error-Code": "EntryNotFound"})
        content = repository.files[path]
        etag = (_sha256 if _is_large(content) else _git)(content)
        return Response(200, content, headers={"ETag": f'"{etag}"', "X-Repo-Commit": repository.commits[-1]})

    def _find(self, kinds: str, repo: str, token: str) -> Repository | None:
        repository = self.repositories.get(("dataset" if kinds == "datasets" else "model", repo))
        hidden = repository and repository.private and repo.partition("/")[0] not in self.writers[token]
        return None if hidden else repository


_REPO = r"(?P<repo>[\w.-]+/[\w.-]+)"
_API = rf"/api/(?P<kinds>models|datasets)/{_REPO}"
_CALLS = (
    ("GET", r"/api/whoami-v2", "whoami"),
    ("POST", r"/api/repos/create", "create"),
    ("POST", r"/api/validate-yaml", "validate"),
    ("GET", _API, "info"),
    ("GET", rf"{_API}/revision/(?P<commit>\w+)", "info"),
    ("GET", rf"{_API}/tree/(?P<commit>\w+)(?:/(?P<folder>.+))?", "tree"),
    ("POST", rf"{_API}/paths-info/(?P<commit>\w+)", "paths"),
    ("POST", rf"{_API}/preupload/main", "preupload"),
    ("POST", rf"{_API}/commit/main", "commit"),
    ("POST", rf"/(?:datasets/)?{_REPO}\.git/info/lfs/objects/batch", "batch"),
    ("PUT", r"/lfs/(?P<oid>\w+)", "put"),
    ("POST", r"/lfs-verify", "verify"),
    ("GET", rf"/(?:(?P<kinds>datasets)/)?{_REPO}/resolve/(?P<commit>\w+)/(?P<path>.+)", "resolve"),
)


def card_errors(card: str, kind: Kind) -> list[str]:
    """What the Hub's schema of a card's front matter refuses, as its documentation states it."""
    match = re.match(r"---\n(.*?)\n---\n", card, re.DOTALL)
    if not match:
        return ["no front matter"]
    about: dict[str, Any] = yaml.safe_load(match[1])
    errors = [f"{name}: not a list of texts" for name in ("tags", "datasets") if not _texts(about.get(name, []))]
    if not re.fullmatch(r"[a-z0-9.-]+", about.get("license", "")):
        errors.append("license: not an identifier")
    if about.get("license") == "other" and not about.get("license_name"):
        errors.append("license_name: needed with license other")
    languages = about.get("language", [])
    if not _texts(languages) or not all(re.fullmatch("[a-z]{2,3}", language) for language in languages):
        errors.append("language: not ISO 639 codes")
    for model in about.get("model-index", []):
        if not model.get("name"):
            errors.append("model-index: no name")
        for result in model["results"]:
            named = {part: set(result.get(part, {})) for part in ("task", "dataset")}
            if "type" not in named["task"] or not {"type", "name"} <= named["dataset"] or not result.get("metrics"):
                errors.append(f"model-index: incomplete: {result}")
            errors += [f"metric: {metric}" for metric in result["metrics"] if not {"type", "value"} <= set(metric)]
    return errors


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) and item for item in value)


def _missing() -> Response:
    return json_response({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})


def _is_large(content: bytes) -> bool:
    return len(content) > LARGE or b"\0" in content[:512]


def _entry(path: str, content: bytes) -> dict[str, Any]:
    entry = {"type": "file", "path": path, "size": len(content), "oid": _git(content)}
    if _is_large(content):
        entry["lfs"] = {"oid": _sha256(content), "size": len(content), "pointerSize": 134}
    return entry


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _git(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\x00" % len(content) + content, usedforsecurity=False).hexdigest()
