"""The whole configuration: `RunConfig` with one section per stage, and the checks between sections.

A field that changes what a stage writes belongs into that stage's section, because the section's fields are hashed into
the key of its artifacts, but for those marked `Operational` (`configs.keys`). `configs/nautile_370m.toml` gives the
source of each of the paper's values; the defaults are ours.
"""

from typing import cast

from pydantic import Field, NonNegativeInt, model_validator

from configs.base import Operational, Section
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
from configs.training import AlignConfig, PretrainConfig, ReasonConfig, SelfDistillConfig


class RunConfig(Section):
    """Everything that determines a run. `configs.load.load` reads it from TOML."""

    name: Operational[str] = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    seed: NonNegativeInt = 0  # of every random choice, together with names and counters
    tokenizer: TokenizerConfig
    model: ModelConfig
    launch: Operational[LaunchConfig] = LaunchConfig()
    telemetry: Operational[TelemetryConfig] = TelemetryConfig()
    operation: Operational[OperationConfig] = OperationConfig()
    resources: Operational[ResourcesConfig] = ResourcesConfig()
    deploy: Operational[dict[Deployed, DeployConfig]] = {}
    schedule: Operational[ScheduleConfig] = ScheduleConfig()
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
    retention: Operational[RetentionConfig] = RetentionConfig()

    def deployment(self, name: str | None) -> DeployConfig:
        """`[deploy.NAME]`, or its defaults."""
        return self.deploy.get(cast(Deployed, name), DeployConfig())

    @model_validator(mode="after")
    def _names_agree(self) -> "RunConfig":
        known = {source.name for source in self.ingest.sources} | {"distilled"}
        for phase in self.pretrain.phases:
            if unknown := set(phase.mixture) - known:
                raise ValueError(
                    f"pretrain.phases {phase.name!r}: unknown sources {sorted(unknown)} in its mixture; "
                    f"known are {sorted(known)}"
                )
        check_fallbacks(self.endpoints)
        named = [("align.judge: `endpoint` or `compare`", name) for name in self.align.judge.endpoints]
        answering = [("distill: an endpoint of its teachers or probe", name) for name in self.distill.endpoints]
        answering += [(f"evaluate.models.{i}.endpoint", m.endpoint) for i, m in enumerate(self.evaluate.models)]
        for field, name in (*named, *answering):
            if name not in self.endpoints:
                raise ValueError(f"{field}: no endpoint {name!r}; [endpoints] has {sorted(self.endpoints)}")
        for field, name in answering:
            for other in with_fallbacks([name], self.endpoints):
                if self.endpoints[other].kind == "checker":
                    raise ValueError(f"{field}: {other!r} is of kind 'checker', which marks answers and writes none")
        for name in self.resources.limits():
            if self.deployment(name).resource:
                raise ValueError(
                    f"deploy.{name}.resource: this section is of a resource; a stage's own may use another"
                )
        if self.tokenizer.vocabulary > self.model.vocabulary:
            raise ValueError(
                f"model.vocabulary {self.model.vocabulary} is smaller than the tokenizer's {self.tokenizer.vocabulary}"
            )
        if self.ingest.row_length > self.model.context:
            raise ValueError(f"ingest.row_length {self.ingest.row_length} exceeds model.context {self.model.context}")
        return self
