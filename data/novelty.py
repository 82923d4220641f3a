"""Texts that say what an earlier one said: the same but for case and space, or alike in a band of MinHash.

The first met is kept. What was met is handed out part by part, to be kept in a file, and read back after a crash.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from data.deduplicate import text_hash
from data.hashes import HashSet, as_bytes

Copy = Literal["duplicate", "near_duplicate"]


class Novelty:
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
        from data.minhash import bands

        return list(zip(exact, bands(texts).tolist(), strict=True))

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
