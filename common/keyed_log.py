"""An append-only, crash-safe log of records that are looked up by their digest, with 16 bytes of memory per record.

A log has one or more files, of records of a fixed size or of lines. One process at a time appends to a file; `load`
indexes the files of earlier processes, and `follow` files that other processes are writing. Readers skip a record that
is incomplete because of a crash or a full disk. Before the next record is written, an incomplete line is ended by a
newline, and an incomplete record of fixed size is truncated.
"""

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

from nautile.common.files import sync_folder
from nautile.common.sorted_keys import SortedKeys

logger = logging.getLogger(__name__)

OFFSET_BITS = 40  # a position is the number of a file and an offset in it of up to 1 TB
READ_BLOCK = 65_536  # bytes per read of a line


class KeyedLog:
    """A log of records of `record_size` bytes each; None: a record is a line.

    `digest_of(record)` returns the digest of a loaded record, or None to skip it, and raises `ValueError` for a damaged
    one. The index has only the last 64 bits of a digest, so the caller of `get` must check the record's digest.
    """

    def __init__(self, digest_of: Callable[[bytes], bytes | None], record_size: int | None = None) -> None:
        self._digest_of, self._record_size = digest_of, record_size
        self._positions = SortedKeys(values=True)
        self._paths: list[Path] = []
        self._descriptors: dict[int, int] = {}  # file number -> descriptor, of files read from or written to
        self._writing: int | None = None  # number of the file that is appended to
        self.end = 0  # size of that file in bytes
        self._followed: dict[Path, tuple[int, int]] = {}  # (number of the file, bytes that are indexed)
        self._torn = False  # the last record of the file is incomplete

    def __len__(self) -> int:
        return len(self._positions)

    def load(self, path: Path) -> None:
        """Index the records of a file. Of two records with the same digest the later one is used."""
        self._paths.append(path)
        with path.open("rb", buffering=2**20) as file:
            if torn := self._index_file(file, len(self._paths) - 1):
                logger.warning("%s: the last record, of %d bytes, is incomplete", path, torn)

    def follow(self, path: Path) -> None:
        """Index the complete lines that another process has appended to `path` since the last call.

        The file may also have been replaced by a longer copy of itself.
        """
        if path not in self._followed:
            self._followed[path] = len(self._paths), 0
            self._paths.append(path)
        number, offset = self._followed[path]
        if path.stat().st_size <= offset:
            return
        with path.open("rb", buffering=2**20) as file:
            # A file that is fetched again is replaced by a longer copy; what is open still has the shorter one.
            if number in self._descriptors and not os.path.sameopenfile(self._descriptors[number], file.fileno()):
                os.close(self._descriptors.pop(number))
            file.seek(offset)
            for line in file:
                # The writer is in the middle of this line: the next call reads it again from its beginning.
                if not line.endswith(b"\n"):
                    break
                self._index(line, number, offset)
                offset += len(line)
        self._followed[path] = number, offset

    def open(self, path: Path, *, exclusive: bool = False) -> None:
        """Open `path` for appending and index its records. `exclusive`: it must not exist. Raises `OSError`."""
        # For reading as well: `get` reads from the same descriptor by `pread`, which does not move its offset.
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | (os.O_EXCL if exclusive else 0)
        descriptor = os.open(path, flags, 0o666)
        sync_folder(path.parent)  # the file may be new, and without its entry there its records would be lost
        self._paths.append(path)
        self._writing = len(self._paths) - 1
        self._descriptors[self._writing] = descriptor
        # A duplicate, because leaving the block closes what the buffered file reads from.
        with os.fdopen(os.dup(descriptor), "rb", buffering=2**20) as file:
            file.seek(0)
            self._torn = self._index_file(file, self._writing) > 0
        self.end = os.fstat(descriptor).st_size

    @property
    def is_open(self) -> bool:
        """Whether a file is open for appending."""
        return self._writing is not None

    def write(self, records: Sequence[bytes]) -> list[int]:
        """Append complete records (lines with their newline) and fsync; returns their positions, for `add`.

        May be called in another thread than the one that reads and indexes, one call at a time. Raises `OSError`.
        """
        assert self._writing is not None, "`open` comes first"
        descriptor = self._descriptors[self._writing]
        if self._torn:
            self._end_torn_record(descriptor)
        # The records are not indexed here: the caller does that by `add` once this returns, so a record that can be
        # found is on disk.
        positions, end = [], self.end
        for record in records:
            positions.append(self._writing << OFFSET_BITS | end)
            end += len(record)
        self._append(descriptor, b"".join(records))
        os.fsync(descriptor)
        return positions

    def add(self, digest: bytes, position: int) -> None:
        """Index a written record."""
        self._positions.add(_key(digest), position)

    def get(self, digest: bytes) -> bytes | None:
        """The record with `digest` (a line without its newline); None if there is none.

        If the file was truncated since it was indexed, a record of fixed size is too short, and a line an `OSError`.
        """
        position = self._positions.get(_key(digest))
        if position is None:
            return None
        number, offset = position >> OFFSET_BITS, position & (1 << OFFSET_BITS) - 1
        # Opened at the first lookup: hundreds of files may be loaded, and a process can open about a thousand.
        if number not in self._descriptors:
            self._descriptors[number] = os.open(self._paths[number], os.O_RDONLY | os.O_CLOEXEC)
        descriptor = self._descriptors[number]
        if self._record_size is not None:
            return os.pread(descriptor, self._record_size, offset)
        line = b""
        while b"\n" not in line and (block := os.pread(descriptor, READ_BLOCK, offset + len(line))):
            line += block
        if not line:
            raise OSError(f"{self._paths[number]}: the record at byte {offset} no longer exists")
        return line.partition(b"\n")[0]

    def close(self) -> None:
        """Close all files; `write` must not be called afterwards."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors, self._writing = {}, None

    def _end_torn_record(self, descriptor: int) -> None:
        self.end = os.fstat(descriptor).st_size
        if self._record_size is None:
            # Do not truncate: if only the newline is missing, the line is complete.
            self._append(descriptor, b"\n")
        else:
            self.end -= self.end % self._record_size
            os.ftruncate(descriptor, self.end)
            self._torn = False

    def _append(self, descriptor: int, content: bytes) -> None:
        self._torn = True  # until all is written: the disk may become full in the middle of a record
        while content:
            written = os.write(descriptor, content)
            self.end += written
            content = content[written:]
        self._torn = False

    def _index_file(self, file: BinaryIO, number: int) -> int:
        """Index the complete records of a file; returns the length of an incomplete record at the end, or 0."""
        offset, size, torn = 0, self._record_size, 0
        for record in file if size is None else iter(lambda: file.read(size), b""):
            if not (record.endswith(b"\n") if size is None else len(record) == size):
                torn = len(record)
            # A line may be complete except for its newline; if it is not, `digest_of` raises `ValueError`.
            if not torn or size is None:
                self._index(record, number, offset)
            offset += len(record)
        return torn

    def _index(self, record: bytes, number: int, offset: int) -> None:
        try:
            if (digest := self._digest_of(record)) is not None:
                self._positions.add(_key(digest), number << OFFSET_BITS | offset)
        except ValueError:
            logger.warning("%s: skipping a damaged record of %d bytes", self._paths[number], len(record))


def _key(digest: bytes) -> int:
    return int.from_bytes(digest[-8:], "big")
