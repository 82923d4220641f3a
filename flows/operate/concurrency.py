"""The limits of `[resources]` on a Prefect server, shared by every flow and host of it.

They are Prefect's global concurrency limits, one for each resource. `tasks.engine.prefect_task` holds a slot while a
step works and not while a run waits for approval, so a run that waits three days delays no other.

Runs that `nautile sweep` starts share this machine whether or not a server has limits. Without them a slot is a lock
file of the store: unlike a limit's, the kernel frees it when its process is killed.
"""

import os
from collections.abc import Mapping

from prefect.client.orchestration import get_client

from store.artifacts import Store

SHARED = "NAUTILE_SHARED_SLOTS"  # set for the runs of a sweep, to an id of its start
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


def shared_slots(store: Store, resource: str, limit: int) -> tuple[str, ...]:
    """The lock files of a resource's slots, if this is a run of a sweep."""
    if SHARED not in os.environ:
        return ()
    return tuple(str(store.root / "locks" / f"slot-{resource}-{number}.lock") for number in range(limit))
