"""An append-only, crash-safe log of records that are looked up by their digest, with 16 bytes of memory per record.

A log has one or more files, of records of a fixed size or of lines. One process at a time appends to a file; `load`
indexes the files of earlier processes, and `follow` files that other processes are writing. Readers skip a record that
is incomplete because of a crash or a full disk. Before the next record is written, an incomplete line is ended by a
newline, and an incomplete record of fixed size is truncated.
"""

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from nautile.common.files import sync_folder

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


SMALLEST_MERGE = 65_536  # keys in the dictionary before it is merged into the array


class SortedKeys:
    """A set of 64-bit keys, or with `values` a map to values below 2^64: 8 bytes per key, 16 with a value.

    A later value replaces an earlier one. The keys are in a sorted array. New ones go to a dictionary first, which is
    merged into the array when it has an eighth of its size, so each key is moved only a few times. 60 million keys take
    480 MB; as a Python set they would take 5 GB. Keys that are loaded from files are sorted together on the first
    lookup, because merging file by file would move all earlier keys for each file.
    """

    def __init__(self, *, values: bool = False) -> None:
        self._keys = np.empty(0, np.uint64)
        self._values = np.empty(0, np.uint64) if values else None
        self._recent: dict[int, int] = {}
        self._loaded: list[np.ndarray] = []  # keys from files that are not in `_keys` yet

    def __len__(self) -> int:
        self._merge()  # a key may be in the dictionary and in the array
        return len(self._keys)

    def __contains__(self, key: int) -> bool:
        return key in self._recent or self._position(key) is not None

    def get(self, key: int) -> int | None:
        """The value of a key; None if the key does not exist."""
        if key in self._recent:
            return self._recent[key]
        position = self._position(key)
        assert self._values is not None, "this is a set"
        return None if position is None else int(self._values[position])

    def add(self, key: int, value: int = 0) -> None:
        """Add a key, or replace its value."""
        self._recent[key] = value
        if len(self._recent) >= max(SMALLEST_MERGE, len(self._keys) // 8):
            self._merge()

    def update(self, keys: Iterable[int]) -> None:
        """Add keys to a set."""
        for key in keys:
            self.add(key)

    def load(self, path: Path) -> None:
        """Add the keys in a file, in the format of `to_bytes`, to a set."""
        self._loaded.append(np.fromfile(path, "<u8").astype(np.uint64))

    def _position(self, key: int) -> int | None:
        if self._loaded:
            self._merge()
        position = int(self._keys.searchsorted(np.uint64(key)))
        return position if position < len(self._keys) and int(self._keys[position]) == key else None

    def _merge(self) -> None:
        if self._loaded:
            # Keys of files: all are sorted together, and of equal neighbours the first stays.
            keys = np.concatenate([self._keys, *self._loaded])
            self._loaded = []
            keys.sort()
            self._keys = keys[np.append(True, keys[1:] != keys[:-1])] if len(keys) else keys
        if not self._recent:
            return
        # Keys of the dictionary: find the place of each in the array, where it may be already.
        keys = np.fromiter(self._recent.keys(), np.uint64, len(self._recent))
        order = np.argsort(keys)
        keys = keys[order]
        positions = np.searchsorted(self._keys, keys)
        is_known = np.zeros(len(keys), bool)  # already in the array: only the value changes
        in_range = positions < len(self._keys)
        is_known[in_range] = self._keys[positions[in_range]] == keys[in_range]
        if self._values is not None:
            values = np.fromiter(self._recent.values(), np.uint64, len(self._recent))[order]
            self._values[positions[is_known]] = values[is_known]
            self._values = np.insert(self._values, positions[~is_known], values[~is_known])
        # `insert` takes places in the array as it is before, so one call puts all new keys in order.
        self._keys = np.insert(self._keys, positions[~is_known], keys[~is_known])
        self._recent = {}


def to_bytes(keys: Iterable[int]) -> bytes:
    """Serialise keys for `SortedKeys.load`: 8 bytes each, little-endian."""
    return np.array(list(keys), "<u8").tobytes()
