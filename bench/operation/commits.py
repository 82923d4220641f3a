"""Concurrent commits into one store: whether rows are lost or duplicated, and how long a commit waits.

A commit is what a stage's parent does while its child works: append an event, then load new events into the catalog.
`python -m bench.operation.commits --processes 8 --commits 1000` prints the waits of all commits in milliseconds, and
those of a single process in the same store as the baseline for the lock.
"""

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from store.artifacts import Store
from store.catalog import Catalog
from store.events import EventWriter

_gate: Any = None  # the barrier of this worker process, so that all begin at once


def _set_gate(gate: Any) -> None:
    global _gate
    _gate = gate


def commit_all(root: str, name: str, count: int) -> list[float]:
    """Commit `count` times; returns the seconds of each commit."""
    store = Store(root)
    catalog = Catalog(store)
    emit = EventWriter(store.root / "events" / f"{name}.jsonl", name, stage="bench")
    # Processes start at different speeds; behind the barrier they all commit at once, which is the case to measure.
    _gate.wait()
    waits = []
    for step in range(count):
        start = time.perf_counter()
        emit("metric", name="loss", step=step, value=step / 2)
        catalog.ingest()
        waits.append(time.perf_counter() - start)
    emit.close()
    return waits


def commit_concurrently(root: Path, names: list[str], count: int) -> list[float]:
    """The waits of all commits, with one process for each of `names`, all started at once."""
    context = multiprocessing.get_context("forkserver")
    gate = context.Barrier(len(names))
    with ProcessPoolExecutor(len(names), mp_context=context, initializer=_set_gate, initargs=(gate,)) as pool:
        waits = pool.map(commit_all, [str(root)] * len(names), names, [count] * len(names))
        return [wait for entry in waits for wait in entry]


def lost_and_double(root: Path, names: list[str], count: int) -> tuple[int, int]:
    """Commits missing from the catalog, and rows beyond one per commit, before and after a rebuild."""
    catalog, lost, double = Catalog(Store(root)), 0, 0
    for rebuild in (False, True):
        if rebuild:
            catalog.rebuild()
        rows = catalog.query("SELECT execution, step, count(*) AS n FROM metrics GROUP BY ALL")
        by_name = {(row["execution"], row["step"]): row["n"] for row in rows}
        lost += sum((name, step) not in by_name for name in names for step in range(count))
        double += sum(n - 1 for n in by_name.values())
    return lost, double


def wait_quantiles(waits: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(waits, n=100)
    return {"p50_ms": cuts[49] * 1e3, "p95_ms": cuts[94] * 1e3, "p99_ms": cuts[98] * 1e3, "max_ms": max(waits) * 1e3}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--commits", type=int, default=1000)
    parser.add_argument("--store", type=Path, default=None, help="a folder to do it in; a temporary one if none")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.store) as folder:
        root = Path(folder) / "store"
        Store(root).prepare()
        # A tenth of the commits is enough for the quantiles of one process, and shares the store with the rest.
        alone = commit_concurrently(root, ["alone"], max(2, arguments.commits // 10))
        names = [f"process{i}" for i in range(arguments.processes)]
        start = time.perf_counter()
        together = commit_concurrently(root, names, arguments.commits)
        seconds = time.perf_counter() - start
        lost, double = lost_and_double(root, names, arguments.commits)
    results: dict[str, Any] = {
        "commits": len(together),
        "lost": lost,
        "double": double,
        "seconds": seconds,
        **wait_quantiles(together),
    }
    alone_ms = wait_quantiles(alone)
    results |= {
        "a_second": len(together) / seconds,
        "alone": alone_ms,
        "p95_of_alone": results["p95_ms"] / alone_ms["p95_ms"],
    }
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
