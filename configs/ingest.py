"""Ingestion's section (paper §3.1): which corpora, which of their records, and what counts as a duplicate."""

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from configs.base import Operational, Section, Share, TaskConfig


class DeduplicateConfig(Section):
    """Duplicates within and across sources. Exact ones are always dropped; case, Unicode form and white space do not
    count as differences."""

    # Also drop documents that share a band of MinHash values (data/screening/minhash.py). Off by default: the makers of
    # FineWeb-Edu did it, and it costs a seventh of the time of tokenising and 112 bytes a document on disk.
    near: bool = False
    across: bool = True  # drop from a source what a source earlier in the list has


class SourceConfig(Section):
    """One corpus to ingest: which reader, and which of its records."""

    name: str = Field(pattern=r"^[a-z][a-z0-9_]*$")
    reader: Literal["hub", "parquet", "jsonl", "wikipedia", "reasoning"]  # the last two work offline
    form: Literal["web", "synth"]  # plain text, or exercises with query, reasoning and answer
    path: str = ""  # Hub id, or a glob of local files; unused by the offline readers
    subset: str = ""  # of the Hub's dataset; empty: its default
    split: str = "train"
    revision: str = ""  # a commit of the Hub; the reader refuses to start without one
    records: PositiveInt | None = None  # None: all
    tasks: tuple[TaskConfig, ...] = ()  # reader "reasoning": what it generates
    worked_share: Share = 1.0  # reader "reasoning": records that show all their reasoning
    brief_share: Share | None = None  # and that show its last step; the others give the answer alone
    seed_offset: PositiveInt | None = (
        None  # added to the seed, as far as the other source reads; else both draw the same
    )
    validation_share: Share = 0.01  # of the documents, kept out of training
    exemplars: NonNegativeInt = 0  # records sampled for retrieval, stratified by exercise
    rows_per_shard: PositiveInt = 4096  # rows of `row_length` tokens in a file; a worker holds one file in memory
    languages: tuple[str, ...] = ()  # drop records in other languages, or without a known one; empty: keep all
    minimum_score: float | None = None  # FineWeb-Edu's `score`: drop records below it, or without one
    license: Operational[str] = ""  # of the text, for the cards of what is made from it
    bad_files_share: Operational[Share] = (
        0.0  # of the files, that may be unreadable: they are skipped, and named in the artifact
    )

    @model_validator(mode="after")
    def _complete(self) -> "SourceConfig":
        if self.reader in ("hub", "parquet", "jsonl") and not self.path:
            raise ValueError(f"source {self.name!r}: reader {self.reader!r} needs `path`")
        if (self.reader == "reasoning") != bool(self.tasks):
            raise ValueError(f"source {self.name!r}: `tasks` goes with reader 'reasoning' and with no other")
        if self.worked_share + (self.brief_share or 0.0) > 1.0:
            raise ValueError(f"source {self.name!r}: worked_share and brief_share are more than 1 together")
        return self

    @property
    def label(self) -> str:
        """The section, for messages."""
        return f"source {self.name!r}"


class IngestConfig(Section):
    """Paper §3.1. Each source becomes its own `tokens` artifact."""

    row_length: PositiveInt = 1024  # tokens in a row; documents are packed into rows
    deduplicate: DeduplicateConfig = DeduplicateConfig()
    sources: tuple[SourceConfig, ...]


class IngestPart(Section):
    """The part of the configuration that an ingest depends on: its one source and the length of the rows."""

    row_length: PositiveInt
    deduplicate: DeduplicateConfig = DeduplicateConfig()
    source: SourceConfig
