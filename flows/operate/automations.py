"""Automations of Prefect's server: end the runs of dead processes, and show regressions.

A flow run sends a heartbeat every 30 s. A run that was killed together with its serving process would stay RUNNING
forever: the automation declared here marks it Crashed after 90 s without a heartbeat. That is three heartbeats, so that
a process that was stopped for half a minute is not marked.
"""

import logging
from datetime import timedelta

from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.objects import StateType
from prefect.events import DeploymentEventTrigger, EventTrigger, Posture, ResourceSpecification
from prefect.events.actions import ChangeFlowRunState
from prefect.events.schemas.automations import AutomationCore

from configs.schema import RunConfig
from flows.nightly.alert import CONFIG_LABEL, EVENT

logger = logging.getLogger(__name__)

TAG = "nautile"
SILENT = "nautile: crash runs that fell silent"
SILENT_S = 90
_BEAT = "prefect.flow-run.heartbeat"
_ENDS = ("Completed", "Failed", "Cancelled", "Crashed")


def silent_runs() -> AutomationCore:
    """The automation that marks runs of this project as Crashed when their heartbeats stop."""
    return AutomationCore(
        name=SILENT,
        description=f"No heartbeat for {SILENT_S} s: the process of the run and its serving process are gone.",
        trigger=EventTrigger(
            after={_BEAT},
            expect={_BEAT, *(f"prefect.flow-run.{end}" for end in _ENDS)},
            match=ResourceSpecification({"prefect.resource.id": ["prefect.flow-run.*"]}),
            # Only runs with our tag: the server may also run flows of others.
            match_related=ResourceSpecification(
                {"prefect.resource.id": [f"prefect.tag.{TAG}"], "prefect.resource.role": ["tag"]}
            ),
            for_each={"prefect.resource.id"},
            # Proactive: the automation fires when an expected event does *not* arrive within the time.
            posture=Posture.Proactive,
            threshold=1,
            within=timedelta(seconds=SILENT_S),
        ),
        actions=[
            ChangeFlowRunState(  # type: ignore[call-arg]  # its fields have positional defaults, which mypy cannot see
                state=StateType.CRASHED,
                message=f"No heartbeat for {SILENT_S} s: its process is gone. Finished work is kept.",
            )
        ],
    )


def on_regression(config: RunConfig) -> DeploymentEventTrigger:
    """The trigger that starts its deployment (`flows.nightly.regression`) after a regression of this configuration."""
    return DeploymentEventTrigger(
        name=f"nautile: show regressions of {config.name}",
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
    """Create the automation, or update the one with its name. Duplicates of the name are removed."""
    known = await client.read_automations_by_name(automation.name)
    # Two `nautile deploy` that start side by side may each create one; every duplicate would end the same run again.
    for extra in known[1:]:
        await client.delete_automation(extra.id)
    if known:
        await client.update_automation(known[0].id, automation)
    else:
        await client.create_automation(automation)
    logger.info("automation %r is declared", automation.name)
