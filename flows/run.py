"""`nautile run`: the pipeline in this process, shown line by line, with a plain account of whatever stops it."""

import logging
import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from rich.console import Console
from rich.text import Text

from common.errors import ConfigError, Retryable
from common.processes import ExitCode
from common.text import duration, visible
from configs.schema import RunConfig
from flows import dag as planning
from flows.cli.tables import relative
from flows.operate import prefect_server as prefect_env
from flows.operate.reconcile import quietly
from flows.operate.services import url_of
from flows.progress_view import Board, Display, display_for, summary
from flows.selection import Selection, choose, given_artifacts
from store.artifacts import Store
from store.mirror import open_store
from tasks.engine import prefect_page as links
from tasks.engine.failure import RESUME_HEADING, advice, reason
from tasks.engine.progress import StageUpdate, subscribe

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Watch:
    """Turns what stages report into what the display shows."""

    board: Board
    display: Display

    def __call__(self, update: StageUpdate) -> None:
        if update.label not in self.board.lines:
            return
        self.board.heading = ""
        line = self.board.lines[update.label]
        if update.state in ("running", "waiting"):
            if line.state != "running" or update.attempt != line.attempt:
                self.board.begin(update.label, update.attempt)
            self.board.advance(update.label, update.done, update.total, update.unit, update.note)
        elif update.state == "retrying":
            self.board.begin(update.label, line.attempt)
            self.board.advance(update.label, None, None, "", f"trying again after: {reason_of(update)}")
        elif update.state != "publishing":
            self.board.end(update.label, update.state, update.outputs.values(), reason_of(update))
        self.display.changed(update.label)


def run(config: RunConfig, typed: str, selection: Selection, out: Console, err: Console) -> int:
    """Run it, print how it went, and return the exit code. `typed` is the configuration as the operator named it.

    Raises `ConfigError` for what is wrong before anything has started.
    """
    store = open_store()
    executions = planning.plan(config)
    chosen = choose(executions, selection)
    store.refresh()
    try:
        given_artifacts(store, executions, chosen, typed)
    except ConfigError as error:
        raise ConfigError(with_config(str(error), typed)) from None
    log_file = prefect_env.quiet(store)
    board = Board(e.label for e in executions if e.label in chosen)
    if "PREFECT_API_URL" not in os.environ:
        board.heading = "starting the embedded Prefect server (about 20 s the first time, less after)"
    display = display_for(board, out)
    if page := url_of(store, "dashboard"):
        os.environ.setdefault(links.DASHBOARD_URL, page)
    begun = time.monotonic()
    unsubscribe = subscribe(Watch(board, display))
    try:
        with _terminable(), display, prefect_env.api():
            from prefect import tags

            from flows.operate.automations import TAG
            from flows.pipeline import StageFailed, pipeline
            from flows.selection import typed as typed_here

            typed_here.set(typed)
            for settled in quietly(store):
                out.print(Text(settled.line()), soft_wrap=True)
            try:
                with tags(TAG, config.name):
                    made = pipeline(config, selection, str(store.root))
            except StageFailed as failure:
                stopped: StageFailed | None = failure
                log.error("stage %s failed", failure.label, exc_info=failure)
                _forget(failure)
            else:
                stopped = None
    except (KeyboardInterrupt, SystemExit) as stop:
        _forget(stop)
        label = next((line.label for line in board.lines.values() if line.state in ("running", "cancelled")), None)
        where = f" in {label}" if label else ""
        err.print(Text(f"stopped{where}; its processes are ended and what was finished is kept."), soft_wrap=True)
        err.print(Text(f"Go on with: {command(typed, selection, label)}"), soft_wrap=True)
        return ExitCode.INTERRUPTED
    finally:
        unsubscribe()
    if stopped:
        account(err, stopped.label, stopped.__cause__, typed, selection, log_file)
        return exit_code(stopped.__cause__)
    out.print()
    out.print(summary(board))
    out.print()
    out.print(f"{len(chosen)} stages in {duration(time.monotonic() - begun)}", highlight=False)
    if page := report_page(store, made.get("report", {}).get("report")):
        out.print(Text(f"report: {page}"), soft_wrap=True)
    return ExitCode.DONE


def exit_code(cause: BaseException | None) -> int:
    """2 for what the operator must mend (bad input, a teacher that does not answer), 1 for a crash."""
    return ExitCode.BAD_INPUT if isinstance(cause, (ConfigError, Retryable)) else ExitCode.FAILED


def report_page(store: Store, artifact_id: str | None) -> Path | None:
    """The HTML page of a report artifact."""
    return relative(store.get(artifact_id).path / "report.html") if artifact_id else None


def command(typed: str, selection: Selection, stopped_at: str | None = None) -> str:
    """The shell command that goes on, as it works from here."""
    program = Path(sys.argv[0])
    if os.access(program, os.X_OK) and str(program.parent) not in os.environ.get("PATH", "").split(os.pathsep):
        name = str(relative(program.absolute()))
    else:
        name = "nautile"
    return f"{name} run {shlex.quote(typed)}{selection.again(stopped_at)}"


def with_config(message: str, typed: str) -> str:
    """A message of the store's, which names commands without knowing the configuration, with the one at hand."""
    return message.replace("nautile run CONFIG ", f"nautile run {shlex.quote(typed)} ")


def reason_of(update: StageUpdate) -> str:
    """Why it failed, in one line: without the log's place and lines, which the closing account gives."""
    said = visible(reason(update.error or "", update.label))
    return said.splitlines()[0] if said else ""


def account(
    err: Console, label: str, cause: BaseException | None, typed: str, selection: Selection, log_file: Path
) -> None:
    """Which stage, why, and what to do. The cause of a crash carries the last lines of its log."""
    why = with_config(visible(str(cause).removeprefix(f"stage {label}: ")), typed)
    err.print(Text(f"stage {label} failed: {why}", style="red"), soft_wrap=True)
    err.print(Text(advice(cause)), soft_wrap=True)
    err.print(Text(f"{RESUME_HEADING} {command(typed, selection, label)}"), soft_wrap=True)
    err.print(Text(f"The run's log is {log_file}"), soft_wrap=True)


def _forget(error: BaseException | None) -> None:
    """Drop the tracebacks. Prefect keeps the exception to the end of the process, and at its exit DuckDB's binding
    would tell the terminal in sixty lines that modules are still referred to."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM ends the run as Ctrl-C does: children ended, states recorded, the way on printed."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
