"""The whole configuration: `RunConfig` with a section for each stage, and the checks across sections.

A field that changes what a stage writes belongs in the section of that stage: the fields of a section, except those
marked `Operational`, are hashed into the keys of the stage's artifacts (`configs.keys`). `configs/nautile_370m.toml`
has the source of each value of the paper; the defaults here are ours.
"""

from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, cast

from pydantic import BeforeValidator, Field, ValidationError, create_model, model_validator

from nautile.configs.base import Operational, Section, Seed, SeedName, TrainOn, Worker
from nautile.configs.distill import DistillConfig, IndexConfig
from nautile.configs.endpoint import EndpointConfig, check_fallbacks, check_writer, with_fallbacks
from nautile.configs.evaluation import EvaluateConfig, HeldOutConfig, ReportConfig
from nautile.configs.ingest import IngestConfig
from nautile.configs.model import ModelConfig, TokenizerConfig
from nautile.configs.operation import (
    DeployConfig,
    Deployed,
    LaunchConfig,
    OperationConfig,
    ResourcesConfig,
    RetentionConfig,
    ScheduleConfig,
    TelemetryConfig,
)
from nautile.configs.stages import STAGES, plugin_section
from nautile.configs.training import (
    TRAINED,
    AlignConfig,
    PretrainConfig,
    ReasonConfig,
    SelfDistillConfig,
    SuperviseConfig,
)


class SeedsConfig(Section):
    """The seeds of a run's random choices. The first three are `seed` of the run where they are not set.

    A step's key holds the seeds that it uses and no others. Distillation has a seed of its own (`distill.seed`), so
    that another seed of the run asks no teacher again.
    """

    data: Seed | None = None  # generated texts, the order of rows, problems of the reinforcement stages and their order
    weights: Seed | None = None  # initial parameters
    sampling: Seed | None = None  # completions of the reinforcement stages, order of traces and of supervised rows
    # Generated test problems, selection of a benchmark's items, order of options, answers. `seed` does not
    # set it: what is measured stays the same over runs.
    evaluation: Seed = 0


DISTILLED = "distilled"  # the distilled documents in a mixture; every other name is a source of `ingest`


def _plugins_part(name: str, value: Any) -> Section | None:
    """The section of a plug-in's stage, by the model that the stage declares."""
    if value is None or isinstance(value, Section):
        return value
    if (model := plugin_section(name)) is None:
        raise ValueError(f"the stage {name} has no section")
    try:
        part: Section = model.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    return part


if TYPE_CHECKING:
    PluginSections = Section
else:
    PluginSections = create_model(
        "PluginSections",
        __base__=Section,
        # The worker's as a whole: only its author knows which of its fields is a path, an address or a budget.
        **{
            name: (Worker[Annotated[Any, BeforeValidator(partial(_plugins_part, name))]], None)
            for name in STAGES.plug_ins
        },
    )


class RunConfig(PluginSections):
    """Everything that determines a run. `configs.load.load` reads it from TOML.

    A configuration without the section of a stage that is None by default has no such step; `false` removes the section
    of an extended file. A stage of a plug-in has a section of its name.
    """

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
    held_out: HeldOutConfig | None = None  # None: what `evaluate` asks
    ingest: IngestConfig
    index: IndexConfig | None = None  # with `[distill]`, which reads it: its defaults
    distill: DistillConfig | None = None
    pretrain: PretrainConfig
    supervise: SuperviseConfig | None = None
    align: AlignConfig | None = None
    reason: ReasonConfig | None = None
    self_distill: SelfDistillConfig | None = None
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
        distilled: dict[str, TrainOn] = {DISTILLED: self.distill.train_on} if self.distill else {}
        return {source.name: source.train_on for source in self.ingest.sources} | distilled

    @property
    def trained(self) -> tuple[str, ...]:
        """The stages of this configuration that train the model, in order; each continues the one before."""
        return tuple(name for name in TRAINED if getattr(self, name) is not None)

    @model_validator(mode="before")
    @classmethod
    def _without_removed_sections(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        if values.get("distill") and values.get("index") is False:
            raise ValueError("index is false, but [distill] shows its teachers exemplars from it: remove both or none")
        optional = [name for name in STAGES if name in cls.model_fields and cls.model_fields[name].default is None]
        values = {name: value for name, value in values.items() if name not in optional or value is not False}
        if values.get("distill") is not None and values.get("index") is None:
            values["index"] = {}
        return values

    @model_validator(mode="after")
    def _names_agree(self) -> "RunConfig":
        source_names = {*self.train_on}
        for phase in self.pretrain.phases:
            if self.distill is None and DISTILLED in phase.mixture:
                raise ValueError(
                    f"pretrain.phases {phase.name!r} mixes {DISTILLED!r}, and there is no [distill]: add the section, "
                    "or take it out of the mixture"
                )
            if unknown := set(phase.mixture) - source_names:
                raise ValueError(
                    f"pretrain.phases {phase.name!r}: unknown sources {sorted(unknown)} in its mixture; "
                    f"known are {sorted(source_names)}"
                )
        for number, stage in enumerate(self.trained):
            start = getattr(self, stage).start
            if start in TRAINED and start not in self.trained[:number]:
                earlier = ", ".join(self.trained[:number]) or "none"
                raise ValueError(f"{stage}.start: {start!r} is no earlier stage of this run; there is {earlier}")
        # Endpoints must exist; a checker can be a judge, but cannot write answers.
        check_fallbacks(self.endpoints)
        judge_names = self.align.judge.endpoints if self.align else []
        judges = [("align.judge: `endpoint` or `compare`", name) for name in judge_names]
        teacher_names = self.distill.endpoints if self.distill else []
        writers = [("distill: an endpoint of its teachers or probe", name) for name in teacher_names]
        writers += [(f"evaluate.models.{i}.endpoint", m.endpoint) for i, m in enumerate(self.evaluate.models)]
        for field, name in (*judges, *writers):
            if name not in self.endpoints:
                raise ValueError(f"{field}: no endpoint {name!r}; [endpoints] has {sorted(self.endpoints)}")
        for field, name in writers:
            for other in with_fallbacks([name], self.endpoints):
                check_writer(field, other, self.endpoints[other])
        for name in self.resources.limits():
            if self.deployment(name).resource:
                raise ValueError(
                    f"deploy.{name}.resource: only the section of a stage may set it, not that of a resource"
                )
        trained_on = set(self.tokenizer.train.megabytes) if self.tokenizer.train else set()
        if unknown := trained_on - {source.name for source in self.ingest.sources}:
            raise ValueError(f"tokenizer.train.megabytes: ingest.sources has none named {', '.join(sorted(unknown))}")
        if self.tokenizer.vocabulary > self.model.vocabulary:
            raise ValueError(
                f"model.vocabulary {self.model.vocabulary} is smaller than the tokenizer's {self.tokenizer.vocabulary}"
            )
        if self.ingest.row_length > self.model.context:
            raise ValueError(f"ingest.row_length {self.ingest.row_length} exceeds model.context {self.model.context}")
        return self


for _name in {*STAGES.plug_ins} & {*RunConfig.__annotations__}:
    STAGES.refuse(STAGES.plug_ins[_name], "the configuration")
