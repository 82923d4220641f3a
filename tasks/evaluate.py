"""Evaluation as a stage: a checkpoint or an endpoint in, an `evaluation` out (paper §5): scores, rows, tables."""

from collections.abc import Sequence
from pathlib import Path
from statistics import quantiles

from common.errors import ConfigError
from common.files import write_json, write_text
from configs.endpoint import EndpointConfig
from configs.evaluation import EvaluateConfig, ModelUnderTest
from configs.model import TokenizerConfig
from data.endpoints.pool import EndpointPool
from evals.benchmarks.catalogue import BENCHMARKS, COMPOSITES
from evals.benchmarks.items import BenchmarkItem
from evals.benchmarks.loading import items_for
from evals.benchmarks.stand_ins import HELD_OUT, held_out
from evals.running.answerers import Answerer, CheckpointAnswerer, EndpointAnswerer
from evals.running.likelihood import CheckpointScorer, with_options
from evals.running.rows import SampleRow, read_rows, sample_readings
from evals.running.runner import evaluate as ask
from evals.running.runner import score_options
from evals.scoring.scores import Scores, summarise
from evals.tables.breakdown import breakdown
from evals.tables.results import table_2, to_html, to_json, to_markdown
from tasks.engine.job import Job
from tasks.engine.stage import stage
from tasks.reporting.render import write_table

ROWS, WEIGHED = "rows.jsonl", "likelihood.jsonl"


@stage("evaluate", version=2, outputs=("evaluation",), accelerator=True)
def evaluate(job: Job) -> None:
    """Ask the model every question of the section that has no row yet, then score and publish."""
    config = job.part("evaluate", EvaluateConfig)
    items = questions(config, job.seed)
    out = job.output("evaluation")
    if "model_under_test" in job.section:
        name, column, rows, weighed = _ask_endpoint(job, config, items, out)
    elif "checkpoint" in job.inputs:
        name, column, rows, weighed = _ask_checkpoint(job, config, items, out)
    else:
        raise ConfigError("stage evaluate: it was given no checkpoint; it needs an input named `checkpoint`")
    scores = summarise(rows, name, protocol(config, job.seed, bool(weighed)), job.seed, column, weighed)
    write_json(out / "scores.json", scores)
    write_json(out / "samples.json", sample_readings(rows))
    tables = breakdown(scores)
    write_json(out / "breakdown.json", [to_json(table) for table in tables])
    write_text(out / "breakdown.md", "\n".join(to_markdown(table) for table in tables))
    write_text(out / "breakdown.html", "\n".join(to_html(table) for table in tables))
    if config.tables:
        write_table(out, "table2", table_2({name: scores}))
    _report(job, scores, out)


def questions(config: EvaluateConfig, seed: int) -> list[BenchmarkItem]:
    """Every item that `config` asks for. Raises `ConfigError` where it names a benchmark twice, or nothing at all."""
    items: dict[str, Sequence[BenchmarkItem]] = {}
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


def protocol(config: EvaluateConfig, seed: int, weighed: bool) -> dict[str, object]:
    """How the questions were asked, beside every score."""
    return {
        "shots": 0,
        "template": "chat, thinking allowed",
        "verdict": "strict: one candidate answer, thinking finished (paper §5)",
        "likelihood": "each option after the bare question, per byte; no letters, no template" if weighed else None,
        "temperature": config.temperature,
        "max_tokens": config.max_tokens,
        "prompt_length": config.prompt_length,
        "seed": seed,
        "sources": {
            part: choice.path or choice.revision or BENCHMARKS[part].pinned
            for choice in config.benchmarks
            for part in COMPOSITES.get(choice.name, (choice.name,))
            if part in BENCHMARKS
        },
    }


def _ask_checkpoint(
    job: Job, config: EvaluateConfig, items: Sequence[BenchmarkItem], out: Path
) -> tuple[str, str, list[SampleRow], list[SampleRow]]:
    tokenizer = job.part("tokenizer", TokenizerConfig) if "tokenizer" in job.section else None
    folder = job.inputs["checkpoint"]
    answerer: Answerer = CheckpointAnswerer(folder, config, tokenizer)
    rows = ask(answerer, items, out / ROWS, job.seed, job.emit) if "generate" in config.ways else []
    choices = with_options(items) if "likelihood" in config.ways else []
    if not rows and not choices:
        raise ConfigError("evaluate.ways: `likelihood` alone is asked for, and no benchmark here has options to weigh")
    weighed = (
        score_options(CheckpointScorer(folder, config, tokenizer), choices, out / WEIGHED, job.emit) if choices else []
    )
    return answerer.name, "nautile_370m", rows, weighed


def _ask_endpoint(
    job: Job, config: EvaluateConfig, items: Sequence[BenchmarkItem], out: Path
) -> tuple[str, str, list[SampleRow], list[SampleRow]]:
    """Endpoints are asked by generation alone: few of them tell how likely a given text is."""
    model = job.part("model_under_test", ModelUnderTest)
    if "generate" not in config.ways:
        raise ConfigError(f"evaluate.ways: endpoint {model.endpoint!r} can be asked by `generate` alone")
    endpoints = {name: EndpointConfig.model_validate(one) for name, one in job.section["endpoints"].items()}
    with EndpointPool(endpoints, job.scratch / "replies.jsonl", job.emit, config.budget_dollars) as pool:
        pool.check()
        answerer = EndpointAnswerer(pool, model.endpoint, config)
        rows = ask(answerer, items, out / ROWS, job.seed, job.emit)
    return answerer.name, model.column, rows, []


def _report(job: Job, scores: Scores, out: Path) -> None:
    for name, one in {**scores["benchmarks"], **scores["composites"], "average": scores["average"]}.items():
        for metric in ("accuracy", "accuracy_lenient"):
            if one and one.get(metric) is not None:
                job.emit("metric", name=f"evaluate/{name}/{metric}", step=0, value=one[metric])
    for name, one in scores.get("likelihood", {}).items():
        if one["accuracy"] is not None:
            job.emit("metric", name=f"evaluate/{name}/likelihood", step=0, value=one["accuracy"])
    job.describe(
        "evaluation",
        model=scores["model"],
        accuracy={name: one["accuracy"] for name, one in scores["benchmarks"].items()},
        samples=sum(one["items"] for one in scores["benchmarks"].values()),
        left_out=sum(sum(one["left_out"].values()) for one in scores["benchmarks"].values()),
        latency_s=_latencies(out / f"latency.{ROWS}"),
        stand_ins=[f"{one['title']}: {one['stand_in']}" for one in scores["benchmarks"].values() if one["stand_in"]],
    )


def _latencies(path: Path) -> dict[str, float]:
    """Median and 95th percentile of the seconds that samples took (of their batch, for a checkpoint)."""
    told = [row["latency_s"] for row in read_rows(path)] if path.exists() else []
    if len(told) < 2:
        return {}
    cuts = quantiles(told, n=20, method="inclusive")
    return {"p50": round(cuts[9], 4), "p95": round(cuts[18], 4)}
