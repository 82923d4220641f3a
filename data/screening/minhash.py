"""MinHash signatures in bands: two texts with an equal value in any band count as near copies.

Word 5-grams, 112 values in 14 bands of 8, as FineWeb (Penedo et al. 2024, arXiv:2406.17557, §3.4): two documents whose
sets of 5-grams overlap by 0.75 share a band with a probability of 77 %, by 0.8 with 92 %, by 0.5 with 5 %.

The 5-grams are hashed here (`data.screening.words`); `rensa` computes R-MinHash values of the hashes, at 130 times the
speed of `datasketch` (bench/corpus/deduplicate.py). A signature depends on its text alone; a version of rensa whose
values differ has another `ALGORITHM_VERSION` and is refused. In a script without spaces a word is as long as a clause,
so fewer near copies are found.
"""

from collections.abc import Sequence

import numpy as np
from rensa import RMinHash

from data.screening.text_hash import text_hash
from data.screening.words import WordArrays, grams, mix_bits, words_of

BANDS, ROWS, WORDS, SEED = 14, 8, 5, 1
ALGORITHM = 2  # of R-MinHash: rensa raises it when its values change


def minhash_bands(texts: Sequence[str]) -> np.ndarray:
    """[texts, BANDS] uint64: the value of each band of each text."""
    if RMinHash.ALGORITHM_VERSION != ALGORITHM:
        raise RuntimeError(f"rensa's R-MinHash is version {RMinHash.ALGORITHM_VERSION}, not {ALGORITHM}: pin rensa")
    signatures = np.empty((len(texts), BANDS), np.uint64)
    done = 0
    for block in words_of(texts):
        counts = np.diff(block.first)
        signatures[done : done + len(counts)] = _block_bands(block)
        for wordless in done + np.flatnonzero(counts == 0):  # has no 5-grams: only an exact copy is a copy of it
            signatures[wordless] = text_hash(texts[wordless])
        done += len(counts)
    return signatures


def facts() -> dict[str, object]:
    """Parameters of the signatures, for the manifest of their artifact."""
    return {"bands": BANDS, "rows": ROWS, "words": WORDS, "seed": SEED, "minhash": f"rensa R-MinHash {ALGORITHM}"}


def _block_bands(block: WordArrays) -> np.ndarray:
    """[texts of the block, BANDS]: each band's `ROWS` MinHash values mixed into one."""
    shingles, offsets = _shingles(block)
    values = RMinHash.digest_matrix_from_flat_token_hashes(shingles, offsets, BANDS * ROWS, SEED).to_rows()
    rows = np.array(values, np.uint64).reshape(-1, BANDS, ROWS)
    mixed = np.zeros(rows.shape[:2], np.uint64)
    for row in range(ROWS):
        mixed = mix_bits(mixed ^ rows[:, :, row])
    return mixed


def _shingles(block: WordArrays) -> tuple[np.ndarray, np.ndarray]:
    """Hashes of the 5-grams of all texts, one text after the other, and the offset of each text's first.

    The last four of a text are shorter than five words, so that a short text has some too.
    """
    counts = np.diff(block.first)
    # Zeros between the texts keep a 5-gram from running over into the next text.
    padding = WORDS - 1
    padded = np.zeros(len(block.values) + padding * len(counts), np.uint64)
    positions = np.arange(len(block.values)) + padding * np.repeat(np.arange(len(counts)), counts)
    padded[positions] = block.values
    hashes = grams(np.append(padded, np.zeros(padding, np.uint64)), WORDS)[positions]
    return hashes, block.first.astype(np.uint64)
