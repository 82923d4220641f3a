"""What is written where there is no terminal, and that the live lines draw in every state."""

import io

import pytest
from rich.console import Console

from nautile.flows.progress_view import LOG_EVERY_S, LiveView, LogView, RunProgress, summary_table, view_for
from nautile.flows.run import ProgressListener
from nautile.tasks.engine.progress import StageUpdate
from tests.flows.test_run_progress import Clock


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def run_progress(clock):
    return RunProgress(["distill", "pretrain"], clock)


@pytest.fixture
def out():
    return Console(file=io.StringIO(), width=100)


@pytest.fixture
def report(run_progress, out, clock):
    """Tell the display of an update of `pretrain`."""
    watch = ProgressListener(run_progress, LogView(run_progress, out, clock))

    def update(state, label="pretrain", **fields):
        watch(StageUpdate(label.partition(":")[0], label, state, **fields))

    return update


def text(console: Console) -> list[str]:
    return console.file.getvalue().splitlines()


def test_one_line_at_the_start_and_one_at_the_end(report, out, clock):
    report("running", done=0, total=10, unit="steps")
    clock.now += 3
    report("running", done=10, total=10, unit="steps", note="loss 2.50")
    report("publishing")
    report("done", outputs={"checkpoint": "checkpoint/0123"})
    assert text(out) == ["pretrain: started (0/10 steps)", "pretrain: done after 3.0 s (loss 2.50)"]


def test_a_progress_line_now_and_then(report, out, clock):
    for step in range(100):
        report("running", done=step, total=100, unit="steps")
        clock.now += 1
    lines = text(out)
    assert len(lines) == 1 + int(99 // LOG_EVERY_S)
    assert lines[1] == "pretrain: running (15/100 steps, 1 steps/s, 1 min 25 s left)"


def test_what_was_waited_for_is_no_part_of_a_stage_that_is_reused_after_it(report, out):
    report("running")
    report("retrying", note="trying again at 14:05:10", error="no answer", reason="no answer", attempt=1)
    report("reused", outputs={"checkpoint": "checkpoint/0123"})
    assert text(out)[-1] == "pretrain: reused"


def test_failure_retry_and_second_attempt(report, out, clock):
    report("running")
    clock.now += 2
    report("failed", reason="its process ended with exit code 1: oh")
    report("retrying", note="trying again at 14:05:10", reason="its process ended with exit code 1: oh")
    report("running", attempt=2)
    assert text(out) == [
        "pretrain: started",
        "pretrain: failed after 2.0 s (its process ended with exit code 1: oh)",
        "pretrain: started (trying again at 14:05:10, after: its process ended with exit code 1: oh)",
        "pretrain: running (attempt 2)",
    ]


def test_stages_that_are_not_shown_are_passed_over(report, out):
    report("running", label="evaluate:align")
    assert text(out) == []


def test_the_kind_of_display_follows_the_console(run_progress):
    assert isinstance(view_for(run_progress, Console(file=io.StringIO())), LogView)
    assert isinstance(view_for(run_progress, Console(file=io.StringIO(), force_terminal=True)), LiveView)


def test_the_live_lines_draw_in_every_state(run_progress, clock):
    console = Console(file=io.StringIO(), force_terminal=True, width=120, color_system=None)
    run_progress.heading = "starting"
    with LiveView(run_progress, console):
        run_progress.begin("distill")
        clock.now += 65
        run_progress.advance("distill", 3, 12, "calls", "2 refused [odd]")
        run_progress.advance("pretrain", 7, None, "steps", "")
    shown = console.file.getvalue()
    assert "distill" in shown
    assert "1 min 5 s" in shown
    assert "3/12 calls, 2 refused [odd]" in shown
    assert "7 steps" in shown  # beside it
    assert "starting" in shown


def test_the_closing_table(run_progress, out, clock):
    run_progress.begin("pretrain")
    clock.now += 61
    run_progress.end("distill", "reused", ["documents/0123", "tokens/0123"])
    run_progress.end("pretrain", "done", ["checkpoint/4567"])
    out.print(summary_table(run_progress))
    rows = [line.split() for line in text(out)]
    assert rows[1] == ["distill", "reused", "documents/0123", "tokens/0123"]
    assert rows[2] == ["pretrain", "done", "1", "min", "1", "s", "checkpoint/4567"]
