"""Distill (paper §3.2, §3.3): prompts and the exemplars nearest to them become documents by teachers, then tokens."""

import hashlib
from typing import Any

from pydantic import PositiveInt, TypeAdapter, ValidationError

from configs.model import TokenizerConfig
from configs.schema import DistillConfig, EndpointConfig
from configs.section import ConfigError
from data.corpus import Corpus, CorpusPlan, write_tokens
from data.distillation import DOCUMENTS, distil
from data.embeddings import Encoder
from data.endpoints import EndpointPool
from data.files import read_jsonl
from data.retrieval import ExemplarIndex, read_exemplars
from data.tally import Tally, by_reason, facts
from tasks.stage import Job, stage

VALIDATION_SHARE = 0.01
ROWS_PER_SHARD = 4096
SAMPLES = 3  # of the kept documents and of each kind of rejected one, in the manifest


@stage("distill", version=1, outputs=("documents", "tokens"))
def distill(job: Job) -> None:
    """Check the teachers, distil, tokenise. A resumed run asks only for replies that never came."""
    config = job.part("distill", DistillConfig)
    endpoints = {name: EndpointConfig.model_validate(one) for name, one in job.section["endpoints"].items()}
    exemplars = read_exemplars(job.inputs["exemplars"], config.neighbours)
    documents = job.output("documents")
    with EndpointPool(endpoints, job.scratch / "replies.jsonl", job.emit, config.budget_dollars) as pool:
        pool.check()
        encoder = Encoder(job.scratch / "vectors")
        index = ExemplarIndex.build(exemplars, encoder)
        tally = distil(config, pool, index, encoder, documents, job.seed, job.emit)
        counts = facts(tally, config, pool)
    corpus = _tokenise(job)
    _measure(job, tally, counts, corpus)
    samples = {name: rows[:SAMPLES] for name, rows in by_reason(tally).items()}
    job.describe("documents", **counts, exemplars=len(exemplars), samples=samples)
    job.describe("tokens", source="distilled", stand_in=counts["stand_in"], **corpus.facts())


def _tokenise(job: Job) -> Corpus:
    path = job.output("documents") / DOCUMENTS
    plan = CorpusPlan(
        tokenizer=job.part("tokenizer", TokenizerConfig),
        form="synth",
        row_length=_row_length(job),
        rows_per_shard=ROWS_PER_SHARD,
        validation_share=VALIDATION_SHARE,
    )
    # Named by the documents: an earlier attempt may have tokenised others (fewer of its requests were answered).
    work = job.scratch / f"tokens-{hashlib.sha256(path.read_bytes()).hexdigest()[:16]}"
    work.mkdir(exist_ok=True)
    return write_tokens(lambda skip: read_jsonl([path], "synth", skip), plan, work, job.output("tokens"), job.emit)


def _row_length(job: Job) -> int:
    try:
        return TypeAdapter(PositiveInt).validate_python(job.section.get("row_length"))
    except ValidationError as error:
        raise ConfigError(f"stage distill: `row_length`: {error.errors()[0]['msg']}") from None


def _measure(job: Job, tally: Tally, counts: dict[str, Any], corpus: Corpus) -> None:
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
