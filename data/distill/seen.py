"""Find exact duplicates (equal but for case and white space) and near duplicates (MinHash) of earlier texts."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from nautile.common.keyed_log import SortedKeys, to_bytes
from nautile.data.screening.minhash import minhash_bands
from nautile.data.screening.text_hash import text_hash

Duplicate = Literal["duplicate", "near_duplicate"]


@dataclass(frozen=True)
class TextHashes:
    """The hashes of a text: its content hash, and the values of its MinHash bands (14, or none)."""

    exact: int
    bands: list[int]


class SeenTexts:
    """The hashes of all texts added so far. `near`: also find near duplicates."""

    def __init__(self, near: bool) -> None:
        self._near = near
        self._exact, self._bands = SortedKeys(), SortedKeys()
        self._unsaved: list[TextHashes] = []

    def hashes(self, texts: Sequence[str]) -> list[TextHashes]:
        """Compute the hashes of texts, without adding them; faster for many texts at once."""
        exact = [text_hash(text) for text in texts]
        if not self._near or not texts:
            return [TextHashes(value, []) for value in exact]
        return [TextHashes(value, band) for value, band in zip(exact, minhash_bands(texts).tolist(), strict=True)]

    def duplicate(self, hashes: TextHashes) -> Duplicate | None:
        """How a text with these hashes matches an earlier one; None if it does not."""
        if hashes.exact in self._exact:
            return "duplicate"
        return "near_duplicate" if any(value in self._bands for value in hashes.bands) else None

    def add(self, hashes: TextHashes) -> None:
        """Add a text by its hashes."""
        self._exact.add(hashes.exact)
        self._bands.update(hashes.bands)
        self._unsaved.append(hashes)

    def take_unsaved(self) -> tuple[bytes, bytes]:
        """The content hashes and band values added since the last call, in the file format that `load` reads."""
        unsaved, self._unsaved = self._unsaved, []
        exact = to_bytes(hashes.exact for hashes in unsaved)
        return exact, to_bytes(value for hashes in unsaved for value in hashes.bands)

    def load(self, exact: Path, bands: Path) -> None:
        """Add the texts that an earlier process saved."""
        self._exact.load(exact)
        self._bands.load(bands)
