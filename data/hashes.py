"""A set of 64-bit hashes in 8 bytes each: a sorted array, and a small set of the latest that is sorted in at times."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np

LATE = 65_536


class HashSet:
    """Grows only. 60 million values take 480 MB, where a Python set would take 5 GB."""

    def __init__(self) -> None:
        self._sorted = np.zeros(0, np.uint64)
        self._late: set[int] = set()

    def __len__(self) -> int:
        return len(self._sorted) + len(self._late)

    def __contains__(self, value: int) -> bool:
        if value in self._late:
            return True
        at = int(self._sorted.searchsorted(np.uint64(value)))
        return at < len(self._sorted) and int(self._sorted[at]) == value

    def update(self, values: Iterable[int]) -> None:
        """Put all of them in."""
        self._late.update([value for value in values if value not in self])
        if len(self._late) > max(LATE, len(self._sorted) // 8):  # geometric: each value is moved a few times at most
            fresh = np.fromiter(self._late, np.uint64, len(self._late))
            self._sorted, self._late = np.union1d(self._sorted, fresh), set()

    def load(self, path: Path) -> None:
        """Put in what a file of 8-byte little-endian values holds."""
        self._sorted = np.union1d(self._sorted, np.fromfile(path, "<u8").astype(np.uint64))


def as_bytes(values: Iterable[int]) -> bytes:
    """The values as `HashSet.load` reads them."""
    return np.array(list(values), "<u8").tobytes()
