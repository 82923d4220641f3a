"""The circuit breaker: who gets a permit, who waits, and when an outage is declared."""

import asyncio
import time

import pytest

from nautile.common.retry import Backoff
from nautile.data.endpoints import circuit_breaker
from nautile.data.endpoints.chat_types import CallError
from nautile.data.endpoints.circuit_breaker import CircuitBreaker, reason_of
from nautile.data.endpoints.rate_limit import FIRST_IN_FLIGHT, RateLimiter

DOWN = CallError("connection", "nobody there")


@pytest.mark.parametrize(
    ("status", "reason", "retryable"),
    [
        (429, "rate_limited", True),
        (500, "server_error", True),
        (503, "server_error", True),
        (408, "server_error", True),
        (421, "server_error", True),
        (424, "server_error", True),  # TGI: the generation has failed
        (498, "server_error", True),  # Groq: no capacity
        (499, "server_error", True),  # nginx: the connection behind it was closed
        (529, "server_error", True),
        (407, "misconfigured", False),
        (400, "refused", False),
        (422, "refused", False),
        (401, "misconfigured", False),
        (402, "misconfigured", False),
        (404, "misconfigured", False),
    ],
)
def test_only_errors_that_may_pass_are_retried(status, reason, retryable):
    assert reason_of(status) == reason
    assert CallError(reason_of(status), "").retryable is retryable


def test_permits_are_given_at_the_rate():
    async def six_permits():
        breaker = CircuitBreaker(RateLimiter(1200), threshold=5)
        await asyncio.gather(*(breaker.acquire() for _ in range(6)))

    began = time.monotonic()
    asyncio.run(six_permits())
    assert time.monotonic() - began >= 5 * 0.05


def test_an_open_breaker_sends_one_probe_and_an_answer_closes_it(monkeypatch):
    monkeypatch.setattr(circuit_breaker, "BACKOFF", Backoff(first_s=0.01))

    async def scenario():
        breaker = CircuitBreaker(RateLimiter(), threshold=3)
        for _ in range(3):
            breaker.on_failure(await breaker.acquire(), DOWN)
        assert breaker.is_open
        waiting = [asyncio.create_task(breaker.acquire()) for _ in range(4)]
        done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.sleep(0.05)
        (probe,) = (task.result() for task in done)
        assert probe.kind == "probe"
        assert sum(task.done() for task in waiting) == 1
        breaker.on_reply(probe)
        assert sorted(permit.kind for permit in await asyncio.gather(*waiting)) == ["probe", "usual", "usual", "usual"]
        assert not breaker.is_open

    asyncio.run(scenario())


def test_a_breaker_without_any_answer_declares_an_outage(monkeypatch):
    monkeypatch.setattr(circuit_breaker, "BACKOFF", Backoff(first_s=0.01))
    monkeypatch.setattr(circuit_breaker, "OUTAGE_S", 0.05)

    async def scenario():
        breaker = CircuitBreaker(RateLimiter(), threshold=2)
        while (permit := await breaker.acquire()) is not None:
            breaker.on_failure(permit, DOWN)
        assert breaker.outage is DOWN
        breaker.reset()
        assert (await breaker.acquire()).kind == "usual"

    asyncio.run(asyncio.wait_for(scenario(), 120))


def test_a_cancelled_probe_makes_room_for_another(monkeypatch):
    monkeypatch.setattr(circuit_breaker, "BACKOFF", Backoff(first_s=0.05))

    async def scenario():
        breaker = CircuitBreaker(RateLimiter(), threshold=1)
        breaker.on_failure(await breaker.acquire(), DOWN)
        first = asyncio.create_task(breaker.acquire())
        await asyncio.sleep(0)
        first.cancel()
        assert (await asyncio.wait_for(breaker.acquire(), 120)).kind == "probe"

    asyncio.run(scenario())


def test_requests_with_a_fallback_use_it_while_one_probes(monkeypatch):
    monkeypatch.setattr(circuit_breaker, "BACKOFF", Backoff(first_s=0.05))

    async def scenario():
        breaker = CircuitBreaker(RateLimiter(), threshold=1)
        breaker.on_failure(await breaker.acquire(), DOWN)
        permits = await asyncio.gather(*(breaker.acquire(has_fallback=True) for _ in range(4)))
        assert [permit if permit == "use_fallback" else permit.kind for permit in permits] == ["probe"] + 3 * [
            "use_fallback"
        ]
        staying = asyncio.create_task(breaker.acquire())
        breaker.on_reply(permits[0])
        assert (await staying).kind == "usual"

    asyncio.run(asyncio.wait_for(scenario(), 120))


def test_at_first_few_are_in_flight_and_each_answer_allows_one_more():
    async def scenario():
        breaker = CircuitBreaker(RateLimiter(), threshold=5)
        waiting = [asyncio.create_task(breaker.acquire()) for _ in range(60)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        through = [task.result() for task in waiting if task.done()]
        assert len(through) == FIRST_IN_FLIGHT
        for permit in through:
            breaker.on_reply(permit)
        await asyncio.sleep(0)
        assert sum(task.done() for task in waiting) == 3 * FIRST_IN_FLIGHT
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    asyncio.run(asyncio.wait_for(scenario(), 120))
