"""One limit for all that works: a stage takes all the cores or the accelerator, so stages of different runs take turns.

The limit is Prefect's, by name, shared by every flow and host of one server. It is held while a stage works and not
while a run waits for a person, so a run that waits three days for an approval holds nobody up. Held by lease: a
process that is killed gives it back within a minute.
"""

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

from prefect.client.orchestration import get_client
from prefect.concurrency.sync import concurrency
from prefect.exceptions import ObjectNotFound

logger = logging.getLogger(__name__)

LIMIT = "nautile-accelerator"
LEASE_S = 60.0  # the least that Prefect takes
LOOK_S = 2.0


def declare(limit: int) -> None:
    """Let `limit` stages work at a time on what this server deploys."""
    with get_client(sync_client=True) as client:
        client.upsert_global_concurrency_limit_by_name(LIMIT, limit)


def limited() -> bool:
    """Whether the server knows the limit: one that was only brought along by `nautile run` does not."""
    with get_client(sync_client=True) as client:
        try:
            return client.read_global_concurrency_limit_by_name(LIMIT) is not None
        except ObjectNotFound:
            return False


@contextmanager
def turn(label: str) -> Iterator[None]:
    """Wait until a stage may work, and hold the place for the length of the block."""
    with ExitStack() as held:
        try:
            held.enter_context(_slot(LOOK_S))
        except TimeoutError:
            logger.info("%s waits for its turn: another stage works (limit %s)", label, LIMIT)
            held.enter_context(_slot(None))
        yield


def _slot(timeout_s: float | None) -> AbstractContextManager[None]:
    # A lease that cannot be renewed for a moment must not fail hours of work.
    return concurrency(LIMIT, timeout_seconds=timeout_s, lease_duration=LEASE_S, raise_on_lease_renewal_failure=False)
