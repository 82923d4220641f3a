"""Who runs work items: the protocol, and threads of this process, each over a child process.

The other executors build on Prefect: `tasks.engine.prefect_executor` and `tasks.engine.ray_executor`.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from common.errors import ConfigError
from configs.operation import LaunchConfig
from tasks.engine.fanout_item import ItemResult, WorkItem, run_item


class Future(Protocol):
    """A running work item: the part of `concurrent.futures.Future` that is used.

    `result` raises what `run_item` does, or `StageCrash` if the worker was lost.
    """

    def add_done_callback(self, call: Callable[[Any], Any]) -> object: ...
    def result(self) -> ItemResult: ...


class Executor(Protocol):
    """Runs work items, `capacity()` of them at a time."""

    def capacity(self) -> int: ...
    def submit(self, item: WorkItem) -> Future: ...


ExecutorFactory = Callable[[LaunchConfig], AbstractContextManager[Executor]]


def local_workers(launch: LaunchConfig) -> int:
    """`launch.workers`, by default one for each core that this process may use."""
    if launch.workers is not None:
        return launch.workers
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class LocalExecutor:
    """Runs each item once, without retries."""

    pool: ThreadPoolExecutor
    workers: int

    def capacity(self) -> int:
        return self.workers

    def submit(self, item: WorkItem) -> Future:
        return self.pool.submit(run_item, item)


@contextmanager
def local_executor(launch: LaunchConfig) -> Iterator[Executor]:
    """Child processes of this one, without Prefect."""
    if launch.engine != "processes":
        raise ConfigError(f"launch.engine {launch.engine!r} needs Prefect: run the stage in a flow")
    workers = local_workers(launch)
    with ThreadPoolExecutor(workers, "work-item") as pool:
        yield LocalExecutor(pool, workers)
