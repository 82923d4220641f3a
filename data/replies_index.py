"""Where each of millions of replies lies in its file: 16 bytes of memory a reply, found in a microsecond.

Keys are the last eight bytes of digests; two of four million agree in them with a chance of 4e-7, and whoever reads a
reply compares the whole digest. New keys go into a dict that is merged into the sorted arrays when it has grown to an
eighth of them, so that what merging costs stays linear. (A dict of whole digests took 130 bytes a reply.)
"""

import numpy as np

LEAST_MERGED = 2**16


class RepliesIndex:
    """Digest (bytes) -> byte offset. Of two offsets of one key the newer counts."""

    def __init__(self) -> None:
        self._keys = np.empty(0, np.uint64)
        self._offsets = np.empty(0, np.uint64)
        self._new: dict[int, int] = {}

    def __len__(self) -> int:
        self.merge()  # a key may be in both
        return len(self._keys)

    def __setitem__(self, digest: bytes, offset: int) -> None:
        self._new[_key(digest)] = offset
        if len(self._new) >= max(LEAST_MERGED, len(self._keys) // 8):
            self.merge()

    def get(self, digest: bytes) -> int | None:
        """The offset, None if there is none."""
        key = _key(digest)
        if key in self._new:
            return self._new[key]
        place = int(np.searchsorted(self._keys, np.uint64(key)))
        found = place < len(self._keys) and int(self._keys[place]) == key
        return int(self._offsets[place]) if found else None

    def merge(self) -> None:
        """Take the new keys into the arrays."""
        if not self._new:
            return
        keys = np.fromiter(self._new.keys(), np.uint64, len(self._new))
        offsets = np.fromiter(self._new.values(), np.uint64, len(self._new))
        order = np.argsort(keys)
        keys, offsets = keys[order], offsets[order]
        places = np.searchsorted(self._keys, keys)
        known = np.zeros(len(keys), bool)
        inside = places < len(self._keys)
        known[inside] = self._keys[places[inside]] == keys[inside]
        self._offsets[places[known]] = offsets[known]
        self._keys = np.insert(self._keys, places[~known], keys[~known])
        self._offsets = np.insert(self._offsets, places[~known], offsets[~known])
        self._new = {}


def _key(digest: bytes) -> int:
    return int.from_bytes(digest[-8:], "big")
