"""The nearest exemplars of a prompt: cosine similarity over sentence vectors, by an exact FAISS index.

Similarities are compared after rounding and equal ones go by position, so that the neighbours of a prompt do not depend
on how many prompts were asked about at once. Near-duplicates of the prompt itself are left out: a teacher that is
shown the answer teaches nothing.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from configs.section import ConfigError
from data.embeddings import MODEL, Encoder
from data.files import read_jsonl
from data.records import SynthRecord, from_dict, to_dict
from data.shards import write_atomically

NEAR_DUPLICATE = 0.97  # cosine; a question and its copy with other punctuation have about 0.98
SPARE = 8  # neighbours looked up beyond those wanted, to replace near-duplicates
DIGITS = 5  # of a similarity that count


@dataclass(frozen=True)
class Neighbour:
    """An exemplar near a prompt: its position in the set, its record, and its cosine similarity."""

    index: int
    record: SynthRecord
    similarity: float

    @property
    def id(self) -> str:
        """The record's own id, or its position in the exemplars."""
        return self.record.synth_id or f"exemplar/{self.index}"


class ExemplarIndex:
    """Exemplars, and the index over the vectors of their queries."""

    def __init__(self, records: Sequence[SynthRecord], vectors: np.ndarray) -> None:
        import faiss

        self.records = list(records)
        self._index = faiss.IndexFlatIP(vectors.shape[1])
        self._index.add(np.ascontiguousarray(vectors, np.float32))

    @classmethod
    def build(cls, records: Sequence[SynthRecord], encoder: Encoder) -> "ExemplarIndex":
        """Index the exemplars by their queries."""
        return cls(records, encoder.encode([record.query for record in records]))

    def nearest(self, queries: Sequence[str], encoder: Encoder, count: int) -> list[list[Neighbour]]:
        """The `count` nearest exemplars of each query, nearest first, without its near-duplicates."""
        vectors = encoder.encode(queries)
        found: list[list[Neighbour]] = [[] for _ in queries]
        left, wanted = list(range(len(queries))), count + SPARE
        while left:  # once, unless a prompt has more near-duplicates than spares
            scores, places = self._index.search(vectors[left], min(wanted, len(self.records)))
            for at, row, where in zip(left, scores, places, strict=True):
                found[at] = self._chosen(queries[at], row, where, count)
            left = [at for at in left if len(found[at]) < count and wanted < len(self.records)]
            wanted *= 4
        return found

    def save(self, folder: Path) -> None:
        """Write the index, the records and what the vectors were made with."""
        import faiss

        write_atomically(folder / "vectors.faiss", faiss.serialize_index(self._index).tobytes())
        rows = "".join(json.dumps(to_dict(record), ensure_ascii=True) + "\n" for record in self.records)
        write_atomically(folder / "exemplars.jsonl", rows.encode())
        write_atomically(folder / "retrieval.json", json.dumps({"model": MODEL, "count": len(self.records)}).encode())

    @classmethod
    def load(cls, folder: Path) -> "ExemplarIndex":
        """What `save` wrote. Raises `ConfigError` if it is not whole or was made with another embedding model."""
        import faiss

        try:
            facts = json.loads((folder / "retrieval.json").read_bytes())
            index = faiss.deserialize_index(np.frombuffer((folder / "vectors.faiss").read_bytes(), np.uint8))
            rows = [json.loads(line) for line in (folder / "exemplars.jsonl").read_bytes().splitlines()]
        except (OSError, ValueError, RuntimeError) as error:
            raise ConfigError(f"retrieval index {folder}: cannot be read ({error}); delete it to rebuild it") from None
        records = [record for row in rows if isinstance(record := from_dict(row, "synth"), SynthRecord)]
        if facts["model"] != MODEL or not len(records) == index.ntotal == facts["count"]:
            raise ConfigError(f"retrieval index {folder}: is damaged, or not of {MODEL}; delete it to rebuild it")
        found = cls.__new__(cls)
        found.records, found._index = records, index
        return found

    def _chosen(self, query: str, scores: np.ndarray, places: np.ndarray, count: int) -> list[Neighbour]:
        ranked = sorted((-round(float(score), DIGITS), int(place)) for score, place in zip(scores, places, strict=True))
        plain = _plain(query)
        return [
            Neighbour(place, self.records[place], -negative)
            for negative, place in ranked
            if -negative < NEAR_DUPLICATE and _plain(self.records[place].query) != plain
        ][:count]


def read_exemplars(folder: Path, at_least: int) -> list[SynthRecord]:
    """The records of an `exemplars` artifact. Raises `ConfigError` if they are fewer than one prompt needs."""
    records = [one for one in read_jsonl([folder / "exemplars.jsonl"], "synth") if isinstance(one, SynthRecord)]
    if len(records) < at_least:
        raise ConfigError(
            f"exemplars {folder}: {len(records)} usable records, but every prompt is shown {at_least}; "
            "raise `exemplars` of a source of form 'synth', or lower distill.neighbours"
        )
    return records


def _plain(text: str) -> str:
    return " ".join("".join(c if c.isalnum() else " " for c in text.casefold()).split())
