"""An object store in memory, as several machines see it through fsspec's interface, with the faults of a network.

Every request is a point at which the machine may be stopped, killed or cut off (`turn`). A fault is armed for the next
request of its kind: its effect happens and its response is lost, or a listing is an old one.
"""

import hashlib
import io
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from nautile.common.files import parse_json


class Bucket:
    """The objects with the times at which they were written, by the bucket's clock. `history`: all past listings."""

    def __init__(self, now: Callable[[], float], changed: Callable[[str], None] = lambda path: None) -> None:
        self.objects: dict[str, tuple[bytes, float]] = {}
        self.history: list[dict[str, tuple[int, float]]] = [{}]
        self.now, self._changed = now, changed

    def write(self, path: str, data: bytes) -> None:
        self.objects[path] = data, self.now()
        self._remember(path)

    def delete(self, path: str) -> None:
        if path not in self.objects:
            raise FileNotFoundError(path)
        del self.objects[path]
        self._remember(path)

    def json(self, path: str) -> Any:
        return parse_json(self.objects[path][0])

    def _remember(self, changed: str) -> None:
        self.history.append({path: (len(data), written) for path, (data, written) in self.objects.items()})
        self._changed(changed)


class BucketView:
    """The bucket as one machine sees it: the part of fsspec's interface that `store.remote.Remote` uses."""

    def __init__(self, bucket: Bucket, turn: Callable[[str], None]) -> None:
        self._bucket, self._turn = bucket, turn
        self.cut_off = False  # nothing is answered
        self.lost_responses = 0  # of the next writes and deletions
        self.cut_uploads = 0  # of the next uploads of an artifact's files, of which half is kept
        self.refused_deletes = 0  # of the next deletions
        self.refused: set[str] = set()  # what these would have deleted
        self.listing_age: int | None = None  # how many changes ago the next listing was taken

    def find(self, prefix: str, detail: bool = True) -> dict[str, dict[str, Any]]:
        self._request(f"find {prefix}")
        history, self_age = self._bucket.history, self.listing_age
        self.listing_age = None
        listing = history[-1] if self_age is None else history[max(0, len(history) - 1 - self_age)]
        return {
            path: {"name": path, "size": size, "type": "file", "mtime": written_at(written)}
            for path, (size, written) in sorted(listing.items())
            if path.startswith(prefix)
        }

    def info(self, path: str) -> dict[str, Any]:
        self._request(f"info {path}")
        return {"name": path, "size": len(self._read(path)), "type": "file"}

    def exists(self, path: str) -> bool:
        self._request(f"exists {path}")
        return path in self._bucket.objects

    def cat_file(self, path: str) -> bytes:
        self._request(f"get {path}")
        return self._read(path)

    def get_file(self, path: str, target: str) -> None:
        self._request(f"get {path}")
        Path(target).write_bytes(self._read(path))

    def open(self, path: str, mode: str, block_size: int) -> io.BytesIO:
        self._request(f"get {path}")
        return io.BytesIO(self._read(path))

    def pipe_file(self, path: str, data: bytes, mode: str = "overwrite") -> None:
        self._request(f"put {path}")
        if mode == "create" and path in self._bucket.objects:
            raise FileExistsError(path)
        self._bucket.write(path, data)
        self._respond(f"put {path}")

    def put_file(self, source: str, path: str) -> None:
        data = Path(source).read_bytes()
        self._request(f"put {path}")
        if self.cut_uploads and "/payload/" in path:
            self.cut_uploads -= 1
            self._bucket.write(path, data[: len(data) // 2])
            raise ConnectionError(f"the upload of {path} was cut off")
        self._bucket.write(path, data)
        self._respond(f"put {path}")

    def rm_file(self, path: str) -> None:
        self._request(f"delete {path}")
        if self.refused_deletes:
            self.refused_deletes -= 1
            self.refused.add(path)
            raise PermissionError(path)
        self._bucket.delete(path)
        self._respond(f"delete {path}")

    def _read(self, path: str) -> bytes:
        if path not in self._bucket.objects:
            raise FileNotFoundError(path)
        return self._bucket.objects[path][0]

    def _request(self, name: str) -> None:
        self._turn(name)
        if self.cut_off:
            raise ConnectionError(name)

    def _respond(self, name: str) -> None:
        self._turn(f"after {name}")  # a machine may be killed between the effect and the response
        if self.lost_responses:
            self.lost_responses -= 1
            raise ConnectionError(f"the response to {name} was lost")


def written_at(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
