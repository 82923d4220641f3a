"""Who does the units of a round: threads of this process, each over a child process. Others:
`tasks.engine.prefect_executor`."""

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
    """A unit under way. `result` raises what `fanout_item.do` does, or `StageCrash` if the worker was lost."""

    def add_done_callback(self, call: Callable[[Any], Any]) -> object: ...
    def result(self) -> ItemResult: ...


class Executor(Protocol):
    """Does units, as many at a time as there is room for."""

    def room(self) -> int: ...
    def submit(self, order: WorkItem) -> Future: ...


ExecutorFactory = Callable[[LaunchConfig], AbstractContextManager[Executor]]


def workers_here(launch: LaunchConfig) -> int:
    """One for each core that this process may use, unless the configuration says how many."""
    if launch.workers is not None:
        return launch.workers
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class LocalExecutor:
    """Each unit once: whoever called decides what is tried again."""

    pool: ThreadPoolExecutor
    workers: int

    def room(self) -> int:
        return self.workers

    def submit(self, order: WorkItem) -> Future:
        return self.pool.submit(run_item, order)


@contextmanager
def local_executor(launch: LaunchConfig) -> Iterator[Executor]:
    """Local processes without Prefect."""
    if launch.engine != "processes":
        raise ConfigError(f"launch.engine {launch.engine!r} is reached through Prefect: run the stage in a flow")
    workers = workers_here(launch)
    with ThreadPoolExecutor(workers, "unit") as pool:
        yield LocalExecutor(pool, workers)
