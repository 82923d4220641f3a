"""The whole configuration as frozen pydantic models: one section per stage, and `RunConfig` that holds them.

A field that alters what a stage writes belongs to that stage's section, for the section is hashed into the key of
its artifacts. Where nothing is said a value is ours; `configs/nautile_370m.toml` gives the source of the paper's.
"""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from configs.model import ModelConfig, TokenizerConfig
from configs.parts import OptimizerConfig, Share, TaskConfig
from configs.reinforcement import AlignConfig, ProblemsConfig, ReasonConfig, SelfDistillConfig
from configs.section import Section


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
    validation_share: Share = 0.01
    exemplars: NonNegativeInt = 0  # records kept aside for retrieval, stratified by exercise
    rows_per_shard: PositiveInt = 4096

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
    sources: tuple[SourceConfig, ...]


class EndpointConfig(Section):
    """A chat endpoint. Keys come from the environment, by name, and are never written anywhere."""

    kind: Literal["openai", "mistral", "embedded"]
    model: str
    url: str = ""  # openai: the base URL, ending in /v1
    key_variable: str = ""  # the NAME of the environment variable; empty: no key is sent
    concurrency: PositiveInt = 8
    requests_per_minute: PositiveInt | None = None
    timeout_s: PositiveFloat = 120.0
    attempts: PositiveInt = 5
    dollars_per_million_in: NonNegativeFloat = 0.0
    dollars_per_million_out: NonNegativeFloat = 0.0
    structured: Literal["json_schema", "grammar", "none"] = "json_schema"
    stand_in: bool = False  # shown beside every result that rests on it

    @model_validator(mode="after")
    def _reachable(self) -> "EndpointConfig":
        if self.kind == "openai" and not self.url:
            raise ValueError(f"endpoint for model {self.model!r}: kind 'openai' needs `url`")
        return self


class TeacherConfig(Section):
    """A teacher and the difficulty (0..1) up to which it is chosen (paper §3.3)."""

    endpoint: str
    up_to: Share = 1.0
    template: str = ""  # of its prompt; empty: the compact one for the embedded model, the full one for others


class DistillConfig(Section):
    """Paper §3.2, §3.3: retrieval-guided distillation on the SYNTH template."""

    prompts: PositiveInt
    prompt_source: Literal["wikipedia", "hub", "jsonl"] = "wikipedia"
    prompt_path: str = ""
    prompt_revision: str = ""
    neighbours: PositiveInt = 5
    teachers: tuple[TeacherConfig, ...]
    max_tokens: PositiveInt = 160
    temperature: NonNegativeFloat = 0.0
    budget_dollars: NonNegativeFloat = 0.0
    max_rejected_share: Share = 1.0
    overlap_limit: Share = 0.5  # share of a reply's 8-grams that may also stand in its neighbours


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


class BenchmarkChoice(Section):
    """One benchmark to evaluate: its name in `evals/benchmarks.py` and how many items (None: all).

    Its records come from the Hub at the pinned commit `revision`, or from the file `path` in the Hub's own schema.
    """

    name: str
    items: PositiveInt | None = None
    revision: str = ""
    path: str = ""


class EvaluateConfig(Section):
    """Paper §5: zero-shot, strict."""

    benchmarks: tuple[BenchmarkChoice, ...]
    held_out: ProblemsConfig | None = None  # held-out problems of the reinforcement stages' own kind
    max_tokens: PositiveInt = 512
    prompt_length: PositiveInt = 512
    batch: PositiveInt = 32
    temperature: NonNegativeFloat = 0.0
    tables: bool = True


class ReportConfig(Section):
    title: str = "Nautile"
    samples: PositiveInt = 12


class LaunchConfig(Section):
    """How the processes of an accelerator stage are started. In no key: it says where work is done, not what.

    With `processes` 1 there is one, here. More are started here, or each on a host of its own by `command`: a template
    in which {host} counts from 0, {commit} is this checkout's, {member} the command to run there, in a checkout.
    """

    processes: PositiveInt = 1
    stages: tuple[str, ...] = ("pretrain",)
    command: str = ""
    coordinator: str = ""  # address:port of the first process; empty: found by itself, here or on a TPU slice
    silent_s: PositiveFloat = 120.0  # a host that says nothing for so long is taken for dead

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
    endpoints: dict[str, EndpointConfig] = {}
    ingest: IngestConfig
    distill: DistillConfig
    pretrain: PretrainConfig
    align: AlignConfig
    reason: ReasonConfig
    self_distill: SelfDistillConfig
    evaluate: EvaluateConfig
    report: ReportConfig = ReportConfig()

    @model_validator(mode="after")
    def _names_agree(self) -> "RunConfig":
        known = {source.name for source in self.ingest.sources} | {"distilled"}
        for phase in self.pretrain.phases:
            if unknown := set(phase.mixture) - known:
                raise ValueError(
                    f"pretrain.phases {phase.name!r}: mixture names {sorted(unknown)}; there are {sorted(known)}"
                )
        asked = [("align.judge.endpoint", self.align.judge.endpoint)]
        asked += [(f"distill.teachers.{i}.endpoint", t.endpoint) for i, t in enumerate(self.distill.teachers)]
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
