"""Overlap of training text with held-out questions, by n-grams of words; every hit is listed with what it shares.

Case, punctuation and spacing do not count. A question shorter than the n-gram is searched for whole, but not below
five words, where a match says nothing.
"""

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

WORD = re.compile(r"\w+")
NGRAM = 13  # as in GPT-3's and most later reports
SHORTEST = 5


@dataclass(frozen=True)
class HeldOut:
    """A question that must not be trained on: the benchmark it belongs to, its id there, its text."""

    benchmark: str
    example: str
    text: str


@dataclass(frozen=True)
class Hit:
    """A document shares n-grams with a held-out question. `share`: of the question's n-grams; `words`: one of them."""

    benchmark: str
    example: str
    share: float
    words: str


class Contamination:
    """An index over held-out questions that documents are checked against."""

    def __init__(self, questions: Iterable[HeldOut], ngram: int = NGRAM) -> None:
        self._ngram = ngram
        self._owners: dict[tuple[str, ...], list[int]] = defaultdict(list)
        self._questions: list[HeldOut] = []
        self._counts: list[int] = []
        self.too_short = 0
        for question in questions:
            words = _words(question.text)
            if len(words) < SHORTEST:
                self.too_short += 1
                continue
            grams = set(_ngrams(words, min(ngram, len(words))))
            for gram in grams:
                self._owners[gram].append(len(self._questions))
            self._questions.append(question)
            self._counts.append(len(grams))
        self._lengths = sorted({len(gram) for gram in self._owners})

    def hits(self, text: str) -> list[Hit]:
        """The held-out questions that `text` overlaps, the largest share first; empty if it is clean."""
        words = _words(text)
        shared: dict[int, list[tuple[str, ...]]] = defaultdict(list)
        for length in self._lengths:
            for gram in dict.fromkeys(_ngrams(words, length)):
                for owner in self._owners.get(gram, ()):
                    shared[owner].append(gram)
        found = [
            Hit(
                self._questions[owner].benchmark,
                self._questions[owner].example,
                len(grams) / self._counts[owner],
                " ".join(grams[0]),
            )
            for owner, grams in shared.items()
        ]
        return sorted(found, key=lambda hit: (-hit.share, hit.benchmark, hit.example))


def _words(text: str) -> list[str]:
    return WORD.findall(text.casefold())


def _ngrams(words: list[str], length: int) -> Iterable[tuple[str, ...]]:
    return zip(*(words[offset:] for offset in range(length)), strict=False)
