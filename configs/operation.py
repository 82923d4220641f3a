"""How a run is operated: its processes, deployments, approvals, the scheduled evaluation, retention and telemetry.

None of this is in a key: it does not change what a stage writes. (`PlanConfig` is the exception: the settings of
`nautile plan`, whose estimates are artifacts of their own.)
"""

import re
from datetime import timedelta
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit
from zoneinfo import ZoneInfo

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, field_validator, model_validator

from configs.base import Section, Share


class LaunchConfig(Section):
    """How the processes of a stage are started.

    A stage's work items (a file each) are done by `workers` processes: on this machine, or with `engine` "ray" on a
    cluster, whose machines all share the store.

    An accelerator stage is one process, or `processes` that compute as one: on this machine, or each on a host of its
    own. With `engine` "ray" the cluster has the hosts; else the template `command` starts each process, in which {host}
    counts from 0, {commit} is this checkout's commit, and {member} the command to run there, in a checkout.
    """

    engine: Literal["processes", "ray"] = "processes"
    workers: PositiveInt | None = None  # work items at a time; None: this machine's cores, or the cluster's CPUs
    # Of a run and all its processes (`nice`): servers, pages and commands go first. 10 is the default of nice(1), a
    # ninth of an ordinary process's share where both want a core. A machine of your own alone: 0.
    niceness: Annotated[int, Field(ge=0, le=19)] = 10
    ray_address: str = ""  # engine "ray"; empty: RAY_ADDRESS, or the cluster of this machine
    processes: PositiveInt = 1  # of each stage in `stages`
    stages: tuple[str, ...] = ("pretrain",)
    command: str = ""  # empty: all processes run on this machine, or on the cluster of engine "ray"
    coordinator: str = ""  # address:port of the first process; empty: detected
    host_resources: dict[str, PositiveFloat] = {}  # engine "ray": of each host, in Ray's names: {GPU = 8}
    tpu_slice: str = Field(default="", pattern=r"^(\w+:\d+(x\d+){1,2})?$")  # engine "ray": of v4:2x2x4, say
    topology: str = "v4:2x4x4"  # the chips that `nautile plan` compiles for, if its option names no others
    cache_gigabytes: PositiveFloat = 100.0  # of token shards that a host keeps, where the store has a remote
    # With a pretraining on CPU: compile the programs of the stages after it meanwhile, in the time that it leaves of
    # the cores. Of an accelerator's programs it makes none, so there it is useless.
    compile_ahead: bool = False
    silent_s: PositiveFloat = 120.0  # without a heartbeat for so long a host counts as dead (whole seconds)

    @model_validator(mode="after")
    def _engine_fits(self) -> "LaunchConfig":
        for name in ("ray_address", "host_resources", "tpu_slice"):
            if getattr(self, name) and self.engine != "ray":
                raise ValueError(f"launch.{name} needs engine 'ray'; launch.engine is {self.engine!r}")
        if self.on_ray and self.coordinator:
            raise ValueError("launch.coordinator: with engine 'ray' it is the first host that the cluster gives")
        return self

    @model_validator(mode="after")
    def _fields_known(self) -> "LaunchConfig":
        try:
            self.command.format(host=0, processes=1, commit="", member="")
        except (KeyError, IndexError, ValueError) as error:
            raise ValueError(
                f"launch.command: only {{host}}, {{processes}}, {{commit}} and {{member}} are replaced in it ({error})"
            ) from None
        if self.command and "{member}" not in self.command:
            raise ValueError("launch.command: it must contain {member}, the command to run on each host")
        return self

    @property
    def on_ray(self) -> bool:
        """Whether the processes of one stage are actors of a Ray cluster."""
        return self.engine == "ray" and self.processes > 1 and not self.command


class PlanConfig(Section):
    """The settings of `nautile plan`, which estimates memory and time before a run."""

    topology: str  # the chips to compile for
    row_length: PositiveInt  # tokens
    mfu: Annotated[float, Field(gt=0.0, le=1.0)] = 0.4  # share of the chips' peak that the estimate of time assumes
    largest: bool = True  # also find the largest batch that fits into memory


class ResourcesConfig(Section):
    """How many steps work at a time on each resource; of a server's deployments, those of all runs together.

    Each step takes all of what it uses, hence one: two trainings on one accelerator are slower than one after the
    other.
    """

    accelerator: PositiveInt = 1  # training, reinforcement, the evaluation of checkpoints
    cpu: PositiveInt = 1  # ingestion, the index, the report, and whatever asks embedded endpoints only
    network: PositiveInt = 1  # steps that wait for endpoints elsewhere

    def limits(self) -> dict[str, int]:
        """The limit of each resource, by its name."""
        return self.model_dump()


Deployed = Literal[
    "pipeline", "held_out", "ingest", "index", "distill", "pretrain", "align", "reason", "self_distill", "evaluate",
    "report", "evaluation", "regression", "accelerator", "cpu", "network",
]  # fmt: skip


class DeployConfig(Section):
    """The work pool of one deployment, `[deploy.NAME]`, and what its stage uses there.

    Where NAME is a resource it is the pool of all stages that use it, unless a stage's own section says otherwise. The
    `pipeline` runs all of its stages where its own pool says; a stage's pool is that of the stage's own deployment.
    """

    pool: str = Field(default="nautile", pattern=r"^[^/%&><\n]+$")  # the name of a Prefect work pool, of any type
    resource: Literal["accelerator", "cpu", "network"] | None = None  # whose limit its steps take; None: as in the DAG
    job_variables: dict[str, Any] = {}  # of the pool's job template; its `env` is added to ours. Never a secret


NEWEST = "newest"
_CRON_FIELD = re.compile(r"[0-9A-Za-z*/,#?-]+")


class StageOperation(Section):
    """Where a run stops for a person's approval, how long it sits out an outage, and which stage gets the cores first.

    A stage that is reused costs nothing and needs no approval.
    """

    approve: bool = False  # before the stage begins
    at_budget: Literal["go_on", "pause"] = "go_on"  # "pause": also when its money runs out before its work is done
    hours: PositiveFloat = 72.0  # an approval that nobody gives within this time fails the run
    outage_hours: PositiveFloat = 24.0  # an endpoint, the Hub or the store's remote is away, and nothing gets done
    niceness: int = Field(default=0, ge=0, le=19)  # of its processes: 19 leaves the cores to stages beside it

    @property
    def patience(self) -> timedelta:
        """`hours` as a time."""
        return timedelta(hours=self.hours)


class OperationConfig(Section):
    """`[operation.STAGE]`, a section for each stage, and where the operator gets messages."""

    # The NAME of the environment variable that holds the URL of a webhook; never the URL, which is a secret.
    notify: str = Field(default="", pattern=r"^([A-Za-z_][A-Za-z0-9_]*)?$")

    held_out: StageOperation = StageOperation()
    ingest: StageOperation = StageOperation()
    index: StageOperation = StageOperation()
    distill: StageOperation = StageOperation()
    pretrain: StageOperation = StageOperation()
    align: StageOperation = StageOperation()
    reason: StageOperation = StageOperation()
    self_distill: StageOperation = StageOperation()
    evaluate: StageOperation = StageOperation()
    report: StageOperation = StageOperation()

    def of(self, stage: str) -> StageOperation:
        """The section of one stage."""
        return getattr(self, stage)


OPERATED = tuple(name for name, field in OperationConfig.model_fields.items() if field.annotation is StageOperation)
"""The stages that `[operation]` has a section for: all of the pipeline."""


class ScheduleConfig(Section):
    """The scheduled evaluation of a checkpoint, and when it counts as a regression.

    A benchmark has regressed against an evaluation in `against` if the upper end of the 95 % interval of the paired
    difference is below minus `margin`; with `rule` "holm" its exact p must also be under 0.05 after Holm's correction
    for the number of benchmarks.
    """

    cron: str = ""  # five fields; empty: deployed without a schedule, to be started by hand
    timezone: str = "UTC"
    checkpoint: str = NEWEST  # "newest" in the store, or an artifact id
    against: Annotated[tuple[Literal["last", "best"], ...], Field(min_length=1)] = ("last", "best")
    rule: Literal["interval", "holm"] = "interval"
    margin: Share = 0.0  # 0.01 is one percentage point

    @model_validator(mode="before")
    @classmethod
    def _moved(cls, fields: Any) -> Any:
        if isinstance(fields, dict) and "webhook" in fields:
            raise ValueError("schedule.webhook is now `notify` in [operation], for all messages")
        return fields

    @field_validator("cron")
    @classmethod
    def _five_fields(cls, cron: str) -> str:
        fields = cron.split()
        if fields and (len(fields) != 5 or not all(_CRON_FIELD.fullmatch(field) for field in fields)):
            raise ValueError("five fields are needed: minute, hour, day, month, weekday (`0 3 * * *`: daily at three)")
        return cron

    @field_validator("timezone")
    @classmethod
    def _known(cls, timezone: str) -> str:
        try:
            return ZoneInfo(timezone).key
        except (KeyError, ValueError, OSError):  # unknown, no name at all, a folder of names
            raise ValueError(f"no time zone {timezone!r}: use a name such as UTC or Europe/Paris") from None


class RetentionConfig(Section):
    """Which live artifacts `nautile store gc` keeps. While neither `newest` nor `days` is set, all of them.

    Otherwise an artifact stays if any rule keeps it, or if a kept one was made from it, at whatever distance. What one
    execution published stays or goes as a whole: a stage is reused only if all of it is there.
    """

    newest: PositiveInt | None = None  # so many of the newest of each label (evaluate:align)
    days: NonNegativeFloat | None = None  # everything younger
    kinds: tuple[str, ...] = Field(default=())  # these kinds, however old
    pins: tuple[str, ...] = Field(default=())  # these artifacts, by id

    @property
    def retires(self) -> bool:
        """Whether the rules let any live artifact go."""
        return self.newest is not None or self.days is not None


class TelemetryConfig(Section):
    """Where metrics are sent besides the store; nowhere by default. Keys belong into the environment, never here: a
    collector's into OTEL_EXPORTER_OTLP_HEADERS, MLflow's into MLFLOW_TRACKING_TOKEN, or _USERNAME and _PASSWORD."""

    tensorboard: str = ""  # a folder for event files, in `<folder>/<run>/<label>`
    otlp: str = ""  # an OpenTelemetry collector (http://host:4318), which gets metrics at /v1/metrics
    mlflow: str = ""  # an MLflow tracking server (http://host:5000)
    trackio: str = ""  # a folder of trackio's databases
    wandb: str = ""  # a folder of W&B's offline runs, for `wandb sync`; nothing is sent from here
    project: str = Field(default="nautile", pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")  # of those three
    timeout_s: PositiveFloat = 5.0  # of a request to a server; what fails is counted

    @model_validator(mode="after")
    def _addresses_usable(self) -> "TelemetryConfig":
        for name, example, variable in (
            ("otlp", "http://127.0.0.1:4318", "OTEL_EXPORTER_OTLP_HEADERS"),
            ("mlflow", "http://127.0.0.1:5000", "MLFLOW_TRACKING_TOKEN"),
        ):
            address = getattr(self, name)
            parts = urlsplit(address)
            if parts.username or parts.password or parts.query:
                raise ValueError(
                    f"telemetry.{name}: no key belongs in an address; put it into the environment as {variable}"
                )
            if address and (parts.scheme not in ("http", "https") or not parts.hostname):
                raise ValueError(f"telemetry.{name} {address!r}: use an address such as {example}")
        return self
