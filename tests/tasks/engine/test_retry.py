"""Which failures are tried again, for how long, and that progress starts the count anew."""

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest

from nautile.common.errors import ConfigError, Retryable
from nautile.configs.operation import OperationConfig, StageOperation
from nautile.configs.stages import STAGES
from nautile.tasks.engine import errors, prefect_task
from nautile.tasks.engine.errors import BACKOFF, CRASHES, ITEM_BACKOFF, RetryPolicy, StageCrash
from nautile.tasks.engine.prefect_task import _TaskRunPage
from nautile.tasks.engine.progress import StageUpdate, read_retry_note
from nautile.tasks.engine.stage import RunContext

HOUR = 3600.0
AWAY = Retryable("http://127.0.0.1:9 does not answer")


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(errors, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def sit_out(policy, clock, seconds):
    """Fail at once at each try for so long; the pauses in between, until the policy gives up."""
    pauses, until = [], clock.now + seconds
    while policy.should_retry(AWAY):
        pauses.append(policy.pause_s())
        clock.now += pauses[-1]
        if clock.now >= until:
            break
    return pauses


def test_an_outage_is_sat_out_for_the_hours_configured_with_growing_pauses(clock):
    policy = RetryPolicy(replace(BACKOFF, give_up_s=24 * HOUR))
    pauses = sit_out(policy, clock, 1000 * HOUR)
    assert clock.now - 1000.0 == pytest.approx(24 * HOUR)
    assert 1.0 <= pauses[0] <= 2.0
    assert max(pauses) <= 600.0
    assert len(pauses) < 24 * HOUR / 300 + 20
    assert len(set(pauses[20:-1])) > 10, "the pauses have no jitter"


def test_progress_and_not_time_starts_the_hours_anew(clock):
    policy = RetryPolicy(replace(BACKOFF, give_up_s=24 * HOUR))
    for day in range(30):
        sit_out(policy, clock, 20 * HOUR)
        policy.progress("prompts", 100.0 + day)
        assert policy.failures == 0
    sit_out(policy, clock, 20 * HOUR)
    policy.progress("prompts", 129.0)  # no farther than before: a resumed attempt reports what an earlier one did
    policy.progress("prompts", 50.0)
    sit_out(policy, clock, 20 * HOUR)
    assert not policy.should_retry(AWAY)


def test_crashes_are_counted_and_bad_input_is_never_retried(clock):
    policy = RetryPolicy(BACKOFF)
    assert [policy.should_retry(StageCrash("x")) for _ in range(CRASHES + 1)] == [True] * CRASHES + [False]
    policy.progress("steps", 1.0)
    assert policy.should_retry(StageCrash("x"))
    assert not any(policy.should_retry(error) for error in (ConfigError("x"), ValueError("x"), None))


def test_an_item_has_a_few_tries(clock):
    policy = RetryPolicy(ITEM_BACKOFF)
    clock.now += 100 * HOUR
    assert [policy.should_retry(AWAY) for _ in range(5)] == [True] * 4 + [False]
    assert policy.left_s() == float("inf")


def test_the_page_and_the_terminal_say_what_is_waited_for_and_until_when(clock, updates, monkeypatch, tmp_path):
    context = RunContext("r1", str(tmp_path), label="sums:a", operation=StageOperation(outage_hours=2))
    staging = tmp_path / "staging" / "a-key"
    staging.mkdir(parents=True)
    page, shown = _TaskRunPage("sums", context), []
    monkeypatch.setattr(page, "_show", lambda percent, text: shown.append((percent, text)))
    monkeypatch.setattr(prefect_task, "SHOW_EVERY_S", 1e9)  # on_update shows nothing
    running = StageUpdate("sums", "sums:a", "running", "a-key", "r1", unit="files")
    page.on_update(replace(running, done=3, total=6))
    assert page.on_failure(AWAY, 1)
    clock.now += 1.9 * HOUR
    assert page.on_failure(AWAY, 2)
    page.on_update(replace(running, done=4, total=6))
    assert page.on_failure(AWAY, 3)
    clock.now += 2.1 * HOUR
    page.on_update(replace(running, done=4, total=6))
    assert not page.on_failure(AWAY, 4)
    assert [(update.state, update.attempt, update.reason) for update in updates] == [
        ("retrying", attempt, str(AWAY)) for attempt in (1, 2, 3)
    ]
    words = r"trying again at \d\d:\d\d:\d\d, until \d{4}-\d\d-\d\d \d\d:\d\d \(operation\.sums\.outage_hours\)"
    assert all(re.fullmatch(words, update.note) for update in updates)
    assert [percent for percent, _ in shown] == pytest.approx([50.0, 50.0, 100 * 4 / 6])
    assert all(re.fullmatch(f"{words}, after: {AWAY}", text) for _, text in shown)
    assert read_retry_note(staging) == shown[-1][1], "for the dashboard and `nautile status`"


def test_the_hours_have_one_default():
    assert {getattr(OperationConfig(), stage).outage_hours for stage in STAGES} == {24.0}
    assert RunContext("r1", "/nowhere").operation.outage_hours == 24.0
