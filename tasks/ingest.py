"""Ingest (paper §3.1): one source becomes a `tokens` artifact, and for SYNTH a sample of `exemplars` for retrieval."""

import itertools
from dataclasses import asdict
from typing import Any

from pydantic import PositiveInt

from configs.model import TokenizerConfig
from configs.schema import SourceConfig
from configs.section import Section
from data.corpus import Corpus, CorpusPlan, write_tokens
from data.exemplars import write_exemplars
from data.sources import STAND_INS, read, rows_in, scan
from tasks.stage import Job, stage

SAMPLES = 3
SAMPLE_CHARACTERS = 400


class IngestPart(Section):
    """What an ingest depends on: its one source, and the length of the rows."""

    row_length: PositiveInt
    source: SourceConfig


@stage("ingest", version=1, outputs=("tokens", "exemplars"), optional=("exemplars",))
def ingest(job: Job) -> None:
    """Read, screen, tokenise and pack the source of the section; goes on from the last finished shard."""
    part = job.part("ingest", IngestPart)
    source = part.source
    plan = CorpusPlan(
        tokenizer=job.part("tokenizer", TokenizerConfig),
        form=source.form,
        row_length=part.row_length,
        rows_per_shard=source.rows_per_shard,
        validation_share=source.validation_share,
        exemplars=source.exemplars if source.form == "synth" else 0,
        records=rows_in(source, job.seed),
    )
    corpus = write_tokens(lambda skip: scan(source, job.seed, skip), plan, job.scratch, job.output("tokens"), job.emit)
    _measure(job, corpus)
    origin: dict[str, Any] = {"source": source.name, "stand_in": STAND_INS.get(source.reader)}
    job.describe("tokens", **origin, **corpus.facts(), samples=_samples(source, job.seed))
    if plan.exemplars:
        write_exemplars(job.output("exemplars") / "exemplars.jsonl", corpus.exemplars)
        exercises = sorted({record.exercise or "" for record in corpus.exemplars})
        job.describe("exemplars", **origin, records=len(corpus.exemplars), exercises=exercises)


def _measure(job: Job, corpus: Corpus) -> None:
    facts = corpus.facts()
    counts = ("records", "documents", "tokens", "cropped", "padded", "bytes_per_token", "disk_bytes_per_token")
    measured = {name: facts[name] for name in counts} | {"tokens_per_second": corpus.tokens_per_second}
    for reason, count in corpus.rejected.items():
        measured[f"rejected_{reason}"] = count
    for name, value in measured.items():
        if value is not None:
            job.emit("metric", name=name, step=0, value=value)


def _samples(source: SourceConfig, seed: int) -> list[dict[str, Any]]:
    """The first few records, long texts cut, for people to look at."""
    return [
        {key: _cut(value) for key, value in asdict(record).items() if value is not None}
        for record in itertools.islice(read(source, seed), SAMPLES)
    ]


def _cut(value: Any) -> Any:
    if not isinstance(value, str) or len(value) <= SAMPLE_CHARACTERS:
        return value
    return value[:SAMPLE_CHARACTERS] + " […]"
