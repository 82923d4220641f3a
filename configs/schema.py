"""The whole configuration as frozen pydantic models: one section per stage, and `RunConfig` that holds them.

A field that alters what a stage writes belongs to that stage's section, for the section is hashed into the key of
its artifacts. Where nothing is said a value is ours; `configs/nautile_370m.toml` gives the source of the paper's.
"""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from configs.distill import DistillConfig, IndexConfig
from configs.endpoint import EndpointConfig, known_fallbacks
from configs.evaluation import BenchmarkChoice, ModelUnderTest, Way
from configs.model import ModelConfig, TokenizerConfig
from configs.operation import OperationConfig, ScheduleConfig
from configs.parts import OptimizerConfig, Share, TaskConfig
from configs.reinforcement import AlignConfig, ProblemsConfig, ReasonConfig, SelfDistillConfig
from configs.retention import RetentionConfig
from configs.screening import DeduplicateConfig
from configs.section import Section
from configs.telemetry import TelemetryConfig


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


class PhaseConfig(Section):
    """A stretch of pretraining: its token budget and the weights of the token sources it draws rows from."""

    name: str
    tokens: PositiveInt
    mixture: dict[str, PositiveFloat]


class PretrainConfig(Section):
    """Paper §3.1: phase 1 on web text, phase 2 on SYNTH with the distilled documents."""

    phases: tuple[PhaseConfig, ...]
    batch_rows: PositiveInt
    micro_rows: PositiveInt | None = None  # gradient accumulation when smaller than batch_rows
    optimizer: OptimizerConfig = OptimizerConfig()
    loss_chunk: PositiveInt = 128
    z_loss: NonNegativeFloat = 0.0
    fsdp: PositiveInt = 1
    save_every: PositiveInt = 1000
    keep: PositiveInt = 3
    log_every: PositiveInt = 10
    validate_every: PositiveInt = 1000
    validation_rows: PositiveInt = 64
    sample_every: PositiveInt = 5000
    skip_limit: NonNegativeInt = 5  # updates in a row that may be skipped for a loss or gradient that is not finite
    spike_factor: NonNegativeFloat = 10.0  # robust deviations above the median of late losses; 0: spikes are let be
    spike_steps: NonNegativeInt = 3  # losses in a row that may be above that
    rollbacks: NonNegativeInt = 3  # times to go back to a checkpoint, past the trouble, before giving up


class EvaluateConfig(Section):
    """Paper §5: zero-shot, strict. `ways`: `generate` is the paper's; `likelihood` also weighs each option's text.

    A checkpoint's answer has up to `max_tokens` tokens, or what its context leaves after a prompt of that size
    (`evals.answerers.buckets`). A prompt above `prompt_length` tokens is not asked, and counted.
    """

    benchmarks: tuple[BenchmarkChoice, ...]
    ways: Annotated[tuple[Way, ...], Field(min_length=1)] = ("generate",)
    models: tuple[ModelUnderTest, ...] = ()  # besides our checkpoints: an evaluation of its own each
    held_out: ProblemsConfig | None = None  # held-out problems of the reinforcement stages' own kind
    max_tokens: PositiveInt = 512
    prompt_length: PositiveInt = 512
    batch: PositiveInt = 32
    temperature: NonNegativeFloat = 0.0
    budget_dollars: NonNegativeFloat = 0.0  # of each of `models`; 0: none
    tables: bool = True


class ReportConfig(Section):
    title: str = "Nautile"
    samples: PositiveInt = 12


class LaunchConfig(Section):
    """How the processes of a stage are started. In no key: it says where work is done, not what.

    The units of a stage (a file each) are done by `workers` processes: here, or with `engine` "ray" on the cluster at
    `ray_address` (empty: RAY_ADDRESS, or the one of this machine), which all share the store.

    An accelerator stage is one process, or `processes` that do it as one: started here, or each on a host of its own
    by `command`: a template in which {host} counts from 0, {commit} is this checkout's, {member} the command to run
    there, in a checkout.
    """

    engine: Literal["processes", "ray"] = "processes"
    workers: PositiveInt | None = None  # units at a time; None: the cores of this machine, or the CPUs of the cluster
    ray_address: str = ""
    processes: PositiveInt = 1
    stages: tuple[str, ...] = ("pretrain",)
    command: str = ""
    coordinator: str = ""  # address:port of the first process; empty: found by itself, here or on a TPU slice
    silent_s: PositiveFloat = 120.0  # a host that says nothing for so long is taken for dead

    @model_validator(mode="after")
    def _address_used(self) -> "LaunchConfig":
        if self.ray_address and self.engine != "ray":
            raise ValueError(f"launch.ray_address goes with engine 'ray'; launch.engine is {self.engine!r}")
        return self

    @model_validator(mode="after")
    def _fields_known(self) -> "LaunchConfig":
        try:
            self.command.format(host=0, processes=1, commit="", member="")
        except (KeyError, IndexError, ValueError) as error:
            raise ValueError(
                f"launch.command: {{host}}, {{processes}}, {{commit}} and {{member}} are what it may hold ({error})"
            ) from None
        if self.command and "{member}" not in self.command:
            raise ValueError("launch.command: it must hold {member}, the command to run on each host")
        return self


class PlanConfig(Section):
    """What `nautile plan` is asked: chips to compile for, and the utilisation to reckon time with."""

    topology: str
    row_length: PositiveInt
    mfu: Annotated[float, Field(gt=0.0, le=1.0)] = 0.4
    largest: bool = True  # also look for the largest batch that fits


class RunConfig(Section):
    """Everything a run is made of. `configs.load.load` reads one from TOML."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    seed: NonNegativeInt = 0
    tokenizer: TokenizerConfig
    model: ModelConfig
    launch: LaunchConfig = LaunchConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    operation: OperationConfig = OperationConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    endpoints: dict[str, EndpointConfig] = {}
    ingest: IngestConfig
    index: IndexConfig = IndexConfig()
    distill: DistillConfig
    pretrain: PretrainConfig
    align: AlignConfig
    reason: ReasonConfig
    self_distill: SelfDistillConfig
    evaluate: EvaluateConfig
    report: ReportConfig = ReportConfig()
    retention: RetentionConfig = RetentionConfig()

    @model_validator(mode="after")
    def _names_agree(self) -> "RunConfig":
        known = {source.name for source in self.ingest.sources} | {"distilled"}
        for phase in self.pretrain.phases:
            if unknown := set(phase.mixture) - known:
                raise ValueError(
                    f"pretrain.phases {phase.name!r}: mixture names {sorted(unknown)}; there are {sorted(known)}"
                )
        known_fallbacks(self.endpoints)
        asked = [("align.judge.endpoint", self.align.judge.endpoint)]
        asked += [("distill: an endpoint of its teachers, probe or quality", name) for name in self.distill.endpoints]
        asked += [(f"evaluate.models.{i}.endpoint", m.endpoint) for i, m in enumerate(self.evaluate.models)]
        for field, name in asked:
            if name not in self.endpoints:
                raise ValueError(f"{field}: no endpoint {name!r}; [endpoints] has {sorted(self.endpoints)}")
        if self.tokenizer.vocabulary > self.model.vocabulary:
            raise ValueError(
                f"model.vocabulary {self.model.vocabulary} is smaller than the tokenizer's {self.tokenizer.vocabulary}"
            )
        if self.ingest.row_length > self.model.context:
            raise ValueError(f"ingest.row_length {self.ingest.row_length} exceeds model.context {self.model.context}")
        return self
