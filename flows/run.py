"""`nautile run`: the pipeline in this process, shown step by step, with a plain account of whatever stops it."""

import logging
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from rich.console import Console
from rich.text import Text

from common.errors import ConfigError, Retryable
from common.processes import ExitCode, collector_paused, give_way
from common.text import duration, visible
from configs.changes import describe_changes
from configs.operation import TelemetryConfig
from configs.schema import RunConfig
from flows.cli.tables import relative
from flows.forecast import asks_paid_endpoints, forecast_calls, forecast_lines
from flows.operate import prefect_server
from flows.operate.services import join_server, url_of
from flows.progress_view import LiveView, LogView, RunProgress, summary_table, view_for
from flows.readiness import has_prompt_files, missing_settings, missing_webhook, refuse_missing_rows
from flows.selection import PreparedRun, Selection, check_ray_hosts, is_in_store, prepare_run
from store.artifacts import Store
from store.mirror import open_store
from tasks.engine import prefect_page
from tasks.engine.failure import RESUME_HEADING, advice
from tasks.engine.progress import StageUpdate, subscribe

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ProgressListener:
    """Passes what stages report on to the run's progress and its view."""

    progress: RunProgress
    view: LiveView | LogView
    undelivered: Counter[str] = field(default_factory=Counter)  # measurements that sinks did not take, by step
    reasons: bool = True  # show why a step failed; False where the command then prints it, of its only step

    def __call__(self, update: StageUpdate) -> None:
        if update.label not in self.progress.steps:
            return
        self.progress.heading = ""
        step = self.progress.steps[update.label]
        if update.state in ("running", "waiting"):
            if step.state != "running" or update.attempt != step.attempt:
                self.progress.begin(update.label, update.attempt)
            self.progress.advance(update.label, update.done, update.total, update.unit, update.note)
        elif update.state == "retrying":
            self.progress.begin(update.label, step.attempt)
            self.progress.advance(update.label, None, None, "", f"{update.note}, after: {reason_of(update)}")
        elif update.state != "publishing":
            reason = reason_of(update) if self.reasons else ""
            self.progress.end(update.label, update.state, update.outputs.values(), reason)
            self.undelivered[update.label] += update.undelivered
        self.view.changed(update.label)


def run(
    config: RunConfig,
    argument: str,
    selection: Selection,
    out: Console,
    err: Console,
    *,
    base: RunConfig | None = None,
    name: str | None = None,
) -> int:
    """Run it, print how it went, and return the exit code. `argument`, `base`: see `prepare_run`.

    `name`: what the run is called; by default the configuration's. Raises `ConfigError` for what is wrong before
    anything has started.
    """
    store = open_store()
    try:
        prepared = prepare_run(config, selection, store, argument, base)
        check_ray_hosts(store, config.launch, prepared)
    except ConfigError as error:
        raise ConfigError(with_config(str(error), argument)) from None
    refuse_missing_rows(s for s in prepared.steps if has_prompt_files(s) and not is_in_store(store, s))
    if prepared.changes:
        out.print(Text(f"changes {describe_changes(prepared.changes)}"), soft_wrap=True)
    print_forecast(out, prepared, store)
    for line in missing_webhook(config.operation):
        out.print(Text(line), soft_wrap=True)
    log_file = prefect_server.configure_prefect(store)
    if server := join_server(store):
        out.print(f"runs on the server of `nautile up`: {server.removesuffix('/api')}", soft_wrap=True, highlight=False)
    progress = RunProgress(step.label for step in prepared.steps)
    if "PREFECT_API_URL" not in os.environ:
        progress.heading = "starting the embedded Prefect server (about 20 s the first time, less after)"
    view = view_for(progress, out)
    if page := url_of(store, "dashboard"):
        os.environ.setdefault(prefect_page.DASHBOARD_URL, page)
    begun = time.monotonic()
    listener = ProgressListener(progress, view)
    unsubscribe = subscribe(listener)
    try:
        with terminable(), view, prefect_server.prefect_api():
            # After an embedded server has been started, which keeps its priority.
            give_way(config.launch.niceness)
            # Prefect reads its settings as it is imported: only now are they all set.
            with collector_paused():
                from prefect import tags

                from flows.operate.automations import TAG
                from flows.operate.reconcile import reconcile_if_possible
                from flows.pipeline import StageFailed, pipeline, prepared_run

            for result in reconcile_if_possible(store):
                out.print(Text(result.line()), soft_wrap=True)
            token = prepared_run.set((config, prepared))
            try:
                with tags(TAG, config.name):
                    outputs = pipeline(argument + selection.options(), name=name or config.name)
            except StageFailed as failure:
                log.error("the run failed", exc_info=failure)
                failures = failure.failures
            else:
                failures = {}
            finally:
                prepared_run.reset(token)
    except (KeyboardInterrupt, SystemExit):
        labels = [step.label for step in progress.steps.values() if step.state in ("running", "cancelled")]
        where = f" in {', '.join(labels)}" if labels else ""
        err.print(Text(f"stopped{where}; its processes are ended and what was finished is kept."), soft_wrap=True)
        err.print(Text(f"Continue with: {prepared.resume_command(next(iter(labels), None))}"), soft_wrap=True)
        return ExitCode.INTERRUPTED
    finally:
        unsubscribe()
        if missing := listener.undelivered.total():
            err.print(Text(undelivered_line(missing, config.telemetry)), soft_wrap=True)
    if failures:
        for label, error in failures.items():
            print_failure(err, label, error, prepared, log_file)
        if left := [step.label for step in progress.steps.values() if step.state == "waiting"]:
            err.print(Text(f"not started, for they need what failed: {', '.join(left)}"), soft_wrap=True)
        return min(map(exit_code, failures.values()))
    out.print()
    out.print(summary_table(progress))
    out.print()
    out.print(f"{len(prepared.steps)} stages in {duration(time.monotonic() - begun)}", highlight=False)
    if report := outputs.get("report", {}).get("report"):
        out.print(Text(f"report: {relative(store.get(report).path / 'report.html')}"), soft_wrap=True)
    return ExitCode.DONE


def exit_code(cause: BaseException | None) -> ExitCode:
    """BAD_INPUT for what the operator must correct (configuration, a teacher that does not answer), else FAILED.

    Of several failures the lowest code counts: a crash is the graver news.
    """
    return ExitCode.BAD_INPUT if isinstance(cause, (ConfigError, Retryable)) else ExitCode.FAILED


def with_config(message: str, argument: str) -> str:
    """Put the configuration's name into the commands of a message of the store, which does not know it."""
    return message.replace("nautile run CONFIG ", f"nautile run {argument} ")


def undelivered_line(points: int, telemetry: TelemetryConfig) -> str:
    """What the end of a run says about measurements that its sinks did not take."""
    sinks = [name for name in ("tensorboard", "otlp", "mlflow", "trackio", "wandb") if getattr(telemetry, name)]
    return f"telemetry ({', '.join(sinks)}): {points:,} measurements were not delivered; the store has them"


def reason_of(update: StageUpdate) -> str:
    """Why a step failed, in one line: without the path and the lines of its log, which the closing account prints."""
    lines = visible(update.reason).splitlines()
    return lines[0] if lines else ""


def print_forecast(out: Console, run: PreparedRun, store: Store) -> None:
    """Print what the run's calls to paid endpoints will cost and what they still need, if it makes any."""
    paid = [step for step in run.steps if asks_paid_endpoints(step)]
    if to_make := [step for step in paid if run.selection.force or not is_in_store(store, step)]:
        out.print(Text("\n".join(forecast_lines(forecast_calls(to_make, store)))), soft_wrap=True)
        if missing := missing_settings(to_make):
            out.print(Text("\n  ".join(["still to be set before they are asked:", *missing])), soft_wrap=True)


def print_failure(err: Console, label: str, cause: BaseException | None, run: PreparedRun, log_file: Path) -> None:
    """Print which step failed, why, what to do, and the resume command. A crash carries the last lines of its log."""
    why = with_config(visible(str(cause)), run.argument)
    err.print(Text(f"stage {label} failed: {why}", style="red"), soft_wrap=True)
    err.print(Text(advice(cause)), soft_wrap=True)
    err.print(Text(f"{RESUME_HEADING} {run.resume_command(label)}"), soft_wrap=True)
    err.print(Text(f"The run's log is {log_file}"), soft_wrap=True)


@contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM ends the run as Ctrl-C does: children ended, states recorded, the resume command printed."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
