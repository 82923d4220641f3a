"""Many processes that commit into one store at once: is anything lost or double, and how long does a commit wait?

A commit is what a stage's parent does while its child works: an event is appended, then the catalog takes in what is
new. `python -m bench.operation.commits --processes 8 --commits 1000` prints the waits of all commits, in milliseconds;
beside them those of one process alone, in the same store, which is what the lock is to be compared with.
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

_gate: Any = None  # of this process: all begin at once


def _enter(gate: Any) -> None:
    global _gate
    _gate = gate


def commit_all(root: str, name: str, count: int) -> list[float]:
    """Commit `count` times; the seconds that each took."""
    store = Store(root)
    catalog = Catalog(store)
    emit = EventWriter(store.root / "events" / f"{name}.jsonl", name, stage="bench")
    _gate.wait()
    waits = []
    for step in range(count):
        begun = time.perf_counter()
        emit("metric", name="loss", step=step, value=step / 2)
        catalog.ingest()
        waits.append(time.perf_counter() - begun)
    emit.close()
    return waits


def crowd(root: Path, names: list[str], count: int) -> list[float]:
    """The waits of all commits of `names`, each a process, let go at once."""
    context = multiprocessing.get_context("forkserver")
    gate = context.Barrier(len(names))
    with ProcessPoolExecutor(len(names), mp_context=context, initializer=_enter, initargs=(gate,)) as pool:
        waits = pool.map(commit_all, [str(root)] * len(names), names, [count] * len(names))
        return [wait for entry in waits for wait in entry]


def lost_and_double(root: Path, names: list[str], count: int) -> tuple[int, int]:
    """Commits that the catalog does not hold, and rows beyond one a commit, in it and after a rebuild."""
    catalog, lost, double = Catalog(Store(root)), 0, 0
    for rebuild in (False, True):
        if rebuild:
            catalog.rebuild()
        rows = catalog.query("SELECT execution, step, count(*) AS n FROM metrics GROUP BY ALL")
        by_name = {(row["execution"], row["step"]): row["n"] for row in rows}
        lost += sum((name, step) not in by_name for name in names for step in range(count))
        double += sum(n - 1 for n in by_name.values())
    return lost, double


def described(waits: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(waits, n=100)
    return {"p50_ms": cuts[49] * 1e3, "p95_ms": cuts[94] * 1e3, "p99_ms": cuts[98] * 1e3, "max_ms": max(waits) * 1e3}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--commits", type=int, default=1000)
    parser.add_argument("--store", type=Path, default=None, help="a folder to do it in; a temporary one if none")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.store) as folder:
        root = Path(folder) / "store"
        Store(root).prepare()
        alone = crowd(root, ["alone"], max(2, given.commits // 10))
        names = [f"process{i}" for i in range(given.processes)]
        begun = time.perf_counter()
        together = crowd(root, names, given.commits)
        seconds = time.perf_counter() - begun
        lost, double = lost_and_double(root, names, given.commits)
    answer = {"commits": len(together), "lost": lost, "double": double, "seconds": seconds, **described(together)}
    alone_ms = described(alone)
    answer |= {
        "a_second": len(together) / seconds,
        "alone": alone_ms,
        "p95_of_alone": answer["p95_ms"] / alone_ms["p95_ms"],
    }
    print(json.dumps(answer, indent=1))


if __name__ == "__main__":
    main()
