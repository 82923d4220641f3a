"""`prefect.yaml`: the same deployments for workers of a pool, where flow runs start on other machines than this one.

    prefect work-pool create nautile --type kubernetes
    nautile deploy CONFIG --pool kubernetes --out prefect.yaml      writes the file
    prefect deploy --all                                            registers what it says
    nautile deploy CONFIG --pool kubernetes                         or registers the same without a file

The last is there because the command of Prefect 3.8.8 registers one deployment and then fails, with the fastapi it is
pinned with: it asks for a pool's workers with `limit: null`, which is refused (422). The file of this repository is
that of configs/local.toml for a pool of processes; a test keeps it so.
"""

import asyncio
import os
from pathlib import Path
from typing import Any

import yaml
from prefect.client.orchestration import get_client
from prefect.deployments.runner import RunnerDeployment
from prefect.exceptions import ObjectNotFound

from common.errors import ConfigError
from common.files import write_atomically
from configs.schema import RunConfig
from flows.operate.concurrency import LIMIT
from flows.operate.deployments import deployments, prepare
from store.mirror import open_store

POOL = "nautile"
TYPES = {"process": "process", "kubernetes": "kubernetes", "cloud": "cloud-run-v2:push"}
_STORE = {"env": {"NAUTILE_STORE": "{{ $NAUTILE_STORE }}"}}
_IMAGE = {"image": "{{ $NAUTILE_IMAGE }}"}
_VARIABLES: dict[str, dict[str, Any]] = {"process": _STORE, "kubernetes": _STORE | _IMAGE, "cloud": _STORE | _IMAGE}
_HEAD = """\
# Written by `nautile deploy {config} --pool {pool} --out prefect.yaml`: write it anew rather than edit it.
#
#   prefect work-pool create {name} --type {type}
#   prefect gcl create {limit} --limit 1
#   prefect deploy --all                            (or, with no file: nautile deploy {config} --pool {pool})
#   prefect worker start --pool {name} --limit 8    (a push pool needs no worker)
#
# NAUTILE_STORE (and NAUTILE_IMAGE, an image with this project installed) are read when `prefect deploy` runs; all that
# run flows must see the same store. The limit lets one stage work at a time on the whole server. Keys of endpoints are
# environment variables of the workers, never of this file.
"""


def write(config: RunConfig, pool: str, out: Path) -> str:
    """Write the file; what to do with it, in a line. Raises `ConfigError` for a type of pool that is not known."""
    _known(pool)
    write_atomically(out, render(config.name, pool, deployments(config)).encode())
    return f"wrote {out}: see its first lines, then `prefect deploy --all`"


def register(config: RunConfig, pool: str, limit: int) -> str:
    """Register the deployments with the pool on the server of PREFECT_API_URL; what there is now, in a line.

    Raises `ConfigError` for a type that is not known, a pool that is not there, or an image that is not named.
    """
    _known(pool)
    variables = {"env": {"NAUTILE_STORE": str(open_store().root)}}
    if pool != "process":
        if not (image := os.environ.get("NAUTILE_IMAGE")):
            raise ConfigError(f"--pool {pool}: the environment variable NAUTILE_IMAGE must name an image")
        variables |= {"image": image}
    return asyncio.run(_register(deployments(config), pool, variables, limit))


async def _register(served: list[RunnerDeployment], pool: str, variables: dict[str, Any], limit: int) -> str:
    async with get_client() as client:
        try:
            there = await client.read_work_pool(POOL)
        except ObjectNotFound:
            make = f"prefect work-pool create {POOL} --type {TYPES[pool]}"
            raise ConfigError(f"the server has no work pool {POOL!r}: `{make}` makes it") from None
    if there.type != TYPES[pool]:
        raise ConfigError(f"--pool {pool}: work pool {POOL!r} is of type {there.type!r}, not {TYPES[pool]!r}")
    await prepare(limit)
    for one in served:
        one.work_pool_name, one.job_variables = POOL, variables
        await one.aapply()
    return f"{len(served)} deployments stand in work pool {POOL!r}; `prefect worker start --pool {POOL}` runs them"


def _known(pool: str) -> None:
    if pool not in TYPES:
        raise ConfigError(f"--pool: {pool!r} is none; there are {', '.join(TYPES)}")


def render(config: str, pool: str, served: list[RunnerDeployment]) -> str:
    """The text of `prefect.yaml` for a work pool of one of `TYPES`; parameters that are shared stand in it once."""
    work_pool = {"name": POOL, "job_variables": _VARIABLES[pool]}
    table = {"name": "nautile", "pull": [], "deployments": [_entry(one, work_pool) for one in served]}
    head = _HEAD.format(config=config, pool=pool, name=POOL, type=TYPES[pool], limit=LIMIT)
    return f"{head}\n{yaml.safe_dump(table, sort_keys=False, width=120, allow_unicode=True)}"


def _entry(one: RunnerDeployment, work_pool: dict[str, Any]) -> dict[str, Any]:
    limit = one.concurrency_options
    entry: dict[str, Any] = {
        "name": one.name,
        "entrypoint": one.entrypoint,
        "description": one.description,
        "tags": one.tags,
        "parameters": one.parameters,
        "enforce_parameter_schema": True,
        "concurrency_limit": {"limit": one.concurrency_limit, "collision_strategy": limit.collision_strategy.value},
        "work_pool": work_pool,
    }
    if one.schedules:
        entry["schedules"] = [{"cron": s.schedule.cron, "timezone": s.schedule.timezone} for s in one.schedules]
    if one.triggers:
        entry["triggers"] = [trigger.model_dump(mode="json", exclude_unset=True) for trigger in one.triggers]
    return entry
