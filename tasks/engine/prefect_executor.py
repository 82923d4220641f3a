"""Units as task runs of Prefect, mapped over a thread pool here or over an existing Ray cluster: the same task.

A unit is handed out when there is room for it, not all at once as `Task.map` would: thousands of files make no queue of
thousands of task runs, and one that must not run any more was never submitted. Prefect counts the tries; the waiting
between them is ours, because nothing interrupts Prefect's own (a cancelled run would wait up to 90 s for it).
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import asdict, dataclass
from typing import Any

from prefect import Task, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.context import TaskRunContext
from prefect.futures import PrefectFuture
from prefect.states import Completed
from prefect.task_runners import TaskRunner, ThreadPoolTaskRunner
from prefect.transactions import BaseTransaction

from common.errors import Retryable
from configs.operation import LaunchConfig
from tasks.engine.errors import StageCrash
from tasks.engine.executors import Executor, Future, workers_here
from tasks.engine.fanout_item import ItemResult, WorkItem, run_item

logger = logging.getLogger(__name__)

OUTAGES, CRASHES = 4, 2  # how often a unit is tried again; it begins anew each time, so time spent counts for nothing


def worth_a_retry(task: Task[..., Any], run: TaskRun, state: State[Any]) -> bool:
    """A broken connection is tried again, a crash too but less often."""
    again = run.run_count <= {Retryable: OUTAGES, StageCrash: CRASHES}.get(type(state.data), 0)
    logger.warning("%s failed%s: %s", run.name, ", and is tried again" if again else "", state.data)
    return again


@task(
    name="unit",
    task_run_name="{step} {unit}",
    retries=max(OUTAGES, CRASHES),
    retry_delay_seconds=0,
    retry_condition_fn=worth_a_retry,
    cache_policy=NO_CACHE,
    persist_result=False,
)
def unit_run(request: str, attempt: int, step: str, unit: str, slot: int) -> State[dict[str, Any]]:
    """Do one unit. A unit that is set aside shows as a state of that name, with the reason."""
    context = TaskRunContext.get()
    before = context.task_run.run_count - 1 if context else 0
    outcome = run_item(WorkItem(request, attempt, step, unit, slot), before)
    if outcome.set_aside is not None:
        return Completed(name="SetAside", message=outcome.set_aside, data=asdict(outcome))
    return Completed(data=asdict(outcome))


@dataclass(frozen=True)
class TaskFlight:
    """A task run under way. `lost` are the errors that mean that its worker was."""

    future: PrefectFuture[Any]
    lost: tuple[type[Exception], ...] = ()

    def add_done_callback(self, call: Callable[[Any], Any]) -> object:
        return self.future.add_done_callback(call)

    def result(self) -> ItemResult:
        try:
            return ItemResult(**self.future.result())
        except self.lost as error:
            raise StageCrash(f"its worker was lost, and so were those that tried after it: {error}") from error


@dataclass(frozen=True)
class TaskCrew:
    """Hands units to a Prefect task runner."""

    runner: TaskRunner[Any]
    capacity: Callable[[], int]
    lost: tuple[type[Exception], ...] = ()

    def room(self) -> int:
        return self.capacity()

    def submit(self, order: WorkItem) -> Future:
        return TaskFlight(copy_context().run(self._submit, order), self.lost)

    def _submit(self, order: WorkItem) -> PrefectFuture[Any]:
        # Apart from the stage's transaction: one unit that fails would roll back all that have ended before it.
        BaseTransaction.__var__.set(None)
        return self.runner.submit(unit_run, order.plain())


@contextmanager
def task_crew(launch: LaunchConfig) -> Iterator[Executor]:
    """The crew that the configuration asks for. Raises `ConfigError` if there is no such cluster."""
    if launch.engine == "ray":
        from tasks.engine.ray_executor import ray_crew  # an extra, which most runs do not have

        with ray_crew(launch) as crew:
            yield crew
        return
    workers = workers_here(launch)
    with ThreadPoolTaskRunner(max_workers=workers) as runner:
        yield TaskCrew(runner, lambda: workers)
