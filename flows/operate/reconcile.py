"""`nautile reconcile`: clean up after dead processes: open attempts, Prefect's runs, staging folders, lock files.

A process holds a kernel lock on the key it writes and on its run. If the lock can be taken, the process is dead; age
does not matter. Unfinished work of a key is kept. Prefect's runs of other stores, and runs that wait (scheduled,
suspended), are not changed.
"""

import logging
import os
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import ArtifactUpdate
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterType,
    FlowRunFilter,
    FlowRunFilterId,
    TaskRunFilter,
    TaskRunFilterState,
    TaskRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, State, StateType, TaskRun
from prefect.client.schemas.sorting import ArtifactSort, TaskRunSort
from prefect.exceptions import ObjectNotFound, PrefectException
from prefect.states import Cancelled, Crashed

from nautile.common.commands import shell_command
from nautile.common.errors import ConfigError, Retryable
from nautile.common.files import read_json, write_json
from nautile.common.processes import is_loopback
from nautile.common.text import size, visible
from nautile.flows.operate.concurrency import PREFIX
from nautile.flows.operate.prefect_calls import call
from nautile.flows.plans import record_interrupted
from nautile.store.artifacts import Store
from nautile.store.catalog import Catalog
from nautile.store.garbage import STALE_DAYS, collect, leftover_staging, unfinished_work
from nautile.store.layout import StagingFiles
from nautile.store.locks import locks_work
from nautile.store.manifest import KEY, host
from nautile.store.schema import ATTEMPTS
from nautile.tasks.engine.attempt_log import write_attempt_row

log = logging.getLogger(__name__)

PATIENCE_S = 5.0  # how long to wait for a process that writes the catalog
GONE = "Its process is gone."
STARTING = timedelta(seconds=60)  # most time from Prefect's "running" to the run's lock, when a run is retried
SETTLED_S = 3.0  # most time from a slot to its lease, on a server
_PAGE = 200
_OPEN_ATTEMPTS = "SELECT * FROM attempts WHERE state = 'running' AND coalesce(key, '') <> ''"
_WITH_PROCESS = ["PENDING", "RUNNING", "PAUSED", "CANCELLING"]
_OPEN_STATES = [StateType.RUNNING, StateType.PENDING, StateType.CANCELLING]


@dataclass(frozen=True)
class Reconciled:
    """Something that a dead process has left behind: its type, its name, and what was done about it."""

    what: str
    name: str
    outcome: str

    def line(self) -> str:
        return f"{self.what} {self.name}: {self.outcome}"

    def row(self) -> dict[str, str]:
        return asdict(self)


def reconcile(store: Store) -> Iterator[Reconciled]:
    """Clean up the store, and the Prefect server of PREFECT_API_URL if it may still show a dead run as running.

    Raises `CatalogBusy`, and `ConfigError` if the store is not writable or the server fails.
    """
    if not store.root.exists():
        return
    # Without locks a living process looks like a dead one, and its run would be ended.
    if not locks_work(store.locks):
        outcome = "skipped: the store's file system has no locks, so dead processes cannot be detected"
        yield Reconciled("reconcile", "stopped", outcome)
        return
    # First the store's own record, which needs no server; then Prefect; then files.
    yield from attempts(store)
    if store.lost_runs():
        yield from flow_runs(store)
    yield from slots()
    yield from staging(store)
    if removed := lock_files(store):
        log.info("removed %d lock files that no process held", removed)


def reconcile_if_possible(store: Store) -> Iterator[Reconciled]:
    """`reconcile` before another command: an error is returned as a line instead of raised."""
    try:
        yield from reconcile(store)
    except (ConfigError, Retryable, OSError) as error:
        log.warning("could not clean up after earlier runs: %s", error)
        yield Reconciled("reconcile", "stopped", f"{error}. `nautile reconcile` tries again")


def settle_runs(store: Store) -> Iterator[Reconciled]:
    """The part of `reconcile` about runs and their slots; cheap if no process has died. Raises as `reconcile`."""
    if store.lost_runs() and locks_work(store.locks):
        yield from attempts(store)
        yield from flow_runs(store)
    yield from slots()


def attempts(store: Store) -> Iterator[Reconciled]:
    """Close the attempts that the catalog has as running, but whose key no process has locked.

    Machines that share only a remote do not share locks, nor do two folders on one machine: each closes its own
    attempts, and the next attempt at a key closes the one before it.
    """
    catalog, closed = Catalog(store), False
    catalog.ingest(patience=PATIENCE_S)
    for row in catalog.query(_OPEN_ATTEMPTS, patience=PATIENCE_S):
        if store.url is not None:
            # A process of this folder has left the lock file of its run, or the attempt in its staging.
            execution = read_json(store.staging_files(row["key"]).execution)
            own = isinstance(execution, dict) and (execution.get("run") or {}).get("id") == row["id"]
            if row["host"] != host() or not (own or row["run"] in store.begun_runs()):
                continue
        lock = store.lock(row["key"])
        if not lock.try_acquire():
            continue
        try:
            # The attempt may have ended just before the lock was taken: read it again, nobody can change it now.
            catalog.ingest(patience=PATIENCE_S)
            if catalog.query(f"{_OPEN_ATTEMPTS} AND id = ?", [row["id"]], patience=PATIENCE_S):
                closed = True
                yield _close_attempt(store, row)
        finally:
            lock.release()
    if closed:
        catalog.ingest(patience=PATIENCE_S)


def flow_runs(store: Store) -> Iterator[Reconciled]:
    """End Prefect's runs whose process is dead, and their tasks. Raises `ConfigError` if the server fails.

    A run counts as dead only if this store has its lock file and the lock is free.
    """
    try:
        with get_client(sync_client=True) as client:
            for run_id in store.begun_runs():
                lock = store.run_lock(run_id)
                if not lock.try_acquire():
                    continue
                try:
                    locked = datetime.fromtimestamp(lock.path.stat().st_mtime, UTC)
                    run = _read_run(client, run_id)
                    if run is None:  # a run of another server: forget its lock file after some days
                        ended = datetime.now(UTC) - locked > timedelta(days=STALE_DAYS)
                    else:
                        ended = not _may_live(run, locked)
                        if ended:
                            yield from _end_run(client, run)
                    if ended:
                        record_interrupted(store, run_id)
                        lock.remove()
                finally:
                    lock.release()
    except (PrefectException, httpx.HTTPError) as error:
        reason = visible(str(error), 200)
        raise ConfigError(f"Prefect's server failed on a request about runs of dead processes: {reason}") from error


def slots() -> Iterator[Reconciled]:
    """Free the slots of resources that no step holds, on the server of PREFECT_API_URL.

    A server that is killed between counting a slot and recording its lease leaves such a slot, as does one that keeps
    leases in its memory.
    """
    api = os.environ.get("PREFECT_API_URL")
    if not api:
        return
    try:
        if not (lost := unheld_slots(api)):
            return
        time.sleep(SETTLED_S)  # a slot that is taken just now has its lease by then
        again = unheld_slots(api)
        for name in sorted(lost.keys() & again.keys()):
            count = min(lost[name], again[name])
            body = {"names": [name], "slots": count}
            call("POST", api, "/v2/concurrency_limits/decrement", json=body, timeout=30.0).raise_for_status()
            yield Reconciled("slot", name, f"{count} held by no step; free again")
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        yield Reconciled("slots", api, f"not checked, because the server does not answer: {visible(str(error), 200)}")


def unheld_slots(api: str) -> dict[str, int]:
    """Name of a limit -> its slots that are taken without a lease.

    Only a server whose leases this machine can read is known so well. Of another one, the slots count as lost only
    while no run has a process.
    """
    limits = call("POST", api, "/v2/concurrency_limits/filter", json={}, timeout=30.0).raise_for_status().json()
    taken = {entry["id"]: entry for entry in limits if entry["name"].startswith(PREFIX) and entry["active_slots"]}
    if not taken:
        return {}
    settings = call("GET", api, "/admin/settings", timeout=30.0).raise_for_status().json()
    folder = Path(settings["home"]) / "concurrency_leases"
    held: Counter[str] = Counter()
    on_disk = settings["server"]["concurrency"]["lease_storage"].endswith(".filesystem")
    if on_disk and is_loopback(urlsplit(api).hostname or "") and folder.is_dir():
        for path in folder.glob("*.json"):
            lease = read_json(path)
            if isinstance(lease, dict) and isinstance(lease.get("resource_ids"), list):
                # An expired one too: the server itself frees its slots.
                held.update({limit: (lease.get("metadata") or {}).get("slots", 1) for limit in lease["resource_ids"]})
    else:
        states = {"flow_runs": {"state": {"type": {"any_": _WITH_PROCESS}}}}
        if call("POST", api, "/flow_runs/count", json=states, timeout=30.0).raise_for_status().json():
            return {}
    counts = {entry["name"]: entry["active_slots"] - held[limit] for limit, entry in taken.items()}
    return {name: count for name, count in counts.items() if count > 0}


def staging(store: Store) -> Iterator[Reconciled]:
    """Remove leftover staging folders whose work is published or discarded. Unfinished work is kept."""
    for item in collect(store, leftover_staging(store)):
        yield Reconciled("staging", item.path.name[:18], f"{item.reason}; {size(item.bytes)} removed")


def unfinished(store: Store) -> Iterator[Reconciled]:
    """List unfinished work that has not changed for a week, with the command that removes it."""
    for item, has_checkpoints in unfinished_work(store):
        request = read_json(StagingFiles(item.path).request) or {}
        stage = f" of {request['stage']}" if "stage" in request else ""
        held = " with checkpoints" if has_checkpoints else ""
        outcome = f"{size(item.bytes)}{stage}{held}, {item.reason}; kept: the run it belongs to resumes from it"
        named = ("--unfinished", item.path.name[:12]) if has_checkpoints else ()
        command = shell_command("nautile", "store", "gc", *named)
        yield Reconciled("staging", item.path.name[:12], f"{outcome}, `{command}` removes it")


def lock_files(store: Store) -> int:
    """Remove the lock files of keys that no process holds and that have no unfinished work; returns how many."""
    removed = 0
    for path in sorted(store.locks.glob("*.lock")):
        if KEY.fullmatch(path.stem) and not store.staging_files(path.stem).folder.exists():
            lock = store.lock(path.stem)
            if lock.try_acquire():
                lock.remove()
                removed += 1
    return removed


def _close_attempt(store: Store, row: dict[str, Any]) -> Reconciled:
    """Write the final row of an attempt whose process died: done if all outputs are published, else interrupted."""
    label, run = row["label"] or row["stage"], (row["run"] or "")[:8]
    published = {a.kind: a for a in store.list() if (a.key, a.recorded_execution) == (row["key"], row["execution"])}
    complete = published and set(next(iter(published.values())).manifest["outputs"]) <= published.keys()
    execution_file = store.staging_files(row["key"]).execution
    execution = read_json(execution_file)
    fields = ATTEMPTS.fields_of(row)
    if complete:
        fields |= {"state": "done", "outputs": {kind: artifact.id for kind, artifact in published.items()}}
        outcome = "its process was killed after it had published; marked done"
    else:
        fields |= {"state": "interrupted", "outputs": None, "error": "the process was killed"}
        outcome = "its process is gone; marked interrupted" + ("; its work is kept" if execution else "")
    write_attempt_row(store, fields)
    # The execution stays, so that the next attempt resumes under its id; only the dead attempt is taken out.
    if isinstance(execution, dict) and (execution.get("run") or {}).get("id") == row["id"]:
        write_json(execution_file, {**execution, "run": None})
    return Reconciled("stage", f"{label} of run {run}", outcome)


def _read_run(client: SyncPrefectClient, run_id: str) -> FlowRun | None:
    """The run on this server; None if the server does not know it, because it belongs to another server."""
    try:
        return client.read_flow_run(UUID(run_id))
    except (ObjectNotFound, ValueError):
        return None


def _may_live(run: FlowRun, locked: datetime) -> bool:
    """Whether the run waits for a process, or its process may not have locked it yet.

    `locked`: when the run's lock was last taken.
    """
    state = run.state
    if state is None or state.is_scheduled() or state.is_pending():
        return True
    if state.is_paused() and state.state_details.pause_reschedule:
        return True  # suspended: Prefect starts a process when it is resumed
    return not state.is_final() and state.timestamp > locked and datetime.now(UTC) - state.timestamp < STARTING


def _end_run(client: SyncPrefectClient, run: FlowRun) -> Iterator[Reconciled]:
    """Set a final state for the run and its open task runs on the server."""
    state = run.state
    if state is not None and not state.is_final():
        end: State[None] = Cancelled(message=GONE) if state.is_cancelling() else Crashed(message=GONE)
        answer = client.set_flow_run_state(run.id, end)
        # Prefect's rules may refuse the transition. The process is dead, whatever they say.
        if answer.status.value != "ACCEPT":
            client.set_flow_run_state(run.id, end, force=True)
        yield Reconciled("Prefect run", f"{run.name} ({str(run.id)[:8]})", f"its process is gone; set {end.name}")
    for task in _open_tasks(client, run):
        client.set_task_run_state(task.id, Crashed(message=GONE), force=True)
        yield Reconciled("Prefect task run", f"{task.name} of {run.name}", "its process is gone; set Crashed")
    _end_bars(client, run)


def _end_bars(client: SyncPrefectClient, run: FlowRun) -> None:
    """End the progress bars of a run that say that a stage works."""
    bars = client.read_artifacts(
        artifact_filter=ArtifactFilter(type=ArtifactFilterType(any_=["progress"])),
        flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[run.id])),
        task_run_filter=TaskRunFilter(),  # every argument is given, because the server refuses the client's defaults
        sort=ArtifactSort.ID_DESC,
        limit=_PAGE,
        offset=0,
    )
    for bar in bars:
        if (bar.description or "").startswith("running"):
            client.update_artifact(bar.id, ArtifactUpdate(description=f"ended: {GONE.lower()}"))


def _open_tasks(client: SyncPrefectClient, run: FlowRun) -> list[TaskRun]:
    tasks: list[TaskRun] = []
    while True:
        page = client.read_task_runs(
            flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[run.id])),
            task_run_filter=TaskRunFilter(state=TaskRunFilterState(type=TaskRunFilterStateType(any_=_OPEN_STATES))),
            sort=TaskRunSort.ID_DESC,  # the server rejects the client's default
            limit=_PAGE,
            offset=len(tasks),
        )
        tasks += page
        if len(page) < _PAGE:
            return tasks
