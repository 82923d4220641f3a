"""An append-only log of records that are found by their digest: crash-safe, read in place, 16 bytes of memory a record.

A log is one or more files of one framing: records of a fixed size, or lines. One process appends to a file at a time;
`load` indexes what earlier processes wrote, `follow` what others are writing in files of their own. Readers skip a
record that was torn by a crash or a full disk. Before the next one is written a torn line is ended by a newline, a torn
record of fixed size cut.
"""

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

from common.sorted_keys import SortedKeys

logger = logging.getLogger(__name__)

OFFSET_BITS = 40  # a position is the number of a file and an offset in it of up to 1 TB
READ_BLOCK = 65_536  # bytes of a line read at once


class KeyedLog:
    """Records of `record_size` bytes each; None: a record is a line.

    `digest_of(record)` gives the digest of a record that is loaded, None for one to leave out, and raises `ValueError`
    for a damaged one. The index holds the last 64 bits of a digest, so the caller of `get` must check the digest of
    what it gets.
    """

    def __init__(self, digest_of: Callable[[bytes], bytes | None], record_size: int | None = None) -> None:
        self._digest_of, self._record_size = digest_of, record_size
        self._positions = SortedKeys(values=True)
        self._paths: list[Path] = []
        self._descriptors: dict[int, int] = {}  # of the files that were read or are written, by number
        self._writing: int | None = None  # the number of the file that is appended to
        self.end = 0  # of that file, in bytes
        self._followed: dict[Path, tuple[int, int]] = {}  # number of a file, and the end of what is indexed of it
        self._torn = False  # its last record was not written as a whole

    def __len__(self) -> int:
        return len(self._positions)

    def load(self, path: Path) -> None:
        """Index the records of a file. Of two records of one digest the later one counts."""
        self._paths.append(path)
        with path.open("rb", buffering=2**20) as file:
            if torn := self._index_file(file, len(self._paths) - 1):
                logger.warning("%s: the last record, of %d bytes, is incomplete", path, torn)

    def follow(self, path: Path) -> None:
        """Index the lines that another process has added to `path` since the last call; a line counts once it ends."""
        if path not in self._followed:
            self._followed[path] = len(self._paths), 0
            self._paths.append(path)
        number, offset = self._followed[path]
        if path.stat().st_size <= offset:
            return
        with path.open("rb", buffering=2**20) as file:
            file.seek(offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._index(line, number, offset)
                offset += len(line)
        self._followed[path] = number, offset

    def open(self, path: Path, *, exclusive: bool = False) -> None:
        """Append to `path` from now on, after indexing what it holds; `exclusive`: it is new. Raises `OSError`."""
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | (os.O_EXCL if exclusive else 0)
        descriptor = os.open(path, flags, 0o666)
        self._paths.append(path)
        self._writing = len(self._paths) - 1
        self._descriptors[self._writing] = descriptor
        with os.fdopen(os.dup(descriptor), "rb", buffering=2**20) as file:
            file.seek(0)
            self._torn = self._index_file(file, self._writing) > 0
        self.end = os.fstat(descriptor).st_size

    @property
    def is_open(self) -> bool:
        """Whether there is a file to append to."""
        return self._writing is not None

    def write(self, records: Sequence[bytes]) -> list[int]:
        """Append records, each whole (a line with its newline); on disk when this returns. Raises `OSError`.

        Returns their positions, for `add`. Safe in another thread than the one that reads and indexes, one call at a
        time.
        """
        assert self._writing is not None, "`open` comes first"
        descriptor = self._descriptors[self._writing]
        if self._torn:
            self._end_torn_record(descriptor)
        positions, end = [], self.end
        for record in records:
            positions.append(self._writing << OFFSET_BITS | end)
            end += len(record)
        self._append(descriptor, b"".join(records))
        os.fsync(descriptor)
        return positions

    def add(self, digest: bytes, position: int) -> None:
        """Make a written record findable."""
        self._positions.add(_key(digest), position)

    def get(self, digest: bytes) -> bytes | None:
        """The record that is indexed under `digest`, a line without its newline; None if there is none.

        Raises `OSError` if the file was cut since it was indexed.
        """
        position = self._positions.get(_key(digest))
        if position is None:
            return None
        number, offset = position >> OFFSET_BITS, position & (1 << OFFSET_BITS) - 1
        if number not in self._descriptors:
            self._descriptors[number] = os.open(self._paths[number], os.O_RDONLY | os.O_CLOEXEC)
        descriptor = self._descriptors[number]
        if self._record_size is not None:
            return os.pread(descriptor, self._record_size, offset)
        line = b""
        while b"\n" not in line and (block := os.pread(descriptor, READ_BLOCK, offset + len(line))):
            line += block
        if not line:
            raise OSError(f"{self._paths[number]}: the record at byte {offset} is gone")
        return line.partition(b"\n")[0]

    def close(self) -> None:
        """Close the files; nothing may be written any more."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors, self._writing = {}, None

    def _end_torn_record(self, descriptor: int) -> None:
        self.end = os.fstat(descriptor).st_size
        if self._record_size is None:
            # Not cut: if only its newline is missing, the line is whole.
            self._append(descriptor, b"\n")
        else:
            self.end -= self.end % self._record_size
            os.ftruncate(descriptor, self.end)
            self._torn = False

    def _append(self, descriptor: int, content: bytes) -> None:
        self._torn = True  # until all of it is written: the disk may become full in the middle of a record
        while content:
            written = os.write(descriptor, content)
            self.end += written
            content = content[written:]
        self._torn = False

    def _index_file(self, file: BinaryIO, number: int) -> int:
        """Index the whole records of a file; returns how many bytes of a torn one follow them."""
        offset, size, torn = 0, self._record_size, 0
        for record in file if size is None else iter(lambda: file.read(size), b""):
            if not (record.endswith(b"\n") if size is None else len(record) == size):
                torn = len(record)
            # A line that lacks only its newline is whole: `digest_of` would refuse half a record.
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
