"""Benchmark contamination: find training texts that share n-grams of words with held-out questions.

Case, punctuation, spacing, invisible characters, the form of a letter (decomposed, full-width, a ligature) and markup
(HTML's tags and entities, Markdown's emphasis and links, LaTeX's commands of form) are ignored. A question shorter than
the n-gram is searched for as a whole, if it has at least five words; a shorter match is no evidence. An n-gram that
occurs in more than `COMMON` questions of one benchmark is no evidence either, but boilerplate ("choose the letter of
the correct answer").

The search takes about a seventh of the time of tokenising the text. Every n-gram of a question contains one of its
anchors (eight words, starting at every sixth word), and a bitmap of all anchors rules out nearly every position of a
text. The remaining positions are compared by 64-bit hashes and finally word by word, so the search is exact: no overlap
is missed and no hit is false.

The questions are an artifact of kind `questions`: the file `questions.jsonl`, one question a line.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path

import numpy as np

from nautile.common.errors import ConfigError
from nautile.common.files import write_atomically
from nautile.data.screening.words import WordArrays, grams_at, words_of

QUESTIONS = "questions.jsonl"
REBUILD = "build it again with `nautile run --force --only held_out`"
NGRAM = 13  # words; as in the GPT-3 paper (arXiv:2005.14165, appendix C) and most later ones
SHORTEST = 5  # words of a question that is searched for
COMMON = 10  # the GPT-3 paper also ignores 13-grams that occur in more than ten documents
_BITS_PER_ANCHOR = 32  # size of the bitmap: few false positives, and 2 MB for 75,000 questions
_STEPS = tuple(np.uint64(n) for n in (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0xD6E8FEB86659FD93))


@dataclass(frozen=True)
class HeldOutQuestion:
    """A question that must not be trained on: the benchmark it belongs to, its id there, its text.

    `whole`: only the whole question is a hit. For generated problems, which differ from each other in a few numbers.
    """

    benchmark: str
    example: str
    text: str
    whole: bool = False


@dataclass(frozen=True)
class Hit:
    """An overlap of a document with a held-out question.

    `share`: the share of the question's n-grams that the document contains; `words`: one of these n-grams.
    """

    benchmark: str
    example: str
    share: float
    words: str


def write_questions(folder: Path, questions: Iterable[HeldOutQuestion]) -> None:
    lines = [json.dumps(asdict(question), sort_keys=True, ensure_ascii=False) + "\n" for question in questions]
    write_atomically(folder / QUESTIONS, "".join(lines).encode("utf-8", "replace"))


def read_questions(folder: Path) -> list[HeldOutQuestion]:
    """The questions of an artifact. Raises `ConfigError` naming the first line that is not a question."""
    path = folder / QUESTIONS
    try:
        lines = path.read_bytes().decode().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"questions artifact {path}: cannot be read ({error}); {REBUILD}") from None
    questions = []
    for number, line in enumerate(lines, 1):
        try:
            if line:
                questions.append(HeldOutQuestion(**json.loads(line)))
        except (ValueError, TypeError) as error:
            raise ConfigError(
                f"questions artifact {path}: line {number} is not a question ({error}); {REBUILD}"
            ) from None
    return questions


def load_contamination_index(folder: Path | None) -> "ContaminationIndex | None":
    """The index over the questions of an artifact; None without one."""
    return None if folder is None else ContaminationIndex(read_questions(folder))


class ContaminationIndex:
    """An index over held-out questions, to screen documents against.

    Some questions cannot be detected: `too_short` counts those of fewer than five words, `boilerplate` those whose
    n-grams are all boilerplate.
    """

    def __init__(self, questions: Iterable[HeldOutQuestion], ngram: int = NGRAM, common: int = COMMON) -> None:
        self._questions = list(questions)
        self._blocks = list(words_of([question.text for question in self._questions]))
        self._block_starts = np.cumsum([0, *(len(block.values) for block in self._blocks)])  # in words
        values = np.concatenate([np.empty(0, np.uint64), *(block.values for block in self._blocks)])
        lengths = np.concatenate([np.empty(0, np.int64), *(np.diff(block.first) for block in self._blocks)])
        tables = _build_tables(self._questions, values, lengths, ngram, common)
        owners = np.concatenate([np.empty(0, np.int64), *(table.owners for table in tables)])
        self._ngram_counts = np.bincount(owners, minlength=len(self._questions))  # n-grams of each question
        self.too_short = int((lengths < SHORTEST).sum())
        self.boilerplate = int(((self._ngram_counts == 0) & (lengths >= SHORTEST)).sum())
        self._filters = [
            _AnchorFilter(width, width_tables, values)
            for width in (4, 8)
            if (width_tables := [table for table in tables if table.width == width])
        ]

    def hits(self, text: str) -> list[Hit]:
        """The held-out questions that `text` overlaps, the largest share first; empty if there are none."""
        return self.screen([text])[0]

    def screen(self, texts: Sequence[str]) -> list[list[Hit]]:
        return list(chain.from_iterable(map(self._screen_block, words_of(texts))))

    def _screen_block(self, block: WordArrays) -> list[list[Hit]]:
        # text -> question -> the n-grams that both contain (a dict as an ordered set)
        shared: dict[int, dict[int, dict[str, None]]] = defaultdict(lambda: defaultdict(dict))
        for table, starts, numbers in chain.from_iterable(f.candidates(block) for f in self._filters):
            # Drop candidates that extend from one text of the block into the next.
            texts = np.searchsorted(block.first, starts, "right") - 1
            inside = starts + table.length <= block.first[texts + 1]
            for start, text, number in zip(*(a[inside].tolist() for a in (starts, texts, numbers)), strict=True):
                # Equal 64-bit values may be a collision: compare the words with those of the question.
                words = block.text(start, start + table.length)
                position = int(table.positions[number])
                block_number = int(np.searchsorted(self._block_starts, position, "right")) - 1
                begin = position - int(self._block_starts[block_number])
                if words == self._blocks[block_number].text(begin, begin + table.length):
                    for owner in table.owners[table.first[number] : table.first[number + 1]].tolist():
                        shared[text][owner][" ".join(words)] = None
        return [self._to_hits(shared.get(text, {})) for text in range(len(block.first) - 1)]

    def _to_hits(self, shared: dict[int, dict[str, None]]) -> list[Hit]:
        hits = []
        for owner, ngrams in shared.items():
            question, share = self._questions[owner], len(ngrams) / int(self._ngram_counts[owner])
            hits.append(Hit(question.benchmark, question.example, share, next(iter(ngrams))))
        return sorted(hits, key=lambda hit: (-hit.share, hit.benchmark, hit.example))


@dataclass(frozen=True)
class _Table:
    """The n-grams of one length that count as evidence, sorted by their 64-bit hash.

    values: [n] hashes; positions: [n] first occurrence of each n-gram among the words of all questions.
    owners[first[i]:first[i + 1]]: the questions that contain n-gram i. skips: [n] offset in words of the n-gram's
    anchor, at most `slack`.
    """

    length: int
    values: np.ndarray
    positions: np.ndarray
    owners: np.ndarray
    first: np.ndarray
    skips: np.ndarray
    slack: int

    @property
    def width(self) -> int:
        """Number of words of an anchor."""
        return 8 if self.length >= 8 else 4

    def find(self, values: np.ndarray) -> np.ndarray:
        """The index of each value in this table, -1 if it is not there."""
        at = np.minimum(np.searchsorted(self.values, values), len(self.values) - 1)
        return np.where(self.values[at] == values, at, -1)


class _AnchorFilter:
    """Finds where a text may contain an n-gram of some tables: by anchors in a bitmap, then by the anchors' hashes."""

    def __init__(self, width: int, tables: list[_Table], values: np.ndarray) -> None:
        self._width, self._tables = width, tables
        # The hash of each n-gram's anchor; and for each distinct anchor, a bit mask of the tables that contain it. With
        # over 64 tables some share a bit, which costs only needless look-ups.
        windows = _windows(values, width)
        anchors = [windows[table.positions + table.skips] for table in tables]
        self._anchors = np.unique(np.concatenate(anchors))
        self._table_bits = np.zeros(len(self._anchors), np.uint64)
        for number, table_anchors in enumerate(anchors):
            self._table_bits[np.searchsorted(self._anchors, table_anchors)] |= _table_bit(number)
        # The bitmap, addressed by the highest bits of each anchor's mixed hash.
        self._shift = np.uint64(64 - max(10, (_BITS_PER_ANCHOR * len(self._anchors)).bit_length()))
        address = _address(self._anchors, self._shift)
        self._bitmap = np.zeros(1 << (61 - int(self._shift)), np.uint8)
        np.bitwise_or.at(self._bitmap, address >> 3, _bit_in_byte(address))

    def candidates(self, block: WordArrays) -> Iterator[tuple[_Table, np.ndarray, np.ndarray]]:
        """(table, starts, numbers): where in the block n-grams of the table begin, and their numbers in the table."""
        # 1. Look up every window of the block in the bitmap; few pass.
        windows = _windows(block.values, self._width)
        address = _address(windows, self._shift)
        passed = np.flatnonzero(self._bitmap[address >> 3] & _bit_in_byte(address))
        # 2. Look these up in the sorted anchors.
        at = np.minimum(np.searchsorted(self._anchors, windows[passed]), len(self._anchors) - 1)
        equal = self._anchors[at] == windows[passed]
        positions, table_bits = passed[equal], self._table_bits[at[equal]]
        present = int(np.bitwise_or.reduce(table_bits))
        # 3. For each table with such an anchor, look up every n-gram that could have its anchor at that position.
        for number, table in enumerate(self._tables):
            if present & int(_table_bit(number)):
                anchored = positions[(table_bits & _table_bit(number)) != 0]
                starts = np.unique(anchored[:, None] - np.arange(table.slack + 1))
                starts = starts[(starts >= 0) & (starts + table.length <= len(block.values))]
                numbers = table.find(grams_at(block.values, starts, table.length))
                yield table, starts[numbers >= 0], numbers[numbers >= 0]


def _build_tables(
    questions: Sequence[HeldOutQuestion], values: np.ndarray, lengths: np.ndarray, ngram: int, common: int
) -> list[_Table]:
    """Build a table for each n-gram length: `ngram`, and the lengths of the questions that are searched as a whole."""
    begins = np.cumsum(lengths) - lengths
    whole = np.array([question.whole for question in questions], bool) | (lengths < ngram)
    owner = np.repeat(np.arange(len(questions)), lengths)  # the question of each word
    offset = np.arange(len(values)) - begins[owner]  # of each word in its question
    names = {name: n for n, name in enumerate(sorted({question.benchmark for question in questions}))}
    benchmark = np.array([names[question.benchmark] for question in questions], np.int64)
    tables = []
    for length in sorted({ngram, *lengths[whole & (lengths >= SHORTEST)].tolist()}):
        # A question that is searched for as a whole has one n-gram, itself; any other has one from every word on.
        starts_here = np.where(whole[owner], (offset == 0) & (lengths[owner] == length), length == ngram)
        positions = np.flatnonzero(starts_here & (offset + length <= lengths[owner]))
        table = _build_table(length, values, positions, owner[positions], benchmark, common)
        # An anchor begins at every `stride`-th word of a question, so that each n-gram contains one; a question that is
        # searched as a whole has one anchor, at its beginning.
        stride = 1 + (length - table.width if length == ngram else 0)
        if len(table.values):
            tables.append(replace(table, skips=-offset[table.positions] % stride, slack=stride - 1))
    return tables


def _build_table(
    length: int, values: np.ndarray, positions: np.ndarray, owners: np.ndarray, benchmark: np.ndarray, common: int
) -> _Table:
    """The distinct n-grams that begin at `positions`, without boilerplate; the caller sets `skips` and `slack`."""
    ngrams = grams_at(values, positions, length)
    order = np.lexsort((owners, ngrams))
    ngrams, owners, positions = ngrams[order], owners[order], positions[order]
    # Count an n-gram once per question.
    is_first = _run_starts(ngrams, owners)
    ngrams, owners, positions = ngrams[is_first], owners[is_first], positions[is_first]
    # Remove boilerplate: n-grams that occur in more than `common` questions of one benchmark.
    benchmarks = benchmark[owners]
    order = np.lexsort((benchmarks, ngrams))
    begins = np.flatnonzero(_run_starts(ngrams[order], benchmarks[order]))
    counts = np.diff(np.append(begins, len(ngrams)))
    is_evidence = ~np.isin(ngrams, ngrams[order][begins[counts > common]])
    ngrams, owners, positions = ngrams[is_evidence], owners[is_evidence], positions[is_evidence]
    distinct, first = np.unique(ngrams, return_index=True)
    return _Table(length, distinct, positions[first], owners, np.append(first, len(ngrams)), np.empty(0, np.int64), 0)


def _run_starts(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Mask of the positions where a run of equal (left, right) pairs begins."""
    changed = np.ones(len(left), bool)
    changed[1:] = (left[1:] != left[:-1]) | (right[1:] != right[:-1])
    return changed


def _windows(values: np.ndarray, width: int) -> np.ndarray:
    """A hash of each `width` consecutive words, for a power of two: hashes of pairs, then of pairs of pairs, …"""
    windows, step = values, 1
    for factor in _STEPS[: width.bit_length() - 1]:
        windows = windows[:-step] * factor + windows[step:]
        step *= 2
    return windows


def _address(windows: np.ndarray, shift: np.uint64) -> np.ndarray:
    """The bit of the bitmap that each window is mapped to."""
    return ((windows * _STEPS[0]) >> shift).view(np.int64)


def _table_bit(table: int) -> np.uint64:
    return np.uint64(1 << table % 64)


def _bit_in_byte(address: np.ndarray) -> np.ndarray:
    return np.left_shift(1, address & 7).astype(np.uint8)
