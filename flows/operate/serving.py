"""What the process of `nautile deploy` does beside the flow runs that it starts.

- It keeps what an operator has changed in Prefect's page: a restart declares only what the configuration has changed
  since the last declaration, which a variable on the server records.
- It drops the scheduled runs that were missed while it was off, except the newest.
- It looks for cancelled runs: Prefect's own watch, a subscription to events, misses those that are cancelled while it
  connects again to a server that was restarted.
- It goes on polling for runs while the server is away: Prefect's loop ends after some minutes of that, and with it the
  process and all runs at work.
- It declares everything again on a server with a new database, which knows nothing of its deployments.
- It settles what dead processes leave: runs, their tasks and their slots (`flows.operate.reconcile`).
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import httpx
from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.actions import DeploymentScheduleCreate, VariableCreate, VariableUpdate
from prefect.client.schemas.filters import (
    DeploymentFilter,
    DeploymentFilterId,
    FlowRunFilter,
    FlowRunFilterId,
    FlowRunFilterNextScheduledStartTime,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.client.schemas.sorting import FlowRunSort
from prefect.deployments.runner import RunnerDeployment
from prefect.events import DeploymentEventTrigger
from prefect.exceptions import ObjectNotFound
from prefect.states import Cancelled

from nautile.flows.operate import services
from nautile.flows.operate.reconcile import settle_runs
from nautile.store.mirror import open_store

log = logging.getLogger(__name__)

CANCELLED_S = 5.0  # between two looks for cancelled runs
SETTLE_EVERY = 12  # of these looks, one also looks for what dead processes have left
SCHEDULE = "nautile"  # slug of the schedule that the configuration declares
_MOST = 200  # runs of a request


class Declared:
    """What was declared last on a server for a configuration: the limits, and the schedules by flow."""

    def __init__(self, config: str) -> None:
        self._name = services.declaration(config)
        self.known = False
        self.limits: dict[str, int] = {}
        self.schedules: dict[str, list[Any]] = {}

    async def read(self, client: PrefectClient) -> "Declared":
        """Read it from the server's variable; empty if nothing was declared yet."""
        variable = await client.read_variable_by_name(self._name)
        self.known = variable is not None
        if variable is not None and isinstance(variable.value, dict):
            self.limits = dict(variable.value.get("limits", {}))
            self.schedules = dict(variable.value.get("schedules", {}))
        return self

    async def write(self, client: PrefectClient, limits: Mapping[str, int], schedules: dict[str, list[Any]]) -> None:
        """Record what is declared now."""
        value: Any = {"limits": dict(limits), "schedules": schedules}
        if self.known:
            await client.update_variable(VariableUpdate(name=self._name, value=value))
        else:
            await client.create_variable(VariableCreate(name=self._name, value=value))


def times_of(schedules: Sequence[Any]) -> list[Any]:
    """The cron expression and the time zone of each schedule, as JSON data."""
    return [[getattr(entry.schedule, "cron", None), getattr(entry.schedule, "timezone", None)] for entry in schedules]


async def keep_changes(client: PrefectClient, entry: RunnerDeployment, before: list[Any] | None) -> None:
    """Let a deployment that is registered again keep its schedules, and what is paused or switched off.

    `before`: the schedules that were declared for it last (`times_of`); None if that is not known. If the configuration
    has others now, these replace them, and stay paused if those were.
    """
    own: list[Any] = [
        schedule.model_copy(update={"slug": SCHEDULE if not number else f"{SCHEDULE}-{number}"})
        for number, schedule in enumerate(entry.schedules or [])
    ]
    entry.schedules = own
    try:
        known = await client.read_deployment_by_name(f"{entry.flow_name}/{entry.name}")
    except ObjectNotFound:
        return
    entry.paused = known.paused
    for trigger in entry.triggers:  # it is made again, and stays off if the operator has switched it off
        if isinstance(trigger, DeploymentEventTrigger) and trigger.name:
            automations = await client.read_automations_by_name(trigger.name)
            trigger.enabled = all(automation.enabled for automation in automations)
    times, existing = times_of(own), list(known.schedules)
    unchanged = times == before if before is not None else all(time in times_of(existing) for time in times)
    if not unchanged:
        replaced = [old for old in existing if (old.slug or "").startswith(SCHEDULE)]
        for old in replaced:
            await client.delete_deployment_schedule(known.id, old.id)
        existing = [old for old in existing if old not in replaced]
        active = all(old.active for old in replaced)
        own = [schedule.model_copy(update={"active": active}) for schedule in own]
    else:
        own = []
    # All of them: the server removes those that an update does not name.
    kept = [
        DeploymentScheduleCreate(
            schedule=old.schedule,
            active=old.active,
            max_scheduled_runs=old.max_scheduled_runs,
            parameters=old.parameters,
            slug=old.slug,
        )
        for old in existing
    ]
    entry.schedules = [*kept, *own]


async def drop_missed(client: PrefectClient, deployments: Sequence[UUID]) -> list[FlowRun]:
    """Cancel the scheduled runs whose time has passed, except the newest of each deployment; returns them.

    Call it before the runs of these deployments are started.
    """
    missed = FlowRunFilter(
        state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.SCHEDULED])),
        next_scheduled_start_time=FlowRunFilterNextScheduledStartTime.model_validate({"before_": datetime.now(UTC)}),
    )
    of_these = DeploymentFilter(id=DeploymentFilterId(any_=list(deployments)))
    runs: list[FlowRun] = []
    while True:
        page = await client.read_flow_runs(
            flow_run_filter=missed,
            deployment_filter=of_these,
            sort=FlowRunSort.NEXT_SCHEDULED_START_TIME_ASC,
            limit=_MOST,
            offset=len(runs),
        )
        runs += page
        if len(page) < _MOST:
            break
    by_deployment: dict[UUID | None, list[FlowRun]] = defaultdict(list)
    for run in runs:
        if run.auto_scheduled:
            by_deployment[run.deployment_id].append(run)
    dropped = [run for waiting in by_deployment.values() for run in waiting[:-1]]
    for run in dropped:
        message = "Its time passed while nothing served its deployment; a later one of its schedule runs."
        await client.set_flow_run_state(run.id, Cancelled(message=message))
    return dropped


async def if_forgotten(config: str, declare_all: Callable[[], Awaitable[object]]) -> None:
    """Declare everything again if the server knows nothing of it, as one with a new database.

    Its answer to the question which runs are due is "none", for ever, so that no schedule and no form would work.
    """
    async with get_client() as client:
        forgotten = not (await Declared(config).read(client)).known
    if forgotten:
        log.warning("the server knows nothing of the deployments of %s, as after a reset: declared again", config)
        await declare_all()


class RunsAtWork:
    """The flow runs of this process. Each is ended once, whoever notices first that it is to be cancelled."""

    def __init__(self) -> None:
        self.ids: set[UUID] = set()
        self._told: set[UUID] = set()
        self._end: Callable[[UUID], None] | None = None

    def learn_from(self, observer: Any) -> None:
        """Follow Prefect's own watch: it is told of each run that begins or ends, and hears of cancellations.

        By a subscription, which ends for good when a server ends in order, misses what happens before it is connected
        again after a server that was killed, and tells of neither. Hence `find_cancelled`.
        """
        begun, gone, self._end = (
            observer.add_in_flight_flow_run_id,
            observer.remove_in_flight_flow_run_id,
            observer.on_cancelling,
        )

        def add_in_flight_flow_run_id(run: UUID) -> None:
            self.ids.add(run)
            begun(run)

        def remove_in_flight_flow_run_id(run: UUID) -> None:
            self.ids.discard(run)
            self._told.discard(run)  # its retry has the same id
            gone(run)

        observer.add_in_flight_flow_run_id = add_in_flight_flow_run_id
        observer.remove_in_flight_flow_run_id = remove_in_flight_flow_run_id
        observer.on_cancelling = self.end

    def end(self, run: UUID) -> None:
        """End a run that is to be cancelled; not again, if that was asked before."""
        if run not in self._told and self._end is not None:
            self._told.add(run)
            self._end(run)

    async def find_cancelled(self) -> None:
        """Ask the server for runs of this process that are to be cancelled, and end them."""
        if not self.ids:
            return
        cancelling = FlowRunFilter(
            id=FlowRunFilterId(any_=list(self.ids)),
            state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.CANCELLING])),
        )
        async with get_client() as client:
            for run in await client.read_flow_runs(flow_run_filter=cancelling):
                self.end(run.id)


async def tend(at_work: RunsAtWork, look_after: Callable[[], Awaitable[object]]) -> None:
    """Look for cancelled runs and for dead processes, until cancelled. An error ends only the look it happens in.

    `look_after` is called each minute, too.
    """
    looks = 0
    while True:
        await asyncio.sleep(CANCELLED_S)
        looks += 1
        try:
            await at_work.find_cancelled()
            if looks % SETTLE_EVERY == 1:  # also at once, after a machine or this process has died
                await look_after()
                await asyncio.to_thread(_settle)
        except Exception as error:  # the server is away, or restarts
            log.debug("looking after the runs failed, and is tried again: %s", error)


def poll_for_ever() -> None:
    """Let this process find no runs that are due where the server does not answer.

    Prefect's loop would count each such answer towards its end.
    """
    ask = PrefectClient.get_scheduled_flow_runs_for_deployments

    async def patient(self: PrefectClient, *args: Any, **kwargs: Any) -> Any:
        try:
            return await ask(self, *args, **kwargs)
        except httpx.HTTPError as error:
            if isinstance(error, httpx.HTTPStatusError) and error.response.status_code < 500:
                raise
            log.warning("the server does not say which runs are due, and is asked again: %s", error)
            return []

    PrefectClient.get_scheduled_flow_runs_for_deployments = patient  # type: ignore[assignment,method-assign]


def _settle() -> None:
    for result in settle_runs(open_store()):
        log.warning("%s", result.line())
