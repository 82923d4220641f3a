"""A cache of sentence vectors on disk, by digest of model and text.

A record is the digest (16 bytes), the vector (float32) and their CRC32, so damaged records are detected and ignored.
Each process appends to its own file, and reads what other processes had written when it started. The index takes 16
bytes of memory a vector: 64 MB for four million.
"""

import hashlib
import uuid
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from nautile.common.errors import ConfigError
from nautile.common.keyed_log import KeyedLog

DIGEST_BYTES, CRC_BYTES = 16, 4


class VectorCache:
    """Vectors of one `model`, `width` numbers each, in `folder`. `put` raises `ConfigError` if it cannot write."""

    def __init__(self, folder: Path, model: str, width: int) -> None:
        self._folder, self._width = folder, width
        self._name = hashlib.sha256(f"{model}\x00{width}".encode()).hexdigest()[:12]
        self._log = KeyedLog(lambda record: record[:DIGEST_BYTES], DIGEST_BYTES + 4 * width + CRC_BYTES)
        for path in sorted(folder.glob(f"{self._name}-*.vectors")):
            self._log.load(path)

    def __len__(self) -> int:
        return len(self._log)

    def digest(self, text: str) -> bytes:
        """The cache key of a text; it includes the model and the width."""
        content = f"{self._name}\x00{text}".encode("utf-8", "replace")
        return hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest()

    def get(self, digest: bytes) -> np.ndarray | None:
        """The vector with the key `digest`, [width] float32; None if it is missing or damaged."""
        record = self._log.get(digest)
        if record is None or record[:DIGEST_BYTES] != digest or _crc(record[:-CRC_BYTES]) != record[-CRC_BYTES:]:
            return None
        return np.frombuffer(record, "<f4", self._width, DIGEST_BYTES).astype(np.float32)

    def put(self, digests: Sequence[bytes], vectors: np.ndarray) -> None:
        """Add vectors [n, width] with their keys; they are on disk when this returns."""
        bodies = [digest + vector.tobytes() for digest, vector in zip(digests, np.asarray(vectors, "<f4"), strict=True)]
        try:
            if not self._log.is_open:
                self._folder.mkdir(parents=True, exist_ok=True)
                self._log.open(self._folder / f"{self._name}-{uuid.uuid4().hex[:12]}.vectors", exclusive=True)
            positions = self._log.write([body + _crc(body) for body in bodies])
        except OSError as error:
            raise ConfigError(f"sentence vectors cannot be written to {self._folder} ({error.strerror})") from None
        for digest, position in zip(digests, positions, strict=True):
            self._log.add(digest, position)

    def close(self) -> None:
        """Close the files."""
        self._log.close()


def _crc(content: bytes) -> bytes:
    return zlib.crc32(content).to_bytes(CRC_BYTES, "little")
