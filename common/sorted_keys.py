"""A set or map of 64-bit keys in flat memory: 8 bytes a key, 16 with a value.

The keys stand in a sorted array; the latest ones are in a dictionary first and are merged in when it has grown to an
eighth of the array, so each key is moved a few times at most. 60 million keys take 480 MB, a Python set of them 5 GB.
Keys that are loaded from files are sorted together, when the first of them is needed: a file at a time would move all
that came before it, for every file.
"""

from collections.abc import Iterable
from pathlib import Path

import numpy as np

SMALLEST_MERGE = 65_536  # keys in the dictionary before it is merged into the array


class SortedKeys:
    """Grows only. With `values`, each key has a value below 2^64, and a key that is added again gets the new one."""

    def __init__(self, *, values: bool = False) -> None:
        self._keys = np.empty(0, np.uint64)
        self._values = np.empty(0, np.uint64) if values else None
        self._recent: dict[int, int] = {}
        self._loaded: list[np.ndarray] = []  # of files, not yet in `_keys`

    def __len__(self) -> int:
        self._merge()  # a key may be in the dictionary and in the array
        return len(self._keys)

    def __contains__(self, key: int) -> bool:
        return key in self._recent or self._position(key) is not None

    def get(self, key: int) -> int | None:
        """The value of a key; None if there is no such key."""
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
        """Add keys of a set."""
        for key in keys:
            self.add(key)

    def load(self, path: Path) -> None:
        """Add the keys in a file, as `to_bytes` writes them, to a set."""
        self._loaded.append(np.fromfile(path, "<u8").astype(np.uint64))

    def _position(self, key: int) -> int | None:
        if self._loaded:
            self._merge()
        position = int(self._keys.searchsorted(np.uint64(key)))
        return position if position < len(self._keys) and int(self._keys[position]) == key else None

    def _merge(self) -> None:
        if self._loaded:
            keys = np.concatenate([self._keys, *self._loaded])
            self._loaded = []
            keys.sort()
            self._keys = keys[np.append(True, keys[1:] != keys[:-1])] if len(keys) else keys
        if not self._recent:
            return
        keys = np.fromiter(self._recent.keys(), np.uint64, len(self._recent))
        order = np.argsort(keys)
        keys = keys[order]
        positions = np.searchsorted(self._keys, keys)
        known = np.zeros(len(keys), bool)  # is in the array already, and only gets its new value
        inside = positions < len(self._keys)
        known[inside] = self._keys[positions[inside]] == keys[inside]
        if self._values is not None:
            values = np.fromiter(self._recent.values(), np.uint64, len(self._recent))[order]
            self._values[positions[known]] = values[known]
            self._values = np.insert(self._values, positions[~known], values[~known])
        self._keys = np.insert(self._keys, positions[~known], keys[~known])
        self._recent = {}


def to_bytes(keys: Iterable[int]) -> bytes:
    """The keys as `SortedKeys.load` reads them: 8 bytes each, little-endian."""
    return np.array(list(keys), "<u8").tobytes()
