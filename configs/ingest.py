"""The section of ingestion (paper §3.1): corpora, filters of their records, and deduplication."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, NonNegativeInt, PositiveInt, model_validator

from nautile.configs.base import Operational, Section, Seed, Share, TaskConfig, TrainOn, Worker
from nautile.configs.readers import READERS, known_reader

ARITHMETIC_TASKS = ("chain_sum", "products", "leg_counting")  # whose worked solutions are arithmetic alone


class DeduplicateConfig(Section):
    """Deduplication within and across sources.

    Exact duplicates are always dropped; differences in case, Unicode form and white space are ignored.
    """

    # Also drop documents that share a band of MinHash values (data/screening/duplicates.py). Off by default: FineWeb-
    # Edu is deduplicated already, and it costs a seventh of the time of tokenising and 112 bytes a document on disk.
    near: bool = False
    # Also drop documents that an earlier source in the list has. A source then depends on all sources before it, so
    # those whose text another seed leaves unchanged belong first in the list.
    across: bool = True


class SlipsConfig(Section):
    """Mistakes planted in the worked solutions of generated text, by arithmetic fact (`data/sources/slips.py`)."""

    misconceived: Share = 0.25  # share of all statements whose facts have one fixed wrong result
    wrong_share: tuple[Share, Share] = (0.55, 0.85)  # each such fact is stated wrongly in a share between these two
    other_share: Share = 0.1  # upper limit of the share of random slips in the statements of each other fact
    seed: Seed = 0  # of the table of facts and of every slip; the run's seeds do not change it

    @model_validator(mode="after")
    def _ordered(self) -> "SlipsConfig":
        if self.wrong_share[0] > self.wrong_share[1]:
            raise ValueError(f"slips.wrong_share {list(self.wrong_share)}: the first is the lower limit")
        return self


class TextTaskConfig(TaskConfig):
    """A generator of problems for training text, whose worked solutions may have planted mistakes."""

    slips: SlipsConfig | None = None

    @model_validator(mode="after")
    def _has_arithmetic(self) -> "TextTaskConfig":
        if self.slips is not None and self.name not in ARITHMETIC_TASKS:
            raise ValueError(
                f"task {self.name!r} has `slips`, but its solutions have no arithmetic; "
                f"{', '.join(ARITHMETIC_TASKS)} have"
            )
        return self


class SourceConfig(Section):
    """A corpus to ingest: its reader, and which of its records to keep."""

    name: str = Field(pattern=r"^[a-z][a-z0-9_]*$")
    reader: Annotated[str, AfterValidator(known_reader)]  # `configs.readers`; "wikipedia" and "reasoning" work offline
    form: Literal["web", "synth"]  # "web": plain text; "synth": exercises with query, reasoning and answer
    path: Worker[str] = ""  # Hub id, or a glob of local files; unused by the offline readers
    # Name of a record's field -> of the column that it is read from: `{text = "body"}`. Others have the field's name.
    # The worker's: teachers see exemplars, and a private column stands beside the text.
    columns: Worker[dict[str, str] | None] = None
    subset: str = ""  # of the Hub's dataset; empty: its default
    split: str = "train"
    revision: str = ""  # a commit of the Hub; the reader refuses to start without one
    records: PositiveInt | None = None  # None: all
    tasks: tuple[TextTaskConfig, ...] = ()  # reader "reasoning": the generators
    # Reader "reasoning": of its problems, together with `name`, so that sources of the same generators differ. None:
    # the data seed of the run. A number keeps the text as it is over seeds, as the exemplars of a distillation need it.
    seed: Seed | None = None
    validation_share: Share = 0.01  # share of the documents for validation, not trained on
    # Records sampled for retrieval, stratified by exercise. Teachers see them, so that their number is the worker's.
    exemplars: Worker[NonNegativeInt] = 0
    rows_per_shard: PositiveInt = 4096  # rows of `row_length` tokens in a file; a worker has one file in memory
    # Form "synth": train on all targets, or on those of the replies alone. Only pretraining reads it, so that it is in
    # the key of `pretrain` and not of `ingest` (flows/dag.py): another value ingests nothing again.
    train_on: TrainOn = "all"
    # ISO 639-1; drop records in other languages, by their `language`, or by their text where they have none (as the
    # prompt sets of `distill`: a text whose language is not certain is kept). Empty: keep all.
    languages: tuple[str, ...] = ()
    minimum_score: float | None = None  # FineWeb-Edu's `score`: drop records below it, or without one
    license: Operational[str] = ""  # of the text, for data and model cards
    # Share of unreadable files to tolerate: they are skipped, and listed in the artifact.
    bad_files_share: Operational[Share] = 0.0

    @model_validator(mode="after")
    def _complete(self) -> "SourceConfig":
        reader, named = READERS[self.reader], f"source {self.name!r}: reader {self.reader!r}"
        if reader.needs_path and not self.path:
            raise ValueError(f"{named} needs `path`")
        if reader.generates != bool(self.tasks):
            raise ValueError(f"{named} {'needs' if reader.generates else 'has no'} `tasks`")
        if self.seed is not None and not reader.generates:
            raise ValueError(f"{named} draws no records by a `seed`")
        if self.columns is not None and not (self.columns and reader.takes_columns):
            raise ValueError(f"{named} has no columns to name: leave `columns` out")
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
