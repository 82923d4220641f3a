"""A `Stage` as a Prefect task: Prefect retries, shows and schedules; what may be reused is the store's business.

Prefect's caching and result storage are off: only artifact ids pass between tasks, and only the store knows whether
the files behind them are whole. Calls to the API are kept rare, a few a minute however fast a stage reports.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any
from uuid import UUID

from prefect import Task, task
from prefect.artifacts import create_markdown_artifact, create_progress_artifact, update_progress_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun

from common.errors import Retryable
from common.text import amount, duration
from store.mirror import open_store
from tasks.engine.attempt import run_stage
from tasks.engine.errors import StageCrash
from tasks.engine.failure import slug
from tasks.engine.prefect_executor import task_crew
from tasks.engine.prefect_page import summary
from tasks.engine.progress import RateMeter, StageUpdate, notify, subscribe
from tasks.engine.stage import RunContext, Stage

logger = logging.getLogger(__name__)

RETRY_DELAYS_S = [2.0, 10.0, 30.0, 60.0]
RETRIES = 50  # the ceiling; what really bounds them is the budget below
OUTAGES, CRASHES = 4, 2  # in a row; an attempt that lasted long enough to get on starts the count anew
GOT_ON_S = 600.0
SHOW_EVERY_S = 5.0
FIRST_SHOWN_AFTER_S = 1.0  # a stage quicker than that has no progress to show


@cache
def as_prefect_task(stage: Stage) -> Task[..., dict[str, str]]:
    """The one Prefect task of `stage`."""

    @task(
        name=stage.name,
        task_run_name=_run_name,
        retries=RETRIES,
        retry_delay_seconds=list(RETRY_DELAYS_S),
        retry_jitter_factor=0.5,
        retry_condition_fn=worth_a_retry,
        cache_policy=NO_CACHE,
        persist_result=False,
        tags=["accelerator"] if stage.accelerator else None,
    )
    def run(section: dict[str, Any], inputs: dict[str, str], context: RunContext) -> dict[str, str]:
        board = _Board(context.label or stage.name, context.run_id)
        unsubscribe = subscribe(board.hear)
        try:
            outputs = run_stage(stage, section, inputs, context, task_crew)
        finally:
            unsubscribe()
        board.finish(context, outputs)
        return outputs

    return run


@dataclass
class _Budget:
    """The failures in a row of one task run."""

    outages: int = 0
    crashes: int = 0
    failed_at: float | None = None


_budgets: dict[UUID, _Budget] = {}


def worth_a_retry(task: Task[..., Any], run: TaskRun, state: State[Any]) -> bool:
    """A broken connection is tried again, a crash too but less often, a bad configuration never."""
    error = state.data
    if not isinstance(error, (Retryable, StageCrash)):
        return False
    budget = _budgets.setdefault(run.id, _Budget())
    if budget.failed_at is not None and time.monotonic() - budget.failed_at > GOT_ON_S:
        budget.outages = budget.crashes = 0
    budget.failed_at = time.monotonic()
    if isinstance(error, Retryable):
        budget.outages += 1
    else:
        budget.crashes += 1
    again = budget.outages <= OUTAGES and budget.crashes <= CRASHES
    if again:
        notify(StageUpdate(task.name, run.name, "retrying", attempt=run.run_count, error=str(error)))
    return again


def _run_name(parameters: dict[str, Any]) -> str:
    context: RunContext = parameters["context"]
    return context.label or "stage"


class _Board:
    """The progress artifact of one task run, brought up to date every few seconds, and what is told of its end."""

    def __init__(self, label: str, run_id: str) -> None:
        self._label, self._run_id = label, run_id
        self._slug = slug(label)
        self._artifact: UUID | None = None
        self._shown_at = time.monotonic() - SHOW_EVERY_S + FIRST_SHOWN_AFTER_S
        self._last: StageUpdate | None = None
        self._pace = RateMeter()

    def hear(self, update: StageUpdate) -> None:
        if (update.label, update.run_id) != (self._label, self._run_id):
            return
        self._last = update
        if update.failure:
            what = f"{self._label} failed"
            self._tell(lambda: create_markdown_artifact(update.failure, key=f"failure-{self._slug}", description=what))
        if update.state == "running" and update.done is not None:
            self._pace.add(time.monotonic(), update.done, update.unit)
        if update.state == "running" and update.share is not None and time.monotonic() - self._shown_at > SHOW_EVERY_S:
            self._shown_at = time.monotonic()
            self._show(100.0 * update.share, _words(update, self._pace))

    def finish(self, context: RunContext, outputs: dict[str, str]) -> None:
        """Fill the bar and leave a page about what was made."""
        last = self._last
        if last is None:
            return
        if self._artifact is not None:
            self._show(100.0, _words(last))

        def send() -> None:
            told = summary(open_store(context.store_root), last, outputs)
            create_markdown_artifact(told, key=f"stage-{self._slug}", description=f"{self._label}: {_words(last)}")

        self._tell(send)

    def _show(self, percent: float, words: str) -> None:
        def send() -> None:
            if self._artifact is None:
                self._artifact = create_progress_artifact(percent, key=f"progress-{self._slug}", description=words)
            else:
                update_progress_artifact(self._artifact, percent, description=words)

        self._tell(send)

    def _tell(self, send: Callable[[], None]) -> None:
        try:
            send()
        except Exception as error:
            # A server that is down for a moment must not fail hours of work; the store has it all.
            logger.warning("Prefect did not take an artifact of %s: %s", self._label, error)


def _words(update: StageUpdate, pace: RateMeter | None = None) -> str:
    parts: list[str] = [update.state]
    if update.done is not None:
        whole = f" of {update.total:g}" if update.total else ""
        parts.append(f"{update.done:g}{whole} {update.unit}".rstrip())
    if pace and (rate := pace.rate()):
        parts.append(f"{amount(rate)} {update.unit}/s")
    if pace and (left := pace.left(update.done, update.total)):
        parts.append(f"{duration(left)} left")
    if update.note:
        parts.append(update.note)
    if update.seconds is not None:
        parts.append(f"{update.seconds:.0f} s")
    return ", ".join(parts)
