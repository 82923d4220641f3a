"""`Executor`, which runs work items, and the local one: threads of this process, each with a child process.

The other executors use Prefect: `tasks.engine.fanout.prefect_executor` and `tasks.engine.fanout.ray_executor`.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any, Protocol

from nautile.common.errors import ConfigError
from nautile.configs.operation import LaunchConfig
from nautile.tasks.engine.fanout.work_item import ItemResult, WorkItem, run_item


class Future(Protocol):
    """A running work item: the methods of `concurrent.futures.Future` that the engine uses."""

    def add_done_callback(self, call: Callable[[Any], Any]) -> object: ...
    def result(self) -> ItemResult: ...


@dataclass(frozen=True)
class Executor:
    """Runs work items, at most `capacity()` at a time."""

    submit: Callable[[WorkItem], Future]
    capacity: Callable[[], int]


ExecutorFactory = Callable[[LaunchConfig], AbstractContextManager[Executor]]


def local_workers(launch: LaunchConfig) -> int:
    """`launch.workers`; by default one per core that this process may use."""
    if launch.workers is not None:
        return launch.workers
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def local_executor(launch: LaunchConfig) -> Iterator[Executor]:
    """Run items in child processes of this one, without Prefect and without retries."""
    if launch.engine != "processes":
        raise ConfigError(f"launch.engine {launch.engine!r} needs Prefect: run the stage in a flow")
    workers = local_workers(launch)
    with ThreadPoolExecutor(workers, "work-item") as pool:
        # Leaving the block waits for the running items; they end as soon as their lease is gone.
        # In the context of the run, with which they are cancelled.
        yield Executor(lambda item: pool.submit(copy_context().run, run_item, item), lambda: workers)
