"""A `Stage` as a Prefect task: Prefect schedules, retries and displays it; the store decides what can be reused.

Prefect's caching and result storage are off: only artifact ids pass between tasks, and only the store can tell whether
their files are intact. Calls to Prefect's API are limited to a few a minute, however often a stage reports.
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect import Task, task
from prefect.artifacts import create_markdown_artifact, create_progress_artifact, update_progress_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.concurrency.sync import concurrency
from prefect.context import TaskRunContext

from common.errors import Retryable
from common.text import visible
from store.locks import KeyLock
from store.mirror import open_store
from tasks.engine.attempt import run_stage
from tasks.engine.child_process import pause
from tasks.engine.errors import BACKOFF, RetryPolicy
from tasks.engine.failure import reason, slug
from tasks.engine.fanout.prefect_executor import MAX_RETRIES, prefect_executor
from tasks.engine.fanout.ray_executor import ray_executor
from tasks.engine.prefect_page import summary
from tasks.engine.progress import RateMeter, StageUpdate, describe_progress, notify, subscribe
from tasks.engine.stage import RunContext, Stage
from tasks.engine.staging import note_giving_up, write_retry_note

logger = logging.getLogger(__name__)

SHOW_EVERY_S = 5.0
LEASE_S = 60.0  # lease of a slot: the minimum that Prefect accepts
SLOT_TRY_S = 3.0
LOCK_TRY_S = 0.5
FIRST_SHOWN_AFTER_S = 1.0  # a shorter stage gets no progress bar

_pages: dict[UUID, "_TaskRunPage"] = {}  # by task run, until it succeeds


@cache
def as_prefect_task(stage: Stage) -> Task[..., dict[str, str]]:
    """The Prefect task that runs `stage`, cached: one object per stage. Arguments as `run_stage`."""

    def run_name(parameters: dict[str, Any]) -> str:
        return parameters["context"].label or stage.name

    @task(
        name=stage.name,
        task_run_name=run_name,  # type: ignore[arg-type]  # Prefect's protocol has a method that no function has
        retries=MAX_RETRIES,
        retry_delay_seconds=0,  # `pause` below waits instead: Prefect's own delay would not end on cancellation
        retry_condition_fn=should_retry,
        cache_policy=NO_CACHE,
        persist_result=False,
    )
    def run(section: dict[str, Any], inputs: dict[str, str], context: RunContext) -> dict[str, str]:
        task_run = TaskRunContext.get()
        assert task_run is not None
        page = _pages.setdefault(task_run.task_run.id, _TaskRunPage(stage.name, context))
        # Waits before the slot is taken: a step that pauses for an hour must not hold one.
        pause(page.pause_s)
        unsubscribe = subscribe(page.on_update)
        try:
            executor = ray_executor if context.launch.engine == "ray" else prefect_executor
            with _slot(context):
                outputs = run_stage(stage, section, inputs, context, executor)
        finally:
            unsubscribe()
        del _pages[task_run.task_run.id]
        page.finish(outputs)
        return outputs

    return run


@contextmanager
def _slot(context: RunContext) -> Iterator[None]:
    """Hold a slot of the server's concurrency limit, or one of the lock files, for the length of the block.

    A slot of the server is held by a lease, so a killed process frees it within a minute. A lease that cannot be
    renewed for a moment must not fail hours of work.
    """
    locks = [] if context.limit else [KeyLock(Path(path)) for path in context.slots]
    with ExitStack() as stack:
        # Wait in short steps, so that the display is updated and a cancelled run does not keep waiting.
        while context.limit:
            try:
                slot = concurrency(
                    context.limit,
                    timeout_seconds=SLOT_TRY_S,
                    lease_duration=LEASE_S,
                    raise_on_lease_renewal_failure=False,
                )
                stack.enter_context(slot)
                break
            except TimeoutError:
                _wait_for_slot(context, context.limit, 0.0)  # `concurrency` has waited already
        while locks:
            if slot_lock := next((lock for lock in locks if lock.try_acquire()), None):
                stack.callback(slot_lock.release)
                break
            _wait_for_slot(context, "a slot of this sweep", LOCK_TRY_S)
        yield


def _wait_for_slot(context: RunContext, slot_name: str, seconds: float) -> None:
    """Report that a step waits for a slot, and pause. Raises `StageCancelled` if the run was cancelled meanwhile."""
    stage, note = context.label.partition(":")[0], f"other steps work: it waits for {slot_name}"
    notify(StageUpdate(stage, context.label, "waiting", run_id=context.run_id, note=note))
    pause(seconds)


def should_retry(task: Task[..., Any], run: TaskRun, state: State[Any]) -> bool:
    """Prefect's retry condition: true for outages and, less often, for crashes; false for configuration errors."""
    page = _pages.get(run.id)
    return page is not None and page.on_failure(state.data, run.run_count)


class _TaskRunPage:
    """The Prefect artifacts of one task run: a progress bar, updated every few seconds, and a page about its end.

    It lives as long as the task run, over all attempts, so it also holds the retry policy.
    """

    def __init__(self, stage: str, context: RunContext) -> None:
        self._stage, self._context = stage, context
        self._label = context.label or stage
        self._slug = slug(self._label)
        self._policy = RetryPolicy(replace(BACKOFF, give_up_s=3600.0 * context.operation.outage_hours))
        self.pause_s = 0.0  # before the next attempt
        self._progress: UUID | None = None  # the artifact of the bar
        # As if shown before, so that the first bar comes after `FIRST_SHOWN_AFTER_S`.
        self._shown_at = time.monotonic() - SHOW_EVERY_S + FIRST_SHOWN_AFTER_S
        self._last: StageUpdate | None = None
        self._meter = RateMeter()

    def on_update(self, update: StageUpdate) -> None:
        # Listeners get the updates of all stages in this process.
        if (update.label, update.run_id) != (self._label, self._context.run_id):
            return
        self._last = update
        if update.failure and not self._policy.failures:
            self._send_failure(update.failure)  # of consecutive failures only the first and the last get a page
        if update.state != "running":
            return
        if update.done is not None:
            self._meter.add(time.monotonic(), update.done, update.unit)
            self._policy.progress(f"{update.phase} {update.unit}", update.done)
        if update.share is not None and time.monotonic() - self._shown_at > SHOW_EVERY_S:
            self._shown_at = time.monotonic()
            self._show(100.0 * update.share, _describe(update, self._meter))

    def on_failure(self, error: object, attempt: int) -> bool:
        """Return whether there is another attempt; if so, show when, and when retrying ends."""
        earlier_failures = self._policy.failures
        # No further attempt: show the last failure, unless it was also the first, and let waiting runs of the sweep go.
        if not self._policy.should_retry(error):
            if earlier_failures and self._last and self._last.failure:
                self._send_failure(self._last.failure)
            if self._last and self._last.key:
                note_giving_up(Path(self._context.store_root) / "staging" / self._last.key, self._context)
            return False
        assert isinstance(error, Exception)  # nothing else is retried
        self.pause_s = self._policy.pause_s()
        now = datetime.now().astimezone()
        note = f"trying again at {now + timedelta(seconds=self.pause_s):%H:%M:%S}"
        # Only an outage has an end that is known in advance; crashes are counted.
        until = None
        if isinstance(error, Retryable):
            until = now + timedelta(seconds=self._policy.left_s())
            note += f", until {until:%Y-%m-%d %H:%M} (operation.{self._stage}.outage_hours)"
        update = StageUpdate(
            self._stage,
            self._label,
            "retrying",
            run_id=self._context.run_id,
            note=note,
            attempt=attempt,
            error=str(error),
            reason=reason(error),
            outage_until=until.timestamp() if until else None,
        )
        notify(update)
        share = (self._last.share if self._last else None) or 0.0
        text = f"{note}, after: {visible(update.reason).splitlines()[0]}"
        self._show(100.0 * share, text)
        if self._last and self._last.key:
            write_retry_note(Path(self._context.store_root) / "staging" / self._last.key, text, self.pause_s)
        return True

    def finish(self, outputs: dict[str, str]) -> None:
        """Fill the bar and create the page about the outputs."""
        last = self._last
        if last is None:
            return
        if self._progress is not None:
            self._show(100.0, _describe(last, RateMeter()))

        def send() -> None:
            store = open_store(self._context.store_root)
            page, title = summary(store, last, outputs), f"{self._label}: {_describe(last, RateMeter())}"
            create_markdown_artifact(page, key=f"stage-{self._slug}", description=title)

        self._send(send)

    def _send_failure(self, page: str) -> None:
        title = f"{self._label} failed"
        self._send(lambda: create_markdown_artifact(page, key=f"failure-{self._slug}", description=title))

    def _show(self, percent: float, text: str) -> None:
        def send() -> None:
            if self._progress is None:
                key = f"progress-{self._slug}"
                created = create_progress_artifact(percent, key=key, description=text)
                self._progress = created  # type: ignore[assignment]  # a coroutine only in an event loop
            else:
                update_progress_artifact(self._progress, percent, description=text)

        self._send(send)

    def _send(self, send: Callable[[], object]) -> None:
        try:
            send()
        except Exception as error:
            # A server that is down for a moment must not fail hours of work; the store has the same facts.
            logger.warning("an artifact of %s could not be sent to Prefect: %s", self._label, error)


def _describe(update: StageUpdate, meter: RateMeter) -> str:
    parts = [update.state, *describe_progress(update.done, update.total, update.unit, update.note, meter)]
    return ", ".join(parts if update.seconds is None else [*parts, f"{update.seconds:.0f} s"])
