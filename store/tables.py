"""The catalog's tables, and how a manifest or an event becomes a row of one.

Times are UTC. Every column that is not known is NULL. Rows are keyed by ids that the truth carries, so that taking a
file in twice changes nothing; of two events with one id the newer is the row. But the end of a run is its end, even by
a clock that was set back since it began, or by the clock of another host.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from store.artifacts import Artifact

SCHEMA = 2  # another one wants a step in store/migrations.py


@dataclass(frozen=True)
class Table:
    """Name, columns with their types, and the columns that make a row's identity."""

    name: str
    columns: dict[str, str]
    key: tuple[str, ...]
    open_state: str = ""  # of a row with a `state`: the one that any other ends, whatever the clocks say

    def order(self, row: dict[str, Any]) -> tuple[bool, datetime]:
        """Of two rows with one id, the one that is greater by this stays."""
        return bool(self.open_state) and row["state"] != self.open_state, row["time"]

    def create(self) -> str:
        columns = ", ".join(f"{name} {kind}" for name, kind in self.columns.items())
        return f"CREATE TABLE IF NOT EXISTS {self.name} ({columns}, PRIMARY KEY ({', '.join(self.key)}))"

    def upsert(self) -> str:
        """Insert rows given as one list a column; an older event never replaces a newer."""
        names = list(self.columns)
        values = ", ".join(f"unnest(?::{self.columns[name].split()[0]}[])" for name in names)
        others = [name for name in names if name not in self.key]
        newer = f" WHERE {self._order('excluded')} >= {self._order(self.name)}" if "time" in names else ""
        updates = ", ".join(f"{name} = excluded.{name}" for name in others)
        return (
            f"INSERT INTO {self.name} ({', '.join(names)}) SELECT {values} "
            f"ON CONFLICT ({', '.join(self.key)}) DO UPDATE SET {updates}{newer}"
        )

    def _order(self, row: str) -> str:
        ended = f"{row}.state IS DISTINCT FROM '{self.open_state}'" if self.open_state else "FALSE"
        return f"({ended}, {row}.time)"


ARTIFACTS = Table(
    "artifacts",
    {
        "id": "VARCHAR",  # kind/<12 digits>, with .n when superseded
        "kind": "VARCHAR",
        "key": "VARCHAR",
        "superseded": "INTEGER",  # 0: live
        "execution": "VARCHAR",
        "stage": "VARCHAR",
        "version": "INTEGER",
        "run": "VARCHAR",
        "created": "TIMESTAMP",
        "bytes": "BIGINT",
        "file_count": "INTEGER",
        "digest": "VARCHAR",
        "commit": "VARCHAR",
        "host": "VARCHAR",
        "config": "JSON",
        "facts": "JSON",
        "files": "JSON",  # path -> {bytes, sha256}
        "label": "VARCHAR",  # the stage and its use: evaluate:align
    },
    ("id",),
)
INPUTS = Table(
    "inputs",
    {
        "artifact": "VARCHAR",  # artifacts.id of what was made
        "name": "VARCHAR",
        "kind": "VARCHAR",
        "key": "VARCHAR",
        "execution": "VARCHAR",  # which making of the input was read
    },
    ("artifact", "name"),
)
RUNS = Table(
    "runs",
    {
        "id": "VARCHAR",  # one attempt at one stage
        "run": "VARCHAR",
        "config": "VARCHAR",
        "stage": "VARCHAR",
        "label": "VARCHAR",
        "key": "VARCHAR",
        "execution": "VARCHAR",
        "attempt": "INTEGER",
        "state": "VARCHAR",  # running, done, reused, failed, cancelled, interrupted
        "reused": "BOOLEAN",
        "forced": "BOOLEAN",
        "started": "TIMESTAMP",
        "ended": "TIMESTAMP",
        "seconds": "DOUBLE",
        "peak_bytes": "BIGINT",
        "exit_code": "INTEGER",
        "outputs": "JSON",  # kind -> artifact id
        "error": "VARCHAR",
        "commit": "VARCHAR",
        "host": "VARCHAR",
        "time": "TIMESTAMP",
    },
    ("id",),
    open_state="running",
)
METRICS = Table(
    "metrics",
    {
        "id": "VARCHAR",
        "execution": "VARCHAR",
        "stage": "VARCHAR",
        "name": "VARCHAR",
        "step": "BIGINT",
        "value": "DOUBLE",
        "source": "VARCHAR",
        "time": "TIMESTAMP",
    },
    ("id",),
)
CALLS = Table(
    "calls",
    {
        "id": "VARCHAR",
        "execution": "VARCHAR",
        "stage": "VARCHAR",
        "endpoint": "VARCHAR",
        "model": "VARCHAR",
        "purpose": "VARCHAR",
        "tag": "VARCHAR",
        "digest": "VARCHAR",
        "attempt": "INTEGER",
        "status": "VARCHAR",
        "cached": "BOOLEAN",
        "tokens_in": "BIGINT",
        "tokens_out": "BIGINT",
        "latency_s": "DOUBLE",
        "dollars": "DOUBLE",
        "error": "VARCHAR",
        "fields": "JSON",  # whatever else the call carried
        "time": "TIMESTAMP",
    },
    ("id",),
)
SAMPLES = Table(
    "samples",
    {
        "id": "VARCHAR",
        "execution": "VARCHAR",
        "stage": "VARCHAR",
        "set": "VARCHAR",
        "index": "BIGINT",
        "fields": "JSON",
        "time": "TIMESTAMP",
    },
    ("id",),
)
TABLES = (ARTIFACTS, INPUTS, RUNS, METRICS, CALLS, SAMPLES)
BY_EVENT = {"run": RUNS, "metric": METRICS, "call": CALLS, "sample": SAMPLES}


def artifact_row(artifact: Artifact) -> dict[str, Any]:
    manifest = artifact.manifest
    return {
        **{name: manifest[name] for name in ("stage", "label", "version", "execution", "run", "digest")},
        **{name: manifest[name] for name in ("commit", "host")},
        "id": artifact.id,
        "kind": artifact.kind,
        "key": artifact.key,
        "superseded": artifact.superseded,
        "created": _iso(manifest["created"]),
        "bytes": artifact.bytes,
        "file_count": len(manifest["files"]),
        **{name: _json(manifest[name]) for name in ("config", "facts", "files")},
    }


def input_rows(artifact: Artifact) -> list[dict[str, Any]]:
    executions = artifact.manifest["input_executions"]
    return [
        {"artifact": artifact.id, "name": name, "kind": kind, "key": key, "execution": executions.get(name)}
        for name, full_id in artifact.manifest["inputs"].items()
        for kind, _, key in [full_id.partition("/")]
    ]


def event_row(event: dict[str, Any]) -> dict[str, Any]:
    """The row of a run, metric, call or sample event. Raises `ValueError` or `TypeError` if it has no place."""
    kind, fields = event["kind"], event["fields"]
    table = BY_EVENT[kind]
    common = {"id": str(event["id"]), "time": _from_us(event["time"])}
    if kind != "run":
        common |= {"execution": str(event["execution"]), "stage": event.get("stage") or None}
    named = [name for name in table.columns if name not in common and name != "fields" and name in fields]
    row = {name: None for name in table.columns} | {name: _cast(table.columns[name], fields[name]) for name in named}
    row |= common
    if "fields" in table.columns:
        row["fields"] = _json({name: value for name, value in fields.items() if name not in named})
    return row


def _cast(kind: str, value: Any) -> Any:
    if value is None:
        return None
    return _CASTS[kind](value)


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text.encode("utf-8", "replace").decode()  # half a surrogate pair is no text to DuckDB


def _json(value: Any) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError:
        text = json.dumps(_finite(value), ensure_ascii=False)
    return text.encode("utf-8", "replace").decode()


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list) else value


def _iso(value: str) -> datetime:
    return datetime.fromisoformat(value).astimezone(UTC).replace(tzinfo=None)


def _from_us(value: int) -> datetime:
    return datetime.fromtimestamp(int(value) // 10**6, UTC).replace(tzinfo=None, microsecond=int(value) % 10**6)


def _integer(bits: int) -> Callable[[Any], int]:
    def cast(value: Any) -> int:
        number = int(value)
        if not -(2 ** (bits - 1)) <= number < 2 ** (bits - 1):
            raise ValueError(f"{number} does not fit into {bits} bits")
        return number

    return cast


_CASTS: dict[str, Callable[[Any], Any]] = {
    "VARCHAR": _text,
    "JSON": _json,
    "INTEGER": _integer(32),
    "BIGINT": _integer(64),
    "DOUBLE": float,
    "BOOLEAN": bool,
    "TIMESTAMP": _iso,
}
