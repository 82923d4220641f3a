"""Locks on requests: if several processes need the same reply, one sends the request and the others wait.

A lock covers one byte of a file, at an offset derived from the request's digest; the file stays empty. They are Linux
open file description locks: the kernel releases them when the process dies, and two pools in one process exclude each
other as well.
"""

import fcntl
import os
import struct
from pathlib import Path

from nautile.common.file_locks import has_locks, try_lock

_FLOCK = "hhqqi4x"  # Linux's `struct flock`: type, whence, start, length, process


class RequestLocks:
    """The locks in one file. Raises `OSError` if it cannot be opened."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)

    def acquire(self, digest: str) -> bool:
        """Take the lock of a digest (hexadecimal); returns False if another process holds it. Reentrant.

        On a file system without locks it always succeeds; a request may then be paid for twice.
        """
        return try_lock(self.path, lambda: self._set(fcntl.F_WRLCK, digest))

    def release(self, digest: str) -> None:
        """Release the lock of a digest, if this object holds it."""
        if has_locks(self.path.parent):
            self._set(fcntl.F_UNLCK, digest)

    def close(self) -> None:
        """Release all locks."""
        os.close(self._descriptor)

    def _set(self, kind: int, digest: str) -> None:
        start = int(digest[:16], 16) >> 2  # an offset has 63 bits
        fcntl.fcntl(self._descriptor, fcntl.F_OFD_SETLK, struct.pack(_FLOCK, kind, os.SEEK_SET, start, 1, 0))
