"""Many concurrent runs on one Prefect server: do they all finish, and how fast do pages and `nautile status` answer?

    PYTHONPATH=. python bench/operation/fleet.py postgres|sqlite [--runs 20] [--items 500] [--item-s 2] [--workers 4]

Starts `--runs` processes of `nautile run` on one store and one server, each with a stage of `--items` work items. An
item is a Prefect task run that only waits. While they work, the requests of Prefect's pages, the first page of the
dashboard (until its script has run, without a browser) and `nautile status` are timed, one after the other; and again
after all runs have ended, `--idle` times. Prints a table of medians and 95th percentiles, failures, processor seconds
by kind of process, and the database's size. `postgres` starts Debian's PostgreSQL server. After `--minutes` the runs
are terminated, and the figures cover what was done by then.
"""

import argparse
import asyncio
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import websockets
from streamlit.logger import set_log_level
from streamlit.proto.BackMsg_pb2 import BackMsg
from streamlit.proto.ForwardMsg_pb2 import ForwardMsg

from common.files import write_json
from store.artifacts import Store
from tests.support.servers.postgres import DATABASE, postgres
from tests.support.servers.prefect_server import running_server

ROOT = Path(__file__).resolve().parents[2]
TOY = ROOT / "tests/support/stages/toy.toml"
PAUSE_S = 2.0  # between two measurements of all requests
PAGES = "Prefect's pages: all six requests"
Times = dict[str, list[float]]


@contextmanager
def server(folder: Path, database: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Start a Prefect server; yields the API's address and the settings of its database."""
    choice: AbstractContextManager[dict[str, str]] = postgres() if database == "postgres" else nullcontext({})
    with choice as settings, running_server(folder / "prefect", settings=settings) as url:
        yield url, settings


def run_command(number: int, arguments: argparse.Namespace) -> list[str]:
    values = (f"seed={number}", f"launch.workers={arguments.workers}", f"launch.niceness={arguments.niceness}")
    sets = [part for value in values for part in ("--set", value)]
    return [sys.executable, "-m", "flows.cli.main", "run", str(TOY), *sets]


def requests(run: str | None) -> dict[str, tuple[str, dict[str, Any]]]:
    """The requests of Prefect's pages: name -> path and body. `run`: the id of a flow run, for the page of a run."""
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


@dataclass
class ResponseTimer:
    """Times the requests that a person causes: Prefect's pages, the dashboard's first page, `nautile status`."""

    client: httpx.Client
    page: str  # the dashboard's address
    environment: dict[str, str]
    errors: list[str] = field(default_factory=list)  # requests that got an error

    def time_all(self, times: Times) -> None:
        """Time each request, the dashboard's first page and `nautile status`, once."""
        runs = self.client.post("/flow_runs/filter", json={"limit": 1}).json()
        all_of_them = 0.0
        for name, (path, body) in requests(runs[0]["id"] if runs else None).items():
            all_of_them += self._time(times, name, partial(self._post, path, body))
        times[PAGES].append(all_of_them)
        self._time(times, "the dashboard's first page", lambda: asyncio.run(first_page(self.page)))
        self._time(times, "nautile status", self._status)

    def _time(self, times: Times, name: str, answer: Callable[[], str | None]) -> float:
        start = time.perf_counter()
        problem = answer()
        seconds = time.perf_counter() - start
        times[name].append(seconds)
        if problem:
            self.errors.append(f"{name}: {problem}")
        return seconds

    def _post(self, path: str, body: dict[str, Any]) -> str | None:
        response = self.client.post(path, json=body)
        return str(response.status_code) if response.is_error else None

    def _status(self) -> str | None:
        command = [sys.executable, "-m", "flows.cli.main", "status", "--json"]
        completed = subprocess.run(command, env=self.environment, cwd=ROOT, capture_output=True, text=True, check=False)
        return completed.stderr.strip()[-200:] if completed.returncode else None


async def first_page(base: str) -> str | None:
    """Request the dashboard's first page as a browser does and wait for its script's end; returns an error or None."""
    request, error = BackMsg(), None
    # What Streamlit's page sends first over its WebSocket, in Streamlit's own messages.
    request.rerun_script.query_string = ""
    address = f"{base.replace('http', 'ws', 1)}/_stcore/stream"
    arguments: dict[str, Any] = {"subprotocols": ["streamlit"], "origin": base, "max_size": None, "open_timeout": 120}
    async with websockets.connect(address, **arguments) as socket:
        await socket.send(request.SerializeToString())
        async for data in socket:
            message = ForwardMsg()
            message.ParseFromString(data)
            if message.WhichOneof("type") == "script_finished":
                return error
            if message.delta.new_element.WhichOneof("type") == "exception":
                error = message.delta.new_element.exception.message
    return "the connection was closed"


def database_bytes(folder: Path, settings: dict[str, str]) -> int:
    """The size of the database on disk."""
    if not settings:
        return sum(path.stat().st_size for path in (folder / "prefect").glob("prefect.db*"))

    async def query_size() -> int:
        import asyncpg

        fields = {name: settings[f"{DATABASE}{name.upper()}"] for name in ("host", "port", "user", "password")}
        connection = await asyncpg.connect(**fields, database=settings[f"{DATABASE}NAME"])
        try:
            return await connection.fetchval("SELECT pg_database_size(current_database())")
        finally:
            await connection.close()

    return asyncio.run(query_size())


def processor_seconds() -> Counter[str]:
    """Processor seconds of the servers of this bench so far, by kind, including ended children."""
    used: Counter[str] = Counter()
    for process in psutil.Process().children(recursive=True):
        try:
            words, times = " ".join(process.cmdline()), process.cpu_times()
            parent = process.parent()
        except psutil.NoSuchProcess:
            continue
        kinds = {"flows.operate.prefect_server": "server", "postgres": "database", "flows/dashboard/": "dashboard"}
        kind = next((name for part, name in kinds.items() if part in words), None)
        # Postgres has a process per connection. The times of those that have ended are in their parent's children.
        if kind == "database" and parent is not None and parent.pid != os.getpid():
            used[kind] += times.user + times.system  # a running process of one connection
        elif kind:
            used[kind] += times.user + times.system + times.children_user + times.children_system
    return used


def wait(process: "subprocess.Popen[bytes]", used: Counter[str]) -> int:
    """Wait for a run; returns its exit code and adds the processor time of its processes to `used`."""
    # `wait4` and not `Popen.wait`: it gives the processor time of the process with all that it has waited for.
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    seconds = usage.ru_utime + usage.ru_stime
    used["runs"] += seconds  # type: ignore[assignment]  # typeshed: a Counter counts in int only
    return process.returncode


def running(process: "subprocess.Popen[bytes]") -> bool:
    # Without `WNOWAIT` the exit code, and with it the processor time, would be taken here.
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


def measure(
    folder: Path, url: str, page: str, settings: dict[str, str], arguments: argparse.Namespace
) -> dict[str, Any]:
    """Start the runs, time requests until they have ended and again afterwards, and count results."""
    environment = {**os.environ} | {"NAUTILE_STORE": str(folder / "store"), "PREFECT_API_URL": url}
    environment |= {"NAUTILE_DAG": "fleet_stages:dag", "PYTHONPATH": f"{ROOT}:{ROOT / 'bench/operation'}"}
    environment |= {"FLEET_ITEMS": str(arguments.items), "FLEET_ITEM_S": str(arguments.item_s)}
    busy: Times = defaultdict(list)
    idle: Times = defaultdict(list)
    loads = {"before": os.getloadavg()[0]}
    empty_bytes, used_before, start = database_bytes(folder, settings), processor_seconds(), time.perf_counter()
    # Start all runs at once, each with its own output file.
    processes: list[subprocess.Popen[bytes]] = []
    for number in range(arguments.runs):
        with (folder / f"run-{number}.log").open("wb") as log:
            command = run_command(number, arguments)
            processes.append(subprocess.Popen(command, env=environment, cwd=folder, stdout=log, stderr=log))
    with httpx.Client(base_url=url, timeout=120.0) as client:
        timer = ResponseTimer(client, page, environment)
        try:
            while any(map(running, processes)) and time.perf_counter() - start < 60 * arguments.minutes:
                timer.time_all(busy)
                time.sleep(PAUSE_S)
        finally:
            loads["at the end"] = os.getloadavg()[0]
            for process in filter(running, processes):
                process.terminate()
        # Processor time of servers by difference, that of the runs as each is waited for.
        used = processor_seconds()
        used.subtract(used_before)
        codes = [wait(process, used) for process in processes]
        seconds = time.perf_counter() - start
        time.sleep(PAUSE_S + 5.0)  # Prefect's server still writes the last events
        for _ in range(arguments.idle):
            timer.time_all(idle)
        # Prefect's own count, to be compared with the marker files below: both must know every item.
        states = {
            state: client.post("/task_runs/count", json={"task_runs": {"state": {"type": {"any_": [state]}}}}).json()
            for state in ("COMPLETED", "FAILED", "CRASHED", "RUNNING", "PENDING", "CANCELLED")
        }
    # Items of unfinished runs are counted in staging, those of finished runs in the artifacts.
    items_done = sum(1 for _ in (folder / "store").glob("staging/*/fan_outs/work/done/item-*"))
    published = [path for path in (folder / "store" / "artifacts" / "tokens").glob("*/items.txt")]
    return {
        "seconds": seconds,
        "exit codes": {str(code): codes.count(code) for code in sorted(set(codes))},
        "items done": items_done + sum(int(path.read_text()) for path in published),
        "task runs by state": {state: count for state, count in states.items() if count},
        "answered with an error": timer.errors,
        "processor seconds": {kind: round(seconds, 1) for kind, seconds in used.items()},
        "database bytes": [empty_bytes, database_bytes(folder, settings)],
        "load average": loads | {"idle looks": os.getloadavg()[0]},
        "busy": busy,
        "idle": idle,
    }


def middle_and_worst(times: list[float]) -> tuple[float, float]:
    """The median and the 95th percentile."""
    return statistics.median(times), sorted(times)[math.ceil(0.95 * len(times)) - 1]


def print_table(result: dict[str, Any]) -> None:
    rows = [f"{'seconds':36s}{'idle':>8s}{'95 %':>8s}{'busy':>8s}{'95 %':>8s}{'looks':>9s}"]
    for name, times in result["busy"].items():
        idle = result["idle"].get(name, [])
        cells = [f"{value:8.2f}" for series in (idle, times) if series for value in middle_and_worst(series)]
        # Without a look at rest its two columns are blank, and the busy figures stay under their own heading.
        rows.append(f"{name:36s}{''.join(cells).rjust(32)}{len(idle):5d}/{len(times)}")
    print("\n".join(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("database", choices=("postgres", "sqlite"))
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--items", type=int, default=500)
    parser.add_argument("--item-s", type=float, default=2.0, help="seconds that an item waits")
    parser.add_argument("--workers", type=int, default=4, help="items at a time in each run")
    parser.add_argument("--niceness", type=int, default=10, help="[launch] niceness of the runs")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--idle", type=int, default=10, help="measurements after all runs have ended")
    parser.add_argument("--out", type=Path, help="also write the figures there, as JSON")
    arguments = parser.parse_args()
    set_log_level("ERROR")  # else streamlit warns that this process is no server of pages
    from bench.operation.dashboard import dashboard

    with (
        tempfile.TemporaryDirectory(prefix="fleet-") as name,
        server(Path(name), arguments.database) as (url, settings),
        dashboard(Store(Path(name) / "store")) as (page, _),
    ):
        result = measure(Path(name), url, page, settings, arguments)
        if set(result["exit codes"]) != {"0"}:
            for log in sorted(Path(name).glob("run-*.log"))[:3]:
                print(log.name, log.read_text(errors="replace")[-800:])
    print_table(result)
    print(json.dumps({key: value for key, value in result.items() if key not in ("busy", "idle")}, indent=1))
    if arguments.out:
        write_json(arguments.out, {"database": arguments.database, **vars(arguments) | {"out": None}, **result})


if __name__ == "__main__":
    main()
