"""The reading commands and the catalog's rebuild over large stores: processor seconds, and memory of the rebuild.

    python bench/operation/commands.py STORE... [--repeats 5] [--others CHECKOUT] [--rebuild] [--json FILE]

STORE: a folder of `large_store.py`, as one of 50 runs and one of 500. Each command runs `repeats` times in a process of
its own, in turn over the stores and with `--others` also with the code of another checkout, which has a copy of each
store beside it (`STORE.others`, of hard links), since their catalogs may differ. The figures are the least
and the median of user and system time, which other programs change less than wall time. The last column is the least
time over the last store as a multiple of that over the first. `--rebuild` also rebuilds each catalog once.
"""

import os
import resource
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.measure import argument_parser, write_results
from nautile.store.artifacts import Store

ROOT = Path(__file__).resolve().parents[2]
OTHERS = ".others"
START = "import sys; sys.argv[0] = 'nautile'; from nautile.flows.cli.main import script; script()"
REBUILD = "import resource, sys; from nautile.store import artifacts, catalog; "
REBUILD += "catalog.Catalog(artifacts.Store(sys.argv[1])).rebuild(); "
REBUILD += "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)"


def commands(store: Path) -> dict[str, list[str]]:
    """Name -> words of the commands that are measured, about the newest artifacts and runs of a store."""
    newest, reports = Store(store).list("checkpoint")[-1].id, Store(store).list("report")
    first, last = (artifact.manifest["run"] for artifact in (reports[0], reports[-1]))
    return {
        "--help": ["--help"],
        "status": ["status"],
        "runs": ["runs"],
        "artifacts": ["artifacts"],
        "show": ["show", newest],
        "lineage": ["lineage", newest],
        "compare": ["compare", first, last],
        "report": ["report"],
        "sql": ["sql", "SELECT count(*) FROM metrics"],
        "params": ["params"],
        "store gc": ["store", "gc", "--dry-run"],
        "store verify": ["store", "verify"],
        "reconcile": ["reconcile"],
    }


def copied(store: Path) -> Path:
    """The copy of a store for other code, of hard links and without a catalog; made if there is none."""
    copy = store.with_name(store.name + OTHERS)
    if not copy.exists():
        shutil.copytree(store, copy, copy_function=os.link, ignore=shutil.ignore_patterns("catalog.*"))
    return copy


def processor_seconds(code: Path, program: str, words: list[str], store: Path) -> tuple[float, str]:
    """User and system seconds of a process with the code of a checkout, and what it prints."""
    # With compiled modules, as an installation has them, and as this process may not.
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    variables |= {"PYTHONPATH": str(code / "src"), "NAUTILE_STORE": str(store)}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-c", program, *words]
    done = subprocess.run(command, env=variables, cwd=store, capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}: {done.stderr}")
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done.stdout


def main() -> None:
    parser = argument_parser(__doc__, repeats=5, rebuild=False, others=None)
    parser.add_argument("stores", type=Path, nargs="+")
    arguments = parser.parse_args()
    codes = {"here": ROOT} | ({"others": arguments.others.resolve()} if arguments.others else {})
    stores = [store.resolve() for store in arguments.stores]
    words_of = {store: commands(store) for store in stores}
    place = {(name, store): store if name == "here" else copied(store) for name in codes for store in stores}
    rows: list[dict[str, Any]] = []
    if arguments.rebuild:
        for name, code in codes.items():
            folders = [place[name, store] for store in stores]
            measured = [processor_seconds(code, REBUILD, [str(folder)], folder) for folder in folders]
            rows.append({"command": "rebuild", "code": name, "seconds": [[seconds] for seconds, _ in measured]})
            # Behind what DuckDB prints of its progress where Python runs a text.
            rows[-1]["memory_mib"] = [int(printed.split()[-1]) for _, printed in measured]
    for command in words_of[stores[0]]:
        times: dict[tuple[str, Path], list[float]] = {(name, store): [] for name in codes for store in stores}
        for repeat in range(arguments.repeats + 1):
            for (name, store), seconds in times.items():
                spent, _ = processor_seconds(codes[name], START, words_of[store][command], place[name, store])
                seconds += [spent] if repeat else []  # the first one reads what was written since the last
        rows += [
            {"command": command, "code": name, "seconds": [times[name, store] for store in stores]} for name in codes
        ]
    for row in rows:
        figures = [f"{min(seconds):.2f} ({statistics.median(seconds):.2f})" for seconds in row["seconds"]]
        growth = min(row["seconds"][-1]) / min(row["seconds"][0])
        print(f"{row['command']:<14}{row['code']:<8}{'  '.join(figures)}  x{growth:.2f}", row.get("memory_mib", ""))
    write_results(rows, arguments.json)


if __name__ == "__main__":
    main()
