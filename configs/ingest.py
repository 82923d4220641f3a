"""What is kept out of the training text: copies of what is there already."""

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from configs.base import Section, Share, TaskConfig


class DeduplicateConfig(Section):
    """Copies within and across sources; exact ones never stay (case, Unicode form and white space do not count).

    `near`: also documents that share a band of MinHash values (`data.screening.minhash`). Off by default:
    FineWeb-Edu's makers
    did it, and it costs a seventh of the time of tokenising and 112 bytes a document on disk. `across`: what a source
    earlier in the list has is dropped from the later ones.
    """

    near: bool = False
    across: bool = True


class SourceConfig(Section):
    """One corpus to ingest. `reader` names how records are had; the rest says which and how many."""

    name: str = Field(pattern=r"^[a-z][a-z0-9_]*$")
    reader: Literal["hub", "parquet", "jsonl", "wikipedia", "reasoning"]
    form: Literal["web", "synth"]
    path: str = ""  # Hub id, or a glob of local files; unused by the offline readers
    subset: str = ""
    split: str = "train"
    revision: str = ""  # a commit of the Hub; the reader refuses to start without one
    records: PositiveInt | None = None  # None: everything there is
    tasks: tuple[TaskConfig, ...] = ()  # reader "reasoning"
    worked_share: Share = 1.0  # of its records, those that show their reasoning; the others give the answer alone
    validation_share: Share = 0.01
    exemplars: NonNegativeInt = 0  # records kept aside for retrieval, stratified by exercise
    rows_per_shard: PositiveInt = 4096
    languages: tuple[str, ...] = ()  # records in others, or that name none, are left out; empty: all are kept
    minimum_score: float | None = None  # FineWeb-Edu's `score`; records below it, or without one, are left out
    bad_files_share: Share = 0.0  # of the files, that may stay unreadable: they are set aside and named

    @model_validator(mode="after")
    def _complete(self) -> "SourceConfig":
        if self.reader in ("hub", "parquet", "jsonl") and not self.path:
            raise ValueError(f"source {self.name!r}: reader {self.reader!r} needs `path`")
        if (self.reader == "reasoning") != bool(self.tasks):
            raise ValueError(f"source {self.name!r}: `tasks` goes with reader 'reasoning' and with no other")
        return self


class IngestConfig(Section):
    """Paper §3.1. Each source becomes its own `tokens` artifact of rows of `row_length` tokens."""

    row_length: PositiveInt = 1024
    deduplicate: DeduplicateConfig = DeduplicateConfig()
    sources: tuple[SourceConfig, ...]
