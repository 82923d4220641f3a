"""Distill (paper §3.2, §3.3): prompts and the exemplars nearest to them become documents by teachers, then tokens."""

import hashlib
from pathlib import Path
from typing import Any

from pydantic import PositiveInt, TypeAdapter, ValidationError

from common.errors import ConfigError
from common.files import sha256_of
from configs.distill import DistillConfig, IndexConfig
from configs.endpoint import EndpointConfig
from configs.model import TokenizerConfig
from data.distill.prompts import check_prompt_set
from data.distill.run import DOCUMENTS, distill_prompts
from data.distill.stats import DistillStats, distill_facts
from data.distill.teacher_prompt import template_for
from data.endpoints.pool import EndpointPool
from data.retrieval.embedders import encoder_for
from data.retrieval.exemplar_index import ExemplarIndex
from data.screening.contamination import ContaminationIndex, HeldOutQuestion, read_questions
from data.sources.local_files import read_jsonl
from data.tokens.build import PublishedTokens, write_tokens
from data.tokens.tokenise_file import CorpusPlan
from tasks.engine.job import Job
from tasks.engine.stage import stage
from tasks.reporting.data_card import write_card

VALIDATION_SHARE = 0.01
ROWS_PER_SHARD = 4096
SAMPLES = 3  # of the kept documents and of each kind of rejected one, in the manifest


@stage("distill", version=3, outputs=("documents", "tokens", "data_card"))
def distill(job: Job) -> None:
    """Check everything that is asked, distil, tokenise, draw the card. A resumed run does no finished file again."""
    config = job.part("distill", DistillConfig)
    endpoints = {name: EndpointConfig.model_validate(one) for name, one in job.section["endpoints"].items()}
    for one in config.prompt_sets:
        check_prompt_set(one)
    encoder = encoder_for(job.part("index", IndexConfig).embedding, job.scratch / "vectors", job.emit)
    index = _index(job, encoder, config.neighbours)
    questions = _held_out(job)
    screen = None if questions is None else ContaminationIndex(questions).screen
    with EndpointPool(
        endpoints, job.scratch / "replies.jsonl", job.emit, config.budget_dollars, config.budget_tokens
    ) as pool:
        for teacher in config.teachers:
            template_for(teacher, pool.config(teacher.endpoint))
        pool.check()
        encoder.embedder.check()
        found = distill_prompts(config, pool, index, job.output("documents"), job.scratch, job.seed, job.emit, screen)
        counts = distill_facts(found.stats, config, pool)
    index.close()
    encoder.close()
    corpus = _tokenise(job)
    _measure(job, found.stats, counts, corpus)
    samples = {name: rows[:SAMPLES] for name, rows in found.stats.samples.items()}
    told = {**counts, "exemplars": len(index), "prompt_sets": found.prompts.facts()}
    told["held_out"] = None if questions is None else len(questions)
    told["contaminated"] = None if questions is None else dict(found.stats.contaminated)
    job.describe("documents", **told, samples=samples)
    job.describe("tokens", source="distilled", stand_in=counts["stand_in"], **corpus.facts())
    card = write_card(job.output("data_card"), {**told, "retrieval": index.facts}, found.stats, config)
    job.describe("data_card", **card, documents=counts["documents"])


def _index(job: Job, encoder: Any, neighbours: int) -> ExemplarIndex:
    """The exemplars. Raises `ConfigError` if they are fewer than one prompt is shown."""
    folder = job.inputs["retrieval"]
    index = ExemplarIndex(folder, encoder)
    if len(index) < neighbours:
        raise ConfigError(
            f"exemplars of {folder}: {len(index)} usable records, but every prompt is shown {neighbours}; "
            "raise `exemplars` of a source of form 'synth', or lower distill.neighbours"
        )
    return index


def _held_out(job: Job) -> list[HeldOutQuestion] | None:
    """The benchmarks' questions, which neither a prompt nor a document may overlap; None where the run has none."""
    return read_questions(job.inputs["questions"]) if "questions" in job.inputs else None


def _tokenise(job: Job) -> PublishedTokens:
    paths = sorted(job.output("documents").glob(DOCUMENTS))
    plan = CorpusPlan(
        tokenizer=job.part("tokenizer", TokenizerConfig),
        form="synth",
        row_length=_row_length(job),
        rows_per_shard=ROWS_PER_SHARD,
        validation_share=VALIDATION_SHARE,
    )
    # Named by the documents, so that what is there already was made of these.
    work = job.scratch / f"tokens-{_digest(paths)}"
    work.mkdir(exist_ok=True)
    return write_tokens(lambda skip: read_jsonl(paths, "synth", skip), plan, work, job.output("tokens"), job.emit)


def _digest(paths: list[Path]) -> str:
    whole = hashlib.sha256()
    for path in paths:
        whole.update(bytes.fromhex(sha256_of(path)))
    return whole.hexdigest()[:16]


def _row_length(job: Job) -> int:
    try:
        return TypeAdapter(PositiveInt).validate_python(job.section.get("row_length"))
    except ValidationError as error:
        raise ConfigError(f"stage distill: `row_length`: {error.errors()[0]['msg']}") from None


def _measure(job: Job, tally: DistillStats, counts: dict[str, Any], corpus: PublishedTokens) -> None:
    measured: dict[str, float | None] = {
        "prompts": tally.prompts,
        "documents": tally.accepted,
        "accepted_share": counts["accepted_share"],
        "mean_difficulty": counts["mean_difficulty"],
        "dollars": counts["dollars"],
        "tokens": corpus.facts()["tokens"],
        **{f"rejected_{reason}": count for reason, count in tally.rejected.items()},
    }
    for name, value in measured.items():
        if value is not None:
            job.emit("metric", name=name, step=0, value=value)
