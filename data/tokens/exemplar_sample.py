"""A sample of SYNTH records for retrieval, stratified by exercise (paper §3.2).

The sample takes the records of smallest hash of each exercise, so it does not depend on the order of records, files or
processes. A file contributes at most `candidates_per_exercise` of each exercise, so an exercise that occurs in a single
file may get less than an even share.
"""

import heapq
import json
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nautile.common.files import write_atomically
from nautile.data.records import Record, SynthRecord, from_dict, to_dict

LEAST_CANDIDATES = 64  # per exercise and file
SLACK = 4  # candidates of a file, as a multiple of its even share of the sample


@dataclass(frozen=True)
class ExemplarCandidate:
    """A record that may enter the sample, with its content hash and its document number in its file."""

    digest: int
    document: int
    record: SynthRecord


def candidates_per_exercise(size: int, files: int) -> int:
    """Number of candidates that each of `files` files keeps per exercise, for a sample of `size` records."""
    return size if files <= 1 else min(size, max(LEAST_CANDIDATES, -(-SLACK * size // files)))


class ExemplarSample:
    """Keeps, per exercise, the `capacity` records of smallest hash among those offered."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._heaps: dict[str, list[tuple[int, int, SynthRecord]]] = defaultdict(list)

    def offer(self, digest: int, document: int, exercise: str | None, record: Callable[[], Record]) -> None:
        """Consider a document by its content hash `digest` and number; `record()` is called only if it is kept."""
        heap = self._heaps[exercise or ""]
        # Negated keys: the heap's first entry is then the one of the largest hash.
        if len(heap) >= self._capacity and (not self._capacity or (-digest, -document) < heap[0][:2]):
            return
        exercise_record = record()
        assert isinstance(exercise_record, SynthRecord)
        entry = (-digest, -document, exercise_record)
        if len(heap) < self._capacity:
            heapq.heappush(heap, entry)
        else:
            heapq.heapreplace(heap, entry)

    def candidates(self) -> list[ExemplarCandidate]:
        """The kept records, sorted by exercise and hash."""
        return [
            ExemplarCandidate(-negative, -document, record)
            for name in sorted(self._heaps)
            for negative, document, record in sorted(self._heaps[name], key=lambda entry: entry[:2], reverse=True)
        ]


def write_candidates(path: Path, candidates: Iterable[ExemplarCandidate]) -> None:
    """Write the candidates of a file as JSON lines."""
    _write_lines(path, ({"hash": c.digest, "document": c.document, **to_dict(c.record)} for c in candidates))


def choose_exemplars(files: Iterable[tuple[Path, np.ndarray]], size: int) -> list[SynthRecord]:
    """Choose the sample: the first record of each exercise by hash, then the second of each, up to `size` records.

    files: the path of each file's candidates, and which of its documents were kept, [documents] bool. Holds the hashes
    of all candidates and the chosen records in memory.
    """
    by_exercise: dict[str, list[tuple[int, Path, int]]] = defaultdict(list)  # (hash, file, line)
    for path, kept_documents in files:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines):
                row = json.loads(line)
                if kept_documents[row["document"]]:
                    by_exercise[row["exercise"] or ""].append((row["hash"], path, number))
    ranked = [(rank, name, *e) for name, entries in by_exercise.items() for rank, e in enumerate(sorted(entries))]
    ranked.sort(key=lambda entry: entry[:2])
    # Read the files a second time, now parsing only the chosen records.
    chosen_lines: dict[Path, dict[int, int]] = defaultdict(dict)  # file -> line -> position in the sample
    for position, (_, _, _, path, number) in enumerate(ranked[:size]):
        chosen_lines[path][number] = position
    records: dict[int, SynthRecord] = {}
    for path, positions in chosen_lines.items():
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines):
                if number in positions and isinstance(record := from_dict(json.loads(line), "synth"), SynthRecord):
                    records[positions[number]] = record
    return [records[position] for position in sorted(records)]


def write_exemplars(path: Path, records: Iterable[SynthRecord]) -> None:
    """Write records as JSON lines in SYNTH's own schema."""
    _write_lines(path, (to_dict(record) for record in records))


def _write_lines(path: Path, rows: Iterable[dict]) -> None:
    # ASCII, because some readers split lines at Unicode line separators, which a text may contain.
    write_atomically(path, "".join(json.dumps(row, ensure_ascii=True) + "\n" for row in rows).encode())
