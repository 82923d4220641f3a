"""Evaluation as a stage: a checkpoint in, an `evaluation` out (paper §5): scores, rows, samples to read."""

import os
from collections.abc import Sequence
from pathlib import Path

from configs.model import TokenizerConfig
from configs.schema import EvaluateConfig
from configs.section import ConfigError
from evals.answerers import CheckpointAnswerer
from evals.items import Item
from evals.loading import items_for
from evals.offline import HELD_OUT, held_out
from evals.readings import readings
from evals.runner import evaluate as ask
from evals.scores import Scores, summarise
from evals.tables import table_2, to_html, to_json, to_markdown
from store.durable import write_json
from tasks.job import Job
from tasks.stage import stage


@stage("evaluate", version=1, outputs=("evaluation",), accelerator=True)
def evaluate(job: Job) -> None:
    """Ask the checkpoint every question of the section that has no row yet, then score and publish."""
    if "checkpoint" not in job.inputs:
        raise ConfigError("stage evaluate: it was given no checkpoint; it needs an input named `checkpoint`")
    config = job.part("evaluate", EvaluateConfig)
    items = questions(config, job.seed)
    tokenizer = job.part("tokenizer", TokenizerConfig) if "tokenizer" in job.section else None
    answerer = CheckpointAnswerer(job.inputs["checkpoint"], config, tokenizer)
    out = job.output("evaluation")
    rows = ask(answerer, items, out / "rows.jsonl", job.seed, job.emit)
    scores = summarise(rows, answerer.name, protocol(config, job.seed), job.seed)
    write_json(out / "scores.json", scores)
    write_json(out / "samples.json", readings(rows))
    if config.tables:
        table = table_2({answerer.name: scores})
        write_json(out / "table2.json", to_json(table))
        _write(out / "table2.md", to_markdown(table))
        _write(out / "table2.html", to_html(table))
    _report(job, scores)


def questions(config: EvaluateConfig, seed: int) -> list[Item]:
    """Every item that `config` asks for. Raises `ConfigError` where it names a benchmark twice, or nothing at all."""
    items: dict[str, Sequence[Item]] = {}
    for choice in config.benchmarks:
        for name, found in items_for(choice, seed).items():
            if name in items:
                raise ConfigError(f"evaluate.benchmarks: {name!r} is asked for twice")
            items[name] = found
    if config.held_out is not None:
        items[HELD_OUT] = held_out(config.held_out, seed)
    if not items:
        raise ConfigError("evaluate: neither `benchmarks` nor `held_out` names anything to ask")
    return [item for found in items.values() for item in found]


def protocol(config: EvaluateConfig, seed: int) -> dict[str, object]:
    """How the questions were asked, beside every score."""
    return {
        "shots": 0,
        "template": "chat, thinking allowed",
        "verdict": "strict: one candidate answer, thinking finished (paper §5)",
        "temperature": config.temperature,
        "max_tokens": config.max_tokens,
        "prompt_length": config.prompt_length,
        "seed": seed,
        "sources": {one.name: one.revision or one.path for one in config.benchmarks if one.revision or one.path},
    }


def _write(path: Path, text: str) -> None:
    partial = path.with_suffix(path.suffix + ".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def _report(job: Job, scores: Scores) -> None:
    for name, one in {**scores["benchmarks"], **scores["composites"], "average": scores["average"]}.items():
        for metric in ("accuracy", "accuracy_lenient"):
            if one and one.get(metric) is not None:
                job.emit("metric", name=f"evaluate/{name}/{metric}", step=0, value=one[metric])
    job.describe(
        "evaluation",
        model=scores["model"],
        accuracy={name: one["accuracy"] for name, one in scores["benchmarks"].items()},
        samples=sum(one["items"] for one in scores["benchmarks"].values()),
        left_out=sum(sum(one["left_out"].values()) for one in scores["benchmarks"].values()),
        stand_ins=[f"{one['title']}: {one['stand_in']}" for one in scores["benchmarks"].values() if one["stand_in"]],
    )
