"""A sample of SYNTH records for retrieval, stratified by exercise (paper §3.2).

Each exercise keeps its records of smallest hash, so the sample depends neither on the order of the records nor on who
worked when. A file keeps only `candidates_per_exercise` of each: where an exercise lies in one file alone, it may be
represented by fewer than its even part.
"""

import heapq
import json
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from common.files import write_atomically
from data.records import Record, SynthRecord, from_dict, to_dict

LEAST = 64  # candidates a unit keeps of an exercise, at least
SLACK = 4  # times its even part


@dataclass(frozen=True)
class ExemplarCandidate:
    """A record in the running: its content hash, its place among the documents of its unit."""

    digest: int
    document: int
    record: SynthRecord


def candidates_per_exercise(size: int, units: int) -> int:
    """How many candidates of an exercise one of `units` units keeps for a sample of `size`."""
    return size if units <= 1 else min(size, max(LEAST, -(-SLACK * size // units)))


class ExemplarSample:
    """Offers in, at most `most` records of each exercise kept: those of the smallest hash."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._heaps: dict[str, list[tuple[int, int, SynthRecord]]] = defaultdict(list)

    def offer(self, digest: int, document: int, exercise: str | None, record: Callable[[], Record]) -> None:
        """Consider the `document`-th document, of content hash `digest`; `record` is called only if it is kept."""
        heap = self._heaps[exercise or ""]
        if len(heap) >= self._most and (not self._most or (-digest, -document) < heap[0][:2]):
            return
        made = record()
        assert isinstance(made, SynthRecord)
        entry = (-digest, -document, made)
        if len(heap) < self._most:
            heapq.heappush(heap, entry)
        else:
            heapq.heapreplace(heap, entry)

    def candidates(self) -> list[ExemplarCandidate]:
        """Everything still in the running, by exercise and hash."""
        return [
            ExemplarCandidate(-negative, -document, record)
            for name in sorted(self._heaps)
            for negative, document, record in sorted(self._heaps[name], key=lambda entry: entry[:2], reverse=True)
        ]


def write_candidates(path: Path, candidates: Iterable[ExemplarCandidate]) -> None:
    """Keep the candidates of a unit: one JSON object a line."""
    _write_lines(path, ({"hash": c.digest, "document": c.document, **to_dict(c.record)} for c in candidates))


def choose_exemplars(units: Iterable[tuple[Path, np.ndarray]], size: int) -> list[SynthRecord]:
    """The sample: the first of each exercise by hash, then the second of each, until it has `size` records.

    units: the candidates' file of each, and which of its documents were kept, [documents] bool. Holds in memory the
    hashes of all candidates, and the records of the chosen ones.
    """
    by_exercise: dict[str, list[tuple[int, Path, int]]] = defaultdict(list)
    for path, kept in units:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines):
                row = json.loads(line)
                if kept[row["document"]]:
                    by_exercise[row["exercise"] or ""].append((row["hash"], path, number))
    ranked = [(rank, name, *e) for name, entries in by_exercise.items() for rank, e in enumerate(sorted(entries))]
    ranked.sort(key=lambda entry: entry[:2])
    chosen: dict[Path, dict[int, int]] = defaultdict(dict)  # file -> line -> place in the sample
    for place, (_, _, _, path, number) in enumerate(ranked[:size]):
        chosen[path][number] = place
    records: dict[int, SynthRecord] = {}
    for path, wanted in chosen.items():
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines):
                if number in wanted and isinstance(record := from_dict(json.loads(line), "synth"), SynthRecord):
                    records[wanted[number]] = record
    return [records[place] for place in sorted(records)]


def write_exemplars(path: Path, records: Iterable[SynthRecord]) -> None:
    """Write records as JSON lines in SYNTH's own schema."""
    _write_lines(path, (to_dict(record) for record in records))


def _write_lines(path: Path, rows: Iterable[dict]) -> None:
    # ASCII: a line break of Unicode's inside a text must not end the line for a reader that splits on all of them.
    write_atomically(path, "".join(json.dumps(row, ensure_ascii=True) + "\n" for row in rows).encode())
