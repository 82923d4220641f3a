"""`nautile deploy`: one process that serves the whole pipeline and each stage by itself as Prefect deployments.

Prefect starts each flow run as a process of its own from here. They are let in one at a time, unless told otherwise:
every stage takes all the cores or the accelerator, and two that share it are slower than two in turn.
"""

import asyncio
import logging
from typing import Any

from prefect.client.schemas.objects import ConcurrencyLimitConfig, ConcurrencyLimitStrategy
from prefect.deployments.runner import RunnerDeployment
from prefect.flows import Flow
from prefect.runner import Runner
from prefect.types.entrypoint import EntrypointType

from configs.schema import RunConfig
from flows.pipeline import pipeline
from flows.stages import all_flows

log = logging.getLogger(__name__)

TAG = "nautile"


def deployments(config: RunConfig) -> list[RunnerDeployment]:
    """The pipeline and each stage, with `config` as the form's default; a second run of one waits for the first."""
    given = {"config": config.model_dump(mode="json", exclude_defaults=True)}
    return [_deployment(flow, config, given) for flow in (pipeline, *all_flows())]


def _deployment(flow: Flow[..., Any], config: RunConfig, given: dict[str, Any]) -> RunnerDeployment:
    return flow.to_deployment(
        name=config.name,
        parameters=given,
        tags=[TAG, config.name],
        description=(flow.description or "").strip(),
        concurrency_limit=ConcurrencyLimitConfig(limit=1, collision_strategy=ConcurrencyLimitStrategy.ENQUEUE),
        enforce_parameter_schema=True,
        entrypoint_type=EntrypointType.MODULE_PATH,
    )


def serve(config: RunConfig, limit: int) -> None:
    """Register the deployments with the API and run what is asked of them until stopped; `limit` runs at once."""
    asyncio.run(_serve(f"nautile-{config.name}", deployments(config), limit))


async def _serve(name: str, served: list[RunnerDeployment], limit: int) -> None:
    runner = Runner(name=name, limit=limit, pause_on_shutdown=False)
    for deployment in served:
        await runner.aadd_deployment(deployment)
    log.info("serving %d deployments, %d runs at once", len(served), limit)
    await runner.start()
