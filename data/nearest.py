"""FAISS indexes over vectors of length one: which kind for how many, trained the same each time, effort set by recall.

An index only proposes candidates; `data.retrieval` ranks them by the vectors themselves, which stay in a mapped file.
So a product code of 48 bytes a vector is enough: at 10,000 vectors (bench/retrieval.py) IVF-PQ reaches a recall@5 of
0.97 with 1 MB in memory, HNSW 0.95 with 18 MB, though twice as fast. HNSW is the same each time only when one thread
builds it. Hence "auto" takes IVF-PQ from `exact_below` vectors on; the recall it has there is measured as it is built.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from configs.distill import IndexConfig
from configs.section import ConfigError

BLOCK = 65_536  # vectors added at once: a mapped file is never wholly in memory
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
    for start in range(0, len(vectors), BLOCK):
        block = queries @ np.asarray(vectors[start : start + BLOCK]).T
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
    for start in range(0, len(vectors), BLOCK):
        index.add(np.ascontiguousarray(vectors[start : start + BLOCK], np.float32))
    return index


def _sample(vectors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Vectors spread over the set, and the nearest of each, itself included."""
    drawn = np.unique(np.linspace(0, len(vectors) - 1, SAMPLE).astype(np.int64))
    queries = np.ascontiguousarray(vectors[drawn], np.float32)
    return queries, exact_nearest(vectors, queries, NEAREST + 1)


def _cells(index: Any) -> int:
    return int(index.nlist)
