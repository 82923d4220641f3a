"""The fields of events of kinds `run`, `plan` and `note`: the models by which they are validated where they enter.

Event files come from any process of any version on any machine that shares the store. What the commands and pages read
out of a row (the label of a step, the field of a change) is checked once, before it becomes a row of the catalog, so
none of them has to expect anything else. Fields that this version does not know are dropped. An event that does not fit
is left out, and counted (`Catalog.left_out`).
"""

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from nautile.common.text import one_line
from nautile.store.manifest import utc_time

MOST_STEPS = 10_000  # of a plan
LARGEST_INTEGER = 2**63 - 1  # of a column of 64 bits


def as_text(value: Any) -> str:
    """A value as a column of text holds it: other values than texts as JSON, half of a surrogate pair as `?`."""
    text = value if isinstance(value, str) else json.dumps(value)
    return text.encode("utf-8", "replace").decode()  # DuckDB refuses a lone surrogate


def as_line(value: Any) -> str:
    """The same without line breaks and control characters, which could change what a terminal shows."""
    text = as_text(value)
    return text if text.isprintable() else one_line(text)


_Text = Annotated[str, BeforeValidator(as_text)]
_Line = Annotated[str, BeforeValidator(as_line)]
_Name = Annotated[str, BeforeValidator(as_line), Field(min_length=1, max_length=4096)]
# Runs, keys, executions and stages name files: no separators, no control characters, no dot in front.
_Id = Annotated[str, Field(pattern=r"^[^/\\\x00-\x1f\x7f.][^/\\\x00-\x1f\x7f]{0,127}$")]
_OptionalId = _Id | Literal[""]
_Time = Annotated[datetime, BeforeValidator(utc_time)]
_Count = Annotated[int, Field(ge=0, le=LARGEST_INTEGER)]
_State = Literal["running", "done", "reused", "failed", "cancelled", "interrupted", "suspended"]


class _Fields(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class _PlannedStep(_Fields):
    label: _Name
    stage: _OptionalId = ""
    key: _OptionalId = ""
    inputs: list[_Name] = []  # full ids, which garbage collection keeps until the run has ended
    after: list[_Name] = []


class _Change(_Fields):
    field: _Name
    before: Any = None
    after: Any = None


class _Began(_Fields):
    """What attempts and plans have in common. `started` is set to the time of the event if the event has none."""

    id: _Name
    run: _OptionalId | None = None
    config: _Line | None = None
    state: _State
    started: _Time
    ended: _Time | None = None
    error: _Text | None = None
    commit: _Line | None = None
    host: _Line | None = None


class _Attempt(_Began):
    stage: _OptionalId | None = None
    label: _Name
    key: _OptionalId | None = None
    execution: _OptionalId | None = None
    attempt: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    reused: bool | None = None
    forced: bool | None = None
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    peak_bytes: _Count | None = None
    exit_code: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    outputs: dict[_Name, _Name] | None = None


class _Plan(_Began):
    run: _Id
    name: _Line | None = None
    steps: Annotated[list[_PlannedStep], Field(max_length=MOST_STEPS)] = []
    settings: dict[str, Any] = {}
    changes: list[_Change] = []
    resume: _Line | None = None


class _Note(_Fields):
    id: _Id
    text: _Text | None = None
    tags: list[_Line] = []


MODELS: Mapping[str, type[_Fields]] = {"run": _Attempt, "plan": _Plan, "note": _Note}


def checked_fields(kind: str, fields: Mapping[str, Any], time: datetime) -> dict[str, Any]:
    """The fields of an event of a kind of `MODELS`, as plain data. `time`: the event's. Raises `ValueError`."""
    given = {name: value for name, value in fields.items() if value is not None}  # null: the event does not say it
    if kind != "note":
        given.setdefault("started", f"{time.isoformat()}+00:00")
    try:
        checked = MODELS[kind].model_validate(given).model_dump()
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))[:80]}: {first['msg']}") from None
    return {name: value for name, value in checked.items() if value is not None}
