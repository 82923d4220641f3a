"""Work items as Prefect task runs, on threads of this process or (`tasks.engine.fanout.ray_executor`) on a Ray cluster.

An item is submitted when there is capacity for it, not all at once as with `Task.map`: thousands of files do not become
a queue of thousands of task runs, and after a failure no queued item remains. Prefect counts the tries; `run_item`
makes the pauses between them, because nothing interrupts Prefect's own (a cancelled run would wait 90 s).
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import asdict
from typing import Any
from uuid import UUID

from prefect import Task, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.context import TaskRunContext
from prefect.futures import PrefectFuture
from prefect.states import Cancelled, Completed
from prefect.task_runners import TaskRunner, ThreadPoolTaskRunner
from prefect.transactions import BaseTransaction

from nautile.common.text import first_line
from nautile.configs.operation import LaunchConfig
from nautile.tasks.engine.errors import ITEM_BACKOFF, RetryPolicy, StageCancelled
from nautile.tasks.engine.fanout import own_disk
from nautile.tasks.engine.fanout.executor import Executor, local_workers
from nautile.tasks.engine.fanout.work_item import ItemResult, WorkItem, run_item

logger = logging.getLogger(__name__)

MAX_RETRIES = 100_000  # `RetryPolicy` sets the limit, not Prefect

# By task run: a policy counts the failures of one item over its tries.
_policies: dict[UUID, RetryPolicy] = defaultdict(lambda: RetryPolicy(ITEM_BACKOFF))


def _name_no_limit(record: logging.LogRecord) -> bool:
    """Take Prefect's number of retries, which has no meaning here, and the error's log out of its message about one."""
    if str(record.msg).startswith("Task run failed with %s: %r - Retry %s/%s") and isinstance(record.args, tuple):
        kind, error, number = record.args[:3]
        text = first_line(error) if isinstance(error, BaseException) else str(error)
        record.msg, record.args = "Task run failed with %s: %s - retry %s follows", (kind, text, number)
    return True


logging.getLogger("prefect.task_runs").addFilter(_name_no_limit)


def should_retry(task: Task[..., Any], run: TaskRun, state: State[Any]) -> bool:
    """Prefect's retry condition: `RetryPolicy` with `ITEM_BACKOFF`, one for each task run."""
    again = _policies[run.id].should_retry(state.data)
    logger.warning("%s failed%s: %s", run.name, " and is retried" if again else "", state.data)
    return again


@task(
    name="work-item",
    task_run_name="{fan_out} {item}",
    retries=MAX_RETRIES,
    retry_delay_seconds=0,
    retry_condition_fn=should_retry,
    cache_policy=NO_CACHE,
    persist_result=False,
)
def item_task(
    request: str,
    attempt: int,
    fan_out: str,
    item: str,
    slot: int,
    url: str = "",
    files: tuple[tuple[str, str], ...] = (),
) -> State[ItemResult]:
    """Run one work item. A skipped item ends in a state named SetAside, with the reason."""
    context = TaskRunContext.get()
    earlier_tries = context.task_run.run_count - 1 if context else 0
    run = own_disk.run_item if url else run_item
    try:
        result = run(WorkItem(request, attempt, fan_out, item, slot, url, files), earlier_tries)
    except StageCancelled as error:
        # Raised, it would be an unexpected crash of this task for Prefect.
        return Cancelled(message=str(error))
    if result.skipped is not None:
        return Completed(name="SetAside", message=result.skipped, data=result)
    return Completed(data=result)


def executor_of(runner: TaskRunner[Any], capacity: Callable[[], int]) -> Executor:
    """The executor that submits items to a Prefect task runner."""

    def submit(item: WorkItem) -> PrefectFuture[Any]:
        # Outside the stage's transaction, in which a failed item would roll back all finished ones.
        BaseTransaction.__var__.set(None)  # type: ignore[arg-type]  # Prefect declares no way to leave a transaction
        return runner.submit(item_task, asdict(item))

    return Executor(lambda item: copy_context().run(submit, item), capacity)


@contextmanager
def prefect_executor(launch: LaunchConfig) -> Iterator[Executor]:
    """Run items as task runs on threads of this process, each with a child process."""
    workers = local_workers(launch)
    runner: ThreadPoolTaskRunner[Any]
    with ThreadPoolTaskRunner(max_workers=workers) as runner:
        yield executor_of(runner, lambda: workers)
