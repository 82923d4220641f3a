"""Kill the processes of a run at random moments, resume it, and compare every byte with an undisturbed run.

    python bench/chaos.py --work DIR [--config FILE] [--kills 20] [--each-round 5] [--seed 1] [--minutes 10]

Without `--config` the run is the pipeline with stand-in stages (tests/support/stages/toy.toml), of some seconds each;
`--config local` runs the default configuration, which takes an hour. It first runs undisturbed. Then come rounds, each
in a new store: at seeded moments one process of `nautile run` is killed with SIGKILL (the flow, a stage's
process, a work item's process, or Prefect's server), and the same command is repeated whenever the run has ended by it.
At the end of a round the store must verify, its artifacts and the rows of its metrics, samples and calls must equal
those of the undisturbed run except for times, a catalog rebuilt from the files must be the same, and no process and no
unfinished work may be left. Exit code 1 if anything differs. The store of such a round stays in DIR.
"""

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from nautile.store.layout import Layout
from nautile.store.manifest import MANIFEST

ROOT = Path(__file__).resolve().parents[1]
TOY = ROOT / "tests" / "support" / "stages" / "toy.toml"
TOY_DAG = "tests.support.stages.toy_dag:toy_dag"
MODULE = "nautile.flows.cli.main"
MOST_COMMANDS = 10  # of a round beyond its kills: more, and the run does not recover
# What differs between any two runs: kinds of artifacts and metrics that contain times.
TIMED_KINDS = ("report", "data_card", "evaluation")
TIMED_METRICS = r"dollars_unknown|second|per_s|_s$|time|latency|mfu|bytes|share_in_steps"
TABLES = ("artifacts", "inputs", "attempts", "metrics", "calls", "samples")
# The rows of live artifacts. An execution with several artifacts would give each row once per artifact, so that only
# the first by id is joined.
ROWS = """
WITH live AS (SELECT execution, min(key) AS key FROM artifacts WHERE superseded = 0 GROUP BY execution)
SELECT 'metrics' AS of, to_json({key: key, name: name, step: step, source: source, value: value}) AS row
FROM metrics JOIN live USING (execution) WHERE NOT starts_with(name, 'system/')
UNION ALL SELECT 'samples', to_json({key: key, "set": "set", "index": "index", fields: fields})
FROM samples JOIN live USING (execution)
UNION ALL SELECT 'calls', to_json({key: key, purpose: purpose, digest: digest})
FROM calls JOIN live USING (execution) WHERE status = 'ok' AND NOT cached
"""


class Run:
    """`nautile run CONFIG` in one store, however often it is repeated."""

    def __init__(self, store: Path, config: str) -> None:
        self.store, self.config, self.log = store, config, store.parent / f"{store.name}.log"
        own = {name: value for name, value in os.environ.items() if not name.startswith(("NAUTILE_", "PREFECT_"))}
        self.environment = own | {"NAUTILE_STORE": str(store), "PYTHONPATH": str(ROOT)}
        if config == str(TOY):
            self.environment |= {"NAUTILE_DAG": TOY_DAG, "NAUTILE_TOY_STEP_S": "0.15"}
        store.mkdir(parents=True)
        self.flow = self.start()

    def start(self) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", MODULE, "run", self.config], env=self.environment, cwd=ROOT,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def nautile(self, *words: str) -> Any:
        """The JSON of a command. `store verify` exits with 2 if something is damaged."""
        command = [sys.executable, "-m", MODULE, *words, "--json"]
        done = subprocess.run(command, env=self.environment, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode not in (0, 2) or not done.stdout:
            raise SystemExit(f"nautile {' '.join(words)}: {done.stderr}")
        return json.loads(done.stdout)

    def processes(self) -> list[psutil.Process]:
        """Every living process that works in this store."""
        processes = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get("NAUTILE_STORE") == str(self.store):
                    processes.append(process)
        return processes

    def kill_all(self) -> None:
        for process in self.processes():
            with suppress(psutil.Error):
                process.kill()
        self.flow.wait()

    def tables(self) -> dict[str, list[str]]:
        """The catalog: the rows of each table as text, sorted."""
        query = " UNION ALL ".join(
            f"SELECT '{name}' AS name, to_json(t)::VARCHAR AS row FROM {name} t" for name in TABLES
        )
        rows = self.nautile("sql", query)
        return {name: sorted(row["row"] for row in rows if row["name"] == name) for name in TABLES}


def kind_of(words: list[str]) -> str | None:
    """What a process of a run is, by its command line; None: one that is not killed."""
    if "nautile.flows.operate.prefect_server" in words:
        return "Prefect's server"
    if "nautile.tasks.engine.child_main" in words:
        # A work item has its fan-out and its name behind the request, with which a stage's command line ends.
        return "work item" if len(words) > words.index("nautile.tasks.engine.child_main") + 2 else "stage"
    return "flow" if MODULE in words and "run" in words else None


def targets(run: Run) -> dict[str, list[psutil.Process]]:
    """The processes that may be killed, by kind."""
    by_kind: dict[str, list[psutil.Process]] = {}
    for process in run.processes():
        with suppress(psutil.Error):
            if kind := kind_of(process.cmdline()):
                by_kind.setdefault(kind, []).append(process)
    return by_kind


def snapshot(run: Run) -> dict[str, Counter[str]]:
    """What must be equal: the digest of each file of a live artifact, and each row, with its number."""
    parts = {"files": Counter(files(run.store))} | {name: Counter[str]() for name in ("metrics", "samples", "calls")}
    for item in run.nautile("sql", ROWS):
        row = json.loads(item["row"])
        if item["of"] == "metrics" and re.search(TIMED_METRICS, row["name"]):
            row["value"] = None
        if item["of"] == "samples":
            row["fields"].pop("latency_s", None)
        parts[item["of"]][json.dumps(row, sort_keys=True, default=str)] += 1
    return parts


def files(store: Path) -> Iterator[str]:
    """Each file of a live artifact with its sha256; of an evaluation, whose files contain times, the scores."""
    for manifest in Layout(store).artifacts.glob(f"*/*/{MANIFEST}"):
        kind, key = manifest.parts[-3:-1]
        if "." in key:  # superseded: how many there are depends on the kills
            continue
        if kind == "evaluation":
            scores = json.loads((manifest.parent / "scores.json").read_text(encoding="utf-8"))["benchmarks"]
            figures = {name: [score.get(of) for of in ("n", "correct", "accuracy")] for name, score in scores.items()}
            yield f"{kind}/{key} {json.dumps(figures, sort_keys=True)}"
        elif kind in TIMED_KINDS:
            yield f"{kind}/{key}"
        else:
            for file, entry in json.loads(manifest.read_text(encoding="utf-8"))["files"].items():
                yield f"{kind}/{key}/{file} {entry['sha256']}"


def differences(plain: dict[str, Counter[str]], result: dict[str, Counter[str]]) -> list[str]:
    """What `result` lacks or has beyond `plain`, a line for each part; empty if they are equal.

    A reply whose row was not on disk when its process was killed is asked for again: a call may occur twice.
    """
    lines = []
    for part, expected in plain.items():
        extra = result[part] - expected
        if part == "calls":
            extra = Counter({row: count for row, count in extra.items() if row not in expected})
        for word, odd in (("missing", expected - result[part]), ("too many", extra)):
            if odd:
                lines.append(f"{part}: {odd.total()} {word}, one is {min(odd)[:200]}")
    return lines


def problems_of(run: Run, plain: dict[str, Counter[str]]) -> list[str]:
    """What is wrong at the end of a round."""
    gone = time.monotonic() + 30  # Prefect's server ends a moment after its run
    while (left := run.processes()) and time.monotonic() < gone:
        time.sleep(0.2)
    lines = [f"process {process.pid} is left" for process in left]
    lines += [f"{path.name[:16]}: unfinished work is left" for path in Layout(run.store).staging_root.glob("?" * 64)]
    lines += [f"{name} is damaged: {names}" for name, names in run.nautile("store", "verify")["damaged"].items()]
    unfinished = run.nautile("sql", "SELECT label FROM attempts WHERE state = 'running'")
    lines += [f"{row['label']} is still running in the catalog" for row in unfinished]
    lines += differences(plain, snapshot(run))
    before = run.tables()
    run.nautile("store", "rebuild")
    after = run.tables()
    lines += [f"rebuilt, the table {name} differs" for name in TABLES if before[name] != after[name]]
    return lines


def disturbed(run: Run, seconds: float, kills: int, rng: random.Random, until: float) -> list[str]:
    """Kill `kills` processes of the run, repeat its command until it succeeds, and return what was killed."""
    killed, commands = list[str](), 1
    moments = sorted(rng.uniform(0.0, 1.3 * seconds) for _ in range(kills))
    start = time.monotonic()
    while True:
        if time.monotonic() > until:
            raise TimeoutError
        if run.flow.poll() is not None:
            if run.flow.returncode == 0:
                return killed
            commands += 1
            if commands > kills + MOST_COMMANDS:
                raise SystemExit(f"no recovery after {commands} commands, killed: {killed}; see {run.log}")
            run.flow = run.start()
        if moments and time.monotonic() - start >= moments[0] and (by_kind := targets(run)):
            # First the kind, or a fan-out's many work items would be all that is ever killed.
            kind = rng.choice(sorted(by_kind))
            with suppress(psutil.Error):
                rng.choice(by_kind[kind]).kill()
                killed.append(kind)
            del moments[0]
        time.sleep(0.05)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--work", type=Path, required=True, help="an empty folder for the stores and the logs")
    parser.add_argument("--config", default=str(TOY))
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--each-round", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=10.0, help="no round begins after them")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # runs every `finally`
    work, until = arguments.work.resolve(), time.monotonic() + 60 * arguments.minutes
    start, run = time.monotonic(), Run(work / "undisturbed", arguments.config)
    try:
        if run.flow.wait() != 0:
            raise SystemExit(f"the undisturbed run failed; see {run.log}")
    finally:
        run.kill_all()
    seconds, plain, done, wrong = time.monotonic() - start, snapshot(run), Counter[str](), 0
    print(f"undisturbed: {seconds:.0f} s, {plain['files'].total()} files", flush=True)
    for number in range(-(-arguments.kills // arguments.each_round)):
        if time.monotonic() > until:
            break
        run = Run(work / f"round-{number}", arguments.config)
        try:
            # A round has its own moments, whatever went before.
            rng = random.Random(f"{arguments.seed}/{number}")
            killed = disturbed(run, seconds, arguments.each_round, rng, until + 20 * seconds)
            problems = problems_of(run, plain)
        except TimeoutError:
            problems, killed = ["it did not end in time"], []
        finally:
            run.kill_all()
        done.update(killed)
        wrong += bool(problems)
        print(f"round {number}: killed {', '.join(killed)}: {'as undisturbed' if not problems else ''}", flush=True)
        print("".join(f"  {line}\n" for line in problems), end="", flush=True)
        if not problems:
            shutil.rmtree(run.store)
    of_kinds = ", ".join(f"{count} of {kind}" for kind, count in sorted(done.items()))
    print(f"{done.total()} kills ({of_kinds}); {wrong} rounds did not end as the undisturbed run")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
