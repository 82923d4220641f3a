"""Approvals: pause a run for an operator, before an expensive stage or after a stage that used up its budget.

The flow run is paused on Prefect's server. The message of its state and the Resume form show the question with the
expected cost: the limits of the configuration, and what the same step took the last time. Resume, Cancel and
`nautile approve` answer it. The run of a deployment is suspended: its process ends, and Prefect starts a new one when
it is resumed, which reuses the finished steps. Two kinds of runs wait in their process instead: a run from a terminal,
which Prefect cannot start again, and a forced run, which would repeat the steps that it has just executed.

A new process of a suspended run learns from the run's states on the server whether its question was answered: only
Resume is a yes (`was_approved`). That Prefect refuses the key of a pause as used is no answer, because it also does so
after a crash or a retry. So every question has a key of its own.

The store has a note of each waiting run with the address of the server, because no other process knows the address of
an embedded server of `nautile run`.

Prefect's `pause_flow_run` and `suspend_flow_run` set the same states, but without a message. The former also keeps
waiting until its time-out after the run is cancelled, and fails if the server is briefly unavailable.
"""

import logging
import os
import time
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import httpx
from prefect.artifacts import create_markdown_artifact
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.responses import SetStateStatus
from prefect.exceptions import ObjectNotFound, Pause
from prefect.input import RunInput, keyset_from_paused_state
from prefect.runtime import deployment
from prefect.settings import get_current_settings
from prefect.states import Paused, State, Suspended

from nautile.common.errors import ConfigError
from nautile.common.files import write_json
from nautile.common.text import duration
from nautile.configs.schema import RunConfig
from nautile.flows.dag import Step
from nautile.flows.forecast import forecast_calls, forecast_text
from nautile.flows.operate.automations import end_of_heartbeats
from nautile.flows.selection import is_in_store
from nautile.store.artifacts import Store
from nautile.store.catalog import Catalog, CatalogBusy
from nautile.store.manifest import host, now
from nautile.tasks.engine.attempt_log import write_row
from nautile.tasks.engine.errors import slug
from nautile.tasks.engine.progress import StageUpdate, notify

logger = logging.getLogger(__name__)

POLL_S = 1.0
# All attempts of one execution count together, because a step that was interrupted took the time of all of them.
_LAST_TIME = """
SELECT config, ended, seconds, dollars FROM executions LEFT JOIN costs USING (execution)
WHERE label = ? AND made ORDER BY (config = ?) DESC, ended DESC LIMIT 1
"""
_ALLOWED = "SELECT count(*) AS count FROM notes WHERE id = ?"
# Names of scheduled states in which a run goes on where it was; every other one starts it anew.
_GOES_ON = ("Resuming", "Late", "AwaitingConcurrencySlot")


class Approval(RunInput):
    """The Resume form in Prefect: no fields, only the question as its description."""


def before_step(store: Store, config: RunConfig, step: Step, force: bool, run_id: str) -> None:
    """Wait for an approval of a step, if `[operation.STAGE] approve` is set and the step will not be reused.

    Raises like `ask`.
    """
    if asks_before(store, config, step, force):
        cost = expected_cost(store, config, step)
        question = f"Stage {step.label} of {config.name} asks for approval before it begins. Expected cost: {cost}"
        patience = config.operation.of(step.stage.name).patience
        ask(store, run_id, f"approve:{step.label}", step.label, question, patience, force)


def asks_before(store: Store, config: RunConfig, step: Step, force: bool) -> bool:
    """Whether `before_step` waits for an approval."""
    return config.operation.of(step.stage.name).approve and (force or not is_in_store(store, step))


def question_at_budget(
    store: Store, config: RunConfig, step: Step, outputs: dict[str, str], argument: str
) -> str | None:
    """The question whether to continue, if the step used up its budget and `at_budget` is "pause".

    None if there is no question, or if it was answered with yes for these outputs (`go_on_with`), in whichever run. So
    a run that only reuses them asks again if the run that made them was cancelled or killed while it waited.
    `argument`: see `PreparedRun`.
    """
    if config.operation.of(step.stage.name).at_budget == "go_on":
        return None
    for artifact_id in outputs.values():
        artifact = store.get(artifact_id)
        facts = artifact.manifest["facts"]
        if facts.get("budget_exhausted") and not _is_allowed(store, artifact.execution):
            stage, unsent = step.stage.name, facts.get("unasked")
            spent = f"${facts['dollars']:,.4f} spent, " if facts.get("dollars") is not None else ""
            if facts.get("dollars_unknown"):
                spent += (
                    f"${facts['dollars_unknown']:,.4f} more perhaps for replies that were cut, late or unreadable, "
                )
            total = f" of {facts['prompts']:,}" if facts.get("prompts") else ""
            remaining = f"{unsent:,}{total} prompts were not sent" if unsent else "its work is not finished"
            return (
                f"Stage {step.label} of {config.name} stopped at its budget: {spent}{remaining}. To use a larger "
                f"budget, cancel, raise {stage}.budget_dollars (or budget_tokens) and run `nautile run "
                f"{argument} --from {stage} --force`: replies that were paid for are reused. Or resume "
                "with less."
            )
    return None


def go_on_with(store: Store, outputs: dict[str, str], run_id: str) -> None:
    """Record that the question about the used-up budget of these outputs was answered with yes in run `run_id`."""
    for execution in {store.get(artifact_id).execution for artifact_id in outputs.values()}:
        text = f"run {run_id} was allowed to go on with what its budget was enough for"
        write_row(store, "note", {"id": _note_about(execution), "text": text, "tags": []})


def was_approved(states: Sequence[State[Any]], key: str) -> bool:
    """Whether question `key` of a run was answered with Resume since the run was started or retried the last time.

    `states`: all states that the run has had. Any other end of the wait (a crash, a cancellation, a retry) is a no.
    """
    approved = False
    waits: State[Any] | None = None
    for state in sorted(states, key=lambda state: state.timestamp):
        if state.is_paused():
            waits = state
            approved = approved and not _asks(state, key)
        elif waits is not None:
            # What the server itself sets after Resume: a suspended run is scheduled by this name, a paused one runs.
            suspended = waits.state_details.pause_reschedule
            resumed = state.name == "Resuming" if suspended else state.is_running()
            approved = resumed and (approved or _asks(waits, key))
            waits = None
        elif state.is_final() or (state.is_scheduled() and state.name not in _GOES_ON):
            approved = False
    return approved


def ask(
    store: Store, run_id: str, key: str, label: str, question: str, patience: timedelta, force: bool = False
) -> None:
    """Pause or suspend flow run `run_id` until it is resumed. `key` identifies the `question` within the run.

    A run that is retried asks again. Returns after the approval. Raises `Pause` in a run that is suspended, and
    `ConfigError` if there is no answer within `patience` or the run is cancelled.
    """
    command = f"nautile approve {run_id[:8]}"
    message = f"{question} Resume to continue (or `{command}`); cancel the run to stop here."
    suspend = deployment.id is not None and not force
    new_state: Any = Suspended if suspend else Paused
    # Another key each time: Prefect refuses one that was used, and does not forget those of a run that is retried.
    pause_key = f"{slug(key)}-{uuid4().hex}"
    # After `timeout_seconds` the server sets the run to Failed, also when this process is gone.
    state: State[Any] = new_state(timeout_seconds=round(patience.total_seconds()), pause_key=pause_key, message=message)
    keyset = keyset_from_paused_state(state)
    state.state_details.run_input_keyset = dict(keyset.items())
    note = store.questions / f"{UUID(run_id)}.json"
    with get_client(sync_client=True) as client:
        if was_approved(client.read_flow_run_states(UUID(run_id)), slug(key)):
            note.unlink(missing_ok=True)
            return
        # First the state, then the note: a note without a paused run would invite an answer that no server accepts.
        answer = client.set_flow_run_state(UUID(run_id), state)
        # The answer to a first try was lost, and the client has sent the state again: the run is paused for this one.
        is_set = answer.state and answer.state.is_paused() and answer.state.state_details.pause_key == pause_key
        if answer.status != SetStateStatus.ACCEPT and not is_set:
            reason = getattr(answer.details, "reason", answer.status)
            raise ConfigError(f"{label}: the run could not be paused for approval: {reason}")
        form = Approval.with_initial_data(description=message)
        form.save(keyset, flow_run_id=UUID(run_id))
        logger.warning("paused: %s", message)
        stage, wait = label.partition(":")[0], f"waits for {command}"
        notify(StageUpdate(stage, label, "waiting", run_id=run_id, note=wait, question=message))
        _create_artifact(label, message)
        note.parent.mkdir(parents=True, exist_ok=True)
        fields: dict[str, Any] = {"run": run_id, "label": label, "message": message, "since": now(), "host": host()}
        fields |= {"api": get_current_settings().api.url, "pid": None if suspend else os.getpid()}
        write_json(note, fields)
        if suspend:
            end_of_heartbeats(run_id)
            raise Pause(state=answer.state)
        try:
            _await_answer(client, UUID(run_id), slug(key), label, patience)
        finally:
            note.unlink(missing_ok=True)


def expected_cost(store: Store, config: RunConfig, step: Step) -> str:
    """The expected cost of a step in one line: the forecast of its calls, its limits, what it took the last time."""
    forecast = [text] if (text := forecast_text(forecast_calls([step], store))) else []
    return f"{'; '.join([*forecast, *step.stage.limits(step.section), _last_time(store, config, step)])}."


def _asks(state: State[Any], key: str) -> bool:
    """Whether a paused state asks question `key`: its own key ends in the digits that `ask` has added."""
    return (state.state_details.pause_key or "").rpartition("-")[0] == key


def _note_about(execution: str) -> str:
    return f"budget:{execution}"


def _is_allowed(store: Store, execution: str) -> bool:
    """Whether `go_on_with` was recorded for an execution. A catalog that cannot be read is no permission."""
    try:
        Catalog(store).ingest(patience=5.0)
        return bool(Catalog(store).query(_ALLOWED, [_note_about(execution)], patience=5.0)[0]["count"])
    except (CatalogBusy, ConfigError) as error:
        logger.warning("whether a used-up budget was allowed is not known now, so it is asked: %s", error)
        return False


def _await_answer(client: SyncPrefectClient, run_id: UUID, key: str, label: str, patience: timedelta) -> None:
    """Poll the state of the paused run until question `key` is answered. Raises `ConfigError` if the run ends instead.

    A run that runs again may also have ended and been retried since the last look.
    """
    while True:
        time.sleep(POLL_S)
        try:
            state = client.read_flow_run(run_id).state
            approved = state and state.is_running() and was_approved(client.read_flow_run_states(run_id), key)
        except ObjectNotFound:
            raise ConfigError(
                f"{label}: the server knows nothing of the run any more, as after a reset, so nobody can answer: start "
                "it again"
            ) from None
        except httpx.HTTPError as error:
            # The server may restart while somebody thinks about the question.
            logger.warning("the server did not answer whether %s is approved: %s", label, error)
            continue
        if state is None or state.is_paused():
            continue
        if approved:
            logger.info("approved: %s", label)
            return
        if state.is_failed():
            hours = f"{patience.total_seconds() / 3600:g}"
            stage = label.partition(":")[0]
            raise ConfigError(f"{label}: nobody answered within {hours} h (operation.{stage}.hours)")
        ended = "started again" if state.is_running() else (state.name or state.type.value).lower()
        raise ConfigError(f"{label}: the run was {ended} while it waited for an answer")


def _create_artifact(label: str, message: str) -> None:
    try:
        create_markdown_artifact(message, key="approval", description=f"{label} waits for an answer")
    except Exception as error:  # not an error of the run: the message of the state has the question as well
        logger.warning("Prefect refused the artifact with the question about %s: %s", label, error)


def _last_time(store: Store, config: RunConfig, step: Step) -> str:
    """Time and cost of the last execution of the step in this store, preferably with the same configuration."""
    try:
        Catalog(store).ingest(patience=1.0)
        rows = Catalog(store).query(_LAST_TIME, [step.label, config.name], patience=1.0)
    except (CatalogBusy, ConfigError) as error:
        return f"its last time is not available now ({error})"
    if not rows or rows[0]["seconds"] is None:
        return "it never ran here, so its time is unknown"
    last = rows[0]
    when: datetime = last["ended"]
    money = f" and ${last['dollars']:,.4f}" if last["dollars"] is not None else ""
    other = "" if last["config"] == config.name else f" for {last['config']}"
    return f"the last time{other} ({when:%Y-%m-%d}) it took {duration(last['seconds'])}{money}"
