"""The limits of `[resources]` on a Prefect server, shared by every flow and host of it.

They are Prefect's global concurrency limits, one for each resource. `tasks.engine.prefect_task` holds a slot while a
step works and not while a run waits for approval, so a run that waits three days delays no other.
"""

from collections.abc import Mapping

from prefect.client.orchestration import get_client

PREFIX = "nautile-"  # of the limits' names


def declare(limits: Mapping[str, int]) -> None:
    """Let so many steps of this server's deployments work at a time on each resource."""
    with get_client(sync_client=True) as client:
        for resource, limit in limits.items():
            client.upsert_global_concurrency_limit_by_name(f"{PREFIX}{resource}", limit)


def declared_limits() -> dict[str, str]:
    """Resource -> name of its limit on the server. The embedded server of `nautile run` has none."""
    with get_client(sync_client=True) as client:
        names = [limit.name for limit in client.read_global_concurrency_limits(limit=200)]
    return {name.removeprefix(PREFIX): name for name in names if name.startswith(PREFIX)}
