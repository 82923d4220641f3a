"""Find equal texts by their content hash (equal but for case and white space) and near copies by MinHash.

The content hash also decides the validation split, so copies of a text are always in the same split. It is XXH3, whose
values are specified for every platform and version.

Two texts with an equal value in any MinHash band (LSH) count as near copies: word 5-grams and 112 values in 14 bands of
8, as for FineWeb (Penedo et al. 2024, arXiv:2406.17557, §3.4). Two documents whose sets of 5-grams have a Jaccard
similarity of 0.75 share a band with a probability of 77 %; of 0.8, 92 %; of 0.5, 5 %. `rensa` computes R-MinHash values
of the 5-grams' hashes, 130 times as fast as `datasketch` (docs/decisions.md); a version that computes other values is
rejected. In scripts without spaces a word is as long as a clause, so fewer near copies are found.
"""

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import xxhash
from rensa import RMinHash

from nautile.common.keyed_log import SortedKeys, to_bytes
from nautile.data.screening.words import FastFolding, WordArrays, grams, mix_bits, words_of

HASH_RANGE = 1 << 64


def text_hash(text: str) -> int:
    """64-bit hash of `text` that ignores case, Unicode normalisation and white space.

    White space is removed altogether ("1 2" equals "12"), so that documents that differ in line wrapping are copies.
    The probability of a collision among 100 million documents is 0.03 %.
    """
    return xxhash.xxh3_64_intdigest(_normalise(text))


def _normalise_slowly(text: str) -> str:
    composed = text if unicodedata.is_normalized("NFC", text) else unicodedata.normalize("NFC", text)
    return "".join(composed.casefold().split())


def _normalise_character(c: str) -> str | None:
    """What a character becomes in `_normalise_slowly`; None if that depends on its neighbours (NFC composition)."""
    # A combining mark joins the letter before it: "e" and U+0301 become "é".
    if unicodedata.category(c)[0] == "M" or not unicodedata.is_normalized("NFC", c):
        return None
    return "" if c.isspace() else c.casefold()


_normalise = FastFolding(_normalise_character, _normalise_slowly)


def in_validation(digest: int, share: float) -> bool:
    """Whether the record with this hash belongs to the validation split, as about `share` of all records do."""
    return digest < share * HASH_RANGE


BANDS, ROWS, WORDS, SEED = 14, 8, 5, 1
ALGORITHM = 2  # of R-MinHash: rensa raises it when its values change


def minhash_bands(texts: Sequence[str]) -> np.ndarray:
    """The value of each band of each text, uint64 [texts, BANDS]."""
    if RMinHash.ALGORITHM_VERSION != ALGORITHM:
        raise RuntimeError(f"rensa's R-MinHash is version {RMinHash.ALGORITHM_VERSION}, not {ALGORITHM}: pin rensa")
    signatures = np.empty((len(texts), BANDS), np.uint64)
    begin = 0  # the first text of the block
    for block in words_of(texts):
        counts = np.diff(block.first)
        signatures[begin : begin + len(counts)] = _block_bands(block)
        for wordless in begin + np.flatnonzero(counts == 0):  # a text without words matches only exact copies
            signatures[wordless] = text_hash(texts[int(wordless)])
        begin += len(counts)
    return signatures


def facts() -> dict[str, object]:
    return {"bands": BANDS, "rows": ROWS, "words": WORDS, "seed": SEED, "minhash": f"rensa R-MinHash {ALGORITHM}"}


def _block_bands(block: WordArrays) -> np.ndarray:
    """The bands of a block's texts, uint64 [texts, BANDS]: each band's `ROWS` MinHash values mixed into one."""
    shingles, offsets = _shingles(block)
    values = RMinHash.digest_matrix_from_flat_token_hashes(shingles, offsets, BANDS * ROWS, SEED).to_rows()
    rows = np.array(values, np.uint64).reshape(-1, BANDS, ROWS)
    mixed = np.zeros(rows.shape[:2], np.uint64)
    for row in range(ROWS):
        mixed = mix_bits(mixed ^ rows[:, :, row])
    return mixed


def _shingles(block: WordArrays) -> tuple[np.ndarray, np.ndarray]:
    """Hashes of the 5-grams of all texts, concatenated, and the offset of each text's first.

    An n-gram begins at every word; the last four of a text are padded, so that short texts have n-grams too.
    """
    counts = np.diff(block.first)
    # Zeros between the texts, so that no 5-gram contains words of two texts.
    padding = WORDS - 1
    padded = np.zeros(len(block.values) + padding * len(counts), np.uint64)
    positions = np.arange(len(block.values)) + padding * np.repeat(np.arange(len(counts)), counts)
    padded[positions] = block.values
    hashes = grams(np.append(padded, np.zeros(padding, np.uint64)), WORDS)[positions]
    return hashes, block.first.astype(np.uint64)


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
        self._exact.add(hashes.exact)
        self._bands.update(hashes.bands)
        self._unsaved.append(hashes)

    def take_unsaved(self) -> tuple[bytes, bytes]:
        """The content hashes and band values added since the last call, in the file format that `load` reads."""
        unsaved, self._unsaved = self._unsaved, []
        exact = to_bytes(hashes.exact for hashes in unsaved)
        return exact, to_bytes(value for hashes in unsaved for value in hashes.bands)

    def load(self, exact: Path, bands: Path) -> None:
        self._exact.load(exact)
        self._bands.load(bands)
