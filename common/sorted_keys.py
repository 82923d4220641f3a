"""A compact set or map of 64-bit keys: 8 bytes per key, 16 with a value.

The keys are in a sorted array. New ones go to a dictionary first, which is merged into the array when it has an eighth
of its size, so each key is moved only a few times. 60 million keys take 480 MB; as a Python set they would take 5 GB.
Keys that are loaded from files are sorted together on the first lookup, because merging file by file would move all
earlier keys for each file.
"""

from collections.abc import Iterable
from pathlib import Path

import numpy as np

SMALLEST_MERGE = 65_536  # keys in the dictionary before it is merged into the array


class SortedKeys:
    """A set, or with `values` a map to values below 2^64, in which a later value replaces an earlier one."""

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
