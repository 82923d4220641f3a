"""A large store, to try the dashboard and the read commands on: runs with a million rows of metrics, samples and calls.

    python bench/operation/large_store.py FOLDER [--rows 1000000] [--runs 40]

The newest run has half of all rows, because its pages are viewed most: a long pretraining and reinforcement, with
rollouts and a distillation's calls. Prints the seconds in which the catalog is rebuilt from the event files.
"""

import math
import random
import sys
import time
import uuid
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.measure import argument_parser
from nautile.configs.load import load
from nautile.store.artifacts import Artifact, Store
from nautile.store.catalog import Catalog
from nautile.store.events import EventWriter
from nautile.store.layout import StagingFiles
from nautile.store.manifest import host
from nautile.tasks.engine.attempt_log import write_attempt_row, write_row

Outputs = dict[str, Artifact]  # label of a step -> what it published
STEPS = ("ingest", "distill", "pretrain", "align", "reason", "self_distill")
PRETRAINING = ("loss", "bits_per_byte", "learning_rate", "gradient_norm", "step_seconds", "validation_loss")
REINFORCING = ("reward", "norm_positive", "norm_negative", "balance_factor", "entropy", "solve_rate", "length")
SYSTEM = ("system/cpu_cores", "system/memory_bytes", "system/store_free_bytes")
# Shares of a run's rows: metrics by stage, samples by stage, and calls of the distillation.
METRICS = {"pretrain": 0.5, "align": 0.12, "reason": 0.15, "self_distill": 0.03}
SAMPLES = {"align": 0.04, "reason": 0.06}
CALLS = 0.1
KINDS = {"ingest": "tokens", "distill": "documents"}
TEXT = "We add the two numbers and check the sum again. " * 12


def fill_store(store: Store, rows: int, runs: int) -> None:
    """Fill an empty store with about `rows` rows of metrics, calls and samples over `runs` runs."""
    store.prepare()
    rng, settings = random.Random(0), load("local").model_dump(mode="json")
    start = datetime.now(UTC) - timedelta(days=runs)
    for number in range(runs):
        own = rows // 2 if number == runs - 1 else rows // 2 // max(1, runs - 1)
        _run(store, rng, own, start + timedelta(days=number), settings)
        Catalog(store).ingest()


def _run(store: Store, rng: random.Random, rows: int, when: datetime, settings: dict[str, Any]) -> None:
    run, outputs = str(uuid.UUID(int=rng.getrandbits(128))), Outputs()
    steps = [
        {"label": label, "stage": label, "key": f"{rng.getrandbits(256):064x}", "after": list(STEPS[:place][-1:])}
        for place, label in enumerate(STEPS)
    ]
    plan = {"id": run, "run": run, "config": "local", "name": f"{when:%b}-{when.day}", "steps": steps, "host": host()}
    plan |= {"settings": settings, "changes": [{"field": "seed", "before": 1, "after": when.day}]}
    for place, step in enumerate(steps):
        start = when + timedelta(minutes=10 * place)
        outputs[step["label"]] = _step(store, rng, run, step, start, rows, outputs)
    end = when + timedelta(minutes=10 * len(steps))
    write_row(store, "plan", plan | {"state": "done", "started": when.isoformat(), "ended": end.isoformat()})


def _step(
    store: Store, rng: random.Random, run: str, step: dict[str, Any], when: datetime, rows: int, outputs: Outputs
) -> Artifact:
    """Write a step's metrics, samples and calls, record its attempt and publish its artifact."""
    execution, stage, key = f"{rng.getrandbits(128):032x}", step["stage"], step["key"]
    emit = EventWriter(store.events / f"{execution}.jsonl", execution, stage=stage)
    names = (*(PRETRAINING if stage == "pretrain" else REINFORCING if stage in METRICS else ()), *SYSTEM)
    steps = range(max(20, int(rows * METRICS.get(stage, 0.0)) // len(names)))
    for name in names:
        emit.many("metric", [{"name": name, "step": at, "value": 8 / math.sqrt(1 + at) + rng.random()} for at in steps])
    emit.many("sample", [_rollout(index, rng) for index in range(int(rows * SAMPLES.get(stage, 0.0)))])
    if stage == "distill":
        call = {"model": "bench", "purpose": "teacher", "attempt": 1, "status": "ok", "cached": False, "tokens_in": 500}
        call |= {"tokens_out": 300, "dollars": 0.001, "finish": "stop", "parameters": {"max_tokens": 160}}
        count = range(int(rows * CALLS))
        emit.many("call", [{**call, "endpoint": f"teacher{i % 3}", "latency_s": rng.random()} for i in count])
    emit.close()
    folder, kind = StagingFiles(store.staging(key)).output(stage), KINDS.get(stage, "checkpoint")
    folder.mkdir(parents=True)
    (folder / "payload.txt").write_text(key)
    inputs = {label: outputs[label] for label in step["after"]}
    artifact = store.publish(
        kind, key, folder, stage=stage, version=1, config={"seed": 0}, inputs=inputs, facts={}, execution=execution,
        run=run, label=step["label"],
    )  # fmt: skip
    row = {"id": f"{rng.getrandbits(128):032x}", "run": run, "config": "local", "stage": stage, "attempt": 1}
    row |= {"label": step["label"], "key": key, "execution": execution, "state": "done", "reused": False}
    row |= {"seconds": 540.0, "peak_bytes": 2**30, "outputs": {kind: artifact.id}, "host": host()}
    end = when + timedelta(minutes=9)
    write_attempt_row(store, row | {"started": when.isoformat(), "ended": end.isoformat()})
    return artifact


def _rollout(index: int, rng: random.Random) -> dict[str, Any]:
    question, correct = f"{index // 8} + {index // 8}?", float(rng.random() < 0.3)
    row = {"set": "rollouts", "index": index, "step": index // 64, "question": question, "prompt": question}
    row |= {"text": f"{TEXT}<|think_end|>\n{index}", "reward": correct, "parts": {"correct": correct}, "length": 100}
    return row | {"advantage": rng.random() - 0.5, "truncated": False, "task": "chain_sum"}


def main() -> None:
    parser = argument_parser(__doc__, rows=1_000_000, runs=40)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    store = Store(arguments.folder.resolve())
    fill_store(store, arguments.rows, arguments.runs)
    start = time.perf_counter()
    Catalog(store).rebuild()
    print(f"the catalog of {store.root}, rebuilt: {time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    main()
