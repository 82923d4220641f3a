"""What Prefect's page says of a stage at work, without a server: its log, its bar, its waiting for a slot, a retry."""

import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest
from prefect.client.schemas.objects import StateType
from prefect.context import TaskRunContext

from nautile.common.errors import Retryable
from nautile.tasks.engine import prefect_task
from nautile.tasks.engine.errors import DASHBOARD_URL, StageCancelled
from nautile.tasks.engine.prefect_task import _TaskRunPage
from nautile.tasks.engine.progress import StageUpdate
from nautile.tasks.engine.stage import RunContext
from tests.support.stages.stage_sums import sums

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


def test_the_log_of_prefects_page_says_once_where_the_stages_own_log_is(page, caplog, monkeypatch):
    monkeypatch.setenv(DASHBOARD_URL, "http://127.0.0.1:4300")
    with caplog.at_level(logging.INFO, prefect_task.__name__):
        page.on_update(RUNNING)
        page.on_update(replace(RUNNING, done=5))
    (line,) = caplog.messages
    assert "`nautile logs r1-and-m --stage sums:a` or http://127.0.0.1:4300/?run=r1-and-more" in line


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


def test_a_retry_is_announced_without_a_limit_that_has_no_meaning():
    text = "Task run failed with %s: %r - Retry %s/%s will start %s"  # as in Prefect 3.8
    values = ("exception", Retryable("no answer\nand its log"), 1, prefect_task.MAX_RETRIES, "immediately")
    record = logging.LogRecord("prefect.task_runs", logging.INFO, "", 0, text, values, None)
    assert logging.getLogger(record.name).filter(record)
    assert record.getMessage() == "Task run failed with exception: no answer - retry 1 follows"


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
