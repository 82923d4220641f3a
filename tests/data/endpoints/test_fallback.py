"""Fallbacks: which endpoint answers when the first is down or out of money."""

import pytest

from nautile.common.errors import ConfigError, Retryable
from nautile.configs.endpoint import EndpointConfig
from nautile.data.endpoints import circuit_breaker
from nautile.data.endpoints.chat_types import ChatFailure, ChatReply, ChatRequest, request_digest
from nautile.data.endpoints.pool import raise_for_outage
from tests.support.servers.fake_openai import FakeOpenAI, always
from tests.support.stages.stage_parent import wait_for

pytestmark = pytest.mark.usefixtures("quick_retries")


def ask(count=30, purpose="teacher"):
    messages = [({"role": "user", "content": f"number {i}"},) for i in range(count)]
    return [ChatRequest("first", message, 20, purpose=purpose) for message in messages]


def endpoint(server, model, **fields):
    return EndpointConfig(kind="openai", model=model, url=server.url, **{"timeout_s": 60.0, **fields})


@pytest.fixture
def servers():
    with FakeOpenAI(models=["a"]) as first, FakeOpenAI(models=["b"]) as second:
        yield first, second


def test_a_fallback_answers_while_the_first_is_down_and_the_ledger_names_it(pool_for, events, servers):
    first, second = servers
    first.faults = always("500")
    result, other = endpoint(first, "a", fallback=("second",), concurrency=4), endpoint(second, "b")
    pool = pool_for(first=result, second=other)
    requests = ask()
    replies = pool.ask(requests)
    assert all(isinstance(reply, ChatReply) for reply in replies)
    assert {reply.endpoint for reply in replies} == {"second"}
    assert [reply.digest for reply in replies] == [request_digest(request, other) for request in requests]
    assert second.answered == 30
    kept = [row for row in events if row["status"] == "ok"]
    assert {(row["endpoint"], row["model"], row["in_place_of"]) for row in kept} == {("second", "b", "first")}
    assert len(first.bodies) < 20, "once it is known to be down it is only probed"
    raise_for_outage(replies)


def test_what_a_fallback_answered_is_not_sent_again(pool_for, servers):
    first, second = servers
    first.faults = always("500")
    endpoints = {"first": endpoint(first, "a", fallback=("second",), attempts=1), "second": endpoint(second, "b")}
    replies = pool_for(**endpoints).ask(ask(5))
    first.faults = always(None)
    again = pool_for(**endpoints).ask(ask(5))
    assert [reply.text for reply in again] == [reply.text for reply in replies]
    assert {(reply.cached, reply.endpoint) for reply in again} == {(True, "second")}
    assert first.answered == 0


def test_the_first_is_used_again_when_it_answers_again(pool_for, servers, monkeypatch):
    monkeypatch.setattr(circuit_breaker, "OUTAGE_S", 300.0)
    first, second = servers
    first.faults = lambda arrival: "500" if arrival < 8 else None
    # The second answers once the first does again. Else it may have answered all by then, on a slow machine.
    second.respond_as = lambda arrival, answer: wait_for(lambda: first.answered) and None
    own = endpoint(first, "a", fallback=("second",), concurrency=4, attempts=20)
    replies = pool_for(first=own, second=endpoint(second, "b")).ask(ask(40))
    assert all(isinstance(reply, ChatReply) for reply in replies)
    assert first.answered + second.answered == 40
    assert second.answered > 0
    assert first.answered > 0


@pytest.mark.parametrize("purpose", ["judge", "evaluate"])
def test_a_judge_and_an_evaluation_never_fall_back_unless_configured(pool_for, servers, purpose):
    first, second = servers
    first.faults = always("500")
    fields = {"fallback": ("second",), "attempts": 2}
    results = pool_for(first=endpoint(first, "a", **fields), second=endpoint(second, "b")).ask(ask(3, purpose))
    assert all(isinstance(result, ChatFailure) for result in results)
    assert not second.bodies
    configured = endpoint(first, "a", fallback_for=("teacher", purpose), **fields)
    assert all(
        isinstance(result, ChatReply)
        for result in pool_for(first=configured, second=endpoint(second, "b")).ask(ask(3, purpose))
    )


@pytest.mark.parametrize(("fault", "reason"), [("400", "refused"), ("401", "misconfigured")])
def test_errors_of_the_request_or_the_key_do_not_fall_back(pool_for, servers, fault, reason):
    first, second = servers
    first.faults = always(fault)
    pool = pool_for(first=endpoint(first, "a", fallback=("second",)), second=endpoint(second, "b"))
    assert {result.reason for result in pool.ask(ask(3))} == {reason}
    assert not second.bodies


def test_an_endpoint_whose_budget_is_spent_falls_back(pool_for, servers):
    first, second = servers
    first.reply = second.reply = lambda body: "four words of reply"
    own = endpoint(first, "a", fallback=("second",), budget_tokens=100)  # a request may take 30
    pool = pool_for(first=own, second=endpoint(second, "b"))
    replies = pool.ask(ask(40))
    assert {reply.endpoint for reply in replies} == {"first", "second"}
    assert 70 < first.tokens_in + first.tokens_out <= 100
    assert pool._limit.spent.tokens == first.tokens_in + first.tokens_out + second.tokens_in + second.tokens_out
    alone = pool_for(first=own.model_copy(update={"fallback": ()})).ask(ask(41))
    assert alone[-1].reason == "endpoint_budget"
    assert "of the budget of endpoint 'first'" in alone[-1].message


def test_a_check_ignores_an_unreachable_endpoint_with_a_fallback(pool_for, servers, monkeypatch):
    with FakeOpenAI() as gone:
        pass
    _, second = servers
    pool_for(first=endpoint(gone, "a", fallback=("second",)), second=endpoint(second, "b")).check()
    with pytest.raises(Retryable, match=gone.url):
        pool_for(first=endpoint(gone, "a"), second=endpoint(second, "b")).check()


def test_an_unknown_fallback_is_refused(pool_for, servers):
    with pytest.raises(ConfigError, match="no endpoint 'third'"):
        pool_for(first=endpoint(servers[0], "a", fallback=("third",))).ask(ask(1))
