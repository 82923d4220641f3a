"""What Prefect's page says of a stage at work, without a server: its log, its bar, its waiting for a slot, a retry."""

import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from prefect.client.schemas.objects import StateType
from prefect.context import TaskRunContext

from nautile.common.errors import ConfigError, Retryable
from nautile.common.text import visible
from nautile.store.layout import Layout
from nautile.tasks.engine import child_main, prefect_task
from nautile.tasks.engine.errors import DASHBOARD_URL, StageCancelled, StageCrash
from nautile.tasks.engine.log_lines import WarningsOf
from nautile.tasks.engine.prefect_task import _TaskRunPage
from nautile.tasks.engine.progress import StageUpdate
from nautile.tasks.engine.stage import RunContext
from tests.support.stages.stage_sums import sums
from tests.support.stages.toy_stages import HOSTILE

RUNNING = StageUpdate("sums", "sums:a", "running", "a-key", "r1-and-more", unit="files", done=4, total=8)


@pytest.fixture
def page(monkeypatch):
    """The page of a stage whose bar is sent; `sent` has what it showed."""
    page = _TaskRunPage("sums", RunContext("r1-and-more", "/nowhere", label="sums:a"))
    page.sent = []

    def create(percent, key, description):
        page.sent.append((percent, description))
        return key

    monkeypatch.setattr(prefect_task, "FIRST_SHOWN_AFTER_S", 0.0)
    monkeypatch.setattr(prefect_task, "create_progress_artifact", create)
    monkeypatch.setattr(prefect_task, "update_progress_artifact", lambda key, *args, **more: create(*args, key, **more))
    page._shown_at -= prefect_task.SHOW_EVERY_S
    return page


def test_the_tasks_log_says_what_the_stage_waits_for_where_its_log_is_what_it_warns_of_and_how_it_ends(
    page, caplog, monkeypatch, tmp_path
):
    monkeypatch.setenv(DASHBOARD_URL, "http://127.0.0.1:4300")
    monkeypatch.setattr(prefect_task, "LOG_EVERY_S", 0.0)
    page._context = replace(page._context, store_root=str(tmp_path))
    files = Layout(tmp_path).staging_files("a-key")
    files.folder.mkdir(parents=True)
    files.log.write_text("2026-11-28 07:13:28,691 WARNING nautile.data: of an earlier attempt\n")
    caplog.set_level(logging.INFO, prefect_task.__name__)
    for _ in range(2):
        page.on_update(replace(RUNNING, state="waiting", note="other steps work: it waits for nautile-cpu"))
    for done in (4, 5):
        page.on_update(replace(RUNNING, done=done))
    assert caplog.messages == [
        "sums:a waits: other steps work: it waits for nautile-cpu",
        f"sums:a works; the log of its process is {files.log} (`nautile logs r1-and-m --stage sums:a` shows it, and "
        "http://127.0.0.1:4300/?run=r1-and-more)",
    ]
    with files.log.open("a") as log:
        log.write(f"2026-11-28 07:13:29,000 WARNING nautile.data: {HOSTILE.replace(chr(10), ' ')}\n")
        log.write("2026-11-28 07:13:29,000 INFO nautile.data: the last line\nWARNING of nothing\n")
    page.on_update(replace(RUNNING, done=6))
    assert caplog.messages[2:] == [visible(f"WARNING nautile.data: {HOSTILE}")]
    files.execution.write_text('{"execution": "e1"}')
    page.on_update(replace(RUNNING, state="publishing"))
    assert caplog.messages[3].startswith(f"sums:a has ended; the last lines of its log, {tmp_path}/logs/sums-e1.txt:\n")
    assert "the last line\nWARNING of nothing" in caplog.messages[3]
    assert "\x1b" not in caplog.text
    page.on_update(replace(RUNNING, state="reused", outputs={"sums": "sums/1", "more": "more/1"}))
    assert caplog.messages[4:] == ["sums:a is in the store: sums/1, more/1"]


@pytest.mark.parametrize(
    ("error", "lines"),
    [
        (ConfigError("sums.parts: three is a crowd"), ["Fix the setting or file named above"]),
        (StageCrash("exit code 1", log=Path("log.txt"), log_tail="  File\nZeroDivisionError"), ["trying again at "]),
    ],
    ids=["operator", "crash"],
)
def test_a_failure_is_one_message_with_what_follows(page, caplog, error, lines):
    page._context = replace(page._context, resume="nautile retry r1")
    will_retry = page.on_failure(error, 1)
    (message,) = caplog.messages
    assert message.splitlines()[0] == f"sums:a failed: {error.args[0]}"
    assert all(line in message for line in lines)
    if will_retry:
        assert message.endswith("The last lines of its log, log.txt:\n  File\nZeroDivisionError")
    else:
        assert message.endswith("Finished work is kept. Continue with: nautile retry r1")


def test_of_a_log_that_warns_of_every_row_fifty_warnings_are_repeated(tmp_path):
    log = tmp_path / "log.txt"
    warnings = WarningsOf(log)
    assert warnings.new() == []  # it is not there yet
    log.write_bytes(b"".join(b"2026-11-28 07:13:28,691 WARNING of row %d\n" % row for row in range(100_000)) + b"2026")
    assert len(lines := warnings.new()) == 51
    assert (lines[0], lines[-1]) == ("WARNING of row 0", f"more warnings follow in {log}")
    assert warnings.new() == []


def test_the_error_that_ends_a_process_is_no_warning_of_it(tmp_path):
    """It would stand twice: as a line of the log, and as the reason of the failure."""
    log = tmp_path / "log.txt"
    warnings = WarningsOf(log)
    start = "2026-11-28 07:13:28,691 ERROR"
    log.write_text(f"{start} {child_main.logger.name}: by zero\n{start} nautile.rl: a row\n")
    assert warnings.new() == ["ERROR nautile.rl: a row"]


def test_a_line_is_repeated_once_it_is_whole_and_one_without_an_end_is_passed(tmp_path):
    log = tmp_path / "log.txt"
    warnings = WarningsOf(log)
    log.write_bytes(b"2026-11-28 07:13:28,691 ERROR of")
    assert warnings.new() == []
    with log.open("ab") as file:
        file.write(b" a row\n" + b"\0" * (3 << 20) + b"\n2026-11-28 07:13:28,691 WARNING of \xff\n")
    assert [line for _ in range(6) for line in warnings.new()] == ["ERROR of a row", "WARNING of \ufffd"]


def test_the_bar_moves_four_times_a_minute_and_ends_with_a_cancelled_stage(page):
    for done in (4, 5, 6):  # at once
        page.on_update(replace(RUNNING, done=done))
    page.end_bar("cancelled; finished work is kept")
    assert page.sent == [(50.0, page.sent[0][1]), (75.0, "cancelled; finished work is kept")]
    assert page.sent[0][1].startswith("running, ")


def test_a_step_that_waits_for_a_slot_is_not_running_for_prefect(monkeypatch):
    shown, free = [], iter([False, False, True])
    monkeypatch.setattr(prefect_task, "_show_state", shown.append)
    monkeypatch.setattr(prefect_task, "pause", lambda seconds: None)
    monkeypatch.setattr(prefect_task.ServerSlot, "try_acquire", lambda slot: next(free))
    monkeypatch.setattr(prefect_task.ServerSlot, "release", lambda slot: None)
    context = RunContext("r1", "", label="sums:a", limit="nautile-cpu")
    with prefect_task._slot(context):
        states = [(state.type, state.name) for state in shown]
    assert states == [(StateType.PENDING, "AwaitingConcurrencySlot"), (StateType.RUNNING, "Running")]
    free = iter([True])
    with prefect_task._slot(context):
        assert len(shown) == 2  # one that need not wait changes nothing


def test_a_cancelled_stage_is_cancelled_and_not_crashed_for_prefect(monkeypatch, sums_task):
    def cancelled(*_, **__):
        raise StageCancelled("the run was cancelled")

    monkeypatch.setattr(prefect_task, "run_stage", cancelled)
    state = sums_task.fn({}, {}, RunContext("r1", "", label="sums:a"))
    assert (state.type, state.message) == (StateType.CANCELLED, "The run was stopped; finished work is kept.")
    assert "a task run" not in prefect_task._pages  # the pages of failed runs of other tests may be there


@pytest.fixture
def sums_task(monkeypatch):
    """The task of a stage, whose body can be called as in a task run."""
    run = SimpleNamespace(task_run=SimpleNamespace(id="a task run"))
    monkeypatch.setattr(TaskRunContext, "get", classmethod(lambda _: run))
    return prefect_task.as_prefect_task(sums)


def test_prefects_own_lines_about_a_failure_are_left_out_of_the_log_of_a_stage(monkeypatch):
    text = "Task run failed with %s: %r - Retry %s/%s will start %s"  # as in Prefect 3.8
    values = ("exception", Retryable("no answer\nand its log"), 1, prefect_task.MAX_RETRIES, "immediately")
    record = logging.LogRecord("prefect.task_runs", logging.INFO, "", 0, text, values, None)
    end = logging.LogRecord(record.name, logging.ERROR, "", 0, "Finished in state Failed('no\\nanswer')", (), None)
    prefects = logging.getLogger(record.name)
    record.task_run_id = end.task_run_id = "of another task"
    assert prefects.filter(record)
    assert prefects.filter(end)
    assert "answer" in end.getMessage()
    monkeypatch.setitem(prefect_task._pages, "ours", None)
    record.task_run_id = end.task_run_id = "ours"
    assert not prefects.filter(record)
    assert prefects.filter(end)
    assert end.getMessage() == "Finished in state Failed"


def test_the_page_about_a_stage_names_its_artifacts_and_newest_metrics(monkeypatch):
    monkeypatch.setenv(DASHBOARD_URL, "http://127.0.0.1:8501/")
    update = StageUpdate("pretrain", "pretrain", "done", run_id="r 1", metrics={"loss": 3.0})
    text = prefect_task._summary(update, {"checkpoint": "checkpoint/abc"})
    page = "http://127.0.0.1:8501/lineage?run=r+1&artifact=checkpoint%2Fabc"
    assert f"| [checkpoint/abc]({page}) |" in text
    assert "| `loss` | 3 |" in text
    assert "[the run in the dashboard](http://127.0.0.1:8501/?run=r+1)" in text
    monkeypatch.delenv(DASHBOARD_URL)
    assert "](" not in prefect_task._summary(update, {"checkpoint": "checkpoint/abc"})
