"""Overlap of training text with held-out questions, by n-grams of words; every hit is listed with what it shares.

Case, punctuation and spacing do not count. A question shorter than the n-gram is searched for whole, but not below
five words, where a match says nothing. An n-gram that stands in more than `COMMON` questions of one benchmark is its
boilerplate ("choose the letter of the correct answer"): it is evidence of nothing.

Most text is seen through at a seventh of the time of tokenising it: every n-gram of a question contains one of its
anchors (eight words, one in six places), and a bitmap tells where a text may have one. What is left is compared by
64-bit values and at last word by word, so no hit is lost and none is made up.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path

import numpy as np

from common.errors import ConfigError
from common.files import write_atomically
from data.screening.words import WordArrays, grams_at, words_of

NGRAM = 13  # as in GPT-3's and most later reports
SHORTEST = 5
COMMON = 10  # GPT-3's report, too, takes 13-grams of more than ten training documents for boilerplate (appendix C)
_SPARSE = 32  # places of the bitmap for each anchor: one place in so many is lit, and 75,000 questions take 2 MB
_STEPS = tuple(np.uint64(n) for n in (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0xD6E8FEB86659FD93))


@dataclass(frozen=True)
class HeldOutQuestion:
    """A question that must not be trained on: the benchmark it belongs to, its id there, its text.

    `whole`: only the whole of it is a hit. For problems of a generator, which differ in a few numbers each.
    """

    benchmark: str
    example: str
    text: str
    whole: bool = False


@dataclass(frozen=True)
class Hit:
    """A document shares n-grams with a held-out question. `share`: of the question's n-grams; `words`: one of them."""

    benchmark: str
    example: str
    share: float
    words: str


class ContaminationIndex:
    """An index over held-out questions that documents are checked against.

    `too_short` and `boilerplate` count the questions that cannot be found: those of fewer than five words, and those
    without an n-gram of their own.
    """

    def __init__(self, questions: Iterable[HeldOutQuestion], ngram: int = NGRAM, common: int = COMMON) -> None:
        self._questions = list(questions)
        self._blocks = list(words_of([question.text for question in self._questions]))
        self._before = np.cumsum([0, *(len(block.values) for block in self._blocks)])
        values = np.concatenate([np.empty(0, np.uint64), *(block.values for block in self._blocks)])
        lengths = np.concatenate([np.empty(0, np.int64), *(np.diff(block.first) for block in self._blocks)])
        tables = _tables(self._questions, values, lengths, ngram, common)
        owners = np.concatenate([np.empty(0, np.int64), *(table.owners for table in tables)])
        self._evidence = np.bincount(owners, minlength=len(self._questions))
        self.too_short = int((lengths < SHORTEST).sum())
        self.boilerplate = int(((self._evidence == 0) & (lengths >= SHORTEST)).sum())
        self._sieves = [
            _Sieve(width, chosen, values)
            for width in (4, 8)
            if (chosen := [table for table in tables if table.width == width])
        ]

    def hits(self, text: str) -> list[Hit]:
        """The held-out questions that `text` overlaps, the largest share first; empty if it is clean."""
        return self.screen([text])[0]

    def screen(self, texts: Sequence[str]) -> list[list[Hit]]:
        """The hits of each text."""
        return list(chain.from_iterable(map(self._screen, words_of(texts))))

    def _screen(self, block: WordArrays) -> list[list[Hit]]:
        shared: dict[int, dict[int, dict[str, None]]] = defaultdict(lambda: defaultdict(dict))
        for table, starts, numbers in chain.from_iterable(sieve.candidates(block) for sieve in self._sieves):
            texts = np.searchsorted(block.first, starts, "right") - 1
            inside = starts + table.length <= block.first[texts + 1]
            for start, text, number in zip(*(a[inside].tolist() for a in (starts, texts, numbers)), strict=True):
                words = block.text(start, start + table.length)
                if words == self._words(int(table.places[number]), table.length):
                    for owner in table.owners[table.first[number] : table.first[number + 1]].tolist():
                        shared[text][owner][" ".join(words)] = None
        return [self._told(shared.get(text, {})) for text in range(len(block.first) - 1)]

    def _told(self, shared: dict[int, dict[str, None]]) -> list[Hit]:
        found = []
        for owner, words in shared.items():
            question, share = self._questions[owner], len(words) / int(self._evidence[owner])
            found.append(Hit(question.benchmark, question.example, share, next(iter(words))))
        return sorted(found, key=lambda hit: (-hit.share, hit.benchmark, hit.example))

    def _words(self, place: int, length: int) -> list[str]:
        number = int(np.searchsorted(self._before, place, "right")) - 1
        begin = place - int(self._before[number])
        return self._blocks[number].text(begin, begin + length)


@dataclass(frozen=True)
class _Table:
    """The n-grams of one length that are evidence, by value. `places`: where each first stands among the questions'
    words; `owners[first[i]:first[i + 1]]`: the questions that have it. `skips[i]`: how far into it its anchor begins,
    at most `slack`.
    """

    length: int
    values: np.ndarray
    places: np.ndarray
    owners: np.ndarray
    first: np.ndarray
    skips: np.ndarray
    slack: int

    @property
    def width(self) -> int:
        """Words of an anchor."""
        return _width(self.length)

    def find(self, values: np.ndarray) -> np.ndarray:
        """The number of each value here, -1 where it is not."""
        at = np.minimum(np.searchsorted(self.values, values), len(self.values) - 1)
        return np.where(self.values[at] == values, at, -1)


class _Sieve:
    """Where a text may have an n-gram of some tables: by their anchors, in a bitmap first, then by value."""

    def __init__(self, width: int, tables: list[_Table], values: np.ndarray) -> None:
        self._width, self._tables = width, tables
        windows = _windows(values, width)
        anchors = [windows[table.places + table.skips] for table in tables]
        self._anchors = np.unique(np.concatenate(anchors))
        self._uses = np.zeros(len(self._anchors), np.uint64)  # of each anchor, a bit for every table it may be of
        for number, own in enumerate(anchors):
            self._uses[np.searchsorted(self._anchors, own)] |= _use(number)
        self._shift = np.uint64(64 - max(10, (_SPARSE * len(self._anchors)).bit_length()))
        address = _address(self._anchors, self._shift)
        self._bits = np.zeros(1 << (61 - int(self._shift)), np.uint8)
        np.bitwise_or.at(self._bits, address >> 3, _bit(address))

    def candidates(self, block: WordArrays) -> Iterator[tuple[_Table, np.ndarray, np.ndarray]]:
        """(table, starts, numbers): words of the block from which on n-grams of the table stand, by their values."""
        windows = _windows(block.values, self._width)
        address = _address(windows, self._shift)
        lit = np.flatnonzero(self._bits[address >> 3] & _bit(address))
        at = np.minimum(np.searchsorted(self._anchors, windows[lit]), len(self._anchors) - 1)
        there = self._anchors[at] == windows[lit]
        lit, uses = lit[there], self._uses[at[there]]
        used = int(np.bitwise_or.reduce(uses))
        for number, table in enumerate(self._tables):
            if used & int(_use(number)):
                starts = np.unique(lit[(uses & _use(number)) != 0, None] - np.arange(table.slack + 1))
                starts = starts[(starts >= 0) & (starts + table.length <= len(block.values))]
                numbers = table.find(grams_at(block.values, starts, table.length))
                yield table, starts[numbers >= 0], numbers[numbers >= 0]


def _tables(
    questions: Sequence[HeldOutQuestion], values: np.ndarray, lengths: np.ndarray, ngram: int, common: int
) -> list[_Table]:
    """A table for each length of n-gram: `ngram` from every word on, and the whole of the questions searched whole."""
    begins = np.cumsum(lengths) - lengths
    whole = np.array([question.whole for question in questions], bool) | (lengths < ngram)
    owner = np.repeat(np.arange(len(questions)), lengths)  # of each word
    offset = np.arange(len(values)) - begins[owner]
    names = {name: n for n, name in enumerate(sorted({question.benchmark for question in questions}))}
    benchmark = np.array([names[question.benchmark] for question in questions], np.int64)
    tables = []
    for length in sorted({ngram, *lengths[whole & (lengths >= SHORTEST)].tolist()}):
        starts_here = np.where(whole[owner], (offset == 0) & (lengths[owner] == length), length == ngram)
        places = np.flatnonzero(starts_here & (offset + length <= lengths[owner]))
        table = _table(length, values, places, owner[places], benchmark, common)
        # One place in so many is an anchor, so that each n-gram has one; a whole question has it at its beginning.
        stride = 1 + (length - table.width if length == ngram else 0)
        if len(table.values):
            tables.append(replace(table, skips=-offset[table.places] % stride, slack=stride - 1))
    return tables


def _table(
    length: int, values: np.ndarray, places: np.ndarray, owners: np.ndarray, benchmark: np.ndarray, common: int
) -> _Table:
    found = grams_at(values, places, length)
    order = np.lexsort((owners, found))
    found, owners, places = found[order], owners[order], places[order]
    once = _changes(found, owners)
    found, owners, places = found[once], owners[once], places[once]
    own = ~np.isin(found, _boilerplate(found, benchmark[owners], common))
    found, owners, places = found[own], owners[own], places[own]
    distinct, first = np.unique(found, return_index=True)
    return _Table(length, distinct, places[first], owners, np.append(first, len(found)), np.empty(0, np.int64), 0)


def _boilerplate(grams: np.ndarray, benchmark: np.ndarray, common: int) -> np.ndarray:
    """The n-grams that stand in more than `common` questions of one benchmark, given the n-grams of each question."""
    order = np.lexsort((benchmark, grams))
    begins = np.flatnonzero(_changes(grams[order], benchmark[order]))
    counts = np.diff(np.append(begins, len(grams)))
    return grams[order][begins[counts > common]]


def _changes(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Where a run of equal pairs begins."""
    changed = np.ones(len(one), bool)
    changed[1:] = (one[1:] != one[:-1]) | (other[1:] != other[:-1])
    return changed


def _width(length: int) -> int:
    return 8 if length >= 8 else 4


def _windows(values: np.ndarray, width: int) -> np.ndarray:
    """A value for each `width` words in a row: two, then two of those, and so on."""
    found, step = values, 1
    for factor in _STEPS[: width.bit_length() - 1]:
        found = found[:-step] * factor + found[step:]
        step *= 2
    return found


def _address(windows: np.ndarray, shift: np.uint64) -> np.ndarray:
    return ((windows * _STEPS[0]) >> shift).view(np.int64)


def _use(table: int) -> np.uint64:
    return np.uint64(1 << table % 64)


def _bit(address: np.ndarray) -> np.ndarray:
    return np.left_shift(1, address & 7).astype(np.uint8)


QUESTIONS = "questions.jsonl"


def write_questions(folder: Path, questions: Iterable[HeldOutQuestion]) -> None:
    """Write the artifact's file, a question a line, in the order given."""
    lines = [json.dumps(asdict(question), sort_keys=True, ensure_ascii=False) + "\n" for question in questions]
    write_atomically(folder / QUESTIONS, "".join(lines).encode("utf-8", "replace"))


def read_questions(folder: Path) -> list[HeldOutQuestion]:
    """The questions of an artifact. Raises `ConfigError` naming the line that is not one."""
    path = folder / QUESTIONS
    try:
        lines = path.read_bytes().decode().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"questions artifact {path}: cannot be read ({error}); make it again: {_AGAIN}") from None
    questions = []
    for number, line in enumerate(lines, 1):
        try:
            if line:
                questions.append(HeldOutQuestion(**json.loads(line)))
        except (ValueError, TypeError) as error:
            raise ConfigError(f"questions artifact {path}: line {number} is no question ({error}); {_AGAIN}") from None
    return questions


def load_contamination_index(folder: Path | None) -> ContaminationIndex | None:
    """What screens texts against the questions of an artifact; None where there is none."""
    return None if folder is None else ContaminationIndex(read_questions(folder))


_AGAIN = "`nautile run --force --only held_out`"
