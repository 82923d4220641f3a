"""Approval: a run that waits for an operator, before an expensive stage or after one that ran out of money.

The flow run is paused on Prefect's server. Its state's message and the form behind Resume show the question with the
expected cost: what the configuration allows, and what the same step took the last time. Resume, Cancel and
`nautile approve` answer it. A run of a deployment is suspended: it holds no process, and Prefect starts one when it is
resumed, which reuses the steps before this one. Two runs wait in their process instead: one from a terminal, for nobody
would start another, and a forced one, which would repeat the steps it has just run.

A note of each waiting run lies under the store, with the address of the server: `nautile run` may have brought an
embedded server that no other process could know of.

Prefect's `pause_flow_run` and `suspend_flow_run` propose the same states, but these carry no message, and the first
goes on waiting until its time-out when the run is cancelled, and fails when the server is down for a moment.
"""

import logging
import os
import time
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import httpx
from prefect.artifacts import create_markdown_artifact
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.responses import SetStateStatus
from prefect.exceptions import Pause
from prefect.input import RunInput, keyset_from_paused_state
from prefect.runtime import deployment
from prefect.settings import get_current_settings
from prefect.states import Paused, State, Suspended

from common.errors import ConfigError
from common.files import write_json
from common.text import amount, duration
from configs.schema import RunConfig
from flows.dag import Step
from flows.operate.questions import NOTES
from flows.selection import is_in_store
from store.artifacts import Store
from store.catalog import Catalog, CatalogBusy
from store.manifest import host, now
from tasks.engine.failure import slug
from tasks.engine.progress import StageUpdate, notify

logger = logging.getLogger(__name__)

POLL_S = 1.0
_LAST_TIME = """
SELECT r.config, max(r.ended) AS ended, sum(r.seconds) AS seconds,
    (SELECT sum(c.dollars) FROM calls c WHERE c.execution = r.execution) AS dollars
FROM runs r WHERE r.label = ? AND NOT r.reused
GROUP BY r.config, r.execution HAVING bool_or(r.state = 'done') ORDER BY (r.config = ?) DESC, ended DESC LIMIT 1
"""


class Approval(RunInput):
    """The form behind Resume: no fields, only the question as its description."""


def before_step(store: Store, config: RunConfig, step: Step, force: bool, run_id: str) -> None:
    """Ask whether to start a step, if `[operation.STAGE] approve` is set and the step will not just be reused.

    Raises as `ask`.
    """
    if asks_before(store, config, step, force):
        cost = expected_cost(store, config, step)
        question = f"Stage {step.label} of {config.name} asks for approval before it begins. Expected cost: {cost}"
        patience = config.operation.of(step.stage.name).patience
        ask(store, run_id, f"approve:{step.label}", step.label, question, patience, force)


def asks_before(store: Store, config: RunConfig, step: Step, force: bool) -> bool:
    """Whether `before_step` asks."""
    return config.operation.of(step.stage.name).approve and (force or not is_in_store(store, step))


def question_at_budget(
    store: Store, config: RunConfig, step: Step, outputs: dict[str, str], run_id: str, argument: str
) -> str | None:
    """Whether to continue with less, if the step's money ran out in this run and its `at_budget` is "pause".

    None if there is nothing to ask. `argument`: see `PreparedRun`.
    """
    if config.operation.of(step.stage.name).at_budget == "go_on":
        return None
    for artifact_id in outputs.values():
        manifest = store.get(artifact_id).manifest
        facts = manifest["facts"]
        # An artifact of another run was asked about in that run.
        if facts.get("budget_exhausted") and manifest["run"] == run_id:
            stage, unasked = step.stage.name, facts.get("unasked")
            spent = f"${facts['dollars']:,.4f} spent, " if facts.get("dollars") is not None else ""
            if facts.get("dollars_unknown"):
                spent += (
                    f"${facts['dollars_unknown']:,.4f} more perhaps for replies that were cut, late or unreadable, "
                )
            total = f" of {facts['prompts']:,}" if facts.get("prompts") else ""
            left = f"{unasked:,}{total} prompts were not sent" if unasked else "its work is not finished"
            return (
                f"Stage {step.label} of {config.name} stopped at its budget: {spent}{left}. To use a larger "
                f"budget, cancel, raise {stage}.budget_dollars (or budget_tokens) and run `nautile run "
                f"{argument} --from {stage} --force`: replies that were paid for are reused. Or resume "
                "with less."
            )
    return None


def ask(
    store: Store, run_id: str, key: str, label: str, question: str, patience: timedelta, force: bool = False
) -> None:
    """Pause or suspend flow run `run_id` until somebody resumes it. `key` names the `question` within the run.

    A run that is retried after its end asks again, for then Prefect forgets its keys. Returns once the question is
    answered; raises `Pause` in a run that is suspended, and `ConfigError` if nobody answers within `patience` or the
    run is cancelled.
    """
    command = f"nautile approve {run_id[:8]}"
    message = f"{question} Resume to continue (or `{command}`); cancel the run to stop here."
    suspend = deployment.id is not None and not force
    state_of: Any = Suspended if suspend else Paused
    state: State[Any] = state_of(timeout_seconds=round(patience.total_seconds()), pause_key=slug(key), message=message)
    keyset = keyset_from_paused_state(state)
    state.state_details.run_input_keyset = dict(keyset)
    note = store.root / NOTES / f"{UUID(run_id)}.json"
    with get_client(sync_client=True) as client:
        answer = client.set_flow_run_state(UUID(run_id), state)
        if answer.status == SetStateStatus.REJECT and answer.state and answer.state.is_running():
            note.unlink(missing_ok=True)  # the key was used: this question has been answered
            return
        if answer.status != SetStateStatus.ACCEPT:
            reason = getattr(answer.details, "reason", answer.status)
            raise ConfigError(f"{label}: the run could not be paused for approval: {reason}")
        form = Approval.with_initial_data(description=message)
        form.save(keyset, flow_run_id=UUID(run_id))
        logger.warning("paused: %s", message)
        what = {"note": f"waits for {command}", "question": message}
        notify(StageUpdate(label.partition(":")[0], label, "waiting", run_id=run_id, **what))
        _create_artifact(label, message)
        note.parent.mkdir(parents=True, exist_ok=True)
        asked = {"run": run_id, "label": label, "message": message, "since": now(), "host": host()}
        asked |= {"api": get_current_settings().api.url, "pid": None if suspend else os.getpid()}
        write_json(note, asked)
        if suspend:
            raise Pause(state=answer.state)
        try:
            _await_answer(client, UUID(run_id), label, patience)
        finally:
            note.unlink(missing_ok=True)


def expected_cost(store: Store, config: RunConfig, step: Step) -> str:
    """One line: what the step may spend by its configuration, and what it took the last time."""
    return f"{'; '.join([*_allowed(config, step), _last_time(store, config, step)])}."


def _await_answer(client: SyncPrefectClient, run_id: UUID, label: str, patience: timedelta) -> None:
    while True:
        time.sleep(POLL_S)
        try:
            state = client.read_flow_run(run_id).state
        except httpx.HTTPError as error:
            logger.warning("the server does not answer whether %s is approved: %s", label, error)
            continue
        if state is None or state.is_paused():
            continue
        if state.is_running():
            logger.info("approved: %s", label)
            return
        if state.is_failed():
            hours = f"{patience.total_seconds() / 3600:g}"
            stage = label.partition(":")[0]
            raise ConfigError(f"{label}: nobody answered within {hours} h (operation.{stage}.hours)")
        ended = (state.name or state.type.value).lower()
        raise ConfigError(f"{label}: the run was {ended} while it waited for an answer")


def _create_artifact(label: str, message: str) -> None:
    try:
        create_markdown_artifact(message, key="approval", description=f"{label} waits for an answer")
    except Exception as error:  # the state's message has it as well
        logger.warning("Prefect refused the artifact with the question about %s: %s", label, error)


def _allowed(config: RunConfig, step: Step) -> list[str]:
    """What the configuration allows the step: its money, tokens, prompts or optimizer steps."""
    section: Any = step.section.get(step.stage.name) or {}
    if step.stage.name == "pretrain":
        return [f"{amount(sum(phase.tokens for phase in config.pretrain.phases))} tokens to train on"]
    if step.stage.name == "distill":
        return [f"{section['prompts']:,} prompts", _budget(section)]
    if step.stage.name in ("align", "reason"):
        rows = section["rollout"]["prompts"] * section["rollout"]["group"]
        return [f"{section['policy']['steps']:,} steps of {rows:,} completions"]
    if step.stage.name == "self_distill":
        rows = section["problems"]["count"] * section["rollout"]["group"] * section["rounds"]
        return [f"{rows:,} completions to draw"]
    if step.stage.name == "evaluate" and "model_under_test" in step.section:
        return [_budget(section)]
    return []


def _budget(section: dict[str, Any]) -> str:
    limits = []
    if dollars := section.get("budget_dollars"):
        limits.append(f"${dollars:,.2f}")
    if tokens := section.get("budget_tokens"):
        limits.append(f"{tokens:,} tokens")
    return f"at most {' and '.join(limits)}" if limits else "no limit of money is set"


def _last_time(store: Store, config: RunConfig, step: Step) -> str:
    """What the step took the last time it ran here, preferably for the same configuration."""
    try:
        Catalog(store).ingest(patience=1.0)
        rows = Catalog(store).query(_LAST_TIME, [step.label, config.name], patience=1.0)
    except (CatalogBusy, ConfigError) as error:
        return f"what it took before is not available now ({error})"
    if not rows or rows[0]["seconds"] is None:
        return "it never ran here, so its time is not known"
    last = rows[0]
    when: datetime = last["ended"]
    money = f" and ${last['dollars']:,.4f}" if last["dollars"] is not None else ""
    other = "" if last["config"] == config.name else f" for {last['config']}"
    return f"the last time{other} ({when:%Y-%m-%d}) it took {duration(last['seconds'])}{money}"
