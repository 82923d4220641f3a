"""`Executor`, which runs work items: on threads of this process, each with a child process, or on a Ray cluster.

An item is submitted when there is capacity for it, not all at once: thousands of files do not become a queue of
thousands of items, and after a failure no queued item remains.
"""

import concurrent.futures
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any

from nautile.configs.operation import LaunchConfig
from nautile.tasks.engine.fanout.work_item import ItemResult, WorkItem, run_item
from nautile.tasks.engine.ray_cluster import connected

LOST_WORKERS = 4  # per item on a Ray cluster, before it counts as failed
_END_S = 30.0  # for the items of a cluster to end without their lease


@dataclass(frozen=True)
class Executor:
    """Runs work items, at most `capacity()` at a time. `result` is called once the item's future is done."""

    submit: Callable[[WorkItem], Future[Any]]
    capacity: Callable[[], int]
    result: Callable[[WorkItem, Future[Any]], ItemResult] = lambda item, future: future.result()


ExecutorFactory = Callable[[LaunchConfig], AbstractContextManager[Executor]]


def local_workers(launch: LaunchConfig) -> int:
    """`launch.workers`; by default one per core that this process may use."""
    if launch.workers is not None:
        return launch.workers
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def local_executor(launch: LaunchConfig) -> Iterator[Executor]:
    """Run items in child processes of this one."""
    workers = local_workers(launch)
    with ThreadPoolExecutor(workers, "work-item") as pool:
        # Leaving the block waits for the running items; they end as soon as their lease is gone.
        # In the context of the run, with which they are cancelled.
        yield Executor(lambda item: pool.submit(copy_context().run, run_item, item), lambda: workers)


@contextmanager
def ray_executor(launch: LaunchConfig, run: Callable[[WorkItem], ItemResult] = run_item) -> Iterator[Executor]:
    """Run items on the existing Ray cluster. Raises `ConfigError` if none answers.

    A worker runs `run` in its process, and so the item in a child process, as a local thread would. When a worker dies,
    its child ends too, and Ray assigns the item to another worker.
    """
    with connected(launch):
        import ray  # an optional extra

        # A core for each item, spread over the hosts, so that they share network and disks. `run` retries failures, Ray
        # only lost workers.
        options: dict[str, Any] = {"num_cpus": 1, "max_retries": LOST_WORKERS, "scheduling_strategy": "SPREAD"}
        remote = ray.remote(**options)(_outcome)
        running: set[Future[Any]] = set()

        def submit(item: WorkItem) -> Future[Any]:
            future: Future[Any] = remote.remote(run, item).future()
            running.add(future)
            return future

        def capacity() -> int:
            # Queried for each item, so that hosts which join the cluster later get work.
            return launch.workers or max(1, int(ray.cluster_resources().get("CPU", 1)))

        def result(item: WorkItem, future: Future[Any]) -> ItemResult:
            running.discard(future)
            outcome = future.result()
            if isinstance(outcome, BaseException):
                raise outcome
            return outcome

        try:
            yield Executor(submit, capacity, result)
        finally:
            concurrent.futures.wait(running, _END_S)


def _outcome(run: Callable[[WorkItem], ItemResult], item: WorkItem) -> ItemResult | BaseException:
    """The result of an item or its error, as a value: raised, Ray would wrap it in an error of its own."""
    try:
        return run(item)
    except BaseException as error:
        return error
