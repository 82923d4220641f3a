"""The catalog's tables, and the conversion of manifests and events into their rows; its views are in `store/views.py`.

Times are UTC; unknown values are NULL. Rows are keyed by the ids in manifests and events, so that ingesting a file
twice changes nothing; of two events with the same id the newer one becomes the row. A run that has ended stays ended
even if a "running" event has a later time, because a clock may have been set back, or be another host's.

Event files come from any process of any version on any machine that shares the store. What the commands and pages read
out of a row (the label of a step, the field of a change) is checked once, before it becomes a row of the catalog, so
none of them has to expect anything else. Fields that this version does not know are dropped. An event that does not fit
is left out, and counted (`Catalog.left_out`).
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import Annotated, Any, Literal

import duckdb
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from nautile.common.text import one_line
from nautile.store.artifacts import Artifact
from nautile.store.events import NAMED_BY_FIELD, with_finite
from nautile.store.manifest import EARLIEST, LATEST, recorded_execution, utc_time

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
    # Built when the first event of the kind is read: most commands read none.
    model_config = ConfigDict(frozen=True, extra="ignore", defer_build=True)


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


SCHEMA = 4  # a catalog with another number is built anew


@dataclass(frozen=True)
class CatalogTable:
    """A table of the catalog: its name, its column definitions in SQL, and the columns that identify a row."""

    name: str
    definition: str
    key: tuple[str, ...] = ("id",)
    open_state: str = ""  # value of the column `state` that any other value replaces, even one with an earlier time
    # DuckDB's schema. `recorded`: the events of all steps; queries read the view of its name, with the run and step.
    place: str = "main"

    @cached_property
    def columns(self) -> dict[str, str]:
        """Column name -> SQL type, in the order of the table."""
        # Without the comments; no type has a comma in it, so commas separate the columns.
        text = " ".join(line.partition("--")[0] for line in self.definition.splitlines())
        return {name: kind for name, kind in map(str.split, text.split(","))}

    def precedence(self, row: dict[str, Any]) -> tuple[bool, datetime]:
        """A sort key for rows with the same id: the greatest one is stored."""
        return bool(self.open_state) and row["state"] != self.open_state, row["time"]

    def fields_of(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of an event that would give this row; without `time`, which is the event's own.

        Queries return JSON as text, and times without their zone.
        """
        fields = {}
        for name, value in row.items():
            kind = self.columns[name]
            if value is not None and kind == "JSON":
                value = json.loads(value)
            elif value is not None and kind == "TIMESTAMP":
                value = value.replace(tzinfo=UTC).isoformat()
            if name != "time":
                fields[name] = value
        return fields

    def create(self) -> str:
        columns = ", ".join(f"{name} {kind}" for name, kind in self.columns.items())
        # Of the events of all steps an index would be larger than the rows, in memory while it is made: what inserts
        # them looks for those that are there (`store.bulk.insert_rows`).
        key = "" if self.place == "recorded" else f", PRIMARY KEY ({', '.join(self.key)})"
        return f"CREATE TABLE {self.place}.{self.name} ({columns}{key})"

    def rows(self) -> str:
        """The query of rows that are given as one list per column, as parameters."""
        # A statement takes milliseconds, however few rows it inserts.
        columns = (f'unnest(?::{kind}[]) AS "{name}"' for name, kind in self.columns.items())
        return f"SELECT {', '.join(columns)}"

    def insert(self, rows: str) -> str:
        """The statement that inserts the rows of a query, whose columns are those of the table, or updates by them.

        An older event never replaces a newer one (see `precedence`). For a table with an index.
        """
        names = list(self.columns)
        newer = ""
        if "time" in names:
            newer = f" WHERE {self._sql_precedence('excluded')} >= {self._sql_precedence(self.name)}"
        updates = ", ".join(f"{name} = excluded.{name}" for name in names if name not in self.key)
        return (
            f"INSERT INTO {self.place}.{self.name} ({', '.join(names)}) {rows} "
            f"ON CONFLICT ({', '.join(self.key)}) DO UPDATE SET {updates}{newer}"
        )

    def _sql_precedence(self, row: str) -> str:
        ended = f"{row}.state IS DISTINCT FROM '{self.open_state}'" if self.open_state else "FALSE"
        return f"({ended}, {row}.time)"


ARTIFACTS = CatalogTable(
    "artifacts",
    """
    id VARCHAR,  -- kind/<12 digits>, with .n when superseded
    kind VARCHAR, key VARCHAR,
    superseded INTEGER,  -- 0: live
    execution VARCHAR, stage VARCHAR, version INTEGER, run VARCHAR, created TIMESTAMP, bytes BIGINT, file_count INTEGER,
    digest VARCHAR, commit VARCHAR, host VARCHAR, config JSON, facts JSON,
    files JSON,  -- path -> {bytes, sha256}
    label VARCHAR,  -- of the step: evaluate:align
    published_as VARCHAR  -- the execution's id in the manifest, which differs after a takeover by another machine
    """,
)
INPUTS = CatalogTable(
    "inputs",
    """
    artifact VARCHAR,  -- artifacts.id of the artifact that was made
    name VARCHAR, kind VARCHAR, key VARCHAR,
    execution VARCHAR,  -- of the input
    published_as VARCHAR  -- of the input: which version of it was read
    """,
    key=("artifact", "name"),
)
ATTEMPTS = CatalogTable(
    "attempts",
    """
    id VARCHAR,  -- of one attempt at one step
    run VARCHAR, config VARCHAR, stage VARCHAR, label VARCHAR, key VARCHAR, execution VARCHAR, attempt INTEGER,
    state VARCHAR,  -- running, done, reused, failed, cancelled, interrupted
    reused BOOLEAN, forced BOOLEAN, started TIMESTAMP, ended TIMESTAMP, seconds DOUBLE, peak_bytes BIGINT,
    exit_code INTEGER,
    outputs JSON,  -- kind -> artifact id
    error VARCHAR, commit VARCHAR, host VARCHAR, time TIMESTAMP
    """,
    open_state="running",
)
METRICS = CatalogTable(
    "metrics",
    """
    id VARCHAR, execution VARCHAR, stage VARCHAR, name VARCHAR, step BIGINT, value DOUBLE, source VARCHAR,
    time TIMESTAMP
    """,
    key=("execution", "id"),
    place="recorded",
)
CALLS = CatalogTable(
    "calls",
    """
    id VARCHAR, execution VARCHAR, stage VARCHAR, endpoint VARCHAR, model VARCHAR, purpose VARCHAR, tag VARCHAR,
    digest VARCHAR, attempt INTEGER, status VARCHAR, cached BOOLEAN, tokens_in BIGINT, tokens_out BIGINT,
    latency_s DOUBLE, dollars DOUBLE, error VARCHAR,
    fields JSON,  -- all other fields of the event
    time TIMESTAMP
    """,
    key=("execution", "id"),
    place="recorded",
)
SAMPLES = CatalogTable(
    "samples",
    """
    id VARCHAR, execution VARCHAR, stage VARCHAR, set VARCHAR, index BIGINT, fields JSON, time TIMESTAMP
    """,
    key=("execution", "id"),
    place="recorded",
)
PLANS = CatalogTable(
    "plans",
    """
    id VARCHAR,  -- of one start of a run: a run that is retried or resumed starts again
    run VARCHAR, config VARCHAR, name VARCHAR,
    state VARCHAR,  -- running, done, failed, cancelled, interrupted, suspended (it waits for an answer)
    steps JSON,  -- in order: label, stage, key, after (the labels whose outputs it reads)
    settings JSON,  -- the whole configuration
    recipe VARCHAR,  -- digest of the settings without the seeds of training and what no key contains
    changes JSON,  -- what it changes in its base configuration: field, before, after
    resume VARCHAR,  -- the command that continues it; of a forced run with `{first unfinished step}` in place of a step
    started TIMESTAMP, ended TIMESTAMP, error VARCHAR, commit VARCHAR, host VARCHAR, time TIMESTAMP
    """,
    open_state="running",
)
NOTES = CatalogTable(
    "notes",
    """
    id VARCHAR,  -- of the run
    text VARCHAR,
    tags JSON,  -- a list
    time TIMESTAMP
    """,
)
TABLES = (ARTIFACTS, INPUTS, ATTEMPTS, METRICS, CALLS, SAMPLES, PLANS, NOTES)
TABLE_OF_EVENT = {"run": ATTEMPTS, "metric": METRICS, "call": CALLS, "sample": SAMPLES, "plan": PLANS, "note": NOTES}


def artifact_row(artifact: Artifact) -> dict[str, Any]:
    manifest = artifact.manifest
    return {
        **{name: manifest[name] for name in ("stage", "label", "version", "run", "digest", "commit", "host")},
        "execution": artifact.recorded_execution,
        "published_as": artifact.execution,
        "id": artifact.id,
        "kind": artifact.kind,
        "key": artifact.key,
        "superseded": artifact.superseded,
        "created": utc_time(manifest["created"]),
        "bytes": artifact.bytes,
        "file_count": len(manifest["files"]),
        **{name: _json(manifest[name]) for name in ("config", "facts", "files")},
    }


def input_rows(artifact: Artifact) -> list[dict[str, Any]]:
    executions = artifact.manifest["input_executions"]
    return [
        {
            "artifact": artifact.id,
            "name": name,
            "kind": kind,
            "key": key,
            "execution": recorded_execution(executions[name]),
            "published_as": executions[name],
        }
        for name, full_id in artifact.manifest["inputs"].items()
        for kind, _, key in [full_id.partition("/")]
    ]


def event_row(event: dict[str, Any]) -> dict[str, Any]:
    """The row of an event in its table.

    Raises `ValueError`, `TypeError` or `OverflowError` if a value does not fit its column, or the event its model.
    """
    kind, fields = event["kind"], event["fields"]
    table = TABLE_OF_EVENT[kind]
    # Microseconds stay integers: as a fraction of seconds they would be rounded. Not through the C library, which
    # reports some years that it cannot represent as an `OSError`.
    time = EARLIEST + timedelta(microseconds=int(event["time"]))
    if not EARLIEST <= time < LATEST:
        raise ValueError(f"its time is {time}")
    common = {"id": as_line(event["id"]), "time": time}
    if kind not in NAMED_BY_FIELD:
        stage = event.get("stage")
        common |= {"execution": as_line(event["execution"]), "stage": as_line(stage) if stage else None}
    if kind in MODELS:
        fields = checked_fields(kind, fields, time)
    if kind == "plan" and fields["settings"]:
        # Here, where every other command has its result: its types are those of all sections of the configuration.
        from nautile.configs import keys

        fields["recipe"] = keys.recipe(fields["settings"])
    # Fields with a column of their own; a table with a column `fields` has all others there as JSON.
    own_columns = [name for name in table.columns if name not in common and name != "fields" and name in fields]
    casts = CASTS_OF[table.name]
    values = {name: casts[name](fields[name]) for name in own_columns if fields[name] is not None}
    # What the event does not say is NULL, not zero or an empty text.
    row = dict.fromkeys(table.columns) | values | common
    if "fields" in table.columns:
        row["fields"] = _json({name: value for name, value in fields.items() if name not in own_columns})
    return row


def _json(value: Any) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError:
        text = json.dumps(with_finite(value), ensure_ascii=False)
    return text.encode("utf-8", "replace").decode()


def _integer(bits: int) -> Callable[[Any], int]:
    def cast(value: Any) -> int:
        number = int(value)
        if not -(2 ** (bits - 1)) <= number < 2 ** (bits - 1):
            raise ValueError(f"{number} does not fit into {bits} bits")
        return number

    return cast


def as_amount(value: Any) -> float:
    """Seconds or dollars: one that is not a number, or below zero, would be in every sum."""
    number = float(value)
    if not (math.isfinite(number) and number >= 0):
        raise ValueError(f"{number} is no amount")
    return number


def _boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{value!r} is not true or false")
    return value


_CASTS: dict[str, Callable[[Any], Any]] = {
    "VARCHAR": as_line,
    "JSON": _json,
    "INTEGER": _integer(32),
    "BIGINT": _integer(64),
    "DOUBLE": float,
    "BOOLEAN": _boolean,
    "TIMESTAMP": lambda time: time,  # read by the model already
}
CASTS_OF = {table.name: {name: _CASTS[kind] for name, kind in table.columns.items()} for table in TABLES}
CASTS_OF["calls"] |= dict.fromkeys(("latency_s", "dollars"), as_amount)
for _table, _column in (("calls", "error"), ("attempts", "error"), ("plans", "error"), ("notes", "text")):
    CASTS_OF[_table][_column] = as_text  # of several lines


def schema_of(connection: duckdb.DuckDBPyConnection) -> int:
    """The schema version of the file; 0 if it has no tables."""
    try:
        row = connection.execute("SELECT position FROM ingested WHERE path = 'schema'").fetchone()
    except duckdb.CatalogException:
        return 0  # no such table
    return row[0] if row else 0
