"""MinHash signatures in bands, for near copies: two texts with an equal value in one band are taken for one.

Word 5-grams, 112 values in 14 bands of 8, as FineWeb (Penedo et al. 2024, arXiv:2406.17557, §3.4): two documents whose
sets of 5-grams overlap by 0.75 share a band with a probability of 77 %, by 0.8 with 92 %, by 0.5 with 5 %.

A word is a run of ASCII letters and digits and of whatever is not ASCII, letters small; a script without spaces has
words as long as its sentences, so that fewer of its copies are found. The 5-grams are hashed here, a block of texts at
a time, and `rensa` makes R-MinHash values of the hashes: at 130 times the speed of `datasketch` (bench/deduplicate.py).
A signature depends on its text alone. A version of rensa that gives other values says so, and is refused.
"""

from collections.abc import Iterator, Sequence
from functools import cache

import numpy as np
from rensa import RMinHash

from data.deduplicate import text_hash

BANDS, ROWS, WORDS, SEED = 14, 8, 5, 1
ALGORITHM = 2  # of R-MinHash: rensa raises it when its values change
BLOCK = 1 << 18  # bytes hashed at once: more would leave the cache

_WORD_BYTES = bytes(
    c | 0x20 if chr(c).isascii() and chr(c).isupper() else c if c >= 128 or chr(c).isalnum() else 0 for c in range(256)
)
_U8 = np.uint64


def bands(texts: Sequence[str]) -> np.ndarray:
    """[texts, BANDS] uint64: the value of each band of each text."""
    if RMinHash.ALGORITHM_VERSION != ALGORITHM:
        raise RuntimeError(f"rensa's R-MinHash is version {RMinHash.ALGORITHM_VERSION}, not {ALGORITHM}: pin rensa")
    found = [_bands(block) for block in _blocks([text.encode("utf-8", "replace") for text in texts])]
    return np.concatenate(found) if found else np.empty((0, BANDS), np.uint64)


def facts() -> dict[str, object]:
    """What the signatures of an artifact were made with."""
    return {"bands": BANDS, "rows": ROWS, "words": WORDS, "seed": SEED, "minhash": f"rensa R-MinHash {ALGORITHM}"}


def _bands(raws: list[bytes]) -> np.ndarray:
    grams, counts = _grams(raws)
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.uint64)
    values = RMinHash.digest_matrix_from_flat_token_hashes(grams, offsets, BANDS * ROWS, SEED).to_rows()
    rows = np.array(values, np.uint64).reshape(-1, BANDS, ROWS)
    mixed = np.zeros(rows.shape[:2], np.uint64)
    for place in range(ROWS):
        mixed = _mixed(mixed ^ rows[:, :, place])
    return mixed


def _grams(raws: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """The hashes of the 5-grams of each text, one after the other, and how many each has.

    The last four of a text are shorter than five words, so that a short text has some too.
    """
    words, counts = _words(raws)
    spaced = np.zeros(len(words) + (WORDS - 1) * len(raws), np.uint64)  # after each text, four words of nothing
    places = np.arange(len(words)) + (WORDS - 1) * np.repeat(np.arange(len(raws)), counts)
    spaced[places] = words
    grams = np.zeros(len(words), np.uint64)
    for ahead in range(WORDS):
        grams += spaced[places + ahead] * _odd()[ahead]
    grams = _mixed(grams)
    if not counts.all():  # no word at all: the text as it stands is its only 5-gram
        empty = np.flatnonzero(counts == 0)
        whole = np.array([text_hash(raws[n].decode()) for n in empty], np.uint64)
        grams = np.insert(grams, np.cumsum(counts)[empty], whole)
        counts = np.maximum(counts, 1)
    return grams, counts


def _words(raws: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """A hash of each word of each text, and how many each has: a polynomial over its bytes, modulo 2^64."""
    ends = np.cumsum([len(raw) + 1 for raw in raws])
    block = np.frombuffer((b"\0".join(raws) + b"\0").translate(_WORD_BYTES), np.uint8)
    inside = np.concatenate([[False], block != 0])
    starts = np.flatnonzero(inside[1:] & ~inside[:-1])
    counts = np.diff(np.searchsorted(starts, ends), prepend=0)
    if not len(starts):
        return np.empty(0, np.uint64), counts
    powers, inverses = _powers(1 << int(len(block) - 1).bit_length())
    terms = _byte_values()[block] * powers[: len(block)]
    return np.add.reduceat(terms, starts) * inverses[starts], counts


def _mixed(values: np.ndarray) -> np.ndarray:
    """Each value with its bits mixed (the finaliser of MurmurHash3)."""
    values = (values ^ (values >> _U8(33))) * _U8(0xFF51AFD7ED558CCD)
    values = (values ^ (values >> _U8(33))) * _U8(0xC4CEB9FE1A85EC53)
    return values ^ (values >> _U8(33))


@cache
def _byte_values() -> np.ndarray:
    """A value for each byte, none for what stands between words."""
    values = _mixed(np.arange(256, dtype=np.uint64) * _U8(0x9E3779B97F4A7C15))
    values[0] = 0
    return values


@cache
def _odd() -> np.ndarray:
    return _mixed(np.arange(1, WORDS + 1, dtype=np.uint64)) | _U8(1)


@cache
def _powers(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Powers of an odd number and of its inverse, modulo 2^64."""
    base = 0x9E3779B97F4A7C15
    both = []
    for factor in (base, pow(base, -1, 1 << 64)):
        factors = np.full(count, factor, np.uint64)
        factors[0] = 1
        both.append(np.cumprod(factors, dtype=np.uint64))
    return both[0], both[1]


def _blocks(raws: list[bytes]) -> Iterator[list[bytes]]:
    block: list[bytes] = []
    size = 0
    for raw in raws:
        block.append(raw)
        size += len(raw)
        if size >= BLOCK:
            yield block
            block, size = [], 0
    if block:
        yield block
