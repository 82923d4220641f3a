"""One limit for all steps: each takes all the cores or the accelerator, so steps of different runs take turns.

The limit is Prefect's, by name, shared by every flow and host of one server. A permit is held while a step works and
not while a run waits for approval, so a run that waits three days delays no other. It is held by a lease: a process
that is killed gives it back within a minute.
"""

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

from prefect.client.orchestration import get_client
from prefect.concurrency.sync import concurrency
from prefect.exceptions import ObjectNotFound

logger = logging.getLogger(__name__)

LIMIT = "nautile-accelerator"
LEASE_S = 60.0  # the least that Prefect accepts
QUICK_TRY_S = 2.0


def declare(limit: int) -> None:
    """Let `limit` steps of this server's deployments work at a time."""
    with get_client(sync_client=True) as client:
        client.upsert_global_concurrency_limit_by_name(LIMIT, limit)


def is_limited() -> bool:
    """Whether the server has the limit. The embedded server of `nautile run` has none."""
    with get_client(sync_client=True) as client:
        try:
            return client.read_global_concurrency_limit_by_name(LIMIT) is not None
        except ObjectNotFound:
            return False


@contextmanager
def permit(label: str) -> Iterator[None]:
    """Wait until the step may work, and hold its permit for the length of the block."""
    with ExitStack() as stack:
        try:
            stack.enter_context(_slot(QUICK_TRY_S))
        except TimeoutError:
            logger.info("%s waits for its permit: another step is working (limit %s)", label, LIMIT)
            stack.enter_context(_slot(None))
        yield


def _slot(timeout_s: float | None) -> AbstractContextManager[None]:
    # A lease that cannot be renewed for a moment must not fail hours of work.
    return concurrency(LIMIT, timeout_seconds=timeout_s, lease_duration=LEASE_S, raise_on_lease_renewal_failure=False)
