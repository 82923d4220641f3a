"""`nautile deploy`: one process that serves the pipeline, each stage by itself and the evaluation as deployments.

Prefect starts each flow run as a process of its own from here. Several are let in, for one that waits (for a person,
for its turn) must not keep the others out. Of their stages one works at a time, unless told otherwise: every stage
takes all the cores or the accelerator, and two that share it are slower than two in turn.
"""

import asyncio
import logging
from typing import Any

from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import ConcurrencyLimitConfig, ConcurrencyLimitStrategy
from prefect.client.schemas.schedules import CronSchedule
from prefect.deployments.runner import RunnerDeployment
from prefect.flows import Flow
from prefect.runner import Runner
from prefect.types.entrypoint import EntrypointType
from pydantic import ValidationError

from common.errors import ConfigError
from configs.schema import RunConfig
from flows.nightly.evaluation import evaluation
from flows.nightly.regression import regression
from flows.operate import automations, concurrency
from flows.operate.automations import TAG
from flows.pipeline import STAGE_FLOWS, pipeline

log = logging.getLogger(__name__)


def deployments(config: RunConfig) -> list[RunnerDeployment]:
    """The pipeline, each stage and the evaluation with `config` as the form's default, and what shows a regression.

    A second run of one waits for the first. Raises `ConfigError` if the schedule is none.
    """
    given = {"config": config.model_dump(mode="json", exclude_defaults=True)}
    served = [_deployment(flow, config, given) for flow in (pipeline, *STAGE_FLOWS)]
    served.append(_deployment(evaluation, config, given, schedules=schedules(config)))
    served.append(_deployment(regression, config, {}, triggers=[automations.on_regression(config)]))
    return served


def schedules(config: RunConfig) -> list[CronSchedule]:
    """The schedule of the evaluation; none without a `cron`. Raises `ConfigError` for a `cron` that means nothing."""
    if not config.schedule.cron:
        return []
    try:
        return [CronSchedule(cron=config.schedule.cron, timezone=config.schedule.timezone)]
    except ValidationError as error:
        raise ConfigError(f"schedule.cron: {config.schedule.cron!r}: {error.errors()[0]['msg']}") from None


def _deployment(flow: Flow[..., Any], config: RunConfig, given: dict[str, Any], **more: Any) -> RunnerDeployment:
    return flow.to_deployment(
        name=config.name,
        parameters=given,
        tags=[TAG, config.name],
        description=(flow.description or "").strip(),
        concurrency_limit=ConcurrencyLimitConfig(limit=1, collision_strategy=ConcurrencyLimitStrategy.ENQUEUE),
        enforce_parameter_schema=True,
        entrypoint_type=EntrypointType.MODULE_PATH,
        **more,
    )


def serve(config: RunConfig, limit: int, runs: int) -> None:
    """Register the deployments with the API and run what is asked of them until stopped.

    `runs` flow runs are let in at once, of whose stages `limit` work at a time.
    """
    asyncio.run(_serve(f"nautile-{config.name}", deployments(config), limit, runs))


async def prepare(limit: int) -> None:
    """What all deployments of a server share: the limit of stages at work, and the end of runs that fell silent."""
    concurrency.declare(limit)
    async with get_client() as client:
        await automations.declare(client, automations.silent_runs())


async def _serve(name: str, served: list[RunnerDeployment], limit: int, runs: int) -> None:
    await prepare(limit)
    runner = Runner(name=name, limit=runs, pause_on_shutdown=False)
    for deployment in served:
        await runner.aadd_deployment(deployment)
    log.info("serving %d deployments, %d runs at once, %d of their stages at work", len(served), runs, limit)
    await runner.start()
