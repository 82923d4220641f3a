"""`nautile deploy`: the pipeline, each stage and the evaluation as Prefect deployments, served here or by a work pool.

Without a pool this process serves them: Prefect starts each flow run as a child process. Several runs may be active in
parallel, so that a run that waits (for an approval, for a slot) does not block others; `[resources]` limits how many of
their steps run in parallel, by default one per resource. With a pool they are only registered for workers, which start
the flow runs, possibly on other machines. `prefect.yaml` does the same for `prefect deploy --all`.
"""

import asyncio
import logging
import os
from collections import Counter
from collections.abc import Callable
from typing import Any, Self
from uuid import UUID

from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.objects import ConcurrencyLimitConfig, ConcurrencyLimitStrategy, WorkPool
from prefect.client.schemas.schedules import CronSchedule
from prefect.deployments.runner import RunnerDeployment
from prefect.exceptions import ObjectNotFound
from prefect.flows import Flow
from prefect.runner import Runner
from prefect.server.schemas import schedules as server_schedules
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
from nautile.configs.schema import RunConfig
from nautile.configs.stages import STAGES
from nautile.flows.dag import steps_of
from nautile.flows.forms import SERVED_BY
from nautile.flows.nightly.evaluation import evaluation
from nautile.flows.nightly.regression import regression
from nautile.flows.operate import automations, concurrency, serving
from nautile.flows.operate.automations import TAG
from nautile.flows.pipeline import pipeline
from nautile.store.mirror import open_store

log = logging.getLogger(__name__)

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


def deployment_name(part: str, config_name: str) -> str:
    """The name of the deployment of a flow or a stage. It includes the configuration: a server may have several."""
    return f"{part}-{config_name}"


def part_of(entry: RunnerDeployment) -> str:
    """What a deployment runs: the stage of one that is the pipeline with that stage alone, else its flow."""
    return str(entry.parameters.get("only") or entry.flow_name)


def serve(config: RunConfig, argument: str, limit: int | None, runs: int) -> None:
    """Register the deployments with the API and start the runs that it schedules, until stopped.

    `argument`: the configuration as given on the command line. `limit`: maximum parallel steps per resource, in place
    of those in `[resources]`. `runs`: maximum parallel flow runs.
    """
    served = ServedConfig.of(argument, config, load_base(argument)).model_dump_json()
    # The processes of flow runs inherit these. Prefect starts them with `-m`, which would otherwise import from the
    # working directory: see `common.processes.module_command`.
    os.environ |= {WORKER: served, SERVED_BY: str(os.getpid()), "PYTHONSAFEPATH": "1"}
    limits = step_limits(config, limit)
    asyncio.run(_serve(config.name, lambda: deployments(config, argument), limits, runs, config.launch.niceness))


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
    environment = {"NAUTILE_STORE": open_store().location, **environment, **deploy.job_variables.get("env", {})}
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
            declared = await serving.Declared(run_config.name).read(client)
            await prepare(limits, declared.limits)
            await declared.write(client, limits, declared.schedules)

    asyncio.run(declare_limits(load(config)))
    return {}


def _deployment(flow: Flow[..., Any], config: RunConfig, parameters: dict[str, Any], **more: Any) -> RunnerDeployment:
    stage = parameters.get("only")
    alone = f"Run the stage `{stage}` of a configuration; what it reads must be in the store."
    return flow.to_deployment(  # type: ignore[return-value]  # a coroutine only in an event loop
        name=deployment_name(stage or flow.name, config.name),
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
        self.at_work = serving.RunsAtWork()

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
    config: str, served: Callable[[], list[RunnerDeployment]], limits: dict[str, int], runs: int, niceness: int
) -> None:
    # `pause_on_shutdown=False`: Prefect would switch the schedules off when this process stops, and they would stay off
    # after a restart.
    runner = _Runner(name=f"nautile-{config}", limit=runs, pause_on_shutdown=False)

    async def declare_all() -> list[UUID]:
        # In a thread: Prefect makes coroutines of them in one with an event loop.
        entries = await asyncio.to_thread(served)
        async with get_client() as client:
            declared = await serving.Declared(config).read(client)
            await prepare(limits, declared.limits)
            times = await _keep_changes(client, entries, declared)
            ids = [await runner.aadd_deployment(entry) for entry in entries]
            await declared.write(client, limits, times)
        return ids

    ids = await declare_all()
    async with get_client() as client:
        for run in await serving.drop_missed(client, ids):
            log.warning("the scheduled run %s was missed, and is left out", run.name)
    give_way(niceness)  # the flow runs that it starts inherit it
    log.info("serving %d deployments, at most %d runs at once; steps at work: %s", len(ids), runs, limits)
    serving.poll_for_ever()
    tending = asyncio.create_task(serving.tend(runner.at_work, lambda: serving.if_forgotten(config, declare_all)))
    try:
        await runner.start()
    finally:
        tending.cancel()


async def _keep_changes(
    client: PrefectClient, entries: list[RunnerDeployment], declared: serving.Declared
) -> dict[str, list[Any]]:
    """`serving.keep_changes` for all of them; returns the schedules that the configuration declares now, by flow."""
    times = {}
    for entry in entries:
        flow = part_of(entry)
        times[flow] = serving.times_of(entry.schedules or [])
        await serving.keep_changes(client, entry, declared.schedules.get(flow))
    return times


async def _register(
    config: str,
    entries: list[tuple[RunnerDeployment, DeployConfig]],
    default_type: str,
    limits: dict[str, int],
    environment: dict[str, str],
) -> str:
    # All pools and variables are checked before anything is registered, so that a mistake in one leaves no half of a
    # deployment.
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
        declared = await serving.Declared(config).read(client)
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
