"""A sample of SYNTH records for retrieval, stratified by exercise (paper §3.2).

Each exercise keeps its records of smallest hash, so the sample depends on the set of records only: not on their order,
nor on how the work was cut into parts.
"""

import heapq
import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from data.records import SynthRecord, from_dict, to_dict
from data.shards import write_atomically

_Entry = tuple[int, SynthRecord]  # hash, record


class Sample:
    """Offers in, at most `size` records out, the exercises as equally represented as the records allow."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._heaps: dict[str, list[tuple[int, int, SynthRecord]]] = defaultdict(list)
        self._offers = 0

    def offer(self, digest: int, record: SynthRecord) -> None:
        """Consider one record; `digest` is its content hash."""
        if not self._size:
            return
        heap = self._heaps[record.exercise or ""]
        self._offers += 1
        entry = (-digest, self._offers, record)  # the counter keeps equal hashes from comparing records
        if len(heap) < self._size:
            heapq.heappush(heap, entry)
        elif entry > heap[0]:
            heapq.heapreplace(heap, entry)

    def candidates(self) -> list[_Entry]:
        """Everything still in the running, by exercise and hash."""
        return [
            (-negative, record)
            for name in sorted(self._heaps)
            for negative, _, record in sorted(self._heaps[name], key=lambda entry: -entry[0])
        ]

    def chosen(self) -> list[SynthRecord]:
        """The sample: the first of each exercise, then the second of each, until it is full."""
        by_exercise: dict[str, list[SynthRecord]] = defaultdict(list)
        for _, record in self.candidates():
            by_exercise[record.exercise or ""].append(record)
        ranked = [(rank, name, r) for name, records in by_exercise.items() for rank, r in enumerate(records)]
        ranked.sort(key=lambda entry: entry[:2])
        return [record for _, _, record in ranked[: self._size]]


def write_candidates(path: Path, entries: Iterable[_Entry]) -> None:
    """Keep the candidates of a part: one JSON object a line, hash and record."""
    _write_lines(path, ({"hash": digest, **to_dict(record)} for digest, record in entries))


def read_candidates(path: Path, sample: Sample) -> None:
    """Offer what `write_candidates` kept."""
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        record = from_dict(row, "synth")
        if isinstance(record, SynthRecord):
            sample.offer(row["hash"], record)


def write_exemplars(path: Path, records: Iterable[SynthRecord]) -> None:
    """Write records as JSON lines in SYNTH's own schema."""
    _write_lines(path, (to_dict(record) for record in records))


def _write_lines(path: Path, rows: Iterable[dict]) -> None:
    # ASCII: a line break of Unicode's inside a text must not end the line for a reader that splits on all of them.
    write_atomically(path, "".join(json.dumps(row, ensure_ascii=True) + "\n" for row in rows).encode())
