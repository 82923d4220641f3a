"""The section of ingestion (paper §3.1): corpora, filters of their records, and deduplication."""

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from configs.base import Operational, Section, Share, TaskConfig, TrainOn


class DeduplicateConfig(Section):
    """Deduplication within and across sources.

    Exact duplicates are always dropped; differences in case, Unicode form and white space are ignored.
    """

    # Also drop documents that share a band of MinHash values (data/screening/minhash.py). Off by default: FineWeb-Edu
    # is deduplicated already, and it costs a seventh of the time of tokenising and 112 bytes per document on disk.
    near: bool = False
    across: bool = True  # also drop documents that an earlier source in the list has


class SourceConfig(Section):
    """A corpus to ingest: its reader, and which of its records to keep."""

    name: str = Field(pattern=r"^[a-z][a-z0-9_]*$")
    reader: Literal["hub", "parquet", "jsonl", "wikipedia", "reasoning"]  # the last two work offline
    form: Literal["web", "synth"]  # "web": plain text; "synth": exercises with query, reasoning and answer
    path: str = ""  # Hub id, or a glob of local files; unused by the offline readers
    subset: str = ""  # of the Hub's dataset; empty: its default
    split: str = "train"
    revision: str = ""  # a commit of the Hub; the reader refuses to start without one
    records: PositiveInt | None = None  # None: all
    tasks: tuple[TaskConfig, ...] = ()  # reader "reasoning": the generators
    worked_share: Share = 1.0  # reader "reasoning": share of records with the whole reasoning
    brief_share: Share | None = None  # share with the last step only; the other records have only the answer
    # Added to the seed. A second source of the same generators needs at least the number of problems that the first one
    # reads, or both have the same problems.
    seed_offset: PositiveInt | None = None
    validation_share: Share = 0.01  # share of the documents for validation, not trained on
    exemplars: NonNegativeInt = 0  # records sampled for retrieval, stratified by exercise
    rows_per_shard: PositiveInt = 4096  # rows of `row_length` tokens in a file; a worker has one file in memory
    # Form "synth": train on all targets, or on those of the replies alone. Only pretraining reads it, so that it is in
    # the key of `pretrain` and not of `ingest` (flows/dag.py): another value ingests nothing again.
    train_on: TrainOn = "all"
    languages: tuple[str, ...] = ()  # drop records in other or unknown languages; empty: keep all
    minimum_score: float | None = None  # FineWeb-Edu's `score`: drop records below it, or without one
    license: Operational[str] = ""  # of the text, for data and model cards
    # Share of unreadable files to tolerate: they are skipped, and listed in the artifact.
    bad_files_share: Operational[Share] = 0.0

    @model_validator(mode="after")
    def _complete(self) -> "SourceConfig":
        if self.reader in ("hub", "parquet", "jsonl") and not self.path:
            raise ValueError(f"source {self.name!r}: reader {self.reader!r} needs `path`")
        if (self.reader == "reasoning") != bool(self.tasks):
            raise ValueError(f"source {self.name!r}: reader 'reasoning' needs `tasks`, and no other reader has them")
        if self.worked_share + (self.brief_share or 0.0) > 1.0:
            raise ValueError(f"source {self.name!r}: worked_share and brief_share are more than 1 together")
        if self.train_on == "replies" and self.form == "web":
            raise ValueError(
                f"source {self.name!r}: train_on 'replies' needs prompts, and form 'web' has none: leave it out"
            )
        return self

    @property
    def label(self) -> str:
        """The name of the section in messages."""
        return f"source {self.name!r}"


class IngestConfig(Section):
    """Ingestion (paper §3.1). Each source becomes its own `tokens` artifact."""

    row_length: PositiveInt = 1024  # tokens in a row; documents are packed into rows
    deduplicate: DeduplicateConfig = DeduplicateConfig()
    sources: tuple[SourceConfig, ...]


class IngestPart(Section):
    """The section of one ingest step: its source, and the length of the rows."""

    row_length: PositiveInt
    deduplicate: DeduplicateConfig = DeduplicateConfig()
    source: SourceConfig
