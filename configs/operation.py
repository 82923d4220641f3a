"""How a configuration is operated: which stages ask before they begin, and when a checkpoint is evaluated by itself.

In no key: nothing here alters what a stage writes.
"""

import re
from datetime import timedelta
from typing import Annotated, Literal
from zoneinfo import ZoneInfo

from pydantic import Field, PositiveFloat, field_validator

from configs.parts import Share
from configs.section import Section

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
