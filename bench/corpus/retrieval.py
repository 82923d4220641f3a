"""Recall@5 against exact search, queries/s, build time and memory of each kind of index, by the number of vectors.

    python bench/corpus/retrieval.py --sizes 10000 100000 [--kinds exact ivf_pq] [--queries 500] [--repeats 5]

The vectors: MiniLM's of the 10,033 Wikipedia summaries (title and first sentence; kept in a file of the temporary
folder), each a centre. A vector is a centre drawn at random plus noise with the covariance of the differences between
centres and their nearest centres, scaled so that the cosine to its centre is about 0.8: clusters as near copies of a
subject make them, in the directions that real vectors differ in. Queries are drawn alike, and are not in the index.
Queries are searched one batch of 64 at a time, as distillation does it, and ranked again by their mapped vectors; kinds
are timed in turn, medians over repeats, on one thread; each is built in a process of its own, for its peak memory.
"""

import json
import multiprocessing
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path

import faiss
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.measure import options
from configs.distill import IndexConfig
from data.retrieval.embedders import Encoder
from data.retrieval.exemplar_index import (
    CANDIDATES_PER_NEIGHBOUR,
    RECALL_NEIGHBOURS,
    SEARCH_BLOCK,
    SPARE_NEIGHBOURS,
    build_faiss_index,
    exact_nearest,
    recall_at,
    search_candidates,
)
from data.sources.wikipedia import articles

BATCH, NOISE = 64, 0.75


def centres(folder: Path) -> np.ndarray:
    """Vectors of the summaries, [10033, 384]; made once."""
    path = folder / "nautile-bench-centres.npy"
    if not path.is_file():
        texts = [f"{a.title}. {a.extract.split('. ')[0][:200]}" for a in articles(0)]
        np.save(path, Encoder().encode(texts))
    return np.load(path)


def draw(base: np.ndarray, count: int, seed: int, out: np.ndarray) -> None:
    """Fill `out` [count, width] with vectors of length one around the centres."""
    rng = np.random.default_rng(seed)
    near = exact_nearest(base, base[:2000], 2)[:, 1]
    differences = base[:2000] - base[near]
    spread = np.linalg.cholesky(np.cov(differences.T) + 1e-6 * np.eye(base.shape[1])).astype(np.float32)
    typical = np.sqrt((spread**2).sum())
    for start in range(0, count, SEARCH_BLOCK):
        size = min(SEARCH_BLOCK, count - start)
        noise = rng.standard_normal((size, base.shape[1]), np.float32) @ spread.T * (NOISE / typical)
        rows = base[rng.integers(0, len(base), size)] + noise
        out[start : start + size] = rows / np.linalg.norm(rows, axis=1, keepdims=True)


def measured(
    path: Path, count: int, kind: str, queries: np.ndarray, truth: np.ndarray, repeats: int, threads: int, pipe
) -> None:
    """Build the index and search it, in a process of its own; send the row of results through `pipe`."""
    vectors = np.memmap(path, "<f4", "r", 0, (count, queries.shape[1]))
    faiss.omp_set_num_threads(threads)
    before = _anonymous()
    began = time.monotonic()
    index, fit = build_faiss_index(vectors, IndexConfig(kind=kind))
    seconds = time.monotonic() - began
    size = len(faiss.serialize_index(index))
    wanted = (RECALL_NEIGHBOURS + SPARE_NEIGHBOURS) * (1 if kind == "exact" else CANDIDATES_PER_NEIGHBOUR)
    recall = recall_at(search_candidates(index, queries, wanted), vectors, queries, truth)
    rates = []
    for _ in range(repeats):
        began = time.monotonic()
        for start in range(0, len(queries), BATCH):
            batch = queries[start : start + BATCH]
            for query, places in zip(batch, search_candidates(index, batch, wanted), strict=True):
                np.einsum("nw,w->n", vectors[np.sort(places[places >= 0])], query)
        rates.append(len(queries) / (time.monotonic() - began))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    row = {"vectors": count, "kind": kind, "recall@5": round(recall, 4), "probes": fit.probes}
    row |= {"queries_per_s": round(statistics.median(rates)), "build_s": round(seconds, 1)}
    pipe.send(row | {"index_MB": round(size / 1e6), "own_MB": round(_anonymous() - before), "peak_rss_MB": round(peak)})


def _anonymous() -> float:
    """MB of this process's own memory, mapped files left out."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.partition("RssAnon:")[2].split()[0]) / 1024


def main() -> None:
    # One thread of FAISS: on a busy machine a second one only spins.
    defaults = {"sizes": [10_000, 100_000], "kinds": ["exact", "ivf_pq"], "queries": 500, "repeats": 5, "threads": 1}
    asked = options(__doc__, **defaults, folder=Path(tempfile.gettempdir())).parse_args()
    base = centres(asked.folder)
    queries = np.zeros((asked.queries, base.shape[1]), np.float32)
    draw(base, asked.queries, 99, queries)
    spawn = multiprocessing.get_context("spawn")
    for count in asked.sizes:
        path = asked.folder / f"nautile-bench-{count}.f4"
        vectors = np.memmap(path, "<f4", "w+", 0, (count, base.shape[1]))
        draw(base, count, 1, vectors)
        vectors.flush()
        truth = exact_nearest(vectors, queries, RECALL_NEIGHBOURS)
        for kind in asked.kinds:
            here, there = spawn.Pipe(duplex=False)
            child = spawn.Process(
                target=measured, args=(path, count, kind, queries, truth, asked.repeats, asked.threads, there)
            )
            child.start()
            there.close()
            try:
                print(json.dumps(here.recv()), flush=True)
            except EOFError:
                print(json.dumps({"vectors": count, "kind": kind, "failed": True}), flush=True)
            child.join()
        del vectors
        path.unlink()


if __name__ == "__main__":
    main()
