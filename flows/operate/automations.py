"""Automations of Prefect's server: end the runs of dead processes, and show regressions.

A flow run sends a heartbeat every 30 s. A run that was killed together with its serving process would stay RUNNING
forever: the automation declared here marks it Crashed after 90 s without a heartbeat. That is three heartbeats, so that
a process that was stopped for half a minute is not marked.

Every state in which a run has no process ends the wait for its heartbeat: a run that waits for an approval or in a
queue may do so for days. The states come from the server, and the heartbeats from the run, so that a heartbeat could
arrive after the state that it preceded, and the wait would begin again. A run therefore sends its heartbeats before it
ends (`sent_before_the_end`), and says itself that they stop when it is suspended (`end_of_heartbeats`).
"""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.objects import StateType
from prefect.events import DeploymentEventTrigger, EventTrigger, Posture, ResourceSpecification, emit_event
from prefect.events.actions import ChangeFlowRunState
from prefect.events.schemas.automations import AutomationCore
from prefect.events.worker import EventsWorker
from prefect.settings import get_current_settings

from nautile.configs.schema import RunConfig
from nautile.flows.nightly.alert import CONFIG_LABEL, EVENT

logger = logging.getLogger(__name__)

TAG = "nautile"
SILENT = "nautile: crash runs that fell silent"
SILENT_S = 90
_BEAT = "prefect.flow-run.heartbeat"
_SUSPENDED = "nautile.flow-run.suspended"  # sent by a run after its last heartbeat
SEND_S = 5.0  # most time to wait until the events of a run are sent
# Prefect's names of all states in which no process works on a run, or need not.
WITHOUT_PROCESS = (
    "Scheduled", "Late", "AwaitingRetry", "AwaitingConcurrencySlot", "Resuming",
    "Pending", "Submitting", "InfrastructurePending", "NotReady", "Paused", "Suspended",
    "Completed", "Failed", "TimedOut", "Cancelled", "Crashed",
)  # fmt: skip


def silent_runs(within: timedelta = timedelta(seconds=SILENT_S)) -> AutomationCore:
    """The automation that marks runs of this project as Crashed when their heartbeats stop for the time `within`."""
    return AutomationCore(
        name=SILENT,
        description=(
            f"Sets a run to Crashed that has sent no heartbeat for {SILENT_S} s: its process is gone, and so "
            "is the one that started it. Finished work is kept, and `nautile retry RUN` continues."
        ),
        trigger=EventTrigger(
            after={_BEAT},
            expect={_BEAT, _SUSPENDED, *(f"prefect.flow-run.{state}" for state in WITHOUT_PROCESS)},
            match=ResourceSpecification({"prefect.resource.id": ["prefect.flow-run.*"]}),
            # Only runs with our tag: the server may also run flows of others.
            match_related=ResourceSpecification(
                {"prefect.resource.id": [f"prefect.tag.{TAG}"], "prefect.resource.role": ["tag"]}
            ),
            for_each={"prefect.resource.id"},
            # Proactive: the automation fires when an expected event does *not* arrive within the time.
            posture=Posture.Proactive,
            threshold=1,
            within=within,
        ),
        actions=[
            ChangeFlowRunState(  # type: ignore[call-arg]  # its fields have positional defaults, which mypy cannot see
                state=StateType.CRASHED,
                message=f"No heartbeat for {SILENT_S} s: its process is gone. Finished work is kept.",
            )
        ],
    )


@contextmanager
def sent_before_the_end() -> Iterator[None]:
    """Context of a flow's body: its heartbeats reach the server before its last state.

    Else the first heartbeat of a run of a second arrives after its end, and the automation fires for a completed run.
    """
    try:
        yield
    finally:
        _send_events()


def end_of_heartbeats(run_id: str) -> None:
    """Say that a suspended run sends no more heartbeats; call it last, in the process of the run."""
    emit_event(_SUSPENDED, resource={"prefect.resource.id": f"prefect.flow-run.{run_id}"})
    _send_events()


def _send_events() -> None:
    """Wait until all events of this process are sent, at most `SEND_S`: a server that is down must not hold the run."""
    if get_current_settings().api.url is None:
        return  # without a server there is nobody to send them to, and asking for the worker would start one
    worker = EventsWorker.instance()
    sender = threading.Thread(target=worker.wait_until_empty, name="send-events", daemon=True)
    sender.start()
    sender.join(SEND_S)


def on_regression(config: RunConfig) -> DeploymentEventTrigger:
    """The trigger that starts its deployment (`flows.nightly.regression`) after a regression of this configuration."""
    return DeploymentEventTrigger(
        name=f"nautile: show regressions of {config.name}",
        description="After an evaluation found that a benchmark has fallen: shows what is answered wrong now.",
        expect={EVENT},
        match=ResourceSpecification({"prefect.resource.id": ["nautile.evaluation.*"], CONFIG_LABEL: [config.name]}),
        posture=Posture.Reactive,
        threshold=1,
        # The id of each side comes from the event's payload when the automation fires, by a template of Prefect's.
        parameters={
            side: {"__prefect_kind": "jinja", "template": f"{{{{ event.payload.{side} }}}}"} for side in _SIDES
        },
    )


_SIDES = ("after", "before")


async def declare(client: PrefectClient, automation: AutomationCore) -> None:
    """Create the automation, or update the one with its name, which stays off if the operator has switched it off.

    Duplicates of the name are removed.
    """
    known = await client.read_automations_by_name(automation.name)
    # Two `nautile deploy` that start side by side may each create one; every duplicate would end the same run again.
    for extra in known[1:]:
        await client.delete_automation(extra.id)
    if known:
        enabled = known[0].enabled
        await client.update_automation(known[0].id, automation.model_copy(update={"enabled": enabled}))
    else:
        await client.create_automation(automation)
    logger.info("automation %r is declared", automation.name)
