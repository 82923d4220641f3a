"""Stand-ins for all stages: they write what the real ones write, a few lines each, at once.

The environment variable NAUTILE_TOY_FAULT makes one of them misbehave: `reason:crash`, `align:config`,
`distill:retry`, or `pretrain:wait=FOLDER` (writes FOLDER/reached, then waits to be ended, or for FOLDER/go).
NAUTILE_TOY_STEP_S is how long each step of those that learn takes.
"""

import json
import os
import time
from itertools import count
from pathlib import Path
from typing import Any

from nautile.common.errors import ConfigError, Retryable
from nautile.tasks.engine.job import Job
from nautile.tasks.engine.stage import Stage, stage

TOY = Path(__file__).with_name("toy.toml")
HOSTILE = "<script>alert(1)</script> \x1b[31mred ``` **bold** [/bold]"


def toy_stage(name: str) -> Stage:
    """The stand-in of that name."""
    return globals()[name]


def _fault(job: Job) -> None:
    name, _, fault = os.environ.get("NAUTILE_TOY_FAULT", "").partition(":")
    kind, _, folder = fault.partition("=")
    if name != job.stage:
        return
    if kind == "config":
        raise ConfigError(f"{name}.steps: three is a crowd")
    if kind == "retry":
        raise Retryable("http://127.0.0.1:9 does not answer")
    if kind == "crash":
        raise ZeroDivisionError("by zero")
    if kind == "wait":
        (Path(folder) / "reached").write_text(str(os.getpid()))
        for tick in count():
            if (Path(folder) / "go").exists():
                return
            if tick % 10 == 0:
                job.emit("progress", done=tick // 10, total=1000, unit="ticks", note="waiting")
            time.sleep(0.05)


def _write(folder: Path, name: str, rows: list[dict[str, Any]]) -> None:
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _learn(job: Job, metrics: dict[str, float], steps: int = 20) -> None:
    for step in range(1, steps + 1):
        for name, start in metrics.items():
            job.emit("metric", name=name, step=step, value=start / step)
        job.emit("progress", done=step, total=steps, unit="steps", note=f"loss {8 / step:.2f}")
        time.sleep(float(os.environ.get("NAUTILE_TOY_STEP_S", "0")))


def _reinforce(job: Job, kind: str, metrics: dict[str, float]) -> None:
    _learn(job, metrics)
    for index in range(8):
        row = {"step": 1 + index // 4, "question": f"{index} + 1?", "expected": str(index + 1), "text": HOSTILE}
        job.emit("sample", set="rollouts", index=index, **row, reward=index % 2, advantage=index % 2 - 0.5)
    row = {"question": "1 + 1?", "expected": "2", "text": HOSTILE, "advantage": 0.5}
    _write(job.output(kind), f"{kind}.jsonl", [row])
    (job.output("checkpoint") / "weights.txt").write_text(job.key)
    job.describe("checkpoint", steps=20, rounds=[{"traces": 3}, {"traces": 5}], **_judge(job.stage))


def _judge(stage_name: str) -> dict[str, Any]:
    if stage_name != "align":
        return {}
    return {"judge": {"model": "toy", "stand_in": True}, "calibration": {"auc": {"overall": 0.57}}}


@stage("held_out", version=1, outputs=("questions",))
def held_out(job: Job) -> None:
    _fault(job)
    _write(job.output("questions"), "questions.jsonl", [{"benchmark": "arc", "example": "7", "text": "why?"}])
    job.describe("questions", questions=1, benchmarks={"arc": 1}, too_short=1, boilerplate=0)


@stage("ingest", version=1, outputs=("tokens", "exemplars", "signatures"), optional=("exemplars", "signatures"))
def ingest(job: Job) -> None:
    _fault(job)
    (job.output("signatures") / "hashes.u8").write_bytes(bytes(8))
    source = job.section["ingest"]["source"]
    (job.output("tokens") / "shard.txt").write_text(source["name"])
    hit = {"benchmark": "arc", "example": "7", "share": 0.5, "words": "why is the sea", "begins": HOSTILE}
    _write(job.output("tokens"), "contamination.jsonl", [hit])
    job.describe("tokens", contaminated={"arc": 2}, rejected={"contaminated": 1, "duplicate": 3})
    job.describe("tokens", source=source["name"], tokens=1000, stand_in=f"{source['name']} stands in for the web")
    if source["exemplars"]:
        _write(job.output("exemplars"), "exemplars.jsonl", [{"query": "why?"}])


@stage("index", version=1, outputs=("retrieval",))
def index(job: Job) -> None:
    _fault(job)
    rows = (job.inputs["exemplars"] / "exemplars.jsonl").read_text().splitlines()
    (job.output("retrieval") / "retrieval.json").write_text(json.dumps({"count": len(rows)}))
    job.describe("retrieval", count=len(rows), index_kind="exact")


@stage("distill", version=1, outputs=("documents", "tokens"))
def distill(job: Job) -> None:
    _fault(job)
    for index in range(3):
        by_name = {"tokens_in": 10, "tokens_out": 20, "dollars": 0.01, "latency_s": 0.5, "cached": index == 2}
        job.emit("call", endpoint="local", model="toy", purpose="teacher", attempt=1, status="ok", **by_name)
    kept = {"query": "why?", "reasoning": HOSTILE, "answer": "because", "rejected": None}
    _write(job.output("documents"), "documents.jsonl", [kept])
    (job.output("tokens") / "shard.txt").write_text("distilled")
    teacher = {"model": "toy", "up_to": 1.0, "asked": 4, "kept": 1, "tokens_in": 30, "tokens_out": 60}
    refused = {"query": "how?", "reasoning": None, "answer": None, "rejected": "too_short"}
    job.describe("documents", prompts=4, documents=1, rejected={"too_short": 2, "copied": 1}, stand_in=None)
    job.describe("documents", teachers={"local": teacher}, samples={"kept": [kept], "too_short": [refused]})


@stage("pretrain", version=1, outputs=("checkpoint",))
def pretrain(job: Job) -> None:
    _fault(job)
    _learn(job, {"loss": 8.0, "validation_bits_per_byte": 3.0})
    (job.output("checkpoint") / "weights.txt").write_text(job.key)
    job.describe("checkpoint", steps=20)


@stage("supervise", version=1, outputs=("checkpoint",))
def supervise(job: Job) -> None:
    _fault(job)
    _learn(job, {"loss": 2.0})
    (job.output("checkpoint") / "weights.txt").write_text(job.key)
    job.describe("checkpoint", rows=20, updates=20)


@stage("align", version=1, outputs=("checkpoint", "rollouts"))
def align(job: Job) -> None:
    _fault(job)
    _reinforce(job, "rollouts", {"reward": 0.5, "kl": 0.1})


@stage("reason", version=1, outputs=("checkpoint", "rollouts"))
def reason(job: Job) -> None:
    _fault(job)
    _reinforce(job, "rollouts", {"reward": 0.5, "kl": 0.1, "norm_positive": 1.0, "norm_negative": 2.0})


@stage("self_distill", version=1, outputs=("traces", "checkpoint"))
def self_distill(job: Job) -> None:
    _fault(job)
    _reinforce(job, "traces", {"loss": 2.0, "solve_rate": 0.5})


@stage("evaluate", version=1, outputs=("evaluation",))
def evaluate(job: Job) -> None:
    _fault(job)
    right = 6 + len((job.inputs["checkpoint"] / "weights.txt").read_text()) % 3
    n = 20
    score = {
        "title": "Held-out problems",
        "stand_in": "reasoning-gym",
        "stands_for": None,
        "n": n,
        "rows": n,
        "correct": right,
    }
    score |= {"accuracy": right / n, "interval": [0.2, 0.5], "accuracy_lenient": right / n, "items": n, "differs": []}
    score |= {"interval_lenient": [0.2, 0.5], "no_answer": 1, "many_answers": 2, "unfinished": 0, "truncated": 0}
    score |= {"left_out": {}, "categories": {}, "instructions": None}
    scores = {"model": "toy", "benchmarks": {"held_out": score}, "composites": {}, "average": None}
    (job.output("evaluation") / "scores.json").write_text(json.dumps(scores))
    asked = {"benchmark": "held_out", "prompt": "1 + 1?", "output": HOSTILE, "expected": "2", "problem": None}
    samples = [{**asked, "strict": strict} for strict in (True, False)]
    (job.output("evaluation") / "samples.json").write_text(json.dumps(samples))
    asked |= {"reasoning": HOSTILE, "answer": HOSTILE, "left_out": None}
    # Other checkpoints solve other problems, so that verdicts change between stages.
    first = int((job.inputs["checkpoint"] / "weights.txt").read_text()[:8], 16) % n
    rows = [
        {**asked, "index": i, "id": str(i), "prompt": f"{i} + 1? {HOSTILE}", "prompt_digest": str(i)}
        | dict.fromkeys(("strict", "lenient"), (i - first) % n < right)
        for i in range(n)
    ]
    _write(job.output("evaluation"), "rows.jsonl", rows)
    job.emit("metric", name="evaluate/held_out/accuracy", step=0, value=right / n)
    job.describe("evaluation", accuracy={"held_out": right / n})
