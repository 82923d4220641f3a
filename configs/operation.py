"""The operational sections: processes, deployments, approvals, scheduled evaluation, retention and telemetry.

None of this is hashed into keys, because it does not change what a stage writes, except `PlanConfig`, the settings of
`nautile plan`, whose estimates are artifacts.
"""

import re
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self
from urllib.parse import urlsplit
from zoneinfo import ZoneInfo

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, create_model, field_validator, model_validator

from nautile.configs.base import Section, Share
from nautile.configs.endpoint import is_variable_name
from nautile.configs.stages import STAGES


class LaunchConfig(Section):
    """How the processes of a stage are started.

    The work items of a stage (one file each) are processed by `workers` processes, on this machine or, with `engine`
    "ray", on a cluster whose machines share the store.

    An accelerator stage is one process, or `processes` processes that compute together: on this machine, or each on its
    own host. With `engine` "ray" the cluster provides the hosts; else the template `command` starts each process. In it
    {host} is the number of the process, from 0, {commit} the commit of this checkout, and {member} the command to run
    on the host, in a checkout.
    """

    engine: Literal["processes", "ray"] = "processes"
    workers: PositiveInt | None = None  # concurrent work items; None: this machine's cores, or the cluster's CPUs
    # Niceness of a run and all its processes, so that servers, pages and commands respond first. 10 is the default of
    # nice(1): a ninth of the CPU share of an ordinary process when both want a core. On a dedicated machine: 0.
    niceness: Annotated[int, Field(ge=0, le=19)] = 10
    ray_address: str = ""  # engine "ray"; empty: RAY_ADDRESS, or the cluster of this machine
    processes: PositiveInt = 1  # processes of each stage in `stages`
    stages: tuple[str, ...] = ("pretrain",)
    command: str = ""  # empty: all processes run on this machine, or on the cluster of engine "ray"
    coordinator: str = ""  # address:port of the first process; empty: detected
    host_resources: dict[str, PositiveFloat] = {}  # engine "ray": resources of a host by Ray's names: {GPU = 8}
    tpu_slice: str = Field(default="", pattern=r"^(\w+:\d+(x\d+){1,2})?$")  # engine "ray": such as v4:2x2x4
    topology: str = "v4:2x4x4"  # the chips that `nautile plan` compiles for by default
    # For `nautile plan`, and for what steps on accelerators cost; None: the list price in model/capacity/topology.py.
    dollars_per_chip_hour: NonNegativeFloat | None = None
    cache_gigabytes: PositiveFloat = 100.0  # size of a host's cache of token shards, if the store has a remote
    # During pretraining on CPU, compile the programs of the later stages at low priority. It cannot compile programs
    # for an accelerator, so it is useless there.
    compile_ahead: bool = False
    silent_s: PositiveFloat = 120.0  # seconds without a heartbeat after which a host counts as dead

    @model_validator(mode="after")
    def _engine_fits(self) -> "LaunchConfig":
        for name in ("ray_address", "host_resources", "tpu_slice"):
            if getattr(self, name) and self.engine != "ray":
                raise ValueError(f"launch.{name} needs engine 'ray'; launch.engine is {self.engine!r}")
        if self.on_ray and self.coordinator:
            raise ValueError("launch.coordinator: cannot be set with engine 'ray', which uses the cluster's first host")
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
        """Whether the processes of a stage are actors of a Ray cluster."""
        return self.engine == "ray" and self.processes > 1 and not self.command


class PlanConfig(Section):
    """The settings of `nautile plan`, which estimates memory and time before a run."""

    topology: str  # the chips to compile for
    row_length: PositiveInt  # tokens
    mfu: Annotated[float, Field(gt=0.0, le=1.0)] = 0.4  # share of the chips' peak that the estimate of time assumes
    largest: bool = True  # also find the largest batch that fits into memory


class ResourcesConfig(Section):
    """How many steps may use a resource at the same time; with deployments, the steps of all runs together.

    The default is one, because a step uses all of its resource: two trainings on one accelerator take longer together
    than one after the other.
    """

    accelerator: PositiveInt = 1  # training, reinforcement, the evaluation of checkpoints
    cpu: PositiveInt = 1  # ingestion, the index, the report, and steps that use only endpoints on this machine
    network: PositiveInt = 1  # steps that wait for remote endpoints

    def limits(self) -> dict[str, int]:
        """The limits by the name of the resource."""
        return self.model_dump()


if TYPE_CHECKING:
    Deployed = str
else:
    Deployed = Literal[("pipeline", *STAGES, "evaluation", "regression", "accelerator", "cpu", "network")]


class DeployConfig(Section):
    """The work pool of a deployment, `[deploy.NAME]`, and what its stage uses there.

    If NAME is a resource, the pool is that of all stages that use the resource and have no section of their own. The
    deployment `pipeline` runs all its stages in its own pool; the pool of a stage is for the stage's own deployment.
    """

    pool: str = Field(default="nautile", pattern=r"^[^/%&><\n]+$")  # the name of a Prefect work pool, of any type
    resource: Literal["accelerator", "cpu", "network"] | None = None  # whose limit applies; None: as in the DAG
    job_variables: dict[str, Any] = {}  # for the pool's job template; `env` is merged with ours. No secrets here


NEWEST = "newest"
_CRON_FIELD = re.compile(r"[0-9A-Za-z*/,#?-]+")


# Eleven years: a time of day that is much later than that cannot be computed.
_Hours = Annotated[float, Field(gt=0, le=100_000)]


class StageOperation(Section):
    """Approval by a person, tolerance of outages, and CPU priority of a stage.

    A stage that is reused needs no approval.
    """

    approve: bool = False  # before the stage begins
    at_budget: Literal["go_on", "pause"] = "go_on"  # "pause": ask for approval when the budget runs out too early
    hours: _Hours = 72.0  # without an approval within this time the run fails
    outage_hours: _Hours = 24.0  # how long to retry while an endpoint, the Hub or the remote store is down
    niceness: int = Field(default=0, ge=0, le=19)  # of its processes; 19 leaves the cores to concurrent stages

    @property
    def patience(self) -> timedelta:
        """`hours` as a `timedelta`."""
        return timedelta(hours=self.hours)


if TYPE_CHECKING:
    StageOperations = Section
else:
    StageOperations = create_model(
        "StageOperations", __base__=Section, **{name: (StageOperation, StageOperation()) for name in STAGES}
    )


class Alert(Section):
    """A message to the webhook of `notify` when the newest value of a metric is above or below a limit.

    It is sent once for each start of a run, whichever of its steps is first beyond the limit.
    """

    metric: str = Field(min_length=1, max_length=200)  # as in `nautile sql "SELECT DISTINCT name FROM metrics"`
    above: float | None = Field(default=None, allow_inf_nan=False)
    below: float | None = Field(default=None, allow_inf_nan=False)
    step: str = ""  # label of the step, such as align; empty: any

    @model_validator(mode="after")
    def _has_a_limit(self) -> Self:
        if self.above is None and self.below is None:
            raise ValueError(f"the alert on {self.metric} needs a limit: `above` or `below`")
        if self.above is not None and self.below is not None and self.above < self.below:
            raise ValueError(f"the alert on {self.metric} fires always: `above` {self.above:g} is less than `below`")
        return self

    def crossed(self, label: str, value: float) -> str:
        """Which limit a value of a step is beyond, in words; "" if none, or if the rule is for another step."""
        if self.step and self.step != label:
            return ""
        if self.above is not None and value > self.above:
            return f"above {self.above:g}"
        return f"below {self.below:g}" if self.below is not None and value < self.below else ""


class OperationConfig(StageOperations):
    """`[operation.STAGE]`, a section for each stage, the webhook for notifications, and alerts on metrics to it."""

    # The NAME of the environment variable with the URL of a webhook; never the URL itself, which is a secret.
    notify: str = Field(default="", pattern=r"^([A-Za-z_][A-Za-z0-9_]*)?$")
    alerts: tuple[Alert, ...] = ()

    @field_validator("notify")
    @classmethod
    def _is_a_name(cls, notify: str) -> str:
        if notify and not is_variable_name(notify):
            raise ValueError("it is the NAME of an environment variable, in capital letters, not the URL itself")
        return notify

    @model_validator(mode="after")
    def _alerts_have_a_receiver(self) -> Self:
        if self.alerts and not self.notify:
            raise ValueError("alerts are sent to a webhook: set `notify` to the NAME of the variable with its URL")
        return self

    def of(self, stage: str) -> StageOperation:
        """The section of a stage."""
        section: StageOperation = getattr(self, stage)
        return section


class ScheduleConfig(Section):
    """The scheduled evaluation of a checkpoint, and the criterion of a regression.

    A benchmark has regressed against an earlier evaluation (`against`) if the upper end of the 95 % interval of the
    paired difference is below -`margin`. With `rule` "holm" its exact p-value must also be below 0.05 after Holm's
    correction for the number of benchmarks.
    """

    cron: str = ""  # five fields; empty: deployed without a schedule
    timezone: str = "UTC"
    checkpoint: str = NEWEST  # "newest" of this configuration's pipeline, or an artifact id
    against: Annotated[tuple[Literal["last", "best"], ...], Field(min_length=1)] = ("last", "best")
    rule: Literal["interval", "holm"] = "interval"
    margin: Share = 0.0  # 0.01 is one percentage point

    @model_validator(mode="before")
    @classmethod
    def _moved(cls, fields: Any) -> Any:
        if isinstance(fields, dict) and "webhook" in fields:
            raise ValueError("schedule.webhook was replaced by `notify` in [operation], for all notifications")
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
        except (KeyError, ValueError, OSError):  # unknown, not a valid name, a folder of the database
            raise ValueError(f"no time zone {timezone!r}: use a name such as UTC or Europe/Paris") from None


class RetentionConfig(Section):
    """Which live artifacts `nautile store gc` keeps; if neither `newest` nor `days` is set, all of them.

    Otherwise an artifact is kept if any rule keeps it, or if a kept artifact was made from it, directly or indirectly.
    The artifacts of an execution are kept or removed together, because a stage is reused only if all of them exist.
    """

    newest: PositiveInt | None = None  # so many of the newest executions of each label (evaluate:align)
    days: NonNegativeFloat | None = None  # everything that is younger
    kinds: tuple[str, ...] = Field(default=())  # all artifacts of these kinds
    pins: tuple[str, ...] = Field(default=())  # these artifacts, by id

    @property
    def retires(self) -> bool:
        """Whether the rules may remove live artifacts."""
        return self.newest is not None or self.days is not None


class TelemetryConfig(Section):
    """Where metrics are sent in addition to the store; nowhere by default.

    Keys belong in the environment, never here: a collector's in OTEL_EXPORTER_OTLP_HEADERS, MLflow's in
    MLFLOW_TRACKING_TOKEN or MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD.
    """

    tensorboard: str = ""  # a folder for event files, written to `<folder>/<run>/<label>`
    otlp: str = ""  # address of an OpenTelemetry collector (http://host:4318); metrics go to /v1/metrics
    mlflow: str = ""  # address of an MLflow tracking server (http://host:5000)
    wandb: str = ""  # a folder for offline runs of W&B, to upload with `wandb sync`
    project: str = Field(default="nautile", pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")  # for the last two
    timeout_s: PositiveFloat = 5.0  # of a request to a server; failed deliveries are counted

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
                    f"telemetry.{name}: an address may not contain a key; put it into the environment as {variable}"
                )
            if address and (parts.scheme not in ("http", "https") or not parts.hostname):
                raise ValueError(f"telemetry.{name} {address!r}: use an address such as {example}")
        return self
