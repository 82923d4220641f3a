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
from datetime import datetime, timedelta
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
from common.text import amount, duration
from configs.schema import RunConfig
from flows.dag import Step
from store.artifacts import Store
from store.catalog import Catalog, CatalogBusy
from store.manifest import host, now
from tasks.engine.progress import StageUpdate, notify

logger = logging.getLogger(__name__)

POLL_S = 1.0
FOLDER = "waiting"
_LAST = """
SELECT r.config, max(r.ended) AS ended, sum(r.seconds) AS seconds,
    (SELECT sum(c.dollars) FROM calls c WHERE c.execution = r.execution) AS dollars
FROM runs r WHERE r.label = ? AND NOT r.reused
GROUP BY r.config, r.execution HAVING bool_or(r.state = 'done') ORDER BY (r.config = ?) DESC, ended DESC LIMIT 1
"""


def before_step(store: Store, config: RunConfig, step: Step, force: bool, run_id: str) -> None:
    """Ask whether to begin, where `[operation.STAGE] approve` says so; of what is there already nothing is asked.

    Raises `ConfigError` as `approval.ask`.
    """
    asked = config.operation.of(step.stage.name)
    if not asked.approve or (not force and _made(store, step)):
        return
    cost = expected(store, config, step)
    question = f"Stage {step.label} of {config.name} asks for approval before it begins. Expected cost: {cost}"
    ask(store, run_id, f"approve:{step.label}", step.label, question, asked.patience)


def after_step(store: Store, config: RunConfig, step: Step, outputs: dict[str, str], run_id: str) -> None:
    """Ask whether to go on with less, where a stage's money ran out and `at_budget` is "pause"."""
    asked = config.operation.of(step.stage.name)
    if asked.at_budget == "go_on":
        return
    for artifact_id in outputs.values():
        manifest = store.get(artifact_id).manifest
        facts = manifest["facts"]
        if facts.get("budget_exhausted") and manifest["run"] == run_id:  # whose it is has been asked when it was made
            question = (
                f"Stage {step.label} of {config.name} stopped at its budget: {_left_undone(facts)}. To go on with "
                f"more, cancel, raise {step.stage.name}.budget_dollars (or budget_tokens) and run "
                f"`nautile run {config.name} --from {step.stage.name}`: that makes the stage anew. Or go on with less."
            )
            ask(store, run_id, f"budget:{step.label}", step.label, question, asked.patience)
            return


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


def expected(store: Store, config: RunConfig, step: Step) -> str:
    """One line: what the stage may spend by its configuration, and what it took the last time."""
    return f"{'; '.join([*_allowed(config, step), _last(store, config, step)])}."


def _allowed(config: RunConfig, step: Step) -> list[str]:
    section: Any = step.section.get(step.stage.name) or {}
    if step.stage.name == "pretrain":
        return [f"{amount(sum(phase.tokens for phase in config.pretrain.phases))} tokens to train on"]
    if step.stage.name == "distill":
        return [f"{section['prompts']:,} prompts", _money(section)]
    if step.stage.name in ("align", "reason"):
        rows = section["rollout"]["prompts"] * section["rollout"]["group"]
        return [f"{section['policy']['steps']:,} steps of {rows:,} completions"]
    if step.stage.name == "self_distill":
        rows = section["problems"]["count"] * section["rollout"]["group"] * section["rounds"]
        return [f"{rows:,} completions to draw"]
    if step.stage.name == "evaluate" and "model_under_test" in step.section:
        return [_money(section)]
    return []


def _money(section: dict[str, Any]) -> str:
    limits = []
    if dollars := section.get("budget_dollars"):
        limits.append(f"${dollars:,.2f}")
    if tokens := section.get("budget_tokens"):
        limits.append(f"{tokens:,} tokens")
    return f"at most {' and '.join(limits)}" if limits else "no limit of money is set"


def _last(store: Store, config: RunConfig, step: Step) -> str:
    try:
        Catalog(store).ingest(patience=1.0)
        rows = Catalog(store).query(_LAST, [step.label, config.name], patience=1.0)
    except (CatalogBusy, ConfigError) as error:
        return f"what it took before cannot be told now ({error})"
    if not rows or rows[0]["seconds"] is None:
        return "it was not made here before, so its time is not known"
    last = rows[0]
    when: datetime = last["ended"]
    money = f" and ${last['dollars']:,.4f}" if last["dollars"] is not None else ""
    whose = "" if last["config"] == config.name else f" for {last['config']}"
    return f"the last time{whose} ({when:%Y-%m-%d}) it took {duration(last['seconds'])}{money}"


def _left_undone(facts: dict[str, Any]) -> str:
    undone = facts.get("rejected", {}).get("failed_budget")
    spent = f"${facts['dollars']:,.4f} spent, " if facts.get("dollars") is not None else ""
    total = f" of {facts['prompts']:,}" if facts.get("prompts") else ""
    return f"{spent}{undone:,}{total} prompts were not asked about" if undone else f"{spent}its work is not done"


def _made(store: Store, step: Step) -> bool:
    try:
        return all(store.find(kind, step.key) for kind in step.outputs)
    except ConfigError:
        return False  # damaged: it will be made anew
