"""The `evaluate` stage (paper §5): from a checkpoint or an endpoint to an `evaluation`: scores, rows, tables.

And the `held_out` stage before all training: the questions that training text is screened for.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from itertools import chain
from pathlib import Path
from statistics import quantiles
from typing import Any

from nautile.common.errors import ConfigError
from nautile.common.files import write_json, write_text
from nautile.configs.endpoint import EndpointConfig
from nautile.configs.evaluation import EvaluateConfig, HeldOutConfig, ModelUnderTest
from nautile.configs.model import TokenizerConfig
from nautile.data.endpoints.pool import EndpointPool
from nautile.data.screening.contamination import (
    COMMON,
    NGRAM,
    SHORTEST,
    ContaminationIndex,
    read_questions,
    write_questions,
)
from nautile.data.tokens.losses import LOST, lost_records
from nautile.evals.benchmarks.items import BenchmarkItem
from nautile.evals.benchmarks.loading import check_benchmark, count_of, items_for, questions
from nautile.evals.benchmarks.registry import BENCHMARKS, composites, parts_of, title_of
from nautile.evals.benchmarks.stand_ins import HELD_OUT
from nautile.evals.benchmarks.stand_ins import held_out as stand_in_items
from nautile.evals.running.answerers import Answerer, CheckpointAnswerer, EndpointAnswerer
from nautile.evals.running.rows import WAYS, SampleRow, read_rows, sample_readings
from nautile.evals.running.runner import CheckpointScorer, score_options, with_options, with_samples
from nautile.evals.running.runner import evaluate as ask
from nautile.evals.scoring.scores import Scores, summarise
from nautile.evals.tables.results import breakdown, table_2, to_html, to_json, to_markdown
from nautile.store.artifacts import Artifact
from nautile.store.layout import StagingFiles
from nautile.store.mirror import open_store
from nautile.tasks.engine.job import Job
from nautile.tasks.engine.stage import Calls, budget_limit, stage
from nautile.tasks.rehearsal import TOKENS, few_problems
from nautile.tasks.reporting.render import write_table

ROWS, LIKELIHOOD_ROWS, SAMPLED_ROWS = WAYS.values()
REHEARSED_ITEMS, REHEARSED_BATCH = 2, 8  # items of each benchmark
SHOWN_BAD_ROWS = 20  # in the manifest; the log has all of them


def _check(section: str, part: EvaluateConfig | HeldOutConfig) -> None:
    composites()  # scoring reads every entry of the registry: a plug-in's that is broken shows before anything runs
    for choice in part.benchmarks:
        check_benchmark(choice, f"{section}.benchmarks")


def _as_it_is(settings: Mapping[str, Any]) -> dict[str, Any]:
    """All questions: some ten files of a few MB each, and what is not read here cannot be held out."""
    return {}


@stage("held_out", version=1, outputs=("questions",), check=partial(_check, "held_out"), rehearsal=_as_it_is)
def held_out(job: Job) -> None:
    """Publish the questions of every benchmark, and count those too short or too common to search for in texts."""
    part = job.part("held_out", HeldOutConfig)
    bad_rows: dict[str, list[str]] = {}
    held_out_questions = list(questions(part.benchmarks, job.seed("evaluation"), bad_rows))
    write_questions(job.output("questions"), held_out_questions)
    screen = ContaminationIndex(held_out_questions)
    messages = list(chain.from_iterable(bad_rows.values()))
    count = len(held_out_questions)
    lost = lost_records(messages, count + len(messages))
    if lost:  # a question that is not known cannot be kept out of the training data
        job.emit("progress", done=count, total=count, unit="questions", note=lost)
    counts = dict(sorted(Counter(question.benchmark for question in held_out_questions).items()))
    job.describe(
        "questions",
        **({LOST: lost} if lost else {}),
        questions=count,
        benchmarks=counts,
        too_short=screen.too_short,
        boilerplate=screen.boilerplate,
        rule={"words": NGRAM, "shortest": SHORTEST, "boilerplate_above": COMMON},
        stand_ins=[title_of(name) for name in counts if BENCHMARKS[name].stand_in],
    )
    for name, value in {"questions": count, "too_short": screen.too_short}.items():
        job.emit("metric", name=name, step=0, value=value)


def screened_for(checkpoint: Artifact) -> set[str]:
    """The questions that all training text of a checkpoint was screened for, by the artifacts that it was made from.

    Empty if some of the text was not screened, is of a checkpoint from elsewhere, or is no longer in the store.
    """
    seen, ids = {checkpoint.full_id}, [checkpoint.full_id]
    held_out_lists: list[set[str]] = []
    while ids:
        artifact = checkpoint.store.find(*ids.pop().split("/"))
        if artifact is None:
            return set()
        inputs = set(artifact.manifest["inputs"].values())
        kinds = {full_id.partition("/")[0] for full_id in inputs}
        if artifact.kind == "questions":
            held_out_lists.append({question.text for question in read_questions(artifact.path)})
        elif artifact.kind in ("tokens", "checkpoint") and not kinds & {"questions", "tokens"}:
            return set()
        ids += inputs - seen
        seen |= inputs
    return reduce(set.intersection, held_out_lists) if held_out_lists else set()


def _calls(section: Mapping[str, Any], endpoints: Mapping[str, EndpointConfig]) -> Iterator[Calls]:
    """A request for each item, if the model is behind an endpoint."""
    if "model_under_test" not in section:
        return
    config = EvaluateConfig.model_validate(section["evaluate"])
    count = config.held_out.count if config.held_out else 0
    count += sum(map(count_of, config.benchmarks))
    tokens = (config.prompt_length, config.max_tokens)
    count *= config.answers
    yield Calls("evaluate", section["model_under_test"]["endpoint"], count, count, tokens)


def _rehearsal(settings: Mapping[str, Any]) -> dict[str, Any]:
    """A few items of each benchmark. Checkpoints write short answers; endpoints whole ones, whose length is a price."""
    part = settings["evaluate"]
    choices = [
        {**choice, "items": min(REHEARSED_ITEMS, choice["items"] or REHEARSED_ITEMS)} for choice in part["benchmarks"]
    ]
    few: dict[str, Any] = {"benchmarks": choices, "batch": min(REHEARSED_BATCH, part["batch"])}
    if part["samples"]:
        few["samples"] = min(REHEARSED_ITEMS, part["samples"])
    if part["held_out"]:
        few["held_out"] = few_problems(part["held_out"])
    if not part["models"]:
        few["max_tokens"] = min(TOKENS, part["max_tokens"])
    return {"evaluate": part | few}


@stage(
    "evaluate",
    version=7,
    outputs=("evaluation",),
    accelerator=True,
    page="evaluations",
    samples="",
    limits=lambda section: [budget_limit(section["evaluate"])] if "model_under_test" in section else [],
    calls=_calls,
    check=partial(_check, "evaluate"),
    rehearsal=_rehearsal,
)
def evaluate(job: Job) -> None:
    """Ask the model each question that has no row yet, then score and publish."""
    config = job.part("evaluate", EvaluateConfig)
    seed, bad_rows = job.seed("evaluation"), dict[str, list[str]]()
    items = _with_screening(job, items_to_ask(config, seed, bad_rows))
    out = job.output("evaluation")
    if "model_under_test" in job.section:
        asked = _ask_endpoint(job, config, items, out)
    elif "checkpoint" in job.inputs:
        asked = _ask_checkpoint(job, config, items, out)
    else:
        raise ConfigError("stage evaluate: no input named `checkpoint`, and no `model_under_test` in its section")
    # Score the rows, then write the scores, sample replies and tables of the artifact.
    bad_counts = {name: len(messages) for name, messages in bad_rows.items()}
    settings = protocol(config, seed, bool(asked.likelihood))
    scores = summarise(
        asked.rows, asked.name, settings, asked.column, asked.likelihood, bad_counts, sampled_rows=asked.sampled
    )
    write_json(out / "scores.json", scores)
    write_json(out / "samples.json", sample_readings(asked.rows))
    tables = breakdown(scores)
    write_json(out / "breakdown.json", [to_json(table) for table in tables])
    write_text(out / "breakdown.md", "\n".join(to_markdown(table) for table in tables))
    write_text(out / "breakdown.html", "\n".join(to_html(table) for table in tables))
    write_table(out, "table2", table_2({asked.name: scores}))
    _describe(job, scores, list(chain.from_iterable(bad_rows.values())), out)


def items_to_ask(config: EvaluateConfig, seed: int, bad_rows: dict[str, list[str]]) -> list[BenchmarkItem]:
    """Load all items of the configured benchmarks.

    Adds a message to `bad_rows`, by benchmark, for each record that is left out. Raises `ConfigError` if a benchmark is
    listed twice, or if there is none.
    """
    items: dict[str, Sequence[BenchmarkItem]] = {}
    for choice in config.benchmarks:
        for name, benchmark_items in items_for(choice, seed, bad_rows).items():
            if name in items:
                raise ConfigError(f"evaluate.benchmarks: {name!r} is listed twice")
            items[name] = benchmark_items
    if config.held_out is not None:
        items[HELD_OUT] = stand_in_items(config.held_out, seed)
    if not items:
        raise ConfigError("evaluate: neither `benchmarks` nor `held_out` names a benchmark to run")
    return list(chain.from_iterable(items.values()))


def _with_screening(job: Job, items: Sequence[BenchmarkItem]) -> list[BenchmarkItem]:
    """The items, marked by whether the training text of the checkpoint was screened for them.

    Held-out problems are not: they are kept apart by the hash of their question.
    """
    if (folder := job.inputs.get("checkpoint")) is None:
        return list(items)
    store = open_store(StagingFiles(job.staging).store_root)
    screened = screened_for(store.get(store.artifact_name(folder)))
    return [item if item.benchmark == HELD_OUT else replace(item, screened=item.question in screened) for item in items]


def protocol(config: EvaluateConfig, seed: int, likelihood: bool) -> dict[str, object]:
    """The settings by which the questions were asked; written with the scores."""
    return {
        "shots": 0,
        "template": "chat, thinking allowed",
        "verdict": "strict: one candidate answer, thinking finished (paper §5)",
        "likelihood": "each option after the bare question, per byte; no letters, no template" if likelihood else None,
        "temperature": config.temperature,
        **({"samples": config.samples, "sample_temperature": config.sampling().temperature} if config.samples else {}),
        "max_tokens": config.max_tokens,
        "prompt_length": config.prompt_length,
        "seed": seed,
        "sources": {
            part: choice.path or choice.revision or BENCHMARKS[part].commit or BENCHMARKS[part].path
            for choice in config.benchmarks
            for part in parts_of(choice.name)
            if not BENCHMARKS[part].build
        },
    }


@dataclass(frozen=True)
class Asked:
    """The rows of an evaluation by way. `name`: of the model; `column`: its column of Table 2."""

    name: str
    column: str
    rows: list[SampleRow]
    likelihood: list[SampleRow]
    sampled: list[SampleRow]


def _sample(
    job: Job,
    answerer: Callable[[EvaluateConfig], Answerer],
    config: EvaluateConfig,
    items: Sequence[BenchmarkItem],
    out: Path,
) -> list[SampleRow]:
    """The sampled answers to all items, by an answerer at their temperature; none if none are asked for."""
    if not config.samples:
        return []
    each = with_samples(items, config.samples)
    return ask(answerer(config.sampling()), each, out / SAMPLED_ROWS, job.seed("evaluation"), job.emit, "sampled")


def _ask_checkpoint(job: Job, config: EvaluateConfig, items: Sequence[BenchmarkItem], out: Path) -> Asked:
    """Evaluate the checkpoint by generation, by sampling and by likelihood."""
    tokenizer = job.part("tokenizer", TokenizerConfig) if "tokenizer" in job.section else None
    folder = job.inputs["checkpoint"]
    answerer: Answerer = CheckpointAnswerer(folder, config, tokenizer)
    # Rows go straight into the output folder, which survives a crash like scratch: what has a row is not asked again.
    rows = ask(answerer, items, out / ROWS, job.seed("evaluation"), job.emit) if "generate" in config.ways else []
    multiple_choice = with_options(items) if "likelihood" in config.ways else []
    if not rows and not multiple_choice:
        raise ConfigError(
            "evaluate.ways: only `likelihood` is set, but none of the benchmarks has answer options to score"
        )
    likelihood_rows: list[SampleRow] = []
    if multiple_choice:
        scorer = CheckpointScorer(folder, config, tokenizer)
        likelihood_rows = score_options(scorer, multiple_choice, out / LIKELIHOOD_ROWS, job.emit)
    sampled_rows = _sample(job, lambda own: CheckpointAnswerer(folder, own, tokenizer), config, items, out)
    return Asked(answerer.name, "nautile_370m", rows, likelihood_rows, sampled_rows)


def _ask_endpoint(job: Job, config: EvaluateConfig, items: Sequence[BenchmarkItem], out: Path) -> Asked:
    """Evaluate an endpoint by generation and by sampling; few endpoints return the likelihood of a text.

    Raises `ConfigError` if `evaluate.ways` has no `generate`.
    """
    model = job.part("model_under_test", ModelUnderTest)
    if "generate" not in config.ways:
        raise ConfigError(f"evaluate.ways: endpoint {model.endpoint!r} supports only `generate`")
    with EndpointPool(job.endpoints, job.reply_source, job.emit, config.budget_dollars) as pool:
        pool.check()
        answerer = EndpointAnswerer(pool, model.endpoint, config)
        rows = ask(answerer, items, out / ROWS, job.seed("evaluation"), job.emit)
        sampled_rows = _sample(job, lambda own: EndpointAnswerer(pool, model.endpoint, own), config, items, out)
    return Asked(answerer.name, model.column, rows, [], sampled_rows)


def _describe(job: Job, scores: Scores, bad_rows: Sequence[str], out: Path) -> None:
    """Emit the accuracies as metrics, and describe the artifact."""
    benchmarks = scores["benchmarks"]
    for name, score in {**benchmarks, **scores["composites"], "average": scores["average"]}.items():
        for metric in ("accuracy", "accuracy_lenient"):
            if score and score.get(metric) is not None:
                job.emit("metric", name=f"evaluate/{name}/{metric}", step=0, value=score[metric])
    for name, score in scores.get("likelihood", {}).items():
        if score["accuracy"] is not None:
            job.emit("metric", name=f"evaluate/{name}/likelihood", step=0, value=score["accuracy"])
    for name, score in scores.get("sampled", {}).items():
        if score["accuracy"] is not None:
            job.emit("metric", name=f"evaluate/{name}/sampled", step=0, value=score["accuracy"])
        for k, share in score["pass_at"].items():
            if int(k) > 1 and share["accuracy"] is not None:
                job.emit("metric", name=f"evaluate/{name}/pass@{k}", step=0, value=share["accuracy"])
    # The seconds that each sample took; for a checkpoint those of its batch.
    path = out / f"latency.{ROWS}"
    seconds = [row["latency_s"] for row in read_rows(path)] if path.exists() else []
    cuts = quantiles(seconds, n=20, method="inclusive") if len(seconds) > 1 else None
    samples = sum(score["items"] for score in benchmarks.values())
    lost = lost_records(bad_rows, samples)
    unscreened = {
        name: score["not_screened"]
        for group in (scores.get("likelihood", {}), benchmarks)
        for name, score in group.items()
        if score["not_screened"]
    }
    notes = [*([lost] if lost else []), *(f"{title_of(name)}: {note}" for name, note in unscreened.items())]
    if notes:
        job.emit("progress", done=samples, total=samples, unit="samples", note="; ".join(notes))
    job.describe(
        "evaluation",
        **({LOST: lost} if lost else {}),
        not_screened=unscreened,
        model=scores["model"],
        accuracy={name: score["accuracy"] for name, score in benchmarks.items()},
        samples=samples,
        left_out=sum(sum(score["left_out"].values()) for score in benchmarks.values()),
        bad_rows=bad_rows[:SHOWN_BAD_ROWS],
        latency_s={"p50": round(cuts[9], 4), "p95": round(cuts[18], 4)} if cuts else {},
        stand_ins=[f"{score['title']}: {score['stand_in']}" for score in benchmarks.values() if score["stand_in"]],
    )
