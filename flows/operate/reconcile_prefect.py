"""Prefect's side of what a dead process left: flow runs and task runs that would be shown as running for ever.

A run counts as dead only if this store has its lock file and the lock is free. Runs of other stores, and those that
wait (scheduled, suspended), are left alone.
"""

import logging
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterId,
    TaskRunFilter,
    TaskRunFilterState,
    TaskRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, State, StateType, TaskRun
from prefect.client.schemas.sorting import TaskRunSort
from prefect.exceptions import ObjectNotFound, PrefectException
from prefect.states import Cancelled, Crashed

from common.errors import ConfigError
from common.text import visible
from flows.operate.reconcile import Settled
from store.artifacts import Store
from store.garbage import STALE_DAYS

log = logging.getLogger(__name__)

GONE = "Its process is gone."
STARTING = timedelta(seconds=60)  # between Prefect's "running" and our lock, in a run that was asked for again
_PAGE = 200
_OPEN = [StateType.RUNNING, StateType.PENDING, StateType.CANCELLING]


def flow_runs(store: Store) -> Iterator[Settled]:
    """Settle the runs whose process is gone, and their tasks. Raises `ConfigError` if the server fails."""
    try:
        with get_client(sync_client=True) as client:
            for run in store.begun_runs():
                lock = store.run_lock(run)
                if not lock.try_acquire():
                    continue
                try:
                    begun = datetime.fromtimestamp(lock.path.stat().st_mtime, UTC)
                    found = _read(client, run)
                    if found is None:
                        settled = datetime.now(UTC) - begun > timedelta(days=STALE_DAYS)
                    else:
                        settled = not _may_live(found, begun)
                        if settled:
                            yield from _settle(client, found)
                    if settled:
                        lock.remove()
                finally:
                    lock.release()
    except (PrefectException, httpx.HTTPError) as error:
        said = visible(str(error), 200)
        raise ConfigError(f"Prefect could not be asked about runs that ended without a word: {said}") from error


def _read(client: SyncPrefectClient, run: str) -> FlowRun | None:
    """None if this server does not know it: another may."""
    try:
        return client.read_flow_run(UUID(run))
    except (ObjectNotFound, ValueError):
        return None


def _may_live(run: FlowRun, locked: datetime) -> bool:
    """Whether the run waits for a process, or has one that has not come to its lock yet. `locked`: when it last had."""
    state = run.state
    if state is None or state.is_scheduled() or state.is_pending():
        return True
    if state.is_paused() and state.state_details.pause_reschedule:
        return True  # suspended: a process comes when it is resumed
    return not state.is_final() and state.timestamp > locked and datetime.now(UTC) - state.timestamp < STARTING


def _settle(client: SyncPrefectClient, run: FlowRun) -> Iterator[Settled]:
    state = run.state
    if state is not None and not state.is_final():
        stopped = state.is_cancelling()
        after: State[None] = Cancelled(message=GONE) if stopped else Crashed(message=GONE)
        answer = client.set_flow_run_state(run.id, after)
        if answer.status.value != "ACCEPT":
            client.set_flow_run_state(run.id, after, force=True)
        yield Settled("Prefect run", f"{run.name} ({str(run.id)[:8]})", f"its process is gone; set {after.name}")
    for task in _open_tasks(client, run):
        client.set_task_run_state(task.id, Crashed(message=GONE), force=True)
        yield Settled("Prefect task run", f"{task.name} of {run.name}", "its process is gone; set Crashed")


def _open_tasks(client: SyncPrefectClient, run: FlowRun) -> list[TaskRun]:
    found: list[TaskRun] = []
    while True:
        page = client.read_task_runs(
            flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[run.id])),
            task_run_filter=TaskRunFilter(state=TaskRunFilterState(type=TaskRunFilterStateType(any_=_OPEN))),
            sort=TaskRunSort.ID_DESC,  # the server refuses the client's default
            limit=_PAGE,
            offset=len(found),
        )
        found += page
        if len(page) < _PAGE:
            return found
