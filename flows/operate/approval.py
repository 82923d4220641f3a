"""A run that waits for a person: before an expensive stage, or when the money of one ran out.

The flow run is paused on Prefect's server, its state's message says what is asked, and whoever answers there (Resume,
or Cancel), or with `nautile approve`, is heard within seconds. What waits is also written under the store, with the
address of the server, for a run from a terminal brings a server of its own that nobody else could know of.

Prefect's own `pause_flow_run` blocks in the same way, but its state carries no message and it looks every ten seconds.
"""

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from uuid import UUID

import httpx
import psutil
from prefect.artifacts import create_markdown_artifact
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.responses import SetStateStatus
from prefect.runtime import flow_run
from prefect.settings import get_current_settings
from prefect.states import Paused, State

from common.errors import ConfigError
from common.files import read_json, write_json
from store.artifacts import Store
from store.manifest import host, now
from tasks.engine.progress import StageUpdate, notify

logger = logging.getLogger(__name__)

POLL_S = 1.0
FOLDER = "waiting"


def ask(store: Store, run_id: str, key: str, label: str, question: str, patience: timedelta) -> None:
    """Pause flow run `run_id` until somebody resumes it. `key` names the `question`, a line of plain text.

    A retry of the run asks again: Prefect remembers that a pause was begun, not that it was answered.

    Raises `ConfigError` if nobody answers within `patience`, or the run is cancelled instead.
    """
    command = f"nautile approve {run_id[:8]}"
    message = f"{question} Resume to go on (or `{command}`); cancel the run to stop here."
    with get_client(sync_client=True) as client:
        attempt = f"{key}:{flow_run.run_count}"
        paused = Paused(timeout_seconds=round(patience.total_seconds()), pause_key=attempt, message=message)
        answer = client.set_flow_run_state(UUID(run_id), paused)
        if answer.status != SetStateStatus.ACCEPT:
            reason = getattr(answer.details, "reason", answer.status)
            raise ConfigError(f"{label}: the run could not be paused for approval: {reason}")
        logger.warning("paused: %s", message)
        notify(StageUpdate(label.partition(":")[0], label, "waiting", run_id=run_id, note=f"waits for {command}"))
        _show(label, message)
        with _noted(store, run_id, label, message):
            _await_answer(client, UUID(run_id), label, patience)


def waiting(store: Store) -> list[dict[str, Any]]:
    """What is written down as waiting, oldest first: run, label, message, since, api (the server's address).

    A run of this machine whose process is gone waits no more, whatever it had no time to take back.
    """
    found = [read_json(path) for path in (store.root / FOLDER).glob("*.json")]
    there = [one for one in found if isinstance(one, dict) and (one["host"] != host() or psutil.pid_exists(one["pid"]))]
    return sorted(there, key=lambda one: one["since"])


def approve(store: Store, run: str, api: str | None) -> dict[str, Any]:
    """Resume the paused run whose id begins with `run`; what was waiting. `api`: the server to ask if it is not noted.

    Raises `ConfigError` if no such run waits, several are meant, or its server does not take it.
    """
    matches = [one for one in waiting(store) if one["run"].startswith(run)]
    if len(matches) > 1:
        raise ConfigError(f"run {run!r} means {len(matches)} that wait: give more digits")
    found = matches[0] if matches else {"run": run, "api": api, "label": "", "message": ""}
    try:
        paused = UUID(found["run"])
    except ValueError:
        raise ConfigError(f"no run {run!r} waits in {store.root}: `nautile approve` lists those that do") from None
    url = found["api"]
    if not url:
        raise ConfigError(f"run {run!r} is not one of {store.root}: PREFECT_API_URL must name its server")
    try:
        reply = httpx.post(f"{url.rstrip('/')}/flow_runs/{paused}/resume", json={}, timeout=30.0)
        told = reply.json() if reply.content else {}
    except (httpx.HTTPError, ValueError) as error:
        raise ConfigError(f"run {run}: its server at {url} does not answer ({type(error).__name__})") from None
    if told.get("status") != "ACCEPT":
        why = (told.get("details") or {}).get("reason") or told.get("detail") or f"status {reply.status_code}"
        raise ConfigError(f"run {run} was not resumed: {why}")
    return found


def _await_answer(client: SyncPrefectClient, run: UUID, label: str, patience: timedelta) -> None:
    while True:
        time.sleep(POLL_S)
        try:
            state = client.read_flow_run(run).state
        except httpx.HTTPError as error:
            logger.warning("the server cannot be asked whether %s is approved: %s", label, error)
            continue
        if state is None or state.is_paused():
            continue
        if not state.is_running():
            raise ConfigError(_unanswered(label, state, patience))
        logger.info("approved: %s", label)
        return


def _unanswered(label: str, state: State[Any], patience: timedelta) -> str:
    if state.is_failed():
        hours = f"{patience.total_seconds() / 3600:g}"
        return f"{label}: nobody answered within {hours} h (operation.{label.partition(':')[0]}.hours)"
    return f"{label}: the run was {state.name.lower()} while it waited for an answer"


def _show(label: str, message: str) -> None:
    try:
        create_markdown_artifact(message, key="approval", description=f"{label} waits for an answer")
    except Exception as error:  # as with progress: the state's message says it all
        logger.warning("Prefect did not take the question about %s as an artifact: %s", label, error)


@contextmanager
def _noted(store: Store, run: str, label: str, message: str) -> Iterator[None]:
    path = store.root / FOLDER / f"{UUID(run)}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    api = get_current_settings().api.url
    note = {"run": run, "label": label, "message": message, "since": now(), "api": api}
    write_json(path, note | {"host": host(), "pid": os.getpid()})
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
