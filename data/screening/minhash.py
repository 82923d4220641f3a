"""MinHash signatures in bands (LSH): two texts with an equal value in any band count as near copies.

Word 5-grams and 112 values in 14 bands of 8, as for FineWeb (Penedo et al. 2024, arXiv:2406.17557, §3.4). Two documents
whose sets of 5-grams have a Jaccard similarity of 0.75 share a band with a probability of 77 %; of 0.8, 92 %; of 0.5,
5 %.

The 5-grams are hashed by `data.screening.words`; `rensa` computes R-MinHash values of the hashes, 130 times as fast as
`datasketch` (docs/decisions.md). A signature depends on its text alone. A version of rensa that computes other values
has another `ALGORITHM_VERSION` and is rejected. In scripts without spaces a word is as long as a clause, so fewer near
copies are found.
"""

from collections.abc import Sequence

import numpy as np
from rensa import RMinHash

from nautile.data.screening.text_hash import text_hash
from nautile.data.screening.words import WordArrays, grams, mix_bits, words_of

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
    """Parameters of the signatures, for the manifest of their artifact."""
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
