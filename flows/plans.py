"""The plan of a run, a row of the catalog's table `plans`: written when the run starts and updated when it ends.

Attempts are recorded only when they begin, so they do not show how many steps will follow, or that a run between two
steps is alive. Each retry or resume of a run adds a new row.
"""

import logging
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State
from prefect.exceptions import Pause, PrefectException
from prefect.runtime import flow_run

from nautile.common.errors import ConfigError, Retryable
from nautile.common.files import writing
from nautile.configs.schema import RunConfig
from nautile.flows.forms import failed_state
from nautile.flows.selection import PreparedRun
from nautile.store.artifacts import Store
from nautile.store.catalog import Catalog
from nautile.store.manifest import code_commit, host, now
from nautile.store.mirror import MirroredStore, open_store
from nautile.store.schema import PLANS
from nautile.tasks.engine.attempt_log import AT_END, write_row

log = logging.getLogger(__name__)

_NEWEST = "SELECT * FROM plans WHERE run = ? ORDER BY started DESC, time DESC LIMIT 1"


def planned_steps(run: PreparedRun) -> list[dict[str, Any]]:
    """The column `plans.steps`: label, stage, key and inputs of each step, and `after`, the labels that it waits for.

    `inputs` (full ids) and `key` are what garbage collection keeps until the run has ended.
    """
    labels = [step.label for step in run.steps]
    return [
        {
            "label": step.label,
            "stage": step.stage.name,
            "key": step.key,
            "inputs": sorted(step.inputs.values()),
            "after": [label for label in labels if label in {need.producer for need in step.needs.values()}],
        }
        for step in run.steps
    ]


@contextmanager
def recorded(store: Store, config: RunConfig, run: PreparedRun, run_id: str, name: str, resume: str) -> Iterator[None]:
    """Record the start and the end of the run around the block; a run that is killed stays `running`.

    `name`: of the flow run. `resume`: the command that resumes it. Raises `ConfigError` if the store is not writable.
    """
    row = {
        "id": uuid.uuid4().hex,
        "run": run_id,
        "config": config.name,
        "name": name,
        "state": "running",
        "steps": planned_steps(run),
        "settings": config.model_dump(mode="json"),
        "changes": [asdict(change) for change in run.changes],
        "resume": resume,
        "started": now(),
        "commit": code_commit(),
        "host": host(),
    }
    # Before the block: a run that is killed in its first second is visible as one that began.
    with writing(store.root):
        write_row(store, "plan", row)
    if isinstance(store, MirroredStore):
        # Garbage collection on another machine keeps what this run plans to read.
        try:
            store.push_events()
        except (ConfigError, Retryable) as error:
            log.warning("other machines do not know of run %s yet: %s", run_id, error)
    try:
        yield
    except Pause:  # the run is suspended until its approval
        _close(store, row, state="suspended")
        raise
    except Exception as error:
        _close(store, row, state="failed", error=str(error))
        raise
    except BaseException as error:
        # Ctrl-C, SIGTERM, or an end by Prefect: none of them is an `Exception`.
        _close(store, row, state="cancelled" if _was_cancelled(run_id, error) else "interrupted")
        raise
    _close(store, row, state="done")


def record_interrupted(store: Store, run_id: str) -> None:
    """Record that the process of a run was killed, if its newest start is recorded as running."""
    newest = _newest(store, run_id)
    if newest is not None and newest["state"] == "running":
        with writing(store.root):
            write_row(store, "plan", newest | {"state": "interrupted", "ended": now()})


def refused(config: str, error: Exception) -> State[Any]:
    """The failed state of the running flow's run, whose parameters are invalid: only the message (`failed_state`).

    The run is recorded as well, so that commands and pages show more than runs that have a plan. `config`: as the form
    names it.
    """
    run_id = str(flow_run.id)
    try:
        store = open_store()
        store.prepare()
        # A retry keeps the steps of the earlier start. It has the same form, so no command resumes it.
        row = (_newest(store, run_id) or {}) | {"id": uuid.uuid4().hex, "run": run_id, "resume": "", "host": host()}
        row |= {"config": Path(config).name.removesuffix(".toml"), "name": str(flow_run.name), "commit": code_commit()}
        row |= {"started": now(), "state": "failed", "error": str(error)}
        _close(store, row)
    except (OSError, ConfigError, Retryable) as problem:
        log.warning("that run %s was refused cannot be recorded: %s", run_id, problem)
    return failed_state(f"The form cannot be followed: {error}")


def _newest(store: Store, run_id: str) -> dict[str, Any] | None:
    """The fields of the newest start of a run, as they are written; None before the first."""
    Catalog(store).ingest(patience=5.0)
    newest = next(iter(Catalog(store).query(_NEWEST, [run_id], patience=5.0)), None)
    return newest and PLANS.fields_of(newest)


def _was_cancelled(run_id: str, error: BaseException) -> bool:
    """Whether somebody has cancelled the run: by Ctrl-C, or on the server.

    A process may also be ended without that: by a signal, or by Prefect, as when the lease of its slot has expired.
    """
    if isinstance(error, KeyboardInterrupt):
        return True
    try:
        with get_client(sync_client=True) as client:
            state = client.read_flow_run(UUID(run_id)).state
    except (httpx.HTTPError, PrefectException, ValueError) as problem:
        log.warning("whether run %s was cancelled is not known: %s", run_id, problem)
        return False
    return state is not None and (state.is_cancelling() or state.is_cancelled())


def _close(store: Store, row: dict[str, Any], **fields: Any) -> None:
    """Record how the run ended. An error here is only logged, so that it does not hide the run's own error."""
    try:
        write_row(store, "plan", row | fields | {"ended": now()})
        Catalog(store).ingest(**AT_END)
        if isinstance(store, MirroredStore):
            store.push_events()
    except (OSError, ConfigError, Retryable) as error:
        log.warning("the end of run %s cannot be recorded: %s", row["run"], error)
