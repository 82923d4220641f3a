"""`nautile run`: run the pipeline in this process, show the progress of each step, and explain failures."""

import logging
import os
import signal
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from rich.console import Console
from rich.text import Text

from nautile.common.errors import ConfigError, Retryable
from nautile.common.processes import ExitCode, collector_paused, give_way
from nautile.common.text import counted, duration, visible
from nautile.configs.changes import describe_changes
from nautile.configs.operation import TelemetryConfig
from nautile.configs.schema import RunConfig
from nautile.flows.dag import Step
from nautile.flows.forecast import asks_paid_endpoints, forecast_calls, forecast_lines
from nautile.flows.operate import prefect_server
from nautile.flows.operate.services import join_server, url_of
from nautile.flows.progress_view import LiveView, LogView, RunProgress, summary_table, view_for
from nautile.flows.readiness import has_prompt_files, missing_settings, missing_webhook, refuse_missing_rows
from nautile.flows.rehearsal import not_rehearsed
from nautile.flows.render import relative
from nautile.flows.selection import PreparedRun, Selection, check_ray_hosts, is_in_store, outdated_lines, prepare_run
from nautile.flows.stored_configs import store_config
from nautile.store.artifacts import Store
from nautile.store.mirror import open_store
from nautile.tasks.engine.attempt import run_stage
from nautile.tasks.engine.errors import DASHBOARD_URL, RESUME_HEADING, advice
from nautile.tasks.engine.progress import StageUpdate, subscribe
from nautile.tasks.engine.stage import RunContext

log = logging.getLogger(__name__)

LONGEST_NAME = 100  # characters in the name of a run (`flows.forms.RunName`)


@dataclass(frozen=True)
class ProgressListener:
    """Callback that passes progress updates of stages to the run's progress and its view."""

    progress: RunProgress
    view: LiveView | LogView
    undelivered: Counter[str] = field(default_factory=Counter)  # step -> measurements that no tracker took
    reasons: bool = True  # show why a step failed; False if the command itself prints it

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
    """Run the pipeline, print its progress and result, and return the exit code. `argument`, `base`: `prepare_run`.

    `name`: the name of the run, by default that of the configuration. Raises `ConfigError` for errors that are
    detected before anything starts.
    """
    store = open_store()
    try:
        prepared = prepare_run(config, selection, store, argument, base)
        check_ray_hosts(store, config.launch, prepared)
    except ConfigError as error:
        raise ConfigError(with_config(str(error), argument)) from None
    # Only of steps that will run: an artifact in the store needs no rows any more.
    refuse_missing_rows(s for s in prepared.steps if has_prompt_files(s) and not is_in_store(store, s))
    if prepared.changes:
        out.print(Text(f"changes {describe_changes(prepared.changes)}"), soft_wrap=True)
    print_forecast(out, prepared, store)
    to_make = [step for step in prepared.steps if selection.force or not is_in_store(store, step)]
    for line in (*outdated_lines(store, prepared), not_rehearsed(store, config, to_make, argument)):
        if line:
            out.print(Text(line, style="yellow"), soft_wrap=True)
    for line in missing_webhook(config.operation):
        out.print(Text(line), soft_wrap=True)
    log_file = prefect_server.configure_prefect(store)
    progress = RunProgress(step.label for step in prepared.steps)
    view = view_for(progress, out)
    begun, name = time.monotonic(), name or run_name_of(config)
    if reused := only_reused(store, config, prepared, to_make, name, progress, view):
        return print_result(out, store, progress, reused, begun)
    if server := join_server(store):
        out.print(f"runs on the server of `nautile up`: {server.removesuffix('/api')}", soft_wrap=True, highlight=False)
    if "PREFECT_API_URL" not in os.environ:
        progress.heading = "starting the embedded Prefect server (about 20 s the first time, less after)"
    if page := url_of(store, "dashboard"):
        os.environ.setdefault(DASHBOARD_URL, page)
    listener = ProgressListener(progress, view)
    unsubscribe = subscribe(listener)
    try:
        # SIGTERM is caught first and let go last, so that it never ends this process between the start of the server
        # and its own end. The view is inside: its live lines must be gone before the closing messages.
        with terminable(), view, prefect_server.prefect_api():
            # Only after the start of an embedded server, which must keep its priority.
            give_way(config.launch.niceness)
            # Prefect reads its settings at import, and only now are they all set.
            with collector_paused():
                from prefect import tags
                from prefect.exceptions import FailedRun

                from nautile.flows.operate.automations import TAG
                from nautile.flows.operate.reconcile import reconcile_if_possible
                from nautile.flows.pipeline import StageFailed, pipeline

            for result in reconcile_if_possible(store):
                out.print(Text(result.line()), soft_wrap=True)
            # By reference, so that whoever follows the flow's parameters later runs the same.
            reference = store_config(store, config, base, argument)
            try:
                with tags(TAG, config.name):
                    outputs: dict[str, dict[str, str]] = pipeline(  # no State is asked for
                        reference, **selection.parameters(), name=name
                    )
            except FailedRun as refusal:  # what was checked above has changed since
                raise ConfigError(str(refusal)) from None
            except StageFailed as failure:
                # The details go into the log; the terminal gets one paragraph per step below.
                log.error("the run failed", exc_info=failure)
                failures = failure.failures
            else:
                failures = {}
    except (KeyboardInterrupt, SystemExit):
        labels = [step.label for step in progress.steps.values() if step.state in ("running", "cancelled")]
        where = f" in {', '.join(labels)}" if labels else ""
        err.print(Text(f"stopped{where}; all processes have ended, finished work is kept."), soft_wrap=True)
        err.print(Text(f"Continue with: {prepared.resume_command(first_unfinished(progress))}"), soft_wrap=True)
        return ExitCode.INTERRUPTED
    finally:
        unsubscribe()
        if missing := listener.undelivered.total():
            err.print(Text(undelivered_line(missing, config.telemetry)), soft_wrap=True)
    if failures:
        for label, cause in failures.items():
            print_failure(err, label, cause, prepared, log_file, stopped_at=first_unfinished(progress))
        if left := [step.label for step in progress.steps.values() if step.state == "waiting"]:
            err.print(Text(f"not started, because they need a failed step: {', '.join(left)}"), soft_wrap=True)
        return min(map(exit_code, failures.values()))
    return print_result(out, store, progress, outputs, begun)


def only_reused(
    store: Store,
    config: RunConfig,
    run: PreparedRun,
    to_make: Sequence[Step],
    name: str,
    progress: RunProgress,
    view: LiveView | LogView,
) -> dict[str, dict[str, str]] | None:
    """Record a run whose steps are all in the store, without a server of Prefect; None if the run needs one.

    It needs one where there is work to do, a message to send or a question to ask, and to appear on that of
    `nautile up`. All else happens as in the flow: artifacts are checked, and the run and its steps are recorded.
    """
    asks = any(config.operation.of(step.stage.name).at_budget != "go_on" for step in run.steps)
    if to_make or asks or config.operation.notify or "PREFECT_API_URL" in os.environ or store.url is not None:
        return None
    if not _intact(store, run):
        return None
    from nautile.flows.plans import recorded  # imports Prefect: late, as in `run`

    run_id = str(uuid.uuid4())
    outputs: dict[str, dict[str, str]] = {}
    unsubscribe = subscribe(ProgressListener(progress, view))
    try:
        with view, store.run_lock(run_id).for_life(), recorded(store, config, run, run_id, name, run.resume_command()):
            for step in run.steps:
                context = RunContext(run_id, str(store.root), False, step.label, config.name, config.launch)
                outputs[step.label] = run_stage(step.stage, step.section, step.inputs, context, slot=_no_work)
    finally:
        unsubscribe()
    return outputs


@contextmanager
def _no_work() -> Iterator[None]:
    raise ConfigError("an artifact has changed since the run began: run the same command again")
    yield


def _intact(store: Store, run: PreparedRun) -> bool:
    """Whether the artifacts of all steps are here and undamaged, so that no step has work to do."""
    try:
        for step in run.steps:
            for kind in step.outputs:
                store.check(store.get(f"{kind}/{step.key}"))
    except (ConfigError, Retryable):
        return False
    return True


def print_result(
    out: Console, store: Store, progress: RunProgress, outputs: dict[str, dict[str, str]], begun: float
) -> int:
    """Print the steps and times of a run that has ended well, and where its report is; returns the exit code."""
    out.print()
    out.print(summary_table(progress))
    out.print()
    out.print(f"{counted(len(progress.steps), 'stage')} in {duration(time.monotonic() - begun)}", highlight=False)
    if report := outputs.get("report", {}).get("report"):
        out.print(Text(f"report: {relative(store.get(report).path / 'report.html')}"), soft_wrap=True)
    return ExitCode.DONE


def exit_code(cause: BaseException | None) -> ExitCode:
    """BAD_INPUT for what the operator must correct (configuration, an endpoint that does not answer), else FAILED.

    After several failures a run exits with the lowest code, so that a crash is not hidden by a wrong setting.
    """
    return ExitCode.BAD_INPUT if isinstance(cause, (ConfigError, Retryable)) else ExitCode.FAILED


def with_config(message: str, argument: str) -> str:
    """Replace the placeholder CONFIG in commands of an error message; the store does not know the configuration."""
    return message.replace("nautile run CONFIG ", f"nautile run {argument} ")


def undelivered_line(points: int, telemetry: TelemetryConfig) -> str:
    """The closing line about measurements that the trackers of `[telemetry]` did not take."""
    trackers = [name for name in ("tensorboard", "otlp", "mlflow", "wandb") if getattr(telemetry, name)]
    return f"telemetry ({', '.join(trackers)}): {points:,} measurements were not delivered; the store has them"


def reason_of(update: StageUpdate) -> str:
    """Why a step failed, in one line. `print_failure` prints the path and the last lines of its log later."""
    lines = visible(update.reason).splitlines()
    return lines[0] if lines else ""


def print_forecast(out: Console, run: PreparedRun, store: Store) -> None:
    """Print the expected cost of the run's calls to paid endpoints, and their missing settings."""
    paid = [step for step in run.steps if asks_paid_endpoints(step)]
    if to_make := [step for step in paid if run.selection.force or not is_in_store(store, step)]:
        out.print(Text("\n".join(forecast_lines(forecast_calls(to_make, store)))), soft_wrap=True)
        if missing := missing_settings(to_make):
            out.print(Text("\n  ".join(["settings that these endpoints still need:", *missing])), soft_wrap=True)


def run_name_of(config: RunConfig) -> str:
    """The name of a run that was given none: its configuration's, shortened to what the flow accepts.

    Both ends stay: a sweep names the configuration of a run after the sweep, all settings of the arm, and the seed.
    """
    name = config.name
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 43]}...{name[-40:]}"


def first_unfinished(progress: RunProgress) -> str | None:
    """The first step, in the order of the DAG, that has not ended well; None if all have.

    A forced run resumes from it. Steps run side by side, so a step that runs or has failed need not be the first: the
    evaluation of an endpoint's model begins at once and comes after all training.
    """
    return next((step.label for step in progress.steps.values() if step.state not in ("done", "reused")), None)


def print_failure(
    err: Console,
    label: str,
    cause: BaseException | None,
    run: PreparedRun,
    log_file: Path,
    *,
    stopped_at: str | None = None,
) -> None:
    """Print which step failed, why, what to do, and the resume command. A crash includes the last lines of its log.

    `stopped_at`: the step that a forced run resumes from, by default the failed one.
    """
    why = with_config(visible(str(cause)), run.argument)
    err.print(Text(f"stage {label} failed: {why}", style="red"), soft_wrap=True)
    err.print(Text(advice(cause)), soft_wrap=True)
    err.print(Text(f"{RESUME_HEADING} {run.resume_command(stopped_at or label)}"), soft_wrap=True)
    err.print(Text(f"The run's log is {log_file}"), soft_wrap=True)


@contextmanager
def terminable() -> Iterator[None]:
    """Handle SIGTERM like Ctrl-C: end child processes, record states, print the resume command."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
