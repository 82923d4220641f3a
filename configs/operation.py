"""How a configuration is operated: which stages ask before they begin, and when a checkpoint is evaluated by itself.

In no key: nothing here alters what a stage writes.
"""

import re
from datetime import timedelta
from typing import Annotated, Literal
from urllib.parse import urlsplit
from zoneinfo import ZoneInfo

from pydantic import (
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from configs.base import Section, Share


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


NEWEST = "newest"
_CRON_FIELD = re.compile(r"[0-9A-Za-z*/,#?-]+")


class StageOperation(Section):
    """Where a run stops to ask a person. A stage that is reused costs nothing and asks nothing.

    `approve`: before the stage begins. `at_budget`: after it, where its money ran out before its work was done: "pause"
    asks whether to go on with what was made, "go_on" does not ask. A question that nobody answers within `hours` fails
    the run.
    """

    approve: bool = False
    at_budget: Literal["go_on", "pause"] = "go_on"
    hours: PositiveFloat = 72.0

    @property
    def patience(self) -> timedelta:
        return timedelta(hours=self.hours)


class OperationConfig(Section):
    """`[operation.STAGE]`, one for each stage."""

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


class ScheduleConfig(Section):
    """The scheduled evaluation. `cron` empty: it is deployed, and fires only when asked to.

    `checkpoint`: "newest" in the store, or an artifact id. A benchmark has regressed against an evaluation in `against`
    if the upper end of the 95 % interval of its paired lead is below minus `margin` (a share: 0.01 is one point); with
    `rule` "holm" its exact p must besides stay under 0.05 after Holm's correction for the number of benchmarks.
    `webhook` is the name of the environment variable that holds the URL to tell, never the URL.
    """

    cron: str = ""
    timezone: str = "UTC"
    checkpoint: str = NEWEST
    against: Annotated[tuple[Literal["last", "best"], ...], Field(min_length=1)] = ("last", "best")
    rule: Literal["interval", "holm"] = "interval"
    margin: Share = 0.0
    webhook: str = Field(default="", pattern=r"^([A-Za-z_][A-Za-z0-9_]*)?$")

    @field_validator("cron")
    @classmethod
    def _five_fields(cls, cron: str) -> str:
        fields = cron.split()
        if fields and (len(fields) != 5 or not all(_CRON_FIELD.fullmatch(field) for field in fields)):
            raise ValueError("five fields are meant: minute, hour, day, month, weekday (`0 3 * * *`: at three)")
        return cron

    @field_validator("timezone")
    @classmethod
    def _known(cls, timezone: str) -> str:
        try:
            return ZoneInfo(timezone).key
        except (KeyError, ValueError, OSError):  # unknown, no name at all, a folder of names
            raise ValueError(f"no time zone {timezone!r}: a name such as UTC or Europe/Paris is meant") from None


class RetentionConfig(Section):
    """What stays. While neither `newest` nor `days` is given, every live artifact does.

    Given one, an artifact stays that any rule keeps, and whatever a kept one was made from, down to the first text.
    What one execution published stays or goes as a whole, for a stage is reused only if all of it is there.
    """

    newest: PositiveInt | None = None  # of each label (evaluate:align), so many of the latest
    days: NonNegativeFloat | None = None  # all that is younger
    kinds: tuple[str, ...] = Field(default=())  # these kinds, however old
    pins: tuple[str, ...] = Field(default=())  # these artifacts, by id

    @property
    def retires(self) -> bool:
        return self.newest is not None or self.days is not None


class TelemetryConfig(Section):
    """Nothing is sent unless one of these is set. Keys of a collector stand in OTEL_EXPORTER_OTLP_HEADERS, never here.

    `tensorboard`: a folder for event files, `<folder>/<run>/<label>`. `otlp`: the address of an OpenTelemetry
    collector (http://host:4318); metrics go to its /v1/metrics.
    """

    tensorboard: str = ""
    otlp: str = ""
    timeout_s: PositiveFloat = 5.0  # for the collector to take a batch; what it does not take is counted and dropped

    @model_validator(mode="after")
    def _address_usable(self) -> "TelemetryConfig":
        parts = urlsplit(self.otlp)
        if self.otlp and (parts.scheme not in ("http", "https") or not parts.hostname):
            raise ValueError(f"telemetry.otlp {self.otlp!r}: an address like http://127.0.0.1:4318 is meant")
        if parts.username or parts.password or parts.query:
            raise ValueError(
                "telemetry.otlp: no key belongs in an address; put it into the environment as "
                "OTEL_EXPORTER_OTLP_HEADERS"
            )
        return self

    @property
    def wanted(self) -> bool:
        return bool(self.tensorboard or self.otlp)
