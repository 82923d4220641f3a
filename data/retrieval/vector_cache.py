"""Vectors kept on disk by the digest of their text and model: fixed-size rows that are only appended.

A row is the digest (16 bytes), the vector (float32) and their CRC32, so a torn or damaged row is seen and passed over.
Each process appends to a file of its own and reads those of all others that were there when it began. In memory there
are 16 bytes a vector: 64 MB for four million.
"""

import hashlib
import logging
import os
import uuid
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from common.errors import ConfigError

log = logging.getLogger(__name__)

DIGEST = 16
LATE = 65_536  # entries looked up in a dictionary before they are sorted in with the rest


class VectorCache:
    """Vectors of one `model` in `folder`. Raises `ConfigError` if nothing can be kept there."""

    def __init__(self, folder: Path, model: str, width: int) -> None:
        self._model, self._width = model, width
        self._row = np.dtype([("digest", f"S{DIGEST}"), ("vector", "<f4", (width,)), ("crc", "<u4")])
        self._name = hashlib.sha256(f"{model}\x00{width}".encode()).hexdigest()[:12]
        self._folder = folder
        self._files: list[Path] = []
        self._keys, self._places = np.zeros(0, np.uint64), np.zeros(0, np.uint64)
        self._late: dict[int, int] = {}
        self._handles: dict[int, int] = {}
        self._own: int | None = None
        self._rows = 0
        for path in sorted(folder.glob(f"{self._name}-*.vectors")):
            self._read(path)
        self._settle()

    def __len__(self) -> int:
        return len(self._keys) + len(self._late)

    def digest(self, text: str) -> bytes:
        """What a text is kept under; the model is part of it."""
        said = f"{self._name}\x00{text}".encode("utf-8", "replace")
        return hashlib.blake2b(said, digest_size=DIGEST).digest()

    def get(self, digest: bytes) -> np.ndarray | None:
        """The vector kept under `digest`, [width] float32; None if there is none, or it is damaged."""
        key = _short(digest)
        place = self._late.get(key)
        if place is None:
            at = int(np.searchsorted(self._keys, np.uint64(key)))
            if at == len(self._keys) or int(self._keys[at]) != key:
                return None
            place = int(self._places[at])
        size = self._row.itemsize
        raw = os.pread(self._handle(place >> 40), size, (place & (1 << 40) - 1) * size)
        if raw[:DIGEST] != digest or zlib.crc32(raw[:-4]) != int.from_bytes(raw[-4:], "little"):
            return None
        return np.frombuffer(raw, "<f4", self._width, DIGEST).astype(np.float32)

    def put(self, digests: Sequence[bytes], vectors: np.ndarray) -> None:
        """Keep vectors [n, width]; on disk when this returns."""
        content = b""
        for digest, vector in zip(digests, np.asarray(vectors, "<f4"), strict=True):
            body = digest + vector.tobytes()
            content += body + zlib.crc32(body).to_bytes(4, "little")
        try:
            own = self._opened()
            while content:
                content = content[os.write(own, content) :]
            os.fsync(own)
        except OSError as error:
            raise ConfigError(f"sentence vectors cannot be kept in {self._folder} ({error.strerror})") from None
        number = len(self._files) - 1
        for digest in digests:
            self._late[_short(digest)] = number << 40 | self._rows
            self._rows += 1
        if len(self._late) > LATE:
            self._settle()

    def close(self) -> None:
        """Close the files."""
        for handle in {*self._handles.values(), *([] if self._own is None else [self._own])}:
            os.close(handle)
        self._handles, self._own = {}, None

    def _opened(self) -> int:
        if self._own is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            path = self._folder / f"{self._name}-{uuid.uuid4().hex[:12]}.vectors"
            self._own = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o666)
            self._handles[len(self._files)] = self._own
            self._files.append(path)
        return self._own

    def _read(self, path: Path) -> None:
        """Take in the rows of another process's file. What follows the last whole row was torn off by its end."""
        number, size = len(self._files), self._row.itemsize
        self._files.append(path)
        with path.open("rb") as file:
            row = 0
            while len(raw := file.read(size)) == size:
                self._late[_short(raw[:DIGEST])] = number << 40 | row
                row += 1
                if len(self._late) > LATE:
                    self._settle()
        if raw:
            log.warning("%s: %d bytes of a torn vector are passed over", path, len(raw))

    def _settle(self) -> None:
        """Sort the late entries in; the latest of equal keys stands."""
        keys = np.fromiter(self._late.keys(), np.uint64, len(self._late))
        places = np.fromiter(self._late.values(), np.uint64, len(self._late))
        kept = ~np.isin(self._keys, keys)
        keys, places = np.concatenate([self._keys[kept], keys]), np.concatenate([self._places[kept], places])
        order = np.argsort(keys)
        self._keys, self._places, self._late = keys[order], places[order], {}

    def _handle(self, number: int) -> int:
        if number not in self._handles:
            self._handles[number] = os.open(self._files[number], os.O_RDONLY | os.O_CLOEXEC)
        return self._handles[number]


def _short(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "little")
