"""A large store, to try the dashboard and the read commands on: runs with metrics, samples, calls and evaluations.

    python bench/operation/large_store.py FOLDER [--runs 40] [--rows 12500] [--newest 500000]

Each run has about `rows` rows. The newest has `newest`, because its pages are viewed most: a long pretraining and
reinforcement, with rollouts and a distillation's calls. `commands.py` measures the commands and the rebuild over it.
"""

import math
import random
import sys
import uuid
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.measure import argument_parser
from nautile.configs.load import load
from nautile.store.artifacts import Artifact, Store
from nautile.store.events import EventWriter
from nautile.store.layout import StagingFiles
from nautile.store.manifest import host
from nautile.tasks.engine.attempt_log import write_attempt_row, write_row

Outputs = dict[str, Artifact]  # label of a step -> what it published
TRAINED = ("pretrain", "align", "reason", "self_distill")
STEPS = ("ingest", "distill", *(label for stage in TRAINED for label in (stage, f"evaluate:{stage}")), "report")
SEEDS = 5
REPORTED = 10  # one run of so many publishes a report; the newest does
PRETRAINING = ("loss", "bits_per_byte", "learning_rate", "gradient_norm", "step_seconds", "validation_loss")
REINFORCING = ("reward", "norm_positive", "norm_negative", "balance_factor", "entropy", "solve_rate", "length")
SYSTEM = ("system/cpu_cores", "system/memory_bytes", "system/store_free_bytes")
# Shares of a run's rows: metrics by stage, samples by stage, and calls of the distillation.
METRICS = {"pretrain": 0.38, "align": 0.09, "reason": 0.11, "self_distill": 0.02}
SAMPLES = {"align": 0.14, "reason": 0.2}
CALLS = 0.06
KINDS = {"ingest": "tokens", "distill": "documents", "evaluate": "evaluation", "report": "report"}
BENCHMARKS = ("gsm8k", "mmlu")
QUESTIONS = 200
TEXT = "We add the two numbers and check the sum again. " * 12


def fill_store(store: Store, runs: int, rows: int, newest: int) -> None:
    """Fill an empty store with `runs` runs of about `rows` rows of metrics, calls and samples, the last of `newest`."""
    store.prepare()
    rng, settings = random.Random(0), load("local").model_dump(mode="json")
    start = datetime.now(UTC) - timedelta(days=runs)
    for number in range(1, runs + 1):
        labels = STEPS if number % REPORTED == 0 or number == runs else STEPS[:-1]
        # Five seeds of each recipe, as a study has them.
        own = settings | {"seed": number % SEEDS, "reason": settings["reason"] | {"negative_weight": number // SEEDS}}
        _run(store, rng, labels, newest if number == runs else rows, start + timedelta(days=number - 1), own)


def _run(
    store: Store, rng: random.Random, labels: tuple[str, ...], rows: int, when: datetime, settings: dict[str, Any]
) -> None:
    run, outputs = str(uuid.UUID(int=rng.getrandbits(128))), Outputs()
    steps = [
        {"label": label, "stage": label.partition(":")[0], "key": f"{rng.getrandbits(256):064x}", "after": after}
        for label in labels
        for after in [[label.partition(":")[2]] if ":" in label else _before(labels, label)]
    ]
    plan = {"id": run, "run": run, "config": "local", "name": f"{when:%b}-{when.day}", "steps": steps, "host": host()}
    plan |= {"settings": settings, "changes": [{"field": "seed", "before": 1, "after": settings["seed"]}]}
    for place, step in enumerate(steps):
        start = when + timedelta(minutes=10 * place)
        outputs[step["label"]] = _step(store, rng, run, step, start, rows, outputs)
    end = when + timedelta(minutes=10 * len(steps))
    write_row(store, "plan", plan | {"state": "done", "started": when.isoformat(), "ended": end.isoformat()})


def _before(labels: tuple[str, ...], label: str) -> list[str]:
    """The step that makes the input of a step that trains: the one before it, evaluations left out."""
    return [own for own in labels[: labels.index(label)] if ":" not in own][-1:]


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
    if stage == "evaluate":
        scores = [{"name": f"evaluate/{name}/accuracy", "step": 0, "value": rng.random()} for name in BENCHMARKS]
        emit.many("metric", scores)
    emit.close()
    kind = KINDS.get(stage, "checkpoint")
    folder = StagingFiles(store.staging(key)).output(stage)
    folder.mkdir(parents=True)
    (folder / "payload.txt").write_text(key * 1000)
    if stage == "report":
        (folder / "report.md").write_text("# Report\n\n" + "| a | b |\n| --- | --- |\n" + "| 1 | 2 |\n" * 60)
        (folder / "report.json").write_text('{"about": {"config": "local"}}')
        (folder / "report.html").write_text("<p>Report</p>")
    inputs = {label: outputs[label] for label in step["after"]}
    artifact = store.publish(
        kind, key, folder, stage=stage, version=1, config={"seed": 0}, inputs=inputs, execution=execution, run=run,
        facts={"samples": QUESTIONS} if stage == "evaluate" else {}, label=step["label"],
    )  # fmt: skip
    store.discard(store.staging_files(key).folder)
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
    parser = argument_parser(__doc__, runs=40, rows=12_500, newest=500_000)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    fill_store(Store(arguments.folder.resolve()), arguments.runs, arguments.rows, arguments.newest)


if __name__ == "__main__":
    main()
