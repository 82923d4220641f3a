"""The dashboard over a store with a million metric rows: every query it asks, and the first paint of each page.

    python bench/dashboard.py [--rows 1000000] [--runs 40] [--repeats 9] [--store FOLDER] [--no-browser]

Queries are timed as the pages ask them (open the catalog, ask, close), median and worst of the repeats, in turn so
that a disturbance hits all of them. First paint is measured in Chromium from the request to the page's title and first
chart, table or text being there: in a new window each time, so that nothing is cached in the browser, and once more in
that window. `--store` keeps the store, and takes it again if it is there.
"""

import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

from measure import in_turns, options

from common.processes import free_port
from flows.dashboard import queries
from flows.run_state import RUNS
from store.artifacts import Store
from store.catalog import Catalog
from store.events import EventWriter
from store.schema import LINEAGE_WITH_CALLS
from tasks.engine.attempt_log import write_attempt_row

ROOT = Path(__file__).resolve().parents[1]
QUERY_MS, PAINT_S = 200.0, 2.0  # what is asked for
STAGES = ("ingest", "distill", "pretrain", "align", "reason", "self_distill", "evaluate")
NAMES = ("loss", "validation_loss", "bits_per_byte", "learning_rate", "gradient_norm", "tokens_per_second")
HEALTH = ("reward", "reward_deviation", "kl", "entropy", "grad_norm", "length", "sampler_gap", "truncated_share")
PAGES = {
    "": "Overview",
    "logs": "Logs",
    "system": "System",
    "training": "Training",
    "reinforcement": "Reinforcement",
    "rollouts": "Rollouts and traces",
    "distillation": "Distillation",
    "evaluations": "Evaluations",
    "lineage": "Lineage",
    "storage": "Storage",
}
# What shows that a page has its content; a page that draws its texts as cards is there with the first of them.
CARDS = ".group"
SETTLED = "[data-testid=stVegaLiteChart] svg, [data-testid=stDataFrame] canvas, [data-testid=stCode], \
[data-testid=stGraphVizChart] svg, [data-testid=stCaptionContainer]"


def make(store: Store, rows: int, runs: int) -> None:
    """`rows` metrics over `runs` runs of seven stages, with calls, samples and artifacts as such runs leave them."""
    store.prepare()
    chance = random.Random(0)
    begun = datetime.now(UTC) - timedelta(days=runs)
    for number in range(runs):
        run, when = str(uuid.UUID(int=chance.getrandbits(128))), begun + timedelta(days=number)
        made: dict[str, Any] = {}
        for stage in STAGES:
            made |= _stage(store, chance, run, stage, when, rows // runs, made)
        Catalog(store).ingest()
    print(f"made {rows:,} metric rows in {runs} runs under {store.root}", flush=True)


def _stage(
    store: Store, chance: random.Random, run: str, stage: str, when: datetime, rows: int, made: dict[str, Any]
) -> dict[str, Any]:
    execution, key = f"{chance.getrandbits(128):032x}", f"{chance.getrandbits(256):064x}"
    emit = EventWriter(store.root / "events" / f"{execution}.jsonl", execution, stage=stage)
    names = {"pretrain": NAMES, "align": HEALTH, "reason": HEALTH}.get(stage, ())
    share = {"pretrain": 0.8, "align": 0.1, "reason": 0.1}.get(stage, 0.0)
    for name in names:
        steps = int(rows * share / len(names))
        results = [{"name": name, "step": step, "value": 8 / (1 + step) + chance.random()} for step in range(steps)]
        emit.many("metric", results)
    if stage == "distill":
        _calls(emit, chance)
    if stage in ("align", "reason"):
        _rollouts(emit, chance)
    emit.close()
    row = {"id": f"{chance.getrandbits(128):032x}", "run": run, "config": "bench", "stage": stage, "label": stage}
    row |= {"key": key, "execution": execution, "attempt": 1, "state": "done", "reused": False, "seconds": 60.0}
    write_attempt_row(store, row | {"started": when.isoformat(), "ended": (when + timedelta(hours=1)).isoformat()})
    kind = {"ingest": "tokens", "distill": "documents", "evaluate": "evaluation"}.get(stage, "checkpoint")
    folder = store.staging(key) / "output" / kind
    folder.mkdir(parents=True)
    if kind == "evaluation":
        shutil.copy(_scores(chance, folder.parent), folder / "scores.json")
    (folder / "payload.txt").write_text(key)
    return {
        kind: store.publish(
            kind,
            key,
            folder,
            stage=stage,
            version=1,
            config={"seed": 0},
            inputs=dict(made),
            facts={},
            execution=execution,
            outputs=(kind,),
            run=run,
        )
    }


def _calls(emit: EventWriter, chance: random.Random, count: int = 1000) -> None:
    call = {"endpoint": "teacher", "model": "bench", "purpose": "teacher", "attempt": 1, "status": "ok"}
    call |= {"cached": False, "tokens_in": 500, "tokens_out": 300, "dollars": 0.001}
    emit.many("call", [{**call, "latency_s": chance.random()} for _ in range(count)])
    emit.many("sample", [{"set": "documents", "index": i, "query": "why?", "answer": "so"} for i in range(64)])


def _rollouts(emit: EventWriter, chance: random.Random, count: int = 500) -> None:
    text = "we add the two numbers and check the sum again. " * 12
    emit.many(
        "sample",
        [
            {
                "set": "rollouts",
                "index": index,
                "step": index // 8,
                "question": f"{index} + {index}?",
                "text": f"{text}<|think_end|>\n{2 * index}",
                "reward": chance.random(),
                "advantage": chance.random() - 0.5,
                "length": 100,
            }
            for index in range(count)
        ],
    )


def _scores(chance: random.Random, folder: Path) -> Path:
    accuracy = chance.random()
    score = {"title": "Held-out problems", "stand_in": "bench", "n": 400, "correct": int(400 * accuracy), "differs": []}
    score |= {"accuracy": accuracy, "interval": [accuracy * 0.9, accuracy], "accuracy_lenient": accuracy, "chance": 0.0}
    path = folder / "scores.json"
    scores = {"model": "bench", "benchmarks": {"held_out": score}, "composites": {}, "average": None}
    path.write_text(json.dumps(scores))
    return path


def questions(catalog: Catalog) -> dict[str, tuple[str, list[Any]]]:
    """Every query of the dashboard, with the parameters its pages give."""
    runs = catalog.query(RUNS, [queries.MOST_RUNS])
    stages = {run["run"]: catalog.query(queries.STAGES, [run["run"]]) for run in runs[:4]}
    newest_run = runs[0]["run"]
    of = {row["stage"]: [row["execution"]] for row in stages[newest_run]}
    every = [row["execution"] for row in stages[newest_run]]
    compared = [row["execution"] for rows in stages.values() for row in rows if row["stage"] == "pretrain"]
    newest = catalog.query(queries.ARTIFACTS, ["evaluation", "evaluation", 1])[0]["id"]
    highest = queries.groups(queries.SAMPLES, "highest reward")
    return {
        "runs": (RUNS, [queries.MOST_RUNS]),
        "stages": (queries.STAGES, [newest_run]),
        "metric_names": (queries.METRIC_NAMES, [of["pretrain"]]),
        "curves, one run": (queries.CURVES, [of["pretrain"], NAMES[:4], queries.POINTS]),
        "curves, four runs": (queries.CURVES, [compared, NAMES[:4], queries.POINTS]),
        "curves, health": (queries.CURVES, [of["reason"], HEALTH, queries.POINTS]),
        "sample_sets": (queries.SAMPLE_SETS, [of["reason"]]),
        "groups": (highest, [of["reason"], "rollouts", "", "", "", "", queries.GROUPS_PAGE, 0]),
        "texts, searched": (
            queries.texts(queries.SAMPLES),
            [of["reason"], "rollouts", "77 + 77", "77 + 77", queries.PAGE, 0],
        ),
        "calls": (queries.CALLS, [of["distill"]]),
        "call_statuses": (queries.CALL_STATUSES, [of["distill"]]),
        "made": (queries.ARTIFACTS_OF, [every]),
        "tokens_a_step": (queries.TOKENS_A_STEP, [of["pretrain"]]),
        "evaluations": (queries.EVALUATIONS, []),
        "artifacts": (queries.ARTIFACTS, ["", "", 500]),
        "sizes": (queries.SIZES, []),
        "lineage": (LINEAGE_WITH_CALLS, [newest]),
    }


def time_queries(store: Store, repeats: int) -> bool:
    catalog = Catalog(store)
    asked = questions(catalog)
    calls = {name: partial(catalog.query, *question) for name, question in asked.items()}
    taken = {name: [1000 * wall for wall, _ in times] for name, times in in_turns(calls, repeats).items()}
    print(f"{'query':<20}{'median ms':>10}{'worst ms':>10}")
    for name, times in taken.items():
        print(f"{name:<20}{statistics.median(times):>10.0f}{max(times):>10.0f}")
    return all(statistics.median(times) < QUERY_MS for times in taken.values())


@contextmanager
def dashboard(store: Store) -> Iterator[str]:
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
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


def time_paint(store: Store, repeats: int) -> bool:
    from tests.support.browser import chromium

    windows = ("a new window", "one that has shown the page before")
    taken: dict[str, dict[str, list[float]]] = {page: {window: [] for window in windows} for page in PAGES}
    with dashboard(store) as base, chromium() as first:
        for repeat in range(repeats + 1):  # the first round loads modules and is not counted
            for page, title in PAGES.items():
                context = first.browser.new_context(viewport={"width": 1440, "height": 1100})
                for window in windows:
                    tab = context.new_page()
                    before = time.perf_counter()
                    tab.goto(f"{base}/{page}", wait_until="commit")
                    tab.get_by_role("heading", name=title, exact=True, level=1).wait_for()
                    shown = CARDS if page == "rollouts" else SETTLED
                    tab.locator(shown).first.wait_for(state="attached")
                    if repeat:
                        taken[page][window].append(time.perf_counter() - before)
                    tab.close()
                context.close()
    print(f"{'first paint in':<20}{' | '.join(windows)}: median s, worst s")
    for page, entry in taken.items():
        results = [f"{statistics.median(times):.2f} {max(times):.2f}" for times in entry.values()]
        print(f"{PAGES[page]:<20}{' | '.join(results)}")
    return all(statistics.median(times) < PAINT_S for candidate in taken.values() for times in candidate.values())


def main() -> None:
    given = options(__doc__, rows=1_000_000, runs=40, repeats=9, store=None, no_browser=False).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store = Store(given.store or Path(folder) / "store")
        if not store.catalog_path.exists():
            make(store, given.rows, given.runs)
        counted = Catalog(store).query("SELECT count(*) AS n FROM metrics")[0]["n"]
        print(f"{counted:,} metric rows, catalog {store.catalog_path.stat().st_size / 1e6:.0f} MB")
        quick = time_queries(store, given.repeats)
        print(f"every query under {QUERY_MS:.0f} ms: {'yes' if quick else 'NO'}")
        if not given.no_browser:
            soon = time_paint(store, given.repeats)
            print(f"every first paint under {PAINT_S:.0f} s: {'yes' if soon else 'NO'}")


if __name__ == "__main__":
    main()
