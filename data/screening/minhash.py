"""MinHash signatures in bands, for near copies: two texts with an equal value in one band are taken for one.

Word 5-grams, 112 values in 14 bands of 8, as FineWeb (Penedo et al. 2024, arXiv:2406.17557, §3.4): two documents whose
sets of 5-grams overlap by 0.75 share a band with a probability of 77 %, by 0.8 with 92 %, by 0.5 with 5 %.

The 5-grams are hashed here (`data.screening.words`), and `rensa` makes R-MinHash values of the hashes, at 130 times
the speed of
`datasketch` (bench/deduplicate.py). A signature depends on its text alone. A version of rensa that gives other values
says so, and is refused. A script without spaces has words as long as its clauses: fewer of its near copies are found.
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
    found = np.empty((len(texts), BANDS), np.uint64)
    done = 0
    for block in words_of(texts):
        counts = np.diff(block.first)
        found[done : done + len(counts)] = _bands(block)
        for wordless in done + np.flatnonzero(counts == 0):  # like nothing but its own copies
            found[wordless] = text_hash(texts[wordless])
        done += len(counts)
    return found


def facts() -> dict[str, object]:
    """What the signatures of an artifact were made with."""
    return {"bands": BANDS, "rows": ROWS, "words": WORDS, "seed": SEED, "minhash": f"rensa R-MinHash {ALGORITHM}"}


def _bands(block: WordArrays) -> np.ndarray:
    shingles, offsets = _shingles(block)
    values = RMinHash.digest_matrix_from_flat_token_hashes(shingles, offsets, BANDS * ROWS, SEED).to_rows()
    rows = np.array(values, np.uint64).reshape(-1, BANDS, ROWS)
    found = np.zeros(rows.shape[:2], np.uint64)
    for place in range(ROWS):
        found = mix_bits(found ^ rows[:, :, place])
    return found


def _shingles(block: WordArrays) -> tuple[np.ndarray, np.ndarray]:
    """The hashes of the 5-grams of each text, one after the other, and where each text's begin.

    The last four of a text are shorter than five words, so that a short text has some too.
    """
    counts = np.diff(block.first)
    after = WORDS - 1  # words of nothing after each text
    spaced = np.zeros(len(block.values) + after * len(counts), np.uint64)
    places = np.arange(len(block.values)) + after * np.repeat(np.arange(len(counts)), counts)
    spaced[places] = block.values
    found = grams(np.append(spaced, np.zeros(after, np.uint64)), WORDS)[places]
    return found, block.first.astype(np.uint64)
