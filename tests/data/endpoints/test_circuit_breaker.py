import asyncio
import email.utils
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.endpoints import circuit_breaker as retry
from data.endpoints import rate_limit as pace
from data.endpoints.budget import NO_USAGE, Budget, SpendingLimit, Usage
from data.endpoints.chat_types import CallError
from data.endpoints.circuit_breaker import CircuitBreaker, backoff, reason_of, retry_after
from data.endpoints.rate_limit import RateLimiter

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
        gate = CircuitBreaker(RateLimiter(1200), threshold=5)
        await asyncio.gather(*(gate.admit() for _ in range(6)))

    began = time.monotonic()
    asyncio.run(passages())
    assert time.monotonic() - began >= 5 * 0.05


def test_an_open_gate_lets_one_probe_through_and_an_answer_closes_it(monkeypatch):
    monkeypatch.setattr(retry, "FIRST_BACKOFF_S", 0.01)

    async def story():
        gate = CircuitBreaker(RateLimiter(), threshold=3)
        for _ in range(3):
            gate.failed(await gate.admit(), DOWN)
        assert gate.open
        waiting = [asyncio.create_task(gate.admit()) for _ in range(4)]
        done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.sleep(0.05)
        (probe,) = (task.result() for task in done)
        assert probe.kind == "probe"
        assert sum(task.done() for task in waiting) == 1
        gate.answered(probe)
        assert sorted(turn.kind for turn in await asyncio.gather(*waiting)) == ["probe", "usual", "usual", "usual"]
        assert not gate.open

    asyncio.run(story())


def test_a_gate_that_gets_no_answer_is_given_up(monkeypatch):
    monkeypatch.setattr(retry, "FIRST_BACKOFF_S", 0.01)
    monkeypatch.setattr(retry, "OUTAGE_S", 0.05)

    async def story():
        gate = CircuitBreaker(RateLimiter(), threshold=2)
        while (turn := await gate.admit()) is not None:
            gate.failed(turn, DOWN)
        assert gate.given_up is DOWN
        gate.reset()
        assert (await gate.admit()).kind == "usual"

    asyncio.run(asyncio.wait_for(story(), 20))


def test_a_cancelled_probe_leaves_its_place(monkeypatch):
    monkeypatch.setattr(retry, "FIRST_BACKOFF_S", 0.05)

    async def story():
        gate = CircuitBreaker(RateLimiter(), threshold=1)
        gate.failed(await gate.admit(), DOWN)
        first = asyncio.create_task(gate.admit())
        await asyncio.sleep(0)
        first.cancel()
        assert (await asyncio.wait_for(gate.admit(), 10)).kind == "probe"

    asyncio.run(story())


def test_who_can_goes_elsewhere_while_one_probes(monkeypatch):
    monkeypatch.setattr(retry, "FIRST_BACKOFF_S", 0.05)

    async def story():
        gate = CircuitBreaker(RateLimiter(), threshold=1)
        gate.failed(await gate.admit(), DOWN)
        turns = await asyncio.gather(*(gate.admit(elsewhere=True) for _ in range(4)))
        assert [turn if turn == "elsewhere" else turn.kind for turn in turns] == ["probe"] + 3 * ["elsewhere"]
        staying = asyncio.create_task(gate.admit())
        gate.answered(turns[0])
        assert (await staying).kind == "usual"

    asyncio.run(asyncio.wait_for(story(), 20))


def test_before_anything_is_known_few_are_under_way_and_each_answer_lets_one_more_through():
    async def story():
        gate = CircuitBreaker(RateLimiter(), threshold=5)
        waiting = [asyncio.create_task(gate.admit()) for _ in range(60)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        through = [task.result() for task in waiting if task.done()]
        assert len(through) == pace.FIRST_WINDOW
        for turn in through:
            gate.answered(turn)
        await asyncio.sleep(0)
        assert sum(task.done() for task in waiting) == 3 * pace.FIRST_WINDOW
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    asyncio.run(asyncio.wait_for(story(), 20))


def test_a_budget_waits_for_what_is_under_way_and_is_never_overrun():
    async def story():
        budget = SpendingLimit(Usage(10.0), Usage(1.0))
        assert await budget.reserve(Usage(6.0))
        second = asyncio.create_task(budget.reserve(Usage(6.0)))
        await asyncio.sleep(0.01)
        assert not second.done(), "the first may cost less than was set aside"
        await budget.settle(Usage(6.0), Usage(2.0))
        assert await second
        await budget.settle(Usage(6.0), Usage(6.0))
        assert not await budget.reserve(Usage(1.5))
        assert await budget.reserve(Usage(1.0))
        assert budget.spent.dollars == 9.0

    asyncio.run(asyncio.wait_for(story(), 10))


def test_tokens_are_a_limit_of_their_own_and_a_purse_names_the_budget_that_is_spent():
    async def story():
        own, shared = SpendingLimit(Usage(0.0, 100), name="own"), SpendingLimit(Usage(5.0), name="shared")
        purse = Budget(own, shared)
        assert await purse.reserve(Usage(1.0, 60)) is None
        assert not purse.fits(Usage(0.0, 41))
        await purse.settle(Usage(1.0, 60), Usage(4.5, 60))
        assert await purse.reserve(Usage(0.0, 41)) is own
        assert await purse.reserve(Usage(0.6, 1)) is shared
        assert own.fits(Usage(0.0, 40)), "what did not fit into the other is given back"
        assert str(own) == "of own, 60 of 100 tokens are spent"

    asyncio.run(asyncio.wait_for(story(), 10))


def test_no_limit_is_no_budget():
    async def story():
        budget = SpendingLimit()
        assert await budget.reserve(Usage(1e9, 10**12))
        await budget.settle(Usage(1e9, 10**12), Usage(1e9))
        assert budget.spent.dollars == 1e9
        assert budget.limit == NO_USAGE

    asyncio.run(story())
