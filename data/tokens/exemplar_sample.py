"""A sample of SYNTH records for retrieval, stratified by exercise (paper §3.2).

Each exercise keeps its records of smallest hash, so the sample depends neither on the order of the records nor on which
process worked when. A file keeps only `candidates_per_exercise` of each: an exercise that occurs in one file alone may
be represented by fewer than its even part.
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

LEAST_CANDIDATES = 64  # that a file keeps of an exercise
SLACK = 4  # times its even part of the sample


@dataclass(frozen=True)
class ExemplarCandidate:
    """A record that may enter the sample: its content hash, its number among the documents of its file."""

    digest: int
    document: int
    record: SynthRecord


def candidates_per_exercise(size: int, files: int) -> int:
    """How many candidates of an exercise each of `files` files keeps for a sample of `size`."""
    return size if files <= 1 else min(size, max(LEAST_CANDIDATES, -(-SLACK * size // files)))


class ExemplarSample:
    """Keeps at most `most` of the records offered of each exercise: those of the smallest hash."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._heaps: dict[str, list[tuple[int, int, SynthRecord]]] = defaultdict(list)

    def offer(self, digest: int, document: int, exercise: str | None, record: Callable[[], Record]) -> None:
        """Consider document number `document`, of content hash `digest`; `record` is called only if it is kept."""
        heap = self._heaps[exercise or ""]
        if len(heap) >= self._most and (not self._most or (-digest, -document) < heap[0][:2]):
            return
        kept = record()
        assert isinstance(kept, SynthRecord)
        entry = (-digest, -document, kept)  # negative: the heap's first entry is the largest hash
        if len(heap) < self._most:
            heapq.heappush(heap, entry)
        else:
            heapq.heapreplace(heap, entry)

    def candidates(self) -> list[ExemplarCandidate]:
        """The records kept, by exercise and hash."""
        return [
            ExemplarCandidate(-negative, -document, record)
            for name in sorted(self._heaps)
            for negative, document, record in sorted(self._heaps[name], key=lambda entry: entry[:2], reverse=True)
        ]


def write_candidates(path: Path, candidates: Iterable[ExemplarCandidate]) -> None:
    """Write the candidates of a file, one JSON object a line."""
    _write_lines(path, ({"hash": c.digest, "document": c.document, **to_dict(c.record)} for c in candidates))


def choose_exemplars(files: Iterable[tuple[Path, np.ndarray]], size: int) -> list[SynthRecord]:
    """The sample: the first of each exercise by hash, then the second of each, until it has `size` records.

    files: the path of each file's candidates, and which of its documents were kept, [documents] bool. Holds in memory
    the hashes of all candidates, and the records of the chosen ones.
    """
    by_exercise: dict[str, list[tuple[int, Path, int]]] = defaultdict(list)  # (hash, file, line)
    for path, kept in files:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines):
                row = json.loads(line)
                if kept[row["document"]]:
                    by_exercise[row["exercise"] or ""].append((row["hash"], path, number))
    ranked = [(rank, name, *e) for name, entries in by_exercise.items() for rank, e in enumerate(sorted(entries))]
    ranked.sort(key=lambda entry: entry[:2])
    # Read the files again for the chosen records alone.
    chosen: dict[Path, dict[int, int]] = defaultdict(dict)  # file -> line -> position in the sample
    for position, (_, _, _, path, number) in enumerate(ranked[:size]):
        chosen[path][number] = position
    records: dict[int, SynthRecord] = {}
    for path, positions in chosen.items():
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines):
                if number in positions and isinstance(record := from_dict(json.loads(line), "synth"), SynthRecord):
                    records[positions[number]] = record
    return [records[position] for position in sorted(records)]


def write_exemplars(path: Path, records: Iterable[SynthRecord]) -> None:
    """Write records as JSON lines in SYNTH's own schema."""
    _write_lines(path, (to_dict(record) for record in records))


def _write_lines(path: Path, rows: Iterable[dict]) -> None:
    # ASCII: a Unicode line separator inside a text must not end the line for readers that split on it.
    write_atomically(path, "".join(json.dumps(row, ensure_ascii=True) + "\n" for row in rows).encode())
