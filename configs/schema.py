"""The whole configuration: `RunConfig` with a section for each stage, and the checks across sections.

A field that changes what a stage writes belongs in the section of that stage: the fields of a section, except those
marked `Operational`, are hashed into the keys of the stage's artifacts (`configs.keys`). `configs/nautile_370m.toml`
has the source of each value of the paper; the defaults here are ours.
"""

from typing import cast

from pydantic import Field, model_validator

from configs.base import Operational, Section, Seed, SeedName, TrainOn, Worker
from configs.distill import DistillConfig, IndexConfig
from configs.endpoint import EndpointConfig, check_fallbacks, with_fallbacks
from configs.evaluation import EvaluateConfig, ReportConfig
from configs.ingest import IngestConfig
from configs.model import ModelConfig, TokenizerConfig
from configs.operation import (
    DeployConfig,
    Deployed,
    LaunchConfig,
    OperationConfig,
    ResourcesConfig,
    RetentionConfig,
    ScheduleConfig,
    TelemetryConfig,
)
from configs.training import TRAINED, AlignConfig, PretrainConfig, ReasonConfig, SelfDistillConfig


class SeedsConfig(Section):
    """The seeds of a run's random choices. The first three are `seed` of the run where they are not set.

    A step's key holds the seeds that it uses and no others. Distillation has a seed of its own (`distill.seed`), so
    that another seed of the run asks no teacher again.
    """

    data: Seed | None = None  # generated texts, the order of rows, problems of the reinforcement stages and their order
    weights: Seed | None = None  # initial parameters
    sampling: Seed | None = None  # completions of the reinforcement stages, order of self-distillation's traces
    # Generated test problems, selection of a benchmark's items, order of options, answers, bootstrap. `seed` does not
    # set it: what is measured stays the same over runs.
    evaluation: Seed = 0


DISTILLED = "distilled"  # the distilled documents in a mixture; every other name is a source of `ingest`


class RunConfig(Section):
    """Everything that determines a run. `configs.load.load` reads it from TOML."""

    name: Operational[str] = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    seed: Seed = 0  # of data, weights and sampling, unless `seeds` sets them
    seeds: SeedsConfig = SeedsConfig()
    tokenizer: TokenizerConfig
    model: ModelConfig
    launch: Operational[Worker[LaunchConfig]] = LaunchConfig()
    telemetry: Operational[Worker[TelemetryConfig]] = TelemetryConfig()
    operation: Operational[Worker[OperationConfig]] = OperationConfig()
    resources: Operational[Worker[ResourcesConfig]] = ResourcesConfig()
    deploy: Operational[Worker[dict[Deployed, DeployConfig]]] = {}
    schedule: Operational[ScheduleConfig] = ScheduleConfig()
    endpoints: Worker[dict[str, EndpointConfig]] = {}
    ingest: IngestConfig
    index: IndexConfig = IndexConfig()
    distill: DistillConfig
    pretrain: PretrainConfig
    align: AlignConfig
    reason: ReasonConfig
    self_distill: SelfDistillConfig
    evaluate: EvaluateConfig
    report: ReportConfig = ReportConfig()
    retention: Operational[Worker[RetentionConfig]] = RetentionConfig()

    @property
    def effective_seeds(self) -> dict[SeedName, int]:
        """The seed of data, weights, sampling and evaluation."""
        own = self.seeds
        return {
            "data": self.seed if own.data is None else own.data,
            "weights": self.seed if own.weights is None else own.weights,
            "sampling": self.seed if own.sampling is None else own.sampling,
            "evaluation": own.evaluation,
        }

    def deployment(self, name: str | None) -> DeployConfig:
        """The section `[deploy.NAME]`, or its defaults."""
        return self.deploy.get(cast(Deployed, name), DeployConfig())

    @property
    def train_on(self) -> dict[str, TrainOn]:
        """Which targets are trained on, by the name of the token source in a mixture."""
        return {source.name: source.train_on for source in self.ingest.sources} | {DISTILLED: self.distill.train_on}

    @model_validator(mode="after")
    def _names_agree(self) -> "RunConfig":
        source_names = {*self.train_on}
        for phase in self.pretrain.phases:
            if unknown := set(phase.mixture) - source_names:
                raise ValueError(
                    f"pretrain.phases {phase.name!r}: unknown sources {sorted(unknown)} in its mixture; "
                    f"known are {sorted(source_names)}"
                )
        for number, stage in enumerate(TRAINED):
            start = getattr(self, stage).start
            if start in TRAINED[number:]:
                earlier = ", ".join(TRAINED[:number]) or "none"
                raise ValueError(f"{stage}.start: {start!r} is no earlier stage of this run; there is {earlier}")
        # Endpoints must exist; a checker can be a judge, but cannot write answers.
        check_fallbacks(self.endpoints)
        judges = [("align.judge: `endpoint` or `compare`", name) for name in self.align.judge.endpoints]
        writers = [("distill: an endpoint of its teachers or probe", name) for name in self.distill.endpoints]
        writers += [(f"evaluate.models.{i}.endpoint", m.endpoint) for i, m in enumerate(self.evaluate.models)]
        for field, name in (*judges, *writers):
            if name not in self.endpoints:
                raise ValueError(f"{field}: no endpoint {name!r}; [endpoints] has {sorted(self.endpoints)}")
        for field, name in writers:
            for other in with_fallbacks([name], self.endpoints):
                if self.endpoints[other].kind == "checker":
                    raise ValueError(f"{field}: {other!r} is of kind 'checker', which marks answers and writes none")
        for name in self.resources.limits():
            if self.deployment(name).resource:
                raise ValueError(
                    f"deploy.{name}.resource: only the section of a stage may set it, not that of a resource"
                )
        if self.tokenizer.vocabulary > self.model.vocabulary:
            raise ValueError(
                f"model.vocabulary {self.model.vocabulary} is smaller than the tokenizer's {self.tokenizer.vocabulary}"
            )
        if self.ingest.row_length > self.model.context:
            raise ValueError(f"ingest.row_length {self.ingest.row_length} exceeds model.context {self.model.context}")
        return self
