"""FAISS indexes over vectors of length one: which kind for how many, trained the same each time, effort set by recall.

An index only proposes candidates; `data.retrieval.exemplar_index` ranks them by the vectors themselves, which stay in
a mapped file.
So a product code of 48 bytes a vector is enough: at 10,000 vectors (bench/retrieval.py) IVF-PQ reaches a recall@5 of
0.97 with 1 MB in memory, HNSW 0.95 with 18 MB, though twice as fast. HNSW is the same each time only when one thread
builds it. Hence "auto" takes IVF-PQ from `exact_below` vectors on; the recall it has there is measured as it is built.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import ConfigError
from common.events import Emit, silent
from common.files import sha256_of, write_atomically
from configs.distill import IndexConfig
from data.records import SynthRecord, from_dict, to_dict
from data.retrieval import exemplar_index as nearest
from data.retrieval.embedders import Encoder
from data.sources.local_files import read_jsonl

SEARCH_BLOCK = 65_536  # vectors added at once: a mapped file is never wholly in memory
SAMPLE = 256  # vectors whose nearest are compared with the exact ones
NEAREST = 5  # paper §3.2
RERANKED = 10  # candidates of an approximate index for each neighbour that is wanted
POINTS_PER_LIST = 64  # to train with; FAISS asks for 39 at least
SMALLEST_TRAINED = 39 * 256  # vectors: what FAISS asks for, to train a product code of 256 centres


@dataclass(frozen=True)
class Fitted:
    """What was built. `effort`: cells or candidates looked at in a search; `recall`: of recall@5 against exact."""

    kind: str
    effort: int | None
    recall: float

    def facts(self) -> dict[str, Any]:
        return asdict(self)


def chosen_kind(config: IndexConfig, count: int) -> str:
    """The kind for `count` vectors. Raises `ConfigError` for one that so few cannot train."""
    if config.kind == "auto":
        return "exact" if count < max(config.exact_below, SMALLEST_TRAINED) else "ivf_pq"
    if config.kind == "ivf_pq" and count < SMALLEST_TRAINED:
        raise ConfigError(
            f"index.kind 'ivf_pq' needs {SMALLEST_TRAINED} exemplars to be trained, there are {count}; take 'exact'"
        )
    return config.kind


def build(vectors: np.ndarray, config: IndexConfig) -> tuple[Any, Fitted]:
    """The index over `vectors` [n, width] and how well it finds.

    Raises `ConfigError` if no search effort reaches the recall that is asked for.
    """
    kind = chosen_kind(config, len(vectors))
    index = {"exact": _exact, "hnsw": _hnsw, "ivf_pq": _ivf_pq}[kind](vectors, config)
    if kind == "exact":
        return index, Fitted(kind, None, 1.0)
    queries, truth = _sample(vectors)
    effort, recall = 16, 0.0
    most = len(vectors) if kind == "hnsw" else _cells(index)
    while True:
        effort = min(effort, most)
        set_effort(index, kind, effort)
        recall = recall_at(candidates(index, queries, (NEAREST + 1) * RERANKED), vectors, queries, truth)
        if recall >= config.recall:
            return index, Fitted(kind, effort, round(recall, 4))
        if effort == most or effort >= 4096:
            raise ConfigError(
                f"index.recall is {config.recall:g}, but {kind} over {len(vectors)} vectors reaches {recall:.3f}; "
                "raise code_bytes or links, or take kind 'exact'"
            )
        effort *= 2


def candidates(index: Any, queries: np.ndarray, count: int) -> np.ndarray:
    """Positions of the `count` likeliest vectors of each query, [queries, count]; -1 where there are fewer."""
    return index.search(np.ascontiguousarray(queries, np.float32), min(count, index.ntotal))[1]


def recall_at(found: np.ndarray, vectors: np.ndarray, queries: np.ndarray, truth: np.ndarray) -> float:
    """Share of the true nearest that are among the best of what was found, once that is ranked exactly."""
    hits = 0
    for row, query, true in zip(found, queries, truth, strict=True):
        places = np.unique(row[row >= 0])
        best = places[np.argsort(-(vectors[places] @ query), kind="stable")[: truth.shape[1]]]
        hits += len(np.intersect1d(best, true))
    return hits / truth.size


def exact_nearest(vectors: np.ndarray, queries: np.ndarray, count: int) -> np.ndarray:
    """The positions by brute force, block by block, [queries, count]."""
    scores = np.full((len(queries), 0), 0, np.float32)
    places = np.zeros((len(queries), 0), np.int64)
    for start in range(0, len(vectors), SEARCH_BLOCK):
        block = queries @ np.asarray(vectors[start : start + SEARCH_BLOCK]).T
        scores = np.concatenate([scores, block], axis=1)
        here = np.broadcast_to(np.arange(start, start + block.shape[1]), block.shape)
        places = np.concatenate([places, here], axis=1)
        best = np.argsort(-scores, axis=1, kind="stable")[:, :count]
        scores, places = np.take_along_axis(scores, best, 1), np.take_along_axis(places, best, 1)
    return places


def set_effort(index: Any, kind: str, effort: int) -> None:
    """How hard a search tries. Kept in the index when it is saved."""
    if kind == "hnsw":
        index.hnsw.efSearch = effort
    elif kind == "ivf_pq":
        index.nprobe = effort


def _exact(vectors: np.ndarray, config: IndexConfig) -> Any:
    import faiss

    return _filled(faiss.IndexFlatIP(vectors.shape[1]), vectors)


def _hnsw(vectors: np.ndarray, config: IndexConfig) -> Any:
    import faiss

    index = faiss.IndexHNSWFlat(vectors.shape[1], config.links)  # L2: the same order, for all lengths are one
    index.hnsw.efConstruction = config.build_effort
    threads = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)  # two threads would link in the order they happen to come
    try:
        return _filled(index, vectors)
    finally:
        faiss.omp_set_num_threads(threads)


def _ivf_pq(vectors: np.ndarray, config: IndexConfig) -> Any:
    import faiss

    count, width = vectors.shape
    if width % config.code_bytes:
        raise ConfigError(f"index.code_bytes is {config.code_bytes}, which does not divide the vectors' width, {width}")
    lists = config.lists or 4 * math.isqrt(count)
    lists = max(1, min(lists, count // POINTS_PER_LIST))
    cells = faiss.IndexFlatL2(width)
    index = faiss.IndexIVFPQ(cells, width, lists, config.code_bytes, 8)
    drawn = np.linspace(0, count - 1, min(count, max(SMALLEST_TRAINED, lists * POINTS_PER_LIST))).astype(np.int64)
    index.train(np.ascontiguousarray(vectors[drawn]))  # FAISS seeds its k-means with a constant
    return _filled(index, vectors)


def _filled(index: Any, vectors: np.ndarray) -> Any:
    for start in range(0, len(vectors), SEARCH_BLOCK):
        index.add(np.ascontiguousarray(vectors[start : start + SEARCH_BLOCK], np.float32))
    return index


def _sample(vectors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Vectors spread over the set, and the nearest of each, itself included."""
    drawn = np.unique(np.linspace(0, len(vectors) - 1, SAMPLE).astype(np.int64))
    queries = np.ascontiguousarray(vectors[drawn], np.float32)
    return queries, exact_nearest(vectors, queries, NEAREST + 1)


def _cells(index: Any) -> int:
    return int(index.nlist)


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
    digests = {name: sha256_of(out / name) for name in (EXEMPLARS, VECTORS, INDEX)}
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
        wrong = [name for name, digest in facts["sha256"].items() if sha256_of(folder / name) != digest]
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


def _plain(text: str) -> str:
    return " ".join("".join(c if c.isalnum() else " " for c in text.casefold()).split())
