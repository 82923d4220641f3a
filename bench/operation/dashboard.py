"""The dashboard over a store with a million rows: each of its queries, and the first paint of each page.

    python bench/operation/dashboard.py [--rows 1000000] [--runs 40] [--repeats 3] [--store FOLDER] [--no-browser]

Queries are timed over one connection, as when a page is rendered, interleaved so that other load disturbs all alike.
First paint is timed by Chromium's clock. "new": from the request until the page's title and its first chart, table or
text are visible, in a window without any cache. "used": from the click on a page until the same, in a window that has
shown it before. The server's processor seconds for the same are printed too; the load of the machine changes them
little. All figures are medians. `--store` names a store to keep, and to reuse if it exists.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import psutil
from dashboard_store import PRETRAINING, REINFORCING, fill_store

from bench.measure import argument_parser, time_interleaved, write_results
from common.processes import free_port
from flows.dashboard import queries
from flows.dashboard.pages import PAGES
from flows.run_state import RUNS
from store.artifacts import Store
from store.catalog import Catalog
from store.schema import LINEAGE_WITH_CALLS
from tests.support.pages.browser import chromium

ROOT = Path(__file__).resolve().parents[2]
QUERY_MS, NEW_S, USED_S = 200.0, 2.0, 0.5  # targets
# The first content below the title, for pages where it is neither a chart nor a table.
CONTENT = {"logs": "pre.literal", "lineage": "[data-testid=stGraphVizChart] svg"}
CONTENT |= dict.fromkeys(("samples", "rollouts"), ".group")
CHART_OR_TABLE = "[data-testid=stVegaLiteChart] svg, [data-testid=stDataFrame] canvas, .plain-table table"
# The page's clock once its title and an element of `content` are visible, else false. Charts from before the click are
# marked `old` and do not count; other old elements are gone when the script has ended.
SHOWN = """([title, content, ended]) => {
    const titles = [...document.querySelectorAll('h1')].map(heading => heading.textContent.trim());
    const state = document.querySelector('[data-testid=stApp]')?.dataset.testScriptState;
    const parts = [...document.querySelectorAll(content)];
    const seen = parts.some(part => !part.dataset.old && part.getBoundingClientRect().height > 0);
    return titles.includes(title) && seen && (!ended || state === 'notRunning') && performance.now();
}"""
CLICK = """([address, charts]) => {
    for (const chart of document.querySelectorAll(charts)) chart.dataset.old = 'yes';
    const links = [...document.querySelectorAll('[data-testid=stSidebarNavLink]')];
    const begun = performance.now();
    links.find(link => new URL(link.href).pathname === address).click();
    return begun;
}"""


def dashboard_queries(catalog: Catalog) -> dict[str, tuple[str, list[Any]]]:
    """Every query of the dashboard, with the parameters that its pages use."""
    runs = catalog.query(RUNS, [queries.MOST_RUNS])
    stages = {run["run"]: catalog.query(queries.STAGES, [run["run"]]) for run in runs[:4]}
    newest_run = runs[0]["run"]
    execution_of = {row["label"]: [row["execution"]] for row in stages[newest_run]}
    executions = [row["execution"] for row in stages[newest_run]]
    compared = [row["execution"] for rows in stages.values() for row in rows if row["stage"] == "pretrain"]
    newest_evaluation = catalog.query(queries.ARTIFACTS, ["evaluation", "evaluation", 1])[0]["id"]
    highest = queries.groups(queries.SAMPLES, "highest reward")
    return {
        "runs": (RUNS, [queries.MOST_RUNS]),
        "stages": (queries.STAGES, [newest_run]),
        "metric_names": (queries.METRIC_NAMES, [execution_of["pretrain"]]),
        "curves, one run": (queries.CURVES, [execution_of["pretrain"], list(PRETRAINING[:4]), queries.POINTS]),
        "curves, four runs": (queries.CURVES, [compared, list(PRETRAINING[:4]), queries.POINTS]),
        "curves, health": (queries.CURVES, [execution_of["reason"], list(REINFORCING), queries.POINTS]),
        "sample_sets": (queries.SAMPLE_SETS, [execution_of["reason"]]),
        "groups": (highest, [execution_of["reason"], "rollouts", "", "", "", "", queries.GROUPS_PAGE, 0]),
        "texts, searched": (
            queries.texts(queries.SAMPLES),
            [execution_of["reason"], "rollouts", "77 + 77", "77 + 77", queries.PAGE, 0],
        ),
        "calls": (queries.CALLS, [execution_of["distill"]]),
        "call_statuses": (queries.CALL_STATUSES, [execution_of["distill"]]),
        "made": (queries.ARTIFACTS_OF, [executions]),
        "tokens_a_step": (queries.TOKENS_A_STEP, [execution_of["pretrain"]]),
        "evaluations": (queries.EVALUATIONS, []),
        "artifacts": (queries.ARTIFACTS, ["", "", 500]),
        "sizes": (queries.SIZES, []),
        "lineage": (LINEAGE_WITH_CALLS, [newest_evaluation]),
    }


def time_queries(store: Store, repeats: int) -> dict[str, float]:
    """Query -> median milliseconds."""
    cases = dashboard_queries(Catalog(store))
    with Catalog(store).reading() as query:
        timings = time_interleaved(
            {name: partial(query, sql, *values) for name, (sql, values) in cases.items()}, repeats
        )
    medians = {name: 1000 * statistics.median(wall for wall, _ in times) for name, times in timings.items()}
    print(f"{'query':<20}{'ms':>8}{'CPU ms':>8}")
    for name, wall in medians.items():
        print(f"{name:<20}{wall:>8.0f}{1000 * statistics.median(processor for _, processor in timings[name]):>8.0f}")
    return medians


@contextmanager
def dashboard(store: Store) -> Iterator[tuple[str, int]]:
    """Start a dashboard; yields its address and process id."""
    port = free_port()
    environment = {**os.environ, "NAUTILE_STORE": str(store.root), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "flows.cli.main", "dashboard", "--port", str(port)]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=5).close()
                break
            except OSError:
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}", process.pid
    finally:
        process.terminate()
        process.wait(30)


def processor_s(pid: int) -> float:
    """Processor seconds that a process has used so far."""
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def time_paint(store: Store, repeats: int) -> dict[str, dict[str, float]]:
    """Page -> medians of seconds: new and used, and of the processor for each."""
    timings: dict[str, dict[str, list[float]]] = {}
    with dashboard(store) as (base, pid), chromium() as used:
        window = used.new_page()
        for repeat in range(repeats + 1):  # the first round is not counted: it fills the used window's cache
            for address, page in PAGES.items():
                content, path = CONTENT.get(address, CHART_OR_TABLE), "" if address == "overview" else address
                # New window: a context without cache, from the request to the first content.
                fresh = used.browser.new_context(viewport={"width": 1280, "height": 900})
                tab, cpu_before = fresh.new_page(), processor_s(pid)
                tab.goto(f"{base}/{path}", wait_until="commit")
                painted_ms = tab.wait_for_function(SHOWN, arg=[page.title, content, False], polling="raf").json_value()
                # The first content stops the clock. Then wait for the script's end, or its remaining work would count
                # for the next page.
                tab.wait_for_function(SHOWN, arg=[page.title, content, True], polling="raf")
                figures = {"new, s": painted_ms / 1000, "new, CPU s": processor_s(pid) - cpu_before}
                fresh.close()
                if repeat == 0:
                    window.goto(f"{base}/{path}", wait_until="commit")
                    window.wait_for_function(SHOWN, arg=[page.title, content, True], polling="raf")
                    continue
                # Used window: from the click to the same content.
                cpu_before = processor_s(pid)
                # Click and content are timed by the browser's own clock, so the round trip of the automation is in
                # neither.
                clicked_ms = window.evaluate(CLICK, [f"/{path}", "svg"])
                painted_ms = window.wait_for_function(
                    SHOWN, arg=[page.title, content, False], polling="raf"
                ).json_value()
                window.wait_for_function(SHOWN, arg=[page.title, content, True], polling="raf")
                figures |= {"used, s": (painted_ms - clicked_ms) / 1000, "used, CPU s": processor_s(pid) - cpu_before}
                for name, figure in figures.items():
                    timings.setdefault(address, {}).setdefault(name, []).append(figure)
    medians = {
        page: {name: statistics.median(times) for name, times in figures.items()} for page, figures in timings.items()
    }
    print(f"{'page':<20}" + "".join(f"{name:>12}" for name in next(iter(medians.values()))))
    for address, figures in medians.items():
        print(f"{PAGES[address].title:<20}" + "".join(f"{figure:>12.2f}" for figure in figures.values()), flush=True)
    return medians


def main() -> None:
    arguments = argument_parser(__doc__, rows=1_000_000, runs=40, repeats=3, store=None, no_browser=False).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store = Store(arguments.store or Path(folder) / "store")
        if not store.catalog_path.exists():
            fill_store(store, arguments.rows, arguments.runs)
        tables = ("metrics", "calls", "samples", "runs", "artifacts")
        counts = {name: Catalog(store).query(f"SELECT count(*) AS n FROM {name}")[0]["n"] for name in tables}
        print(", ".join(f"{count:,} {name}" for name, count in counts.items()), end="; ")
        print(f"catalog {store.catalog_path.stat().st_size / 1e6:.0f} MB; load {os.getloadavg()[0]:.1f}")
        results: dict[str, Any] = {"rows": counts, "queries, ms": time_queries(store, arguments.repeats)}
        slow = [name for name, wall in results["queries, ms"].items() if wall > QUERY_MS]
        if not arguments.no_browser:
            results["pages"] = time_paint(store, arguments.repeats)
            for page, figures in results["pages"].items():
                slow += [page] if figures["new, s"] > NEW_S or figures["used, s"] > USED_S else []
        limits = f"{QUERY_MS:.0f} ms a query, {NEW_S} s a page in a new window, {USED_S} s in a used one"
        print(f"over {limits}: {', '.join(slow) or 'none'}; load {os.getloadavg()[0]:.1f}")
        write_results(results, arguments.json)


if __name__ == "__main__":
    main()
