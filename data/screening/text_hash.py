"""Exact deduplication of normalised text, by 64-bit hashes.

The same hash decides which split a record belongs to, so two copies of one text, in one source or in two, never stand
on both sides of the validation split. It is XXH3, whose values its specification fixes for every platform and version.
"""

import unicodedata
from pathlib import Path

import numpy as np
import xxhash

from data.records import Record, WebRecord
from data.screening.words import Folding

SPAN = 1 << 64


def content_hash(record: Record) -> int:
    """64-bit hash of the record's text; case, Unicode form and white space do not count."""
    if isinstance(record, WebRecord):
        return text_hash(record.text)
    return text_hash("\x00".join((record.query, record.synthetic_reasoning, record.synthetic_answer)))


def text_hash(text: str) -> int:
    """64-bit hash of `text` without its case, Unicode form and white space: "1 2" counts as "12", for a document that
    was wrapped or joined anew is a copy. A chance collision among 100 million documents has a probability of 0.03 %.
    """
    return xxhash.xxh3_64_intdigest(_normal(text))


def _normalised(text: str) -> str:
    composed = text if unicodedata.is_normalized("NFC", text) else unicodedata.normalize("NFC", text)
    return "".join(composed.casefold().split())


def _character(c: str) -> str | None:
    """None for what a neighbour can join or composition alters."""
    if unicodedata.category(c)[0] == "M" or not unicodedata.is_normalized("NFC", c):
        return None
    return "" if c.isspace() else c.casefold()


_normal = Folding(_character, _normalised)


def in_validation(digest: int, share: float) -> bool:
    """Whether a record of this hash is held out for validation; about `share` of all records are."""
    return digest < share * SPAN


class Seen:
    """The hashes met so far; can be written to a file part by part and read back."""

    def __init__(self) -> None:
        self._all: set[int] = set()
        self._fresh: list[int] = []

    def add(self, digest: int) -> bool:
        """Remember `digest`; False if it had been met before."""
        if digest in self._all:
            return False
        self._all.add(digest)
        self._fresh.append(digest)
        return True

    def take_fresh(self) -> bytes:
        """What was added since the last call, 8 bytes each, to be kept for `load`."""
        fresh, self._fresh = np.array(self._fresh, "<u8").tobytes(), []
        return fresh

    def load(self, path: Path) -> None:
        """Meet again what an earlier process kept in a file."""
        self._all.update(np.fromfile(path, "<u8").tolist())
