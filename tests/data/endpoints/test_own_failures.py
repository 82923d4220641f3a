"""Requests that always fail are no outage, and an endpoint that answers nothing is one, whatever its code."""

import time

import pytest

from nautile.common.errors import ConfigError, Retryable
from nautile.common.retry import Backoff
from nautile.configs.endpoint import EndpointConfig
from nautile.data.endpoints import circuit_breaker
from nautile.data.endpoints.chat_types import ChatFailure, ChatReply, ChatRequest
from nautile.data.endpoints.pool import raise_for_outage
from tests.support.servers.fake_openai import FakeOpenAI, always


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(circuit_breaker, "BACKOFF", Backoff(first_s=0.005, longest_s=0.05))
    monkeypatch.setattr(circuit_breaker, "OUTAGE_S", 0.2)


def openai(server, **fields):
    return EndpointConfig(
        kind="openai", model="fake", url=server.url, **{"timeout_s": 60.0, "concurrency": 4, **fields}
    )


def requests(count, **fields):
    return [ChatRequest("fake", ({"role": "user", "content": f"number {i}"},), 20, **fields) for i in range(count)]


def poison(numbers, fault="500"):
    return lambda text: fault if text in {f"number {i}" for i in numbers} else None


def check_own(results, numbers):
    failures = {i: result for i, result in enumerate(results) if isinstance(result, ChatFailure)}
    assert set(failures) == set(numbers)
    assert all(failure.own and failure.unfinished for failure in failures.values())
    raise_for_outage(results)


@pytest.mark.parametrize(
    ("numbers", "fault"),
    [
        (range(5), "500"),
        ([39], "500"),
        (range(0, 40, 8), "503"),
        (range(17, 22), "cut"),
        ([0], "close"),
        (range(35, 40), "invalid"),
    ],
    ids=str,
)
def test_a_few_requests_that_always_fail_are_no_outage(pool_for, numbers, fault):
    """First, in the middle, last, scattered: all others are answered, and each of these gets its attempts."""
    with FakeOpenAI(poison=poison(numbers, fault)) as server:
        results = pool_for(fake=openai(server, attempts=3)).ask(requests(40))
        texts = [body["messages"][0]["content"] for body in server.bodies]
    check_own(results, numbers)
    assert all(texts.count(f"number {i}") == 3 for i in numbers)
    assert len([text for text in texts if not text.startswith("number")]) <= len(numbers), "small requests, to be sure"


@pytest.mark.parametrize("concurrency", [1, 2])
def test_requests_that_fail_before_any_is_answered_are_no_outage(pool_for, concurrency):
    with FakeOpenAI(poison=poison(range(6))) as server:
        results = pool_for(fake=openai(server, concurrency=concurrency)).ask(requests(20))
    check_own(results, range(6))


def test_more_failures_than_requests_in_flight_are_no_outage(pool_for):
    with FakeOpenAI(poison=poison(range(24))) as server:
        results = pool_for(fake=openai(server, attempts=2)).ask(requests(40))
    check_own(results, range(24))


def test_what_has_failed_for_its_own_reason_gets_one_attempt_in_the_next_process(pool_for, events):
    with FakeOpenAI(poison=poison([3])) as server:
        check_own(pool_for(fake=openai(server)).ask(requests(10)), [3])
        before = len(server.bodies)
        check_own(pool_for(fake=openai(server)).ask(requests(10)), [3])
        assert len(server.bodies) == before + 1
        server.poison = lambda text: None
        assert all(isinstance(result, ChatReply) for result in pool_for(fake=openai(server)).ask(requests(10)))


@pytest.mark.parametrize(("fault", "answered"), [("500", 0), ("503", 23), ("close", 10), ("429", 0), ("429", 10)])
def test_an_endpoint_that_answers_nothing_any_more_is_an_outage(pool_for, fault, answered):
    """Ten of 24 are answered, and the last one alone is not; nothing is counted as a failure of the requests."""
    with FakeOpenAI(faults=lambda arrival: fault if arrival >= answered else None, retry_after="0.01") as server:
        pool = pool_for(fake=openai(server, concurrency=2, attempts=3))
        results = pool.ask(requests(24))
        assert sum(isinstance(result, ChatReply) for result in results) == answered
        assert not any(isinstance(result, ChatFailure) and result.own for result in results)
        with pytest.raises(Retryable):
            raise_for_outage(results)
        server.faults = always(None)
        assert all(isinstance(result, ChatReply) for result in pool.ask(requests(24)))
        assert server.answered == 24, "nothing is asked twice"


def test_a_refusal_for_the_rate_is_asked_again_while_others_are_answered(pool_for):
    """Every second request is refused, far more often than a request has attempts."""
    with FakeOpenAI(faults=lambda arrival: "429" if arrival % 4 else None, retry_after="0.01") as server:
        results = pool_for(fake=openai(server, attempts=1, concurrency=2)).ask(requests(12))
    assert all(isinstance(result, ChatReply) for result in results)


def test_a_pool_says_why_it_waits(pool_for):
    seen = []
    with FakeOpenAI(faults=lambda arrival: "429" if 1 <= arrival < 4 else None, retry_after="0.3") as server:
        pool = pool_for(fake=openai(server, concurrency=1))
        assert pool.waits_for() == ""
        with pool.session() as session:
            session.submit(enumerate(requests(2)))
            session.next_result()
            while not session.has_result:
                seen.append(pool.waits_for())
                time.sleep(0.005)
            session.next_result()
        assert pool.waits_for() == ""
    assert "endpoint 'fake' refuses requests for their rate (429)" in seen


def test_a_caller_that_waits_is_called(pool_for, monkeypatch):
    from nautile.data.endpoints import pool as sessions

    monkeypatch.setattr(sessions, "WAITING_S", 0.01)
    calls = []
    with FakeOpenAI(delay_s=0.2) as server, pool_for(fake=openai(server)).session() as session:
        session.submit(enumerate(requests(1)))
        session.next_result(lambda: calls.append(1))
    assert calls


@pytest.mark.parametrize("status", ["403", "404"])
def test_a_request_that_is_forbidden_is_one_request(pool_for, status):
    """As by a vendor's moderation. If nothing else is answered, the endpoint is at fault."""
    with FakeOpenAI(poison=poison([3, 4], status)) as server:
        results = pool_for(fake=openai(server, concurrency=1)).ask(requests(10))
        assert [i for i, result in enumerate(results) if isinstance(result, ChatFailure)] == [3, 4]
        assert {results[3].reason, results[4].reason} == {"refused"}
        server.poison = lambda text: status
        later = pool_for(fake=openai(server, concurrency=1)).ask(requests(40))
        with pytest.raises(ConfigError, match=status):
            raise_for_outage(later)
        assert len(server.bodies) <= 20


@pytest.mark.parametrize("kind", ["openai", "mistral"])
def test_an_endpoint_whose_replies_are_never_readable_is_misconfigured_after_a_few(pool_for, monkeypatch, kind):
    monkeypatch.setenv("FAKE_KEY", "sk-planted-0123456789abcdef")
    with FakeOpenAI(reshape=lambda arrival, answer: {**answer, "choices": []}) as server:
        config = openai(server, concurrency=2, key_variable="FAKE_KEY").model_copy(update={"kind": kind})
        results = pool_for(fake=config).ask(requests(12))
        with pytest.raises(ConfigError, match=r"none of its first \d+ replies can be read"):
            raise_for_outage(results)
        assert len(server.bodies) <= 12
    with FakeOpenAI(reshape=lambda arrival, answer: {**answer, "choices": []}) as server:
        with pytest.raises(ConfigError, match="none of its first 5 replies can be read"):
            raise_for_outage(pool_for(fake=openai(server)).ask(requests(1, temperature=1.0)))
        assert len(server.bodies) == 5


def test_a_page_in_between_is_no_misconfiguration(pool_for):
    """A vendor's page about maintenance, once the endpoint has answered."""
    from tests.support.servers.http_server import Response

    page = Response(body=b"<html>down for a minute</html>", content_type="text/html")
    with FakeOpenAI(respond_as=lambda arrival, answer: page if arrival == 3 else None) as server:
        results = pool_for(fake=openai(server, concurrency=1)).ask(requests(6))
    assert all(isinstance(result, ChatReply) for result in results)
