"""The nearest exemplars of a prompt (paper §3.2), out of an index that is built once and kept as an artifact.

    retrieval.json     the embedding model, the kind of index, counts, and the digest of each other file
    exemplars.jsonl    the exemplars, one a line       vectors.f4   [n, width] float32 of their queries, mapped
    index.faiss        what `faiss.serialize_index` gives: no pickle

Similarities are cosines of the vectors themselves, compared after rounding, and equal ones go by position, so that the
neighbours of a prompt do not depend on how many prompts were asked about at once. Near-duplicates of the prompt itself
are left out: a teacher that is shown the answer teaches nothing. Of the exemplars only offsets are held in memory.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from configs.distill import IndexConfig
from configs.emit import Emit, silent
from configs.section import ConfigError
from data import nearest
from data.embeddings import Encoder
from data.files import read_jsonl
from data.records import SynthRecord, from_dict, to_dict
from data.shards import write_atomically

FORMAT = "nautile-retrieval-1"
NEAR_DUPLICATE = 0.97  # cosine; a question and its copy with other punctuation have about 0.98
SPARE = 8  # neighbours looked up beyond those wanted, to replace near-duplicates
DIGITS = 5  # of a similarity that count
BLOCK = 1024  # exemplars encoded at once
EXEMPLARS, VECTORS, INDEX, FACTS = "exemplars.jsonl", "vectors.f4", "index.faiss", "retrieval.json"
REBUILD = "build it again with `nautile run --force --only index`"


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


def build_index(source: Path, encoder: Encoder, config: IndexConfig, out: Path, emit: Emit = silent) -> dict[str, Any]:
    """Index the records of the JSON-lines file `source` by their queries, into the folder `out`; returns its facts.

    Raises `ConfigError` for a file that cannot be read or has no usable record.
    """
    out.mkdir(parents=True, exist_ok=True)
    count, unusable, waiting = 0, 0, []
    with (out / f".{EXEMPLARS}.tmp").open("wb") as rows, (out / f".{VECTORS}.tmp").open("wb") as vectors:

        def flush() -> None:
            vectors.write(encoder.encode([record.query for record in waiting]).astype("<f4").tobytes())
            rows.write("".join(json.dumps(to_dict(one), ensure_ascii=True) + "\n" for one in waiting).encode())
            waiting.clear()

        for record in read_jsonl([source], "synth"):
            if not isinstance(record, SynthRecord):
                unusable += 1
                continue
            waiting.append(record)
            count += 1
            if len(waiting) == BLOCK:
                flush()
                emit("progress", done=count, total=None, unit="exemplars", note="embedding")
        flush()
    if not count:
        raise ConfigError(f"exemplars {source}: no usable record ({unusable} unusable); see `exemplars` of the source")
    for name in (EXEMPLARS, VECTORS):
        (out / f".{name}.tmp").replace(out / name)
    emit("progress", done=count, total=count, unit="exemplars", note="building the index")
    index, fitted = nearest.build(_mapped(out / VECTORS, count, encoder.width), config)
    _write(out / INDEX, index)
    facts = {"format": FORMAT, "model": encoder.model, "width": encoder.width, "count": count, "unusable": unusable}
    digests = {name: _digest(out / name) for name in (EXEMPLARS, VECTORS, INDEX)}
    facts |= {**fitted.facts(), "index_bytes": (out / INDEX).stat().st_size, "sha256": digests}
    write_atomically(out / FACTS, (json.dumps(facts, indent=1, sort_keys=True) + "\n").encode())
    return facts


class ExemplarIndex:
    """A built index, opened. Raises `ConfigError` if it is not whole or was made with another embedding model."""

    def __init__(self, folder: Path, encoder: Encoder) -> None:
        import faiss

        self.facts = _checked(folder, encoder)
        self._encoder = encoder
        self._vectors = _mapped(folder / VECTORS, self.facts["count"], encoder.width)
        try:
            self._index = faiss.deserialize_index(np.fromfile(folder / INDEX, np.uint8))
        except RuntimeError as error:
            raise ConfigError(f"retrieval index {folder}: {INDEX} is damaged ({error}); {REBUILD}") from None
        self._file = (folder / EXEMPLARS).open("rb")
        ends = np.cumsum([len(line) for line in self._file], dtype=np.int64)
        self._starts = np.concatenate([[0], ends])
        if not len(ends) == self._index.ntotal == len(self):
            raise ConfigError(f"retrieval index {folder}: {EXEMPLARS}, {INDEX} and {FACTS} differ in count; {REBUILD}")

    def __len__(self) -> int:
        return self.facts["count"]

    def close(self) -> None:
        """Close the file of exemplars."""
        self._file.close()

    def record(self, place: int) -> SynthRecord:
        """The exemplar at a position, read from the file."""
        self._file.seek(int(self._starts[place]))
        record = from_dict(json.loads(self._file.read(int(self._starts[place + 1] - self._starts[place]))), "synth")
        assert isinstance(record, SynthRecord), "only such records were written"
        return record

    def nearest(
        self, queries: Sequence[str], count: int, relevance: float = 1.0, candidates: int = 32
    ) -> list[list[Neighbour]]:
        """The `count` nearest exemplars of each query, nearest first, without its near-duplicates.

        `relevance` below 1: chosen among the `candidates` nearest by maximal marginal relevance, in the order chosen.
        """
        vectors = self._encoder.encode(queries)
        found: list[list[Neighbour]] = [[] for _ in queries]
        pool = count if relevance == 1 else max(count, candidates)
        left, wanted = list(range(len(queries))), pool + SPARE
        while left:  # once, unless a prompt has more near-duplicates than spares
            factor = 1 if self.facts["kind"] == "exact" else nearest.RERANKED
            proposed = nearest.candidates(self._index, vectors[left], wanted * factor)
            for at, places in zip(left, proposed, strict=True):
                ranked = self._ranked(vectors[at], places[places >= 0])[:wanted]
                found[at] = self._fresh(queries[at], ranked, pool)
            left = [at for at in left if len(found[at]) < pool and wanted < len(self)]
            wanted *= 4
        if relevance == 1:
            return found
        return [self._diverse(near, count, relevance) for near in found]

    def _ranked(self, query: np.ndarray, places: np.ndarray) -> list[tuple[float, int]]:
        places = np.sort(places)
        similar = np.einsum("nw,w->n", self._vectors[places], query)  # one by one: a product would sum by its shape
        pairs = zip((round(float(one), DIGITS) for one in similar), places.tolist(), strict=True)
        return sorted(pairs, key=lambda pair: (-pair[0], pair[1]))

    def _fresh(self, query: str, ranked: list[tuple[float, int]], count: int) -> list[Neighbour]:
        plain, chosen = _plain(query), []
        for similarity, place in ranked:
            if similarity < NEAR_DUPLICATE and _plain((record := self.record(place)).query) != plain:
                chosen.append(Neighbour(place, record, similarity))
            if len(chosen) == count:
                break
        return chosen

    def _diverse(self, near: list[Neighbour], count: int, relevance: float) -> list[Neighbour]:
        vectors = np.asarray(self._vectors[[one.index for one in near]])
        picked = marginal([one.similarity for one in near], vectors @ vectors.T, count, relevance)
        return [near[place] for place in picked]


def marginal(similar: Sequence[float], between: np.ndarray, count: int, relevance: float) -> list[int]:
    """Maximal marginal relevance (Carbonell and Goldstein, 1998): one after the other, the candidate of largest

        relevance * similarity to the query - (1 - relevance) * its largest similarity to those chosen.

    `between` [n, n]: similarity among the candidates. Equal ones go by position.
    """
    worth = relevance * np.asarray(similar, np.float64)
    shared = np.full(len(worth), -np.inf)
    left, chosen = np.ones(len(worth), bool), []
    for _ in range(min(count, len(worth))):
        score = worth if not chosen else worth - (1 - relevance) * shared
        best = int(np.argmax(np.where(left, np.round(score, DIGITS), -np.inf)))
        chosen.append(best)
        left[best] = False
        shared = np.maximum(shared, between[best])
    return chosen


def _checked(folder: Path, encoder: Encoder) -> dict[str, Any]:
    try:
        facts = json.loads((folder / FACTS).read_bytes())
        if facts["format"] != FORMAT:
            raise ConfigError(f"retrieval index {folder}: format {facts['format']!r}, not {FORMAT!r}; {REBUILD}")
        wrong = [name for name, digest in facts["sha256"].items() if _digest(folder / name) != digest]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"retrieval index {folder}: cannot be read ({error}); {REBUILD}") from None
    if wrong:
        raise ConfigError(f"retrieval index {folder}: {', '.join(wrong)}: the digest differs; {REBUILD}")
    if (facts["model"], facts["width"]) != (encoder.model, encoder.width):
        raise ConfigError(f"retrieval index {folder}: is of {facts['model']}, not of {encoder.model}; {REBUILD}")
    return facts


def _mapped(path: Path, count: int, width: int) -> np.ndarray:
    return np.memmap(path, "<f4", "r", 0, (count, width))


def _write(path: Path, index: Any) -> None:
    import faiss

    write_atomically(path, faiss.serialize_index(index).data)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _plain(text: str) -> str:
    return " ".join("".join(c if c.isalnum() else " " for c in text.casefold()).split())
