"""Progress, rates and time left, from reports at given moments."""

import io
import shutil
from contextlib import nullcontext

import pytest
from rich.console import Console

from nautile.configs.operation import TelemetryConfig
from nautile.flows.cli.terminal import console_for
from nautile.flows.operate import prefect_server
from nautile.flows.pipeline import pipeline
from nautile.flows.progress_view import LogView, RunProgress
from nautile.flows.run import ProgressListener, run, undelivered_line
from nautile.flows.selection import Selection
from nautile.tasks.engine.progress import RATE_WINDOW_S, StageUpdate, notify


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def progress(clock):
    return RunProgress(["distill", "pretrain"], clock)


def advance(progress, clock, seconds, done, total=100, unit="steps", note=""):
    clock.now += seconds
    progress.advance("pretrain", done, total, unit, note)


def test_rate_and_time_left(progress, clock):
    advance(progress, clock, 0, 10)
    assert progress.steps["pretrain"].meter.rate() is None
    advance(progress, clock, 5, 20, note="loss 3.1")
    step = progress.steps["pretrain"]
    assert step.meter.rate() == pytest.approx(2.0)
    assert step.meter.left_s(step.done, step.total) == pytest.approx(40.0)
    assert step.meter.left_s(step.done, step.done - 1) == 0.0  # more is done than was expected
    assert step.describe() == "20/100 steps, 2 steps/s, loss 3.1, 40 s left"


def test_a_resumed_stage_is_not_credited_with_what_was_there(progress, clock):
    advance(progress, clock, 0, 90)
    advance(progress, clock, 10, 91)
    assert progress.steps["pretrain"].meter.rate() == pytest.approx(0.1)


def test_the_rate_is_that_of_the_last_half_minute(progress, clock):
    advance(progress, clock, 0, 0)
    for done in range(1, 31):
        advance(progress, clock, 10, done)
    for _ in range(10):
        advance(progress, clock, RATE_WINDOW_S / 10, 30 + 3 * (_ + 1))
    assert progress.steps["pretrain"].meter.rate() == pytest.approx(1.0, rel=0.15)


def test_what_rises_seldom_keeps_its_rate(progress, clock):
    """A file each five minutes, told of three times a second."""
    for second in range(1200):
        advance(progress, clock, 1, second // 300)
        advance(progress, clock, 0.3, second // 300)
    step = progress.steps["pretrain"]
    assert step.meter.rate() == pytest.approx(1 / 390, rel=0.7)
    assert step.meter.left_s(step.done, step.total) == pytest.approx(97 * 390, rel=0.7)


def test_another_unit_or_a_step_back_begins_the_rate_anew(progress, clock):
    advance(progress, clock, 0, 0, unit="problems")
    advance(progress, clock, 1, 100, unit="problems")
    advance(progress, clock, 1, 5, unit="steps")
    assert progress.steps["pretrain"].meter.rate() is None
    advance(progress, clock, 1, 6, unit="steps")
    assert progress.steps["pretrain"].meter.rate() == pytest.approx(1.0)
    advance(progress, clock, 1, 2, unit="steps")
    assert progress.steps["pretrain"].meter.rate() is None


def test_unknown_totals_are_not_guessed(progress, clock):
    advance(progress, clock, 0, 3, total=None)
    step = progress.steps["pretrain"]
    assert step.share() is None
    assert step.meter.left_s(step.done, step.total) is None
    assert step.describe() == "3 steps"


def test_the_time_of_a_stage_ends_with_it(progress, clock):
    progress.begin("distill")
    clock.now += 7
    assert progress.elapsed("distill") == 7
    progress.end("distill", "done", ["documents/abc"])
    clock.now += 100
    assert progress.elapsed("distill") == 7
    assert progress.elapsed("pretrain") is None


def test_a_failure_says_its_reason_and_success_keeps_the_last_note(progress, clock):
    advance(progress, clock, 0, 1, note="loss 3.1")
    progress.end("pretrain", "done")
    assert progress.steps["pretrain"].note == "loss 3.1"
    progress.end("pretrain", "failed", reason="out of memory")
    assert progress.steps["pretrain"].note == "out of memory"


def test_the_end_of_a_run_counts_what_its_sinks_missed_in_all_attempts(progress):
    listener = ProgressListener(progress, LogView(progress, console_for()))
    for state, missed in (("running", 0), ("failed", 3), ("running", 0), ("done", 1_200)):
        listener(StageUpdate("pretrain", "pretrain", state, undelivered=missed))
    telemetry = TelemetryConfig(mlflow="http://127.0.0.1:5000", wandb="boards")
    assert undelivered_line(listener.undelivered.total(), telemetry) == (
        "telemetry (mlflow, wandb): 1,203 measurements were not delivered; the store has them"
    )


@pytest.fixture
def run_until_stopped(made, toy_stages, monkeypatch, tmp_path):
    """run_until_stopped(pipeline, config, selection) -> what is printed about the end; `pipeline` replaces the flow."""
    monkeypatch.setenv("NAUTILE_STORE", str(shutil.copytree(made[0].root, tmp_path / "store")))
    for name in ("PREFECT_HOME", "PREFECT_API_URL"):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(prefect_server, "prefect_api", nullcontext)
    monkeypatch.setattr(prefect_server, "configure_prefect", lambda store: tmp_path / "nautile.log")
    monkeypatch.setattr("nautile.flows.operate.reconcile.reconcile_if_possible", lambda store: ())

    def call(pipeline, config, selection):
        monkeypatch.setattr("nautile.flows.pipeline.pipeline", pipeline)
        err = Console(file=io.StringIO(), width=200)
        assert run(config, "toy.toml", selection, Console(file=io.StringIO()), err) == 130
        return err.file.getvalue()

    return call


def test_a_forced_run_resumes_from_its_first_unfinished_step_though_a_later_one_was_at_work(toy, run_until_stopped):
    """The evaluation of an endpoint's model reads nothing and begins at once, however late it is in the DAG."""

    def stopped(*_, **__):
        for label in ("held_out", "ingest:wikipedia"):
            notify(StageUpdate(label.partition(":")[0], label, "done"))
        notify(StageUpdate("evaluate", "evaluate:align", "running"))
        raise KeyboardInterrupt

    message = run_until_stopped(stopped, toy, Selection(force=True))
    assert "stopped in evaluate:align" in message
    assert "nautile run toy.toml --from ingest:synth --force" in message


def test_a_configuration_with_a_long_name_has_a_run_whose_name_the_flow_accepts(toy, run_until_stopped):
    """A sweep names the configuration of each run after all settings of its arm."""

    def checked(config, **parameters):
        pipeline.validate_parameters({"config": config, **parameters})
        raise KeyboardInterrupt

    run_until_stopped(checked, toy.model_copy(update={"name": "sweep." + "learning_rate-0.001-" * 8}), Selection())
