"""A catalog of four million calls: the time to build it, to query it, and to load a backlog while watching a stage.

    python bench/operation/catalog.py [--calls 4000000] [--executions 8] [--repeats 5] [--store FOLDER] [--json FILE]

The store contains only event files, as distillations of that many prompts write them. Measured: `rebuild`, building the
catalog from these files; `backlog`, the same in the short turns that a stage's parent takes between two checks of its
child, with the longest turn, during which the child is not watched; `query`, the dashboard's queries about one
execution and a sum over all calls. Baselines are DuckDB alone over the same files: as a table of the JSON's columns,
without keys, and as a query of the files. `--store` names a store to keep, and to reuse if it exists.
"""

import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import duckdb

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.measure import argument_parser, medians, time_interleaved, write_results
from flows.dashboard import queries
from store.artifacts import Store
from store.catalog import Catalog
from store.events import EventWriter
from tasks.engine.attempt_log import WATCHING

BATCH = 10_000
Result = TypeVar("Result")
SUM = "SELECT endpoint, count(*) AS n, sum(dollars) AS dollars, sum(tokens_out) AS tokens FROM {calls} GROUP BY ALL"
OF_FILES = "(SELECT unnest(fields) FROM read_ndjson('{files}', columns = {columns}))"
COLUMNS = """{id: 'VARCHAR', execution: 'VARCHAR', stage: 'VARCHAR', time: 'BIGINT', fields: 'STRUCT(endpoint VARCHAR,
model VARCHAR, purpose VARCHAR, tag VARCHAR, digest VARCHAR, attempt INTEGER, status VARCHAR, cached BOOLEAN,
tokens_in BIGINT, tokens_out BIGINT, latency_s DOUBLE, dollars DOUBLE)'}"""


def write_calls(store: Store, calls: int, executions: int) -> None:
    """Write the calls as `executions` executions of `distill` would."""
    store.prepare()
    for number in range(executions):
        execution = f"{number:032x}"
        emit = EventWriter(store.root / "events" / f"distill-{execution}-1.jsonl", execution, stage="distill")
        count = calls // executions
        for begin in range(0, count, BATCH):
            emit.many("call", [_call(number, index) for index in range(begin, min(begin + BATCH, count))])
        emit.close()


def _call(execution: int, index: int) -> dict[str, object]:
    fields: dict[str, object] = {
        "endpoint": f"teacher{index % 4}",
        "model": "bench",
        "purpose": "teacher",
        "tag": f"{index:08d}",
    }
    fields |= {"digest": f"{execution:08x}{index:056x}", "attempt": 1, "status": "200" if index % 50 else "429"}
    return fields | {"cached": False, "tokens_in": 900, "tokens_out": 300, "latency_s": 2.5, "dollars": 3e-4}


def time_call(work: Callable[[], Result]) -> tuple[float, Result]:
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


def main() -> None:
    arguments = argument_parser(__doc__, calls=4_000_000, executions=8, repeats=5, store=None).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store = Store(arguments.store or Path(folder) / "store")
        if not (store.root / "events").exists():
            write_calls(store, arguments.calls, arguments.executions)
        catalog, files = Catalog(store), f"{store.root}/events/distill-*.jsonl"
        of_files = OF_FILES.format(files=files, columns=COLUMNS)
        # The backlog first, on an empty catalog, then the rebuild from the same files.
        catalog.path.unlink(missing_ok=True)
        turns, rows = [], 1
        # A turn that loads nothing is the last.
        while rows:
            seconds_taken, rows = time_call(partial(catalog.ingest, **WATCHING))
            turns.append(seconds_taken)
        rebuild, _ = time_call(catalog.rebuild)
        with duckdb.connect(str(Path(folder) / "bare.duckdb")) as bare:
            table, _ = time_call(partial(bare.execute, f"CREATE TABLE calls AS FROM {of_files}"))
        calls, first = catalog.query("SELECT count(*) AS n FROM calls")[0]["n"], [[f"{0:032x}"]]
        query_calls = {
            "calls of one execution": lambda: catalog.query(queries.CALLS, first),
            "statuses of one execution": lambda: catalog.query(queries.CALL_STATUSES, first),
            "sum of all calls": lambda: catalog.query(SUM.format(calls="calls")),
            "sum of the files": lambda: duckdb.sql(SUM.format(calls=of_files)).fetchall(),
        }
        seconds = medians(time_interleaved(query_calls, arguments.repeats))
    results = {"calls": calls, "rebuild_s": rebuild, "rebuild_of_bare_table": rebuild / table, "backlog_s": sum(turns)}
    results |= {"backlog_of_rebuild": sum(turns) / rebuild, "longest_turn_s": max(turns), "turns": len(turns)}
    results |= {f"{name}, s": value for name, value in seconds.items()}
    results["sum_of_files"] = seconds["sum of all calls"] / seconds["sum of the files"]
    for name, value in results.items():
        print(f"{name:<32}{value:>14,.3f}")
    write_results(results, arguments.json)


if __name__ == "__main__":
    main()
