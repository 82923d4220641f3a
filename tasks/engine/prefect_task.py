"""A `Stage` as a Prefect task: Prefect schedules, retries and displays it; the store decides what can be reused.

The task's log in Prefect says where the stage's own log is, what the stage waits for, its warnings, its last lines, and
what to do after a failure.

Prefect's caching and result storage are off: only artifact ids pass between tasks, and only the store can tell whether
their files are intact. Calls to Prefect's API are limited to a few a minute, however often a stage reports.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import replace
from datetime import datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
from prefect import Task, task
from prefect.artifacts import create_markdown_artifact, create_progress_artifact, update_progress_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import State, TaskRun
from prefect.context import TaskRunContext
from prefect.logging import get_run_logger
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from prefect.states import Cancelled, Pending, Running
from prefect.utilities.engine import emit_task_run_state_change_event

from nautile.common.commands import shell_command
from nautile.common.errors import Retryable
from nautile.common.files import read_json
from nautile.common.text import first_line, markdown_table, visible
from nautile.store.layout import Layout, StagingFiles
from nautile.store.locks import KeyLock
from nautile.tasks.engine.attempt import run_stage
from nautile.tasks.engine.attempt_log import note_giving_up
from nautile.tasks.engine.child_process import pause
from nautile.tasks.engine.errors import (
    BACKOFF,
    RESUME_HEADING,
    RetryPolicy,
    StageCancelled,
    StageCrash,
    advice,
    artifact_page,
    reason,
    run_page,
    slug,
)
from nautile.tasks.engine.log_lines import WarningsOf
from nautile.tasks.engine.progress import RateMeter, StageUpdate, describe_progress, notify, subscribe, write_retry_note
from nautile.tasks.engine.stage import RunContext, Stage

logger = logging.getLogger(__name__)

LONGEST_LINE = 2000  # characters of a line that is repeated in the task's log
MOST_METRICS = 16  # in the page about a stage
MAX_RETRIES = 100_000  # `RetryPolicy` sets the limit, not Prefect
SHOW_EVERY_S = 15.0  # each time is an event of Prefect's
LEASE_S = 60.0  # lease of a slot: the minimum that Prefect accepts
RENEW_S = 15.0
SLOT_TRY_S = 3.0
SLOT_TIMEOUT_S = 30.0  # of a request about a slot
LOCK_TRY_S = 0.5
_FINAL = (400, 401, 403, 404, 405, 422)  # statuses of requests that cannot succeed when they are sent again
LOG_EVERY_S = 2.0  # between two looks at the warnings of the stage's own log
FIRST_SHOWN_AFTER_S = 1.0  # a shorter stage gets no progress bar

_pages: dict[UUID, "_TaskRunPage"] = {}  # by task run, until it succeeds


def _said_before(record: logging.LogRecord) -> bool:
    """Take Prefect's own words about a failure out of the log of a stage: `_TaskRunPage.on_failure` says more.

    Its number of retries has no meaning here, and its last line repeats all lines of the error in one.
    """
    if getattr(record, "task_run_id", "") not in map(str, _pages):
        return True
    if str(record.msg).startswith("Finished in state Failed("):
        record.msg = "Finished in state Failed"
    return not str(record.msg).startswith("Task run failed with ")


logging.getLogger("prefect.task_runs").addFilter(_said_before)


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
        unsubscribe = subscribe(page.on_update)
        try:
            # Waits before the slot is taken: a step that pauses for an hour must not hold one.
            pause(page.pause_s)
            outputs = run_stage(stage, section, inputs, context, slot=lambda: _slot(context))
        except StageCancelled:
            # Another thread of the run was cancelled. Raised, it would be an unexpected crash of this task for Prefect.
            del _pages[task_run.task_run.id]
            page.end_bar("stopped; finished work is kept")
            return Cancelled(message="The run was stopped; finished work is kept.")  # type: ignore[return-value]  # Prefect takes a state
        finally:
            unsubscribe()
        del _pages[task_run.task_run.id]
        page.finish(outputs)
        return outputs

    return run


@contextmanager
def _slot(context: RunContext) -> Iterator[None]:
    """Hold a slot of the server's concurrency limit, or one of the lock files, for the length of the block.

    A slot of the server is kept whatever happens to the server (`ServerSlot`). The kernel frees a lock file.
    """
    slots: Sequence[ServerSlot | KeyLock] = [KeyLock(Path(path)) for path in context.slots]
    name, try_every_s = "a slot of the sweeps in this store", LOCK_TRY_S
    if context.limit:
        slots, name, try_every_s = [ServerSlot(context.limit)], context.limit, SLOT_TRY_S
    held, waited = None, False
    # Wait in short steps, so that the display is updated and a cancelled run does not keep waiting.
    while slots and (held := next((slot for slot in slots if slot.try_acquire()), None)) is None:
        stage, note = context.label.partition(":")[0], f"other steps work: it waits for {name}"
        notify(StageUpdate(stage, context.label, "waiting", run_id=context.run_id, note=note))
        if not waited:
            _show_state(Pending(name="AwaitingConcurrencySlot", message=f"It waits for {name}."))
        waited = True
        pause(try_every_s)
    try:
        if waited:
            _show_state(Running())
        yield
    finally:
        if held:
            held.release()


def _show_state(state: State[Any]) -> None:
    """Show another state of this task run in Prefect's page, for which a task that has begun is "Running"."""
    context = TaskRunContext.get()
    if context is None or context.task_run.state is None:
        return
    try:
        task_run = context.task_run
        state.state_details.task_run_id, state.state_details.flow_run_id = task_run.id, task_run.flow_run_id
        emit_task_run_state_change_event(task_run, initial_state=task_run.state, validated_state=state)
    except Exception as error:  # a display: the work does not depend on it
        logger.warning("Prefect does not show that %s is %s: %s", context.task_run.name, state.name, error)


class ServerSlot:
    """A slot of one of the server's limits, held until it is released, whatever happens to the server meanwhile.

    It is held by a lease that a thread renews, so a killed process frees it within a minute. A server that was away for
    longer than that has given the slot back; the thread then takes one again as soon as there is one. Hours of work are
    not ended for that, and until then another step may work at the same time.
    """

    def __init__(self, limit: str) -> None:
        self._limit = limit
        self._lease = ""
        self._released = threading.Event()
        # With the context of the step, so that the thread uses its settings of Prefect.
        self._keeper = threading.Thread(
            target=copy_context().run, args=(self._keep,), name=f"slot-{limit}", daemon=True
        )

    def try_acquire(self) -> bool:
        """Take a slot; False if all are taken, or if the server does not answer now: the caller tries again."""
        try:
            with _impatient_client() as client:
                if not self._take(client):
                    return False
        except httpx.HTTPError as error:
            # A server that is away, or busy, is asked again; one that refuses the request would refuse the next too.
            if isinstance(error, httpx.HTTPStatusError) and error.response.status_code in _FINAL:
                raise
            logger.warning("whether %s has a free slot is not known: %s", self._limit, error)
            return False
        self._keeper.start()
        return True

    def release(self) -> None:
        """Give the slot back. If the server does not answer, its lease ends within a minute."""
        self._released.set()
        self._keeper.join(5.0)
        try:
            with _impatient_client() as client:
                client.release_concurrency_slots_with_lease(UUID(self._lease))
        except httpx.HTTPError as error:
            logger.warning("the slot of %s could not be given back, and is free in a minute: %s", self._limit, error)

    def _take(self, client: SyncPrefectClient) -> bool:
        try:
            response = client.increment_concurrency_slots_with_lease(
                names=[self._limit], slots=1, mode="concurrency", lease_duration=LEASE_S
            )
        except httpx.HTTPStatusError as error:
            # 423: all slots are taken. 422: the operator has set the limit to zero.
            if error.response.status_code == httpx.codes.LOCKED or "greater than the limit" in error.response.text:
                return False
            raise
        self._lease = response.json()["lease_id"]
        return True

    def _keep(self) -> None:
        lost = False
        while not self._released.wait(RENEW_S):
            try:
                with _impatient_client() as client:
                    if not lost:
                        lost = not self._renew(client)
                    if lost and self._take(client):
                        lost = False
                        logger.warning(
                            "the slot of %s was lost while the server was away, and is held again", self._limit
                        )
            except Exception as error:  # whatever it is, without this thread the slot is lost in a minute
                logger.warning("the slot of %s could not be renewed, which is tried again: %s", self._limit, error)

    def _renew(self, client: SyncPrefectClient) -> bool:
        """Renew the lease; False if the server has ended it."""
        try:
            client.renew_concurrency_lease(UUID(self._lease), LEASE_S)
        except httpx.HTTPStatusError as error:
            if error.response.status_code == httpx.codes.GONE:
                return False
            raise
        return True


@contextmanager
def _impatient_client() -> Iterator[SyncPrefectClient]:
    """A client that does not repeat a request by itself: nothing interrupts it while it waits between its tries."""
    # With settings of its own, it is not the client of the task, which other threads use and close.
    own: dict[str, Any] = {"timeout": SLOT_TIMEOUT_S}
    with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}), get_client(own, sync_client=True) as client:
        yield client


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
        self._attempt = 0  # the last one that the log has the beginning of
        self._waits_for = ""  # what the log last said about it
        self._warnings: WarningsOf | None = None
        self._looked_at = 0.0
        self._meter = RateMeter()

    def on_update(self, update: StageUpdate) -> None:
        # Listeners get the updates of all stages in this process.
        if (update.label, update.run_id) != (self._label, self._context.run_id):
            return
        self._last = update
        if update.failure and not self._policy.failures:
            self._send_failure(update.failure)  # of consecutive failures only the first and the last get a page
        if update.state == "waiting" and update.note != self._waits_for:
            self._waits_for = update.note
            self._log.info("%s waits: %s", self._label, visible(update.note, LONGEST_LINE))
        if update.state == "reused":
            self._log.info("%s is in the store: %s", self._label, ", ".join(update.outputs.values()))
        if update.state in ("running", "publishing", "cancelled"):  # after a failure the last lines follow
            self._repeat_warnings(at_once=update.state != "running")
        if update.state == "publishing":
            self._log_end(update.key)
        if update.state != "running":
            return
        if self._attempt != update.attempt:
            self._attempt = update.attempt
            self._log_begin(update)
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
            if isinstance(error, Exception):
                self.end_bar(f"failed: {visible(first_line(error), 200)}")
                resume = f"\n{RESUME_HEADING} {self._context.resume}" if self._context.resume else ""
                self._log.error(
                    "%s failed: %s\n%s%s%s", self._label, _reason(error), advice(error), resume, _tail(error)
                )
            if self._last and self._last.key:
                note_giving_up(Layout(self._context.store_root).staging_files(self._last.key).folder, self._context)
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
        self._log.warning("%s failed: %s\n%s%s", self._label, _reason(error), note, _tail(error))
        share = (self._last.share if self._last else None) or 0.0
        text = f"{note}, after: {visible(update.reason).splitlines()[0]}"
        self._show(100.0 * share, text)
        if self._last and self._last.key:
            write_retry_note(Layout(self._context.store_root).staging_files(self._last.key).folder, text, self.pause_s)
        return True

    @property
    def _log(self) -> logging.Logger | logging.LoggerAdapter[logging.Logger]:
        # Outside a task run, as in a thread without its context, Prefect has no log to write to.
        return get_run_logger() if TaskRunContext.get() else logger

    def _files(self, key: str) -> StagingFiles:
        return Layout(self._context.store_root).staging_files(key)

    def _log_begin(self, update: StageUpdate) -> None:
        """Say where the log of the stage's own process is."""
        run, own = self._context.run_id[:8], self._files(update.key).log
        self._warnings, self._waits_for = WarningsOf(own), ""
        page = run_page(self._context.run_id)
        command = shell_command("nautile", "logs", run, "--stage", self._label)
        what = f"{self._label} works" + (f", attempt {update.attempt}" if update.attempt > 1 else "")
        where = f"{own} (`{command}` shows it" + (f", and {page})" if page else ")")
        self._log.info("%s; the log of its process is %s", what, where)

    def _repeat_warnings(self, *, at_once: bool) -> None:
        if self._warnings is None or (not at_once and time.monotonic() - self._looked_at < LOG_EVERY_S):
            return
        self._looked_at = time.monotonic()
        for line in self._warnings.new():
            self._log.warning("%s", visible(line, LONGEST_LINE))

    def _log_end(self, key: str) -> None:
        """Repeat the last lines of the stage's own log, and say where it will be: its folder goes with publication."""
        files, layout = self._files(key), Layout(self._context.store_root)
        if (tail := files.log_tail()) and isinstance(record := read_json(files.execution), dict):
            kept = layout.execution_log(self._stage, str(record.get("execution")))
            self._log.info("%s has ended; the last lines of its log, %s:\n%s", self._label, kept, visible(tail))

    def end_bar(self, text: str) -> None:
        """Leave the bar, if there is one, where it is: the stage has failed or was cancelled."""
        if self._progress is not None and self._last is not None:
            self._show(100.0 * (self._last.share or 0.0), text)

    def finish(self, outputs: dict[str, str]) -> None:
        """Fill the bar and create the page about the outputs."""
        last = self._last
        if last is None:
            return
        if self._progress is not None:
            self._show(100.0, _describe(last, RateMeter()))

        def send() -> None:
            title = f"{self._label}: {_describe(last, RateMeter())}"
            create_markdown_artifact(_summary(last, outputs), key=f"stage-{self._slug}", description=title)

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


def _reason(error: Exception) -> str:
    return visible(reason(error), LONGEST_LINE)


def _tail(error: Exception) -> str:
    """The last lines of the log of a process that crashed; "" after an error that says all by itself."""
    if not isinstance(error, StageCrash) or not error.log_tail.strip():
        return ""
    return f"\nThe last lines of its log, {error.log}:\n{visible(error.log_tail)}"


def _summary(update: StageUpdate, outputs: dict[str, str]) -> str:
    """The page about a stage that succeeded, as Markdown: its artifacts and newest metrics; `update` is its last.

    `nautile show` and the dashboard have the facts and curves.
    """
    pages = {artifact: artifact_page(update.run_id, artifact) for artifact in outputs.values()}
    rows = [(f"[{artifact}]({page})" if page else f"`{artifact}`",) for artifact, page in pages.items()]
    parts = [f"## {update.label}: {update.state}", markdown_table(("artifact",), rows)]
    if update.metrics:
        cells = [(f"`{name}`", f"{value:.6g}") for name, value in sorted(update.metrics.items())[:MOST_METRICS]]
        parts.append(markdown_table(("metric", "last value"), cells))
    if page := run_page(update.run_id):
        parts.append(f"[the run in the dashboard]({page})")
    return "\n\n".join(parts) + "\n"


def _describe(update: StageUpdate, meter: RateMeter) -> str:
    parts = [update.state, *describe_progress(update.done, update.total, update.unit, update.note, meter)]
    return ", ".join(parts if update.seconds is None else [*parts, f"{update.seconds:.0f} s"])
