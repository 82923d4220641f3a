"""The 64-bit hash of a text's content: exact deduplication and the validation split both use it.

Two copies of a text, in one source or in two, are therefore always in the same split. The hash is XXH3, whose values
its specification fixes for every platform and version.
"""

import unicodedata

import xxhash

from data.screening.words import FastFolding

HASH_RANGE = 1 << 64


def text_hash(text: str) -> int:
    """64-bit hash of `text` without its case, Unicode form and white space.

    "1 2" counts as "12": a document whose lines were only wrapped differently is a copy. The probability of a chance
    collision among 100 million documents is 0.03 %.
    """
    return xxhash.xxh3_64_intdigest(_normalise(text))


def _normalise_slowly(text: str) -> str:
    composed = text if unicodedata.is_normalized("NFC", text) else unicodedata.normalize("NFC", text)
    return "".join(composed.casefold().split())


def _normalise_character(c: str) -> str | None:
    """None for a character that may compose with its neighbours, or that composition alters."""
    if unicodedata.category(c)[0] == "M" or not unicodedata.is_normalized("NFC", c):
        return None
    return "" if c.isspace() else c.casefold()


_normalise = FastFolding(_normalise_character, _normalise_slowly)


def in_validation(digest: int, share: float) -> bool:
    """True if the record of this hash belongs to the validation split; about `share` of all records do."""
    return digest < share * HASH_RANGE
