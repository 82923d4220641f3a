"""The limits of `[resources]` on a Prefect server, shared by all of its flows and hosts.

They are Prefect's global concurrency limits, one for each resource. `tasks.engine.prefect_task` holds a slot while a
step runs, but not while a run waits for an approval, so that a waiting run does not block others.

Runs that `nautile sweep` starts share this machine also without a server's limits. Their slots are lock files of the
store, which the kernel releases when a process is killed.
"""

import os
from collections.abc import Mapping

from prefect.client.orchestration import get_client

from nautile.store.artifacts import Store

SHARED = "NAUTILE_SHARED_SLOTS"  # set for the runs of a sweep, to an id of its start
PREFIX = "nautile-"  # prefix of the limits' names


def declare(limits: Mapping[str, int], before: Mapping[str, int] = {}) -> None:
    """Set the maximum number of parallel steps per resource on the server.

    `before`: the limits that were declared last. Where they are the same, the server's limit is left as it is, because
    an operator may have changed it there.
    """
    known = declared_limits()
    with get_client(sync_client=True) as client:
        for resource, limit in limits.items():
            if resource not in known or before.get(resource) != limit:
                client.upsert_global_concurrency_limit_by_name(f"{PREFIX}{resource}", limit)


def declared_limits() -> dict[str, str]:
    """Resource -> name of its limit on the server. The embedded server of `nautile run` has no limits."""
    with get_client(sync_client=True) as client:
        names = [limit.name for limit in client.read_global_concurrency_limits(limit=200)]
    return {name.removeprefix(PREFIX): name for name in names if name.startswith(PREFIX)}


def shared_slots(store: Store, resource: str, limit: int) -> tuple[str, ...]:
    """The lock files of a resource's slots; empty unless this is a run of a sweep."""
    if SHARED not in os.environ:
        return ()
    return tuple(str(store.locks / f"slot-{resource}-{number}.lock") for number in range(limit))
