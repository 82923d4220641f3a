"""Exact and near duplicates among texts: the same but for case and white space, or sharing a band of MinHash."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from common.sorted_keys import SortedKeys, to_bytes
from data.screening.minhash import minhash_bands
from data.screening.text_hash import text_hash

Duplicate = Literal["duplicate", "near_duplicate"]


@dataclass(frozen=True)
class TextHashes:
    """What a text is recognised by: the hash of its words, and the values of its MinHash bands (14, or none)."""

    exact: int
    bands: list[int]


class SeenTexts:
    """Hashes of the texts seen so far. `near`: near duplicates are looked for too."""

    def __init__(self, near: bool) -> None:
        self._near = near
        self._exact, self._bands = SortedKeys(), SortedKeys()
        self._unsaved: list[TextHashes] = []

    def hashes(self, texts: Sequence[str]) -> list[TextHashes]:
        """The hashes of each text; cheaper for many texts at once. Nothing is remembered."""
        exact = [text_hash(text) for text in texts]
        if not self._near or not texts:
            return [TextHashes(value, []) for value in exact]
        return [TextHashes(value, band) for value, band in zip(exact, minhash_bands(texts).tolist(), strict=True)]

    def duplicate(self, hashes: TextHashes) -> Duplicate | None:
        """Whether a text with these hashes was added before, and in which way they match."""
        if hashes.exact in self._exact:
            return "duplicate"
        return "near_duplicate" if any(value in self._bands for value in hashes.bands) else None

    def add(self, hashes: TextHashes) -> None:
        """Remember a text."""
        self._exact.add(hashes.exact)
        self._bands.update(hashes.bands)
        self._unsaved.append(hashes)

    def take_unsaved(self) -> tuple[bytes, bytes]:
        """Exact hashes and band values added since the last call, as `load` reads them from files."""
        unsaved, self._unsaved = self._unsaved, []
        exact = to_bytes(hashes.exact for hashes in unsaved)
        return exact, to_bytes(value for hashes in unsaved for value in hashes.bands)

    def load(self, exact: Path, bands: Path) -> None:
        """Add the texts that an earlier process saved."""
        self._exact.load(exact)
        self._bands.load(bands)
