"""A test store for `dashboard.py`: forty runs with a million rows of metrics, calls and samples.

The newest run has half of all rows, because its pages are viewed most: a long pretraining and reinforcement, with
health and system metrics and rollouts. Every page has data, also those of the uses.
"""

import itertools
import json
import math
import random
import uuid
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from configs.load import load
from configs.survey import SimulateConfig
from data.labelled.texts import write_rows
from data.surveys.people import Person
from data.surveys.reading import parse_survey, personas_config
from evals.benchmarks.items import BenchmarkItem
from evals.labelling.classifier import classification_examples, classification_summary
from evals.opinions.comparison import compare
from evals.running.runner import evaluate
from evals.scoring.scores import summarise
from flows.dashboard.training.curves import HEALTH
from store.artifacts import Artifact, Store
from store.catalog import Catalog
from store.events import EventWriter
from store.manifest import host
from tasks.classify import EXAMPLES
from tasks.engine.attempt_log import write_attempt_row, write_row
from tasks.extract import REFUSED
from tests.evals.conftest import Known

Outputs = dict[str, Artifact]  # label of a step -> what it published
TRAINED = ("pretrain", "align", "reason", "self_distill")
STEPS = ("ingest", "distill", *itertools.chain.from_iterable((stage, f"evaluate:{stage}") for stage in TRAINED))
PRETRAINING: tuple[str, ...] = (
    "loss", "bits_per_byte", "learning_rate", "gradient_norm", "update_norm", "skipped_updates",
    "step_seconds", "tokens_per_second", "memory_bytes", "validation_loss", "validation_bits_per_byte",
)  # fmt: skip
REINFORCING = tuple(dict.fromkeys(itertools.chain(*(names for group in HEALTH.values() for names in group.values()))))
SYSTEM = ("system/cpu_cores", "system/memory_bytes", "system/store_free_bytes")
# Shares of a run's rows: metrics by stage, samples by stage, and calls of the distillation.
METRICS = {"pretrain": 0.5, "align": 0.12, "reason": 0.15, "self_distill": 0.03}
SAMPLES = {"pretrain": 0.005, "distill": 0.005, "align": 0.04, "reason": 0.05}
CALLS = 0.1
KINDS = {"ingest": "tokens", "distill": "documents", "evaluate": "evaluation"}
TEXT = "We add the two numbers and check the sum again. " * 12


def fill_store(store: Store, rows: int, runs: int) -> None:
    """Fill an empty store with about `rows` rows of metrics, calls and samples over `runs` runs."""
    store.prepare()
    rng = random.Random(0)
    settings = load("local").model_dump(mode="json")
    scores = _evaluations(store.root / "scores", rng)
    start = datetime.now(UTC) - timedelta(days=runs)
    for number in range(runs):
        own = rows // 2 if number == runs - 1 else rows // 2 // (runs - 1)
        _run(store, rng, own, start + timedelta(days=number), settings, scores)
        Catalog(store).ingest()
    _uses(store, rng)
    Catalog(store).ingest()


def _run(
    store: Store, rng: random.Random, rows: int, when: datetime, settings: dict[str, Any], scores: list[Path]
) -> None:
    run, outputs = str(uuid.UUID(int=rng.getrandbits(128))), dict[str, Artifact]()
    dependencies: dict[str, list[str]] = {label: [] for label in STEPS}
    steps: list[dict[str, Any]] = []
    for place, label in enumerate(STEPS):
        stage, _, of = label.partition(":")
        earlier_steps = [other for other in STEPS[:place] if not other.startswith("evaluate")]
        dependencies[label] = [of] if of else earlier_steps[-1:]
        key = f"{rng.getrandbits(256):064x}"
        steps.append({"label": label, "stage": stage, "key": key, "after": dependencies[label]})
    plan: dict[str, Any] = {
        "id": run,
        "run": run,
        "config": "local",
        "name": f"{when:%b}-{when.day}",
        "steps": steps,
        "host": host(),
    }
    plan |= {"settings": settings, "changes": [{"field": "seed", "before": 1, "after": when.day}]}
    write_row(store, "plan", plan | {"state": "running", "started": when.isoformat()})
    for place, step in enumerate(steps):
        start = when + timedelta(minutes=10 * place)
        outputs[step["label"]] = _step(store, rng, run, step, start, rows, outputs, scores)
    end = when + timedelta(minutes=10 * len(steps))
    write_row(store, "plan", plan | {"state": "done", "started": when.isoformat(), "ended": end.isoformat()})


def _step(
    store: Store,
    rng: random.Random,
    run: str,
    step: dict[str, Any],
    when: datetime,
    rows: int,
    outputs: Outputs,
    scores: list[Path],
) -> Artifact:
    """Write a step's metrics, samples and calls, record its attempt and publish its artifact."""
    execution, stage = f"{rng.getrandbits(128):032x}", step["stage"]
    emit = EventWriter(store.root / "events" / f"{execution}.jsonl", execution, stage=stage)
    _metrics(emit, rng, stage, int(rows * METRICS.get(stage, 0.0)))
    _samples(emit, rng, stage, int(rows * SAMPLES.get(stage, 0.0)))
    folder = store.staging(step["key"]) / "output" / stage
    folder.mkdir(parents=True)
    facts: dict[str, Any] = {}
    if stage == "distill":
        _calls(emit, rng, int(rows * CALLS))
        facts = {"teachers": {"teacher": {"asked": 100, "kept": 80}}, "rejected": {"ungrounded": 15, "truncated": 5}}
    # One of the two evaluations of this stage, copied with its samples and scores.
    if stage == "evaluate":
        chosen = scores[TRAINED.index(step["label"].partition(":")[2]) + rng.choice((0, len(TRAINED)))]
        for name in ("scores.json", "rows.jsonl"):
            (folder / name).write_bytes((chosen / name).read_bytes())
        answers = (json.loads(line) for line in (chosen / "rows.jsonl").read_text().splitlines())
        emit.many("sample", [{"set": row["benchmark"], "index": index, **row} for index, row in enumerate(answers)])
        measured = json.loads((chosen / "scores.json").read_text())["benchmarks"]
        facts = {"accuracy": {name: score["accuracy"] for name, score in measured.items()}}
    emit.close()
    (folder / "payload.txt").write_text(step["key"])
    # A log of 2,000 lines, for the page of logs.
    log = store.root / "logs" / f"{stage}-{execution}.txt"
    log.parent.mkdir(exist_ok=True)
    log.write_text("".join(f"{when:%H:%M:%S} INFO {stage}: step {line}, {TEXT}\n" for line in range(2000)))
    kind = KINDS.get(stage, "checkpoint")
    artifact = store.publish(
        kind,
        step["key"],
        folder,
        stage=stage,
        version=1,
        config={"seed": 0},
        inputs={label: outputs[label] for label in step["after"]},
        facts=facts,
        execution=execution,
        run=run,
        label=step["label"],
    )
    # The row of the attempt in the catalog.
    row = {"id": f"{rng.getrandbits(128):032x}", "run": run, "config": "local", "stage": stage, "attempt": 1}
    row |= {"label": step["label"], "key": step["key"], "execution": execution, "state": "done", "reused": False}
    row |= {"seconds": 540.0, "peak_bytes": 2**30, "outputs": {kind: artifact.id}, "host": host()}
    end = when + timedelta(minutes=9)
    write_attempt_row(store, row | {"started": when.isoformat(), "ended": end.isoformat()})
    return artifact


def _metrics(emit: EventWriter, rng: random.Random, stage: str, rows: int) -> None:
    names = (*(PRETRAINING if stage == "pretrain" else REINFORCING if rows else ()), *SYSTEM)
    steps = max(20, rows // len(names))
    for name in names:
        emit.many(
            "metric",
            [{"name": name, "step": step, "value": 8 / math.sqrt(1 + step) + rng.random()} for step in range(steps)],
        )


def _samples(emit: EventWriter, rng: random.Random, stage: str, rows: int) -> None:
    sampled: list[dict[str, Any]] = []
    for index in range(rows):
        question = f"{index // 8} + {index // 8}?"
        row = {"index": index, "question": question, "prompt": question, "text": f"{TEXT}<|think_end|>\n{index}"}
        if stage == "pretrain":
            # Sixty-four prompts sampled every two hundred steps, as in a run.
            at = 200 * (1 + index // 64)
            row |= {"set": f"pretrain-{at}", "step": at, "prompt": f"{index % 64} + 1?", "index": index % 64}
        elif stage == "distill":
            row |= {
                "set": "documents",
                "query": question,
                "reasoning": TEXT,
                "answer": str(index),
                "teacher": "teacher",
            }
        else:
            correct = float(rng.random() < 0.3)
            row |= {"set": "rollouts", "step": index // 64, "reward": correct, "parts": {"correct": correct}}
            row |= {"advantage": rng.random() - 0.5, "length": 100, "truncated": False, "task": "chain_sum"}
        sampled.append(row)
    emit.many("sample", sampled)


def _calls(emit: EventWriter, rng: random.Random, rows: int) -> None:
    call = {"model": "bench", "purpose": "teacher", "attempt": 1, "status": "ok", "parameters": {"max_tokens": 160}}
    call |= {"cached": False, "tokens_in": 500, "tokens_out": 300, "dollars": 0.001, "finish": "stop"}
    emit.many("call", [{**call, "endpoint": f"teacher{i % 3}", "latency_s": rng.random()} for i in range(rows)])


def _evaluations(folder: Path, rng: random.Random) -> list[Path]:
    """Folders with the scores and rows of two evaluations after each stage, of 400 problems each."""
    items = [
        BenchmarkItem("held_out", n, f"sum/{n}", f"{n} + 1?", "number", str(n + 1), category="sum") for n in range(400)
    ]
    folders = []
    for number, stage in enumerate(TRAINED * 2):
        # Each stage solves ten points more than the one before, and the second evaluation two more: charts with a
        # slope, and pairs that differ.
        skill = 0.1 * (1 + TRAINED.index(stage)) + 0.02 * (number // len(TRAINED))
        right = {item.prompt for item in items if rng.random() < skill}
        model = Known(items, lambda item, right=right: item.expected if item.prompt in right else "0")
        own = folder / str(number)
        rows = evaluate(model, items, own / "rows.jsonl")
        (own / "scores.json").write_text(json.dumps(summarise(rows, stage, {"shots": 0})))
        folders.append(own)
    return folders


def _uses(store: Store, rng: random.Random) -> None:
    """A classification, an extraction, a simulated survey and a tuning, for the pages that show them."""

    def publish(kind: str, stage: str, facts: dict[str, Any], files: dict[str, list[dict[str, Any]] | Any]) -> None:
        key = f"{rng.getrandbits(256):064x}"
        folder = store.staging(key) / kind
        folder.mkdir(parents=True)
        for name, content in files.items():
            if isinstance(content, pa.Table):
                pq.write_table(content, folder / name)
            elif name.endswith(".json"):
                (folder / name).write_text(json.dumps(content))
            else:
                write_rows(folder / name, content)
        store.publish(kind, key, folder, stage=stage, version=1, config={}, inputs={}, facts=facts, execution=key[:32])

    # A classification with an abstention below a probability of one half.
    labels = [f"label {number}" for number in range(8)]
    rows: list[dict[str, Any]] = []
    for number in range(2000):
        share, label = rng.uniform(0.3, 1.0), labels[number % len(labels)]
        row = {"number": number + 1, "label": label if share > 0.5 else None, "probability": share, "reason": None}
        rows.append(row | {"abstained": share <= 0.5, "likeliest": label})
    facts = {**classification_summary(rows, labels), "labels": labels, "zero_shot": True}
    publish("labelled", "classify", facts, {EXAMPLES: classification_examples(rows, [TEXT] * len(rows))})
    refused = [
        {"number": n, "reason": "span", "detail": "a", "text": TEXT, "reply": "{}", "tokens": 9} for n in range(500)
    ]
    facts = {"rows": 2000, "extracted": 1500, "spans": 3000, "refused": {"span": len(refused)}}
    publish("extracted", "extract", facts, {REFUSED: refused})
    publish("opinions", "simulate", {}, {"summary.json": _survey()})
    report, wrong = _tuning(labels[:4], rng)
    publish("tuning", "tune", {}, {"tuning.json": report, "rows.parquet": wrong})


def _survey() -> dict[str, Any]:
    question = {"name": "more", "text": "More or less?", "options": ["less", "same", "more"], "ordered": True}
    question |= {"humans": [0.2, 0.3, 0.5], "respondents": 500, "groups": {"side": {"left": [0.1, 0.3, 0.6]}}}
    survey = parse_survey({"name": "p", "title": "Public", "persona": "{side}", "questions": [question]}, "bench")
    people = [Person(str(i), {"side": ("left", "right")[i % 2]}) for i in range(200)]
    config = SimulateConfig(personas=personas_config("people.csv"), by=("side",), draws=50)
    summary = compare(survey, config, people, [np.random.default_rng(0).dirichlet([2, 2, 2], len(people))], None)
    return summary | {"title": "Public", "model": "bench", "personas": 200, "personas_source": "bench", "left_out": 0}


def _tuning(labels: list[str], rng: random.Random) -> tuple[dict[str, Any], pa.Table]:
    def arm(name: str, shots: int) -> dict[str, Any]:
        value = 0.5 + 0.1 * rng.random()
        part = {"value": value, "low": value - 0.1, "high": value + 0.1}
        figures = {"accuracy": part, "macro_f1": part, "ece": 0.1, "ece_uncalibrated": 0.2, "coverage": 0.8}
        return {"arm": name, "shots": shots, **figures, "accuracy_covered": None, "rows": 400, "seeds": 2}

    report = {
        "form": "label",
        "method": "head",
        "labels": labels,
        "notes": [],
        "rows": {"train": 800, "validation": 200, "test": 400},
        "data": {"duplicates": 1, "contradictory": 2, "contradictory_texts": 1, "leaked": {"test": 3}},
        "arms": [arm(name, shots) for name in ("head", "majority") for shots in (0, 8, 32, 128)],
        "chosen": {"shots": 0, "seed": 0, "temperature": 1.0, "threshold": 0.5, "validation_loss": 0.6},
        "confusion": [[100 if a == b else 10 for b in labels] for a in labels],
        "leads": [],
        "reliability": [{"low": 0.1 * n, "high": 0.1 * n + 0.1, "count": 40, "confidence": 0.1 * n, "accuracy": 0.1 * n}
                        for n in range(10)],
    }  # fmt: skip
    wrong = {"text": [TEXT] * 400, "label": labels * 100, "given": labels[::-1] * 100}
    return report, pa.table(wrong | {"probability": [rng.random() for _ in range(400)]})
