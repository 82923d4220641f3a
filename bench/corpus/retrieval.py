"""Recall@5 relative to exact search, queries/s, build time and memory of each kind of index, by number of vectors.

    python bench/corpus/retrieval.py --sizes 10000 100000 [--kinds exact ivf_pq] [--queries 500] [--repeats 5]

The centres are MiniLM's vectors of the 10,033 Wikipedia summaries (title and first sentence; cached in the temporary
folder). A vector is a random centre plus noise with the covariance of the differences between centres and their nearest
centres, scaled so that the cosine to its centre is about 0.8. This gives clusters like those of near copies, in
directions in which real vectors differ. Queries are drawn in the same way and are not in the index. They are searched
in batches of 64, as in distillation, and ranked again by the memory-mapped vectors. Medians over repeats, on one
thread; each index is built in a separate process, for its peak memory.
"""

import json
import multiprocessing
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Literal

import faiss
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.measure import argument_parser
from nautile.configs.distill import IndexConfig
from nautile.data.retrieval.embedders import Encoder
from nautile.data.retrieval.exemplar_index import (
    CANDIDATES_PER_NEIGHBOUR,
    RECALL_NEIGHBOURS,
    SEARCH_BLOCK,
    SPARE_NEIGHBOURS,
    build_faiss_index,
    exact_nearest,
    recall_at,
    search_candidates,
)
from nautile.data.sources.wikipedia import articles

BATCH, NOISE = 64, 0.75


def centres(folder: Path) -> np.ndarray:
    """Vectors of the summaries, [10033, 384]; computed once and cached in `folder`."""
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
    # Noise in the directions in which real neighbours differ. Noise in all directions alike would make search easier
    # than it is.
    spread = np.linalg.cholesky(np.cov(differences.T) + 1e-6 * np.eye(base.shape[1])).astype(np.float32)
    typical = np.sqrt((spread**2).sum())
    for start in range(0, count, SEARCH_BLOCK):
        size = min(SEARCH_BLOCK, count - start)
        noise = rng.standard_normal((size, base.shape[1]), np.float32) @ spread.T * (NOISE / typical)
        rows = base[rng.integers(0, len(base), size)] + noise
        out[start : start + size] = rows / np.linalg.norm(rows, axis=1, keepdims=True)


def measure(
    path: Path, count: int, kind: Literal["exact", "ivf_pq"], queries: np.ndarray, truth: np.ndarray, repeats: int, pipe
) -> None:
    """Build an index and search it, in a separate process; send the row of results through `pipe`."""
    vectors = np.memmap(path, "<f4", "r", 0, (count, queries.shape[1]))
    faiss.omp_set_num_threads(1)  # on a busy machine a second one only busy-waits
    start = time.monotonic()
    index, fit = build_faiss_index(vectors, IndexConfig(kind=kind))
    seconds = time.monotonic() - start
    size = len(faiss.serialize_index(index))
    candidates = (RECALL_NEIGHBOURS + SPARE_NEIGHBOURS) * (1 if kind == "exact" else CANDIDATES_PER_NEIGHBOUR)
    recall = recall_at(search_candidates(index, queries, candidates), vectors, queries, truth)
    rates = []
    for _ in range(repeats):
        start = time.monotonic()
        for first in range(0, len(queries), BATCH):
            batch = queries[first : first + BATCH]
            for query, places in zip(batch, search_candidates(index, batch, candidates), strict=True):
                # The second ranking by the exact vectors is timed too: an approximate index needs it, and reads the
                # file for it.
                np.einsum("nw,w->n", vectors[np.sort(places[places >= 0])], query)
        rates.append(len(queries) / (time.monotonic() - start))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    row = {"vectors": count, "kind": kind, "recall@5": round(recall, 4), "probes": fit.probes}
    row |= {"queries_per_s": round(statistics.median(rates)), "build_s": round(seconds, 1)}
    pipe.send(row | {"index_MB": round(size / 1e6), "peak_rss_MB": round(peak)})


def main() -> None:
    defaults = {"sizes": [10_000, 100_000], "kinds": ["exact", "ivf_pq"], "queries": 500, "repeats": 5}
    arguments = argument_parser(__doc__, **defaults, folder=Path(tempfile.gettempdir())).parse_args()
    base = centres(arguments.folder)
    queries = np.zeros((arguments.queries, base.shape[1]), np.float32)
    draw(base, arguments.queries, 99, queries)
    spawn = multiprocessing.get_context("spawn")
    for count in arguments.sizes:
        path = arguments.folder / f"nautile-bench-{count}.f4"
        vectors = np.memmap(path, "<f4", "w+", 0, (count, base.shape[1]))
        draw(base, count, 1, vectors)
        vectors.flush()
        truth = exact_nearest(vectors, queries, RECALL_NEIGHBOURS)
        for kind in arguments.kinds:
            receiver, sender = spawn.Pipe(duplex=False)
            child = spawn.Process(target=measure, args=(path, count, kind, queries, truth, arguments.repeats, sender))
            child.start()
            sender.close()
            print(json.dumps(receiver.recv()), flush=True)  # EOFError if the child died, for want of memory
            child.join()
        del vectors
        path.unlink()


if __name__ == "__main__":
    main()
