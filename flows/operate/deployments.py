"""`nautile deploy`: the pipeline, each stage and the evaluation as Prefect deployments, served here or by a work pool.

Without a pool this process serves them: Prefect starts each flow run as a child process. Several runs may be active in
parallel, so that a run that waits (for an approval, for a slot) does not block others; `[resources]` limits how many of
their steps run in parallel, by default one per resource. With a pool they are only registered for workers, which start
the flow runs, possibly on other machines. `prefect.yaml` does the same for `prefect deploy --all`.

Beside the flow runs that it starts, the process

- keeps what an operator has changed in Prefect's page: a restart declares only what the configuration has changed since
  the last declaration, which a variable on the server records;
- drops the scheduled runs that were missed while it was off, except the newest;
- looks for cancelled runs: Prefect's own watch, a subscription to events, misses those that are cancelled while it
  connects again to a server that was restarted;
- goes on polling for runs while the server is away: Prefect's loop ends after some minutes of that, and with it the
  process and all runs at work;
- declares everything again on a server with a new database, which knows nothing of its deployments;
- kills the processes of runs that the server has ended, as the automation for silent runs does: one that hangs would
  keep its run's tasks, slot and keys for ever;
- settles what dead processes leave: runs, their tasks and their slots (`flows.operate.reconcile`).
"""

import asyncio
import json
import logging
import os
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Self
from uuid import UUID

import httpx
import psutil
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
from prefect.client.schemas.objects import (
    TERMINAL_STATES,
    ConcurrencyLimitConfig,
    ConcurrencyLimitStrategy,
    FlowRun,
    StateType,
    WorkPool,
)
from prefect.client.schemas.schedules import CronSchedule
from prefect.client.schemas.sorting import FlowRunSort
from prefect.deployments.runner import RunnerDeployment
from prefect.events import DeploymentEventTrigger
from prefect.exceptions import ObjectNotFound
from prefect.flows import Flow
from prefect.runner import Runner
from prefect.server.schemas import schedules as server_schedules
from prefect.states import Cancelled
from prefect.types.entrypoint import EntrypointType
from prefect.utilities.schema_tools import ValidationError as SchemaMismatch
from prefect.utilities.schema_tools import validate
from pydantic import ValidationError

from nautile.common.commands import shell_command
from nautile.common.errors import ConfigError
from nautile.common.processes import give_way
from nautile.configs.forms import WORKER, ServedConfig
from nautile.configs.load import load, load_base
from nautile.configs.operation import DeployConfig
from nautile.configs.plugins import PLUGINS, REQUIRED, required
from nautile.configs.schema import RunConfig
from nautile.configs.stages import STAGES
from nautile.flows.dag import DAG_VARIABLE, steps_of
from nautile.flows.forms import SERVED_BY
from nautile.flows.nightly.evaluation import evaluation
from nautile.flows.nightly.regression import regression
from nautile.flows.operate import automations, concurrency, services
from nautile.flows.operate.automations import TAG
from nautile.flows.operate.kept_changes import SCHEDULE
from nautile.flows.operate.reconcile import settle_runs
from nautile.flows.pipeline import pipeline
from nautile.store.mirror import open_store

log = logging.getLogger(__name__)

CANCELLED_S = 5.0  # between two looks for cancelled runs
SETTLE_EVERY = 12  # of these looks, one also looks for what dead processes have left
LINGER = timedelta(seconds=60)  # most time from the end of a run, as the server has it, to that of its process
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

    async def kill_ended(self) -> list[UUID]:
        """Kill the processes of runs that the server ended more than `LINGER` ago; returns the ids of these runs.

        Such a process hangs, or was stopped: one that works ends by itself, because its run's slot is not renewed.
        """
        if not self.ids:
            return []
        ended = FlowRunFilter(
            id=FlowRunFilterId(any_=list(self.ids)),
            state=FlowRunFilterState(type=FlowRunFilterStateType(any_=list(TERMINAL_STATES))),
        )
        killed: list[UUID] = []
        async with get_client() as client:
            runs = await client.read_flow_runs(flow_run_filter=ended)
        late = {str(run.id) for run in runs if run.state and datetime.now(UTC) - run.state.timestamp > LINGER}
        for process, run in services.run_processes(os.getpid()).items() if late else ():
            if run in late:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
                killed.append(UUID(run))
        return killed


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
                for run in await at_work.kill_ended():
                    log.warning("run %s has ended for the server, but its process had not: killed", run)
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


POOL = DeployConfig().pool
POOL_TYPES = {"process": "process", "kubernetes": "kubernetes", "cloud": "cloud-run-v2:push"}


def deployments(config: RunConfig, argument: str) -> list[RunnerDeployment]:
    """The deployments of the pipeline, each stage, the evaluation, and the flow that shows a regression.

    `argument`: the configuration as given on the command line, the default of the parameter `config`. A second run of a
    deployment waits for the first. Raises `ConfigError` if the schedule is invalid.
    """
    parameters = {"config": argument}
    used = {step.stage.name for step in steps_of(config)}  # none for a section that the configuration lacks
    result = [_deployment(pipeline, config, parameters)]
    result += [_deployment(pipeline, config, parameters | {"only": stage}) for stage in STAGES if stage in used]
    result.append(_deployment(evaluation, config, parameters, schedules=schedules(config)))
    result.append(_deployment(regression, config, {}, triggers=[automations.on_regression(config)]))
    return result


def schedules(config: RunConfig) -> list[CronSchedule]:
    """The schedule of the evaluation; none without a `cron`. Raises `ConfigError` for an invalid `cron`."""
    if not config.schedule.cron:
        return []
    try:
        schedule = CronSchedule(cron=config.schedule.cron, timezone=config.schedule.timezone)
    except ValidationError as error:
        raise ConfigError(f"schedule.cron: {config.schedule.cron!r}: {error.errors()[0]['msg']}") from None
    try:
        asyncio.run(server_schedules.CronSchedule(cron=schedule.cron).get_dates(n=1))
    except ValueError:  # as the 30th of February
        raise ConfigError(f"schedule.cron: {config.schedule.cron!r} is on no date that there is") from None
    return [schedule]


def part_of(entry: RunnerDeployment) -> str:
    """What a deployment runs: the stage of one that is the pipeline with that stage alone, else its flow."""
    return str(entry.parameters.get("only") or entry.flow_name)


def serve(config: RunConfig, argument: str, limit: int | None, runs: int, declared: Callable[[], None]) -> None:
    """Register the deployments with the API and start the runs that it schedules, until stopped.

    `argument`: the configuration as given on the command line. `limit`: maximum parallel steps per resource, in place
    of those in `[resources]`. `runs`: maximum parallel flow runs. `declared`: called once all are registered.
    """
    served = ServedConfig.of(argument, config, load_base(argument)).model_dump_json()
    # The processes of flow runs inherit these. Prefect starts them with `-m`, which would otherwise import from the
    # working directory: see `common.processes.module_command`.
    os.environ |= {WORKER: served, SERVED_BY: str(os.getpid()), "PYTHONSAFEPATH": "1"}
    limits = step_limits(config, limit)
    entries = partial(deployments, config, argument)
    asyncio.run(_serve(config.name, entries, limits, runs, config.launch.niceness, declared))


def register(config: RunConfig, argument: str, pool_type: str, limit: int | None) -> str:
    """Register the deployments with their work pools on the server of PREFECT_API_URL; returns lines for the operator.

    `argument`: the configuration as given on the command line. The default pool must have type `pool_type`; pools of
    `[deploy.NAME] pool` may have any type. Raises `ConfigError` for an unknown type, a pool that does not exist, a
    missing image, or variables that do not match the pool's schema.
    """
    if pool_type not in POOL_TYPES:
        raise ConfigError(f"--pool: unknown type {pool_type!r}; use one of {', '.join(POOL_TYPES)}")
    settings = deploy_settings(config)
    entries = [
        (entry, settings.get(part_of(entry)) or config.deployment(part_of(entry)))
        for entry in deployments(config, argument)
    ]
    worker = {WORKER: ServedConfig.of(argument, config, load_base(argument)).model_dump_json()}
    return asyncio.run(_register(config.name, entries, POOL_TYPES[pool_type], step_limits(config, limit), worker))


def deploy_settings(config: RunConfig) -> dict[str, DeployConfig]:
    """Stage -> its `[deploy.STAGE]`, completed by the fields of `[deploy.RESOURCE]` that it does not set.

    The resource is that of the stage's steps; if they use several, the one that comes first in `[resources]`.
    """
    resources_of: dict[str, set[str]] = {}
    for step in steps_of(config):
        resource = config.deployment(step.stage.name).resource or step.resource
        resources_of.setdefault(step.stage.name, set()).add(resource)
    settings = {}
    for stage, resources in resources_of.items():
        resource = min(resources, key=list(config.resources.limits()).index)
        fields: dict[str, Any] = {}
        for section in (config.deployment(resource), config.deployment(stage)):
            fields |= {name: getattr(section, name) for name in section.model_fields_set}
        settings[stage] = DeployConfig(**fields)
    return settings


def job_variables(deploy: DeployConfig, pool_type: str, **environment: str) -> dict[str, Any]:
    """The variables of a pool's jobs: the location of the store, the image, and `[deploy.NAME] job_variables`.

    `environment`: additional environment variables of the jobs. Raises `ConfigError` if the pool needs an image and
    none is configured.
    """
    # The later wins: what the operator sets in `job_variables.env` replaces ours.
    # A worker has the environment of its host; there the plug-ins have to be these.
    plugged = {REQUIRED: json.dumps(wanted)} if (wanted := required()) else {}
    plugged |= {name: os.environ[name] for name in (PLUGINS, DAG_VARIABLE) if name in os.environ}
    environment = {
        "NAUTILE_STORE": open_store().location,
        **plugged,
        **environment,
        **deploy.job_variables.get("env", {}),
    }
    variables = {**deploy.job_variables, "env": environment}
    if pool_type != "process" and "image" not in variables:
        if not (image := os.environ.get("NAUTILE_IMAGE")):
            raise ConfigError(
                f"a work pool of type {pool_type}: the environment variable NAUTILE_IMAGE must name an image"
            )
        variables["image"] = image
    return variables


def step_limits(config: RunConfig, limit: int | None) -> dict[str, int]:
    """Resource -> maximum number of parallel steps, over all runs of the server."""
    return {resource: limit or configured for resource, configured in config.resources.limits().items()}


async def prepare(limits: dict[str, int], before: dict[str, int]) -> None:
    """Declare what a server's deployments share: the limits of parallel steps, and the automation for dead runs.

    `before`: the limits that were declared last. A limit that the configuration has not changed since is left as it is.
    """
    concurrency.declare(limits, before)
    async with get_client() as client:
        await automations.declare(client, automations.silent_runs())


def declare(config: str) -> dict[str, Any]:
    """`prepare` as a build step of prefect.yaml, so that `prefect deploy --all` declares the same as `nautile deploy`.

    Returns no outputs for later steps.
    """

    async def declare_limits(run_config: RunConfig) -> None:
        limits = step_limits(run_config, None)
        async with get_client() as client:
            declared = await Declared(run_config.name).read(client)
            await prepare(limits, declared.limits)
            await declared.write(client, limits, declared.schedules)

    asyncio.run(declare_limits(load(config)))
    return {}


def _deployment(flow: Flow[..., Any], config: RunConfig, parameters: dict[str, Any], **more: Any) -> RunnerDeployment:
    stage = parameters.get("only")
    alone = f"Run the stage `{stage}` of a configuration; what it reads must be in the store."
    return flow.to_deployment(  # type: ignore[return-value]  # a coroutine only in an event loop
        name=f"{stage or flow.name}-{config.name}",  # a server may have those of several configurations
        parameters=parameters,
        tags=[TAG, config.name],
        description=alone if stage else (flow.description or "").strip(),
        # A second run of one deployment waits instead of failing; it would wait for the locks of the same keys anyway.
        concurrency_limit=ConcurrencyLimitConfig(limit=1, collision_strategy=ConcurrencyLimitStrategy.ENQUEUE),
        enforce_parameter_schema=True,
        # By module and not by path, so that a worker with another folder of the checkout finds the flow.
        entrypoint_type=EntrypointType.MODULE_PATH,
        **more,
    )


class _Runner(Runner):
    """Prefect's runner, whose runs at work are known to those who look for cancelled ones."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.at_work = RunsAtWork()

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        self.at_work.learn_from(self._cancelling_observer)  # before the first run begins
        return self

    def handle_sigterm(self, *args: Any, **kwargs: Any) -> None:
        """End the process as Prefect's handler does: the runner is left as the event loop ends.

        That handler creates a coroutine that nobody awaits, with a warning at each stop.
        """
        log.info("SIGTERM: stopping")
        raise SystemExit(0)


async def _serve(
    config: str,
    served: Callable[[], list[RunnerDeployment]],
    limits: dict[str, int],
    runs: int,
    niceness: int,
    after_declaration: Callable[[], None],
) -> None:
    # `pause_on_shutdown=False`: Prefect would switch the schedules off when this process stops.
    runner = _Runner(name=f"nautile-{config}", limit=runs, pause_on_shutdown=False)

    async def declare_all() -> list[UUID]:
        # In a thread: Prefect makes coroutines of them in one with an event loop.
        entries = await asyncio.to_thread(served)
        async with get_client() as client:
            declared = await Declared(config).read(client)
            await prepare(limits, declared.limits)
            times = await _keep_changes(client, entries, declared)
            ids = [await runner.aadd_deployment(entry) for entry in entries]
            await declared.write(client, limits, times)
        return ids

    ids = await declare_all()
    async with get_client() as client:
        for run in await drop_missed(client, ids):
            log.warning("the scheduled run %s was missed, and is left out", run.name)
    await asyncio.to_thread(after_declaration)
    give_way(niceness)  # the flow runs that it starts inherit it
    log.info("serving %d deployments, at most %d runs at once; steps at work: %s", len(ids), runs, limits)
    poll_for_ever()
    tending = asyncio.create_task(tend(runner.at_work, lambda: if_forgotten(config, declare_all)))
    try:
        await runner.start()
    finally:
        tending.cancel()


async def _keep_changes(
    client: PrefectClient, entries: list[RunnerDeployment], declared: Declared
) -> dict[str, list[Any]]:
    """`keep_changes` for all of them; returns the schedules that the configuration declares now, by flow."""
    times = {}
    for entry in entries:
        flow = part_of(entry)
        times[flow] = times_of(entry.schedules or [])
        await keep_changes(client, entry, declared.schedules.get(flow))
    return times


async def _register(
    config: str,
    entries: list[tuple[RunnerDeployment, DeployConfig]],
    default_type: str,
    limits: dict[str, int],
    environment: dict[str, str],
) -> str:
    # Checked before anything is registered, so that a mistake in one leaves no half of a deployment.
    pools: dict[str, WorkPool] = {}
    async with get_client() as client:
        for name in sorted({deploy.pool for _, deploy in entries}):
            try:
                pools[name] = await client.read_work_pool(name)
            except ObjectNotFound:
                command = shell_command("prefect", "work-pool", "create", name, "--type", default_type)
                raise ConfigError(f"the server has no work pool {name!r}: create it with `{command}`") from None
    if POOL in pools and pools[POOL].type != default_type:
        raise ConfigError(f"work pool {POOL!r} is of type {pools[POOL].type!r}, not {default_type!r}")
    for entry, deploy in entries:
        pool = pools[deploy.pool]
        entry.work_pool_name, entry.job_variables = pool.name, job_variables(deploy, pool.type, **environment)
        try:  # the server validates as well, but its error does not name the field
            schema = pool.base_job_template.get("variables", {})
            validate(entry.job_variables, schema, raise_on_error=True, preprocess=True, ignore_required=True)
        except SchemaMismatch as error:
            raise ConfigError(f"deploy.{part_of(entry)}.job_variables: work pool {pool.name!r}: {error}") from None
    async with get_client() as client:
        declared = await Declared(config).read(client)
        await prepare(limits, declared.limits)
        times = await _keep_changes(client, [entry for entry, _ in entries], declared)
        for entry, _ in entries:
            await entry.aapply()
        await declared.write(client, limits, times)
    counts = Counter(deploy.pool for _, deploy in entries)
    lines = [
        f"registered {count} deployments in work pool {name!r}; "
        f"`{shell_command('prefect', 'worker', 'start', '--pool', name)}` runs them"
        for name, count in counts.items()
    ]
    return "\n".join(lines)
