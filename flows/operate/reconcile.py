"""What a process that died could not tidy away: attempts left running, Prefect's runs, staging, lock files.

Nothing is judged by its age. A process holds a lock of the kernel's on the key it makes and on the run it works for;
whoever can take that lock knows that the process is gone. Work that a key still owns is kept, whatever its state.
"""

import json
import logging
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from common.errors import ConfigError, Retryable
from common.files import read_json, write_json
from common.text import size
from store.artifacts import Store
from store.catalog import Catalog
from store.garbage import STALE_DAYS, collect, find_garbage
from store.manifest import KEY
from tasks.engine.attempt_log import write_attempt_row

log = logging.getLogger(__name__)

PATIENCE_S = 5.0
_OPEN = "SELECT * FROM runs WHERE state = 'running'"


@dataclass(frozen=True)
class Settled:
    """One thing that was left behind: what it is, and what became of it."""

    what: str
    name: str
    outcome: str

    def line(self) -> str:
        return f"{self.what} {self.name}: {self.outcome}"

    def row(self) -> dict[str, str]:
        return asdict(self)


def reconcile(store: Store) -> Iterator[Settled]:
    """Settle what lies in the store, and in the Prefect that PREFECT_API_URL names, where a run may be stuck there.

    Raises `CatalogBusy`, and `ConfigError` if the store cannot be written or the server fails.
    """
    if not store.root.exists():
        return
    yield from attempts(store)
    if lost_runs(store):
        from flows.operate.reconcile_prefect import (
            flow_runs,  # imports Prefect, which most of the time is not needed here
        )

        yield from flow_runs(store)
    yield from staging(store)
    if removed := lock_files(store):
        log.info("%d lock files that nobody held are removed", removed)


def quietly(store: Store) -> Iterator[Settled]:
    """`reconcile`, for the start of something else: what hinders it is told, and hinders nothing."""
    try:
        yield from reconcile(store)
    except (ConfigError, Retryable, OSError) as error:
        log.warning("what earlier runs left behind could not be settled: %s", error)
        yield Settled("reconcile", "stopped", f"{error}. `nautile reconcile` tries again")


def lost_runs(store: Store) -> list[str]:
    """The runs whose process is gone, by their locks."""
    return [run for run in store.begun_runs() if not store.run_lock(run).held_elsewhere()]


def attempts(store: Store) -> Iterator[Settled]:
    """Attempts at a stage that are written down as running, and whose key nobody holds."""
    catalog = Catalog(store)
    catalog.ingest(patience=PATIENCE_S)
    for row in catalog.query(_OPEN, patience=PATIENCE_S):
        lock = store.lock(row["key"])
        if not lock.try_acquire():
            continue
        try:
            # It may have ended properly just before we had the lock; nobody can change it now.
            catalog.ingest(patience=PATIENCE_S)
            if catalog.query(f"{_OPEN} AND id = ?", [row["id"]], patience=PATIENCE_S):
                yield _settle_attempt(store, row)
        finally:
            lock.release()
    catalog.ingest(patience=PATIENCE_S)


def staging(store: Store) -> Iterator[Settled]:
    """Rests of staging folders whose work is published or thrown away. Unfinished work is never touched here."""
    rests = [item for item in find_garbage(store, stale_days=math.inf) if item.path.parent.name == "staging"]
    for item in collect(store, rests):
        yield Settled("staging", item.path.name[:18], f"{item.reason}; {size(item.bytes)} removed")


def unfinished(store: Store) -> Iterator[Settled]:
    """Unfinished work that nobody has touched for a week: named, with what may be done about it."""
    for item in find_garbage(store, stale_days=STALE_DAYS):
        if item.path.parent.name == "staging" and item.reason.startswith("unfinished"):
            request = read_json(item.path / "request.json") or {}
            whose = f" of {request['stage']}" if "stage" in request else ""
            said = f"{size(item.bytes)}{whose}, {item.reason}; kept: the run it belongs to goes on with it"
            yield Settled("staging", item.path.name[:12], f"{said}, `nautile store gc` removes it")


def lock_files(store: Store) -> int:
    """Remove the files of locks on keys that nobody holds and nothing is unfinished for; how many they were."""
    removed = 0
    for path in sorted((store.root / "locks").glob("*.lock")):
        if KEY.fullmatch(path.stem) and not (store.root / "staging" / path.stem).exists():
            lock = store.lock(path.stem)
            if lock.try_acquire():
                lock.remove()
                removed += 1
    return removed


def _settle_attempt(store: Store, row: dict[str, Any]) -> Settled:
    who, run = row["label"] or row["stage"], (row["run"] or "")[:8]
    made = {a.kind: a for a in store.list() if (a.key, a.execution) == (row["key"], row["execution"])}
    whole = made and set(next(iter(made.values())).manifest["outputs"]) <= made.keys()
    known = read_json(store.root / "staging" / row["key"] / "execution.json")
    fields = {name: _plain(value) for name, value in row.items() if name != "time"}
    if whole:
        fields |= {"state": "done", "outputs": {kind: artifact.id for kind, artifact in made.items()}}
        outcome = "its process was killed after it had published; marked done"
    else:
        fields |= {"state": "interrupted", "outputs": None, "error": "the process was killed"}
        outcome = "its process is gone; marked interrupted" + ("; its work is kept" if known else "")
    write_attempt_row(store, fields)
    if isinstance(known, dict) and (known.get("run") or {}).get("id") == row["id"]:
        write_json(store.root / "staging" / row["key"] / "execution.json", {**known, "run": None})
    return Settled("stage", f"{who} of run {run}", outcome)


def _plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.replace(tzinfo=UTC).isoformat()
    if isinstance(value, str) and value[:1] == "{":
        return json.loads(value)
    return value
