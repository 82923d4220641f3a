import asyncio
import email.utils
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data import retry
from data.budget import Budget
from data.retry import CallError, Gate, backoff, reason_of, retry_after

DOWN = CallError("connection", "nobody there")


@pytest.mark.parametrize(
    ("status", "reason", "again"),
    [
        (429, "rate_limited", True),
        (500, "server_error", True),
        (503, "server_error", True),
        (408, "server_error", True),
        (400, "refused", False),
        (422, "refused", False),
        (401, "misconfigured", False),
        (404, "misconfigured", False),
    ],
)
def test_only_what_may_pass_is_worth_another_attempt(status, reason, again):
    assert reason_of(status) == reason
    assert CallError(reason_of(status), "").worth_another is again


def test_retry_after_is_read_in_each_of_its_forms():
    assert retry_after({"retry-after": "3"}) == 3
    assert retry_after({"retry-after": "0.25"}) == 0.25
    assert retry_after({"retry-after-ms": "1500", "retry-after": "9"}) == 1.5
    assert 50 < retry_after({"retry-after": email.utils.formatdate(time.time() + 60, usegmt=True)}) <= 61
    assert retry_after({"retry-after": email.utils.formatdate(0, usegmt=True)}) == 0
    assert retry_after({}) is None


@given(st.text())
def test_an_unreadable_retry_after_is_none(text):
    waited = retry_after({"retry-after": text})
    assert waited is None or waited >= 0


@given(st.integers(1, 60))
def test_backoff_doubles_to_a_bound_and_half_of_it_is_random(attempt):
    longest = min(retry.LONGEST_BACKOFF_S, retry.FIRST_BACKOFF_S * 2 ** (attempt - 1))
    assert longest / 2 <= backoff(attempt) <= longest


def test_a_gate_lets_through_at_its_rate():
    async def passages():
        gate = Gate(1200, threshold=5)
        await asyncio.gather(*(gate.admit() for _ in range(6)))

    began = time.monotonic()
    asyncio.run(passages())
    assert time.monotonic() - began >= 5 * 0.05


def test_an_open_gate_lets_one_probe_through_and_an_answer_closes_it(monkeypatch):
    monkeypatch.setattr(retry, "FIRST_BACKOFF_S", 0.01)

    async def story():
        gate = Gate(None, threshold=3)
        for _ in range(3):
            gate.failed(await gate.admit(), DOWN)
        assert gate.open
        waiting = [asyncio.create_task(gate.admit()) for _ in range(4)]
        done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.sleep(0.05)
        assert [task.result() for task in done] == ["probe"]
        assert sum(task.done() for task in waiting) == 1
        gate.answered("probe")
        assert sorted(await asyncio.gather(*waiting)) == ["probe", "usual", "usual", "usual"]
        assert not gate.open

    asyncio.run(story())


def test_a_gate_that_gets_no_answer_is_given_up(monkeypatch):
    monkeypatch.setattr(retry, "FIRST_BACKOFF_S", 0.01)
    monkeypatch.setattr(retry, "OUTAGE_S", 0.05)

    async def story():
        gate = Gate(None, threshold=2)
        while (turn := await gate.admit()) is not None:
            gate.failed(turn, DOWN)
        assert gate.given_up is DOWN
        gate.reset()
        assert await gate.admit() == "usual"

    asyncio.run(asyncio.wait_for(story(), 20))


def test_a_cancelled_probe_leaves_its_place(monkeypatch):
    monkeypatch.setattr(retry, "FIRST_BACKOFF_S", 0.05)

    async def story():
        gate = Gate(None, threshold=1)
        gate.failed(await gate.admit(), DOWN)
        first = asyncio.create_task(gate.admit())
        await asyncio.sleep(0)
        first.cancel()
        assert await asyncio.wait_for(gate.admit(), 10) == "probe"

    asyncio.run(story())


def test_a_budget_waits_for_what_is_under_way_and_is_never_overrun():
    async def story():
        budget = Budget(10.0, spent=1.0)
        assert await budget.reserve(6.0)
        second = asyncio.create_task(budget.reserve(6.0))
        await asyncio.sleep(0.01)
        assert not second.done(), "the first may cost less than was set aside"
        await budget.settle(6.0, 2.0)
        assert await second
        await budget.settle(6.0, 6.0)
        assert not await budget.reserve(1.5)
        assert await budget.reserve(1.0)
        assert budget.spent == 9.0

    asyncio.run(asyncio.wait_for(story(), 10))


def test_no_limit_is_no_budget():
    async def story():
        budget = Budget(0.0)
        assert await budget.reserve(1e9)
        await budget.settle(1e9, 1e9)
        assert budget.spent == 1e9

    asyncio.run(story())
