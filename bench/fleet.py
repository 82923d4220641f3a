"""Many runs at once on one Prefect server: do they all finish, and do its page and `nautile status` still answer?

    PYTHONPATH=. python bench/fleet.py postgres|sqlite [--runs 20] [--items 500] [--item-s 2] [--workers 4]

So many `nautile run` processes on one store and one server, each with a stage of so many work items, which are
stand-ins: a task run of Prefect's each, that only waits. While they work, the requests that Prefect's pages send and
`nautile status` are timed, one after the other. Prints failures, medians and worst times, and the database's size. With
`postgres`, a PostgreSQL server of Debian's is started for it. After `--minutes` the runs are ended, and the figures are
those of what was done by then.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import httpx

from common.files import write_json
from tests.support.postgres import DATABASE, postgres
from tests.support.prefect_server import running_server

ROOT = Path(__file__).resolve().parents[1]
TOY = ROOT / "tests/support/toy.toml"
PAUSE_S = 2.0  # between two looks at the page and the status


@contextmanager
def server(folder: Path, database: str) -> Iterator[tuple[str, dict[str, str]]]:
    """The API's address and the settings of its database."""
    choice = postgres() if database == "postgres" else nullcontext({})
    with choice as settings, running_server(folder / "prefect", settings=settings) as url:
        yield url, settings


def run_command(number: int, options: argparse.Namespace) -> list[str]:
    values = (f"seed={number}", f"launch.workers={options.workers}")
    sets = [part for value in values for part in ("--set", value)]
    return [sys.executable, "-m", "flows.cli.main", "run", str(TOY), *sets]


def requests(run: str | None) -> dict[str, tuple[str, dict[str, Any]]]:
    """What Prefect's pages ask for: name -> path and body. `run`: one of the flow runs, whose page is looked at."""
    newest = {"sort": "START_TIME_DESC", "limit": 10}
    pages = {
        "the list of runs": ("/flow_runs/filter", newest),
        "the number of runs": ("/flow_runs/count", {}),
        "the number of task runs": ("/task_runs/count", {}),
        "the newest task runs": ("/task_runs/filter", {"sort": "EXPECTED_START_TIME_DESC", "limit": 10}),
    }
    if run:
        only = {"flow_runs": {"id": {"any_": [run]}}}
        pages["a run's task runs"] = ("/task_runs/filter", {**only, "sort": "EXPECTED_START_TIME_DESC", "limit": 100})
        pages["a run's log"] = ("/logs/filter", {"logs": {"flow_run_id": {"any_": [run]}}, "limit": 200})
    return pages


def look(client: httpx.Client, environment: dict[str, str], times: dict[str, list[float]], lost: list[str]) -> None:
    """Time each request, and `nautile status`, once."""
    runs = client.post("/flow_runs/filter", json={"limit": 1}).json()
    for name, (path, body) in requests(runs[0]["id"] if runs else None).items():
        began = time.perf_counter()
        response = client.post(path, json=body)
        times[name].append(time.perf_counter() - began)
        if response.is_error:
            lost.append(f"{name}: {response.status_code}")
    began = time.perf_counter()
    status = [sys.executable, "-m", "flows.cli.main", "status", "--json"]
    done = subprocess.run(status, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    times["nautile status"].append(time.perf_counter() - began)
    if done.returncode:
        lost.append(f"nautile status: {done.stderr.strip()[-200:]}")


def database_bytes(folder: Path, settings: dict[str, str]) -> int:
    """The size of the database on the disk."""
    if not settings:
        return sum(path.stat().st_size for path in (folder / "prefect").glob("prefect.db*"))

    async def ask() -> int:
        import asyncpg

        fields = {name: settings[f"{DATABASE}{name.upper()}"] for name in ("host", "port", "user", "password")}
        connection = await asyncpg.connect(**fields, database=settings[f"{DATABASE}NAME"])
        try:
            return await connection.fetchval("SELECT pg_database_size(current_database())")
        finally:
            await connection.close()

    return asyncio.run(ask())


def measure(folder: Path, url: str, settings: dict[str, str], options: argparse.Namespace) -> dict[str, Any]:
    """Start the runs, look at them until they have ended, and count."""
    environment = {**os.environ} | {"NAUTILE_STORE": str(folder / "store"), "PREFECT_API_URL": url}
    environment |= {"NAUTILE_DAG": "fleet_stages:dag", "PYTHONPATH": f"{ROOT}:{ROOT / 'bench'}"}
    environment |= {"FLEET_ITEMS": str(options.items), "FLEET_ITEM_S": str(options.item_s)}
    times: dict[str, list[float]] = defaultdict(list)
    empty, lost, began = database_bytes(folder, settings), [], time.perf_counter()
    processes = []
    for number in range(options.runs):
        with (folder / f"run-{number}.log").open("wb") as log:
            command = run_command(number, options)
            processes.append(subprocess.Popen(command, env=environment, cwd=folder, stdout=log, stderr=log))
    with httpx.Client(base_url=url, timeout=120.0) as client:
        while any(process.poll() is None for process in processes):
            if time.perf_counter() - began > 60 * options.minutes:
                for process in processes:
                    process.terminate()
                break
            look(client, environment, times, lost)
            time.sleep(PAUSE_S)
        codes = [process.wait() for process in processes]
        took = time.perf_counter() - began
        states = {
            state: client.post("/task_runs/count", json={"task_runs": {"state": {"type": {"any_": [state]}}}}).json()
            for state in ("COMPLETED", "FAILED", "CRASHED", "RUNNING", "PENDING", "CANCELLED")
        }
    done = sum(1 for _ in (folder / "store").glob("staging/*/rounds/work/done/item-*"))
    published = [path for path in (folder / "store" / "artifacts" / "tokens").glob("*/items.txt")]
    return {
        "seconds": took,
        "exit codes": {str(code): codes.count(code) for code in sorted(set(codes))},
        "items done": done + sum(int(path.read_text()) for path in published),
        "task runs by state": {state: count for state, count in states.items() if count},
        "requests that failed": lost,
        "database bytes": [empty, database_bytes(folder, settings)],
        "times": {name: [len(each), statistics.median(each), max(each)] for name, each in times.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("database", choices=("postgres", "sqlite"))
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--items", type=int, default=500)
    parser.add_argument("--item-s", type=float, default=2.0, help="seconds that an item waits")
    parser.add_argument("--workers", type=int, default=4, help="items at a time in each run")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--out", type=Path, help="also write the figures there, as JSON")
    options = parser.parse_args()
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="fleet-") as name, server(Path(name), options.database) as (url, settings):
        result = measure(Path(name), url, settings, options)
        result["load average before and after"] = [load_before, os.getloadavg()[0]]
        if set(result["exit codes"]) != {"0"}:
            for log in sorted(Path(name).glob("run-*.log"))[:3]:
                print(log.name, log.read_text(errors="replace")[-800:])
    for what, (count, median, worst) in result["times"].items():
        print(f"{what:26s} {median:6.2f} s   worst {worst:6.2f} s   ({count} times)")
    print(json.dumps({key: value for key, value in result.items() if key != "times"}, indent=1))
    if options.out:
        write_json(options.out, {"database": options.database, **vars(options) | {"out": None}, **result})


if __name__ == "__main__":
    main()
