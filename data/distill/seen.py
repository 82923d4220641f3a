"""A set of 64-bit hashes in 8 bytes each: a sorted array, and a small set of the latest that is sorted in at times."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from data.screening.text_hash import text_hash

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


Copy = Literal["duplicate", "near_duplicate"]


class SeenTexts:
    """Remembers what it is asked to. `near`: also by MinHash, 14 more hashes a text."""

    def __init__(self, near: bool) -> None:
        self._near = near
        self._exact, self._bands = HashSet(), HashSet()
        self._fresh: tuple[list[int], list[int]] = ([], [])

    def marks(self, texts: Sequence[str]) -> list[tuple[int, list[int]]]:
        """The hash of each text, and the values of its bands; many at once are cheaper."""
        exact = [text_hash(text) for text in texts]
        if not self._near or not texts:
            return [(one, []) for one in exact]
        from data.screening.minhash import minhash_bands

        return list(zip(exact, minhash_bands(texts).tolist(), strict=True))

    def copy(self, mark: tuple[int, list[int]]) -> Copy | None:
        """Whether a text of this mark was met before; nothing is remembered."""
        if mark[0] in self._exact:
            return "duplicate"
        return "near_duplicate" if any(value in self._bands for value in mark[1]) else None

    def add(self, mark: tuple[int, list[int]]) -> None:
        """Remember a text."""
        self._exact.update([mark[0]])
        self._bands.update(mark[1])
        self._fresh[0].append(mark[0])
        self._fresh[1].extend(mark[1])

    def take_fresh(self) -> tuple[bytes, bytes]:
        """What was added since the last call: hashes and values of bands."""
        fresh, self._fresh = self._fresh, ([], [])
        return as_bytes(fresh[0]), as_bytes(fresh[1])

    def load(self, exact: Path, bands: Path) -> None:
        """Meet again what an earlier process kept."""
        self._exact.load(exact)
        self._bands.load(bands)
