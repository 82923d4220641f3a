"""The pool of endpoints against a fake server on a real socket."""

import threading
import time
from concurrent.futures import CancelledError
from contextlib import nullcontext, suppress

import pytest

from nautile.common.errors import ConfigError, Retryable
from nautile.common.retry import Backoff
from nautile.configs.endpoint import EndpointConfig
from nautile.data.endpoints import circuit_breaker
from nautile.data.endpoints.chat_types import ChatFailure, ChatReply, ChatRequest
from nautile.data.endpoints.pool import EndpointPool, raise_for_outage
from nautile.data.endpoints.reply_cache import ReplyCache
from tests.support.samples.replies import reply_rows, unknown_rows
from tests.support.servers.fake_openai import FakeOpenAI, always, openai, script
from tests.support.servers.http_server import json_response

KEY = "sk-planted-0123456789abcdef"


pytestmark = pytest.mark.usefixtures("quick_retries")


def request(text="hello there", endpoint="fake", **fields):
    return ChatRequest(endpoint, ({"role": "user", "content": text},), **{"max_tokens": 20, **fields})


def test_replies_come_in_the_order_of_the_requests_and_are_reported_as_they_come(pool_for, events):
    reported = {}
    with FakeOpenAI(reply=lambda body: f"to {body['messages'][0]['content']}", delay_s=0.02) as server:
        replies = pool_for(fake=openai(server, concurrency=7)).ask(
            [request(str(i)) for i in range(40)], reported.__setitem__
        )
    assert [reply.text for reply in replies] == [f"to {i}" for i in range(40)]
    assert reported == dict(enumerate(replies))
    assert 1 < server.most_at_once <= 7
    assert sorted(event["digest"] for event in events) == sorted(reply.digest for reply in replies)
    assert {event["status"] for event in events} == {"ok"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["openai", "mistral"])
@pytest.mark.parametrize(
    ("fault", "status"),
    [("429", "429"), ("500", "500"), ("hang", "timeout"), ("cut", "cut"), ("invalid", "invalid_reply")],
)
def test_a_request_is_sent_again_after_a_transient_fault(pool_for, events, monkeypatch, kind, fault, status):
    monkeypatch.setenv("FAKE_KEY", KEY)
    with FakeOpenAI(faults=script(fault)) as server:
        # Only a server that hangs needs a timeout; it must still be long enough for the second attempt's answer.
        timeout_s = 4.0 if fault == "hang" else 120.0
        config = openai(server, timeout_s=timeout_s, key_variable="FAKE_KEY").model_copy(update={"kind": kind})
        (reply,) = pool_for(fake=config).ask([request()])
    assert isinstance(reply, ChatReply)
    assert [event["status"] for event in events] == [status, "ok"]
    assert [event["attempt"] for event in events] == [1, 2]
    assert server.answered == 1


@pytest.mark.parametrize("kind", ["openai", "mistral"])
@pytest.mark.parametrize(("fault", "reason"), [("400", "refused"), ("401", "misconfigured"), ("404", "misconfigured")])
def test_a_request_is_not_sent_again_after_a_permanent_fault(pool_for, events, monkeypatch, kind, fault, reason):
    monkeypatch.setenv("FAKE_KEY", KEY)
    with FakeOpenAI(faults=always(fault)) as server:
        config = openai(server, key_variable="FAKE_KEY").model_copy(update={"kind": kind})
        (failure,) = pool_for(fake=config).ask([request()])
    assert isinstance(failure, ChatFailure)
    assert (failure.reason, failure.attempts) == (reason, 1)
    assert len(server.bodies) == len(events) == 1
    assert events[0]["dollars"] == 0


def test_attempts_are_limited(pool_for, events):
    with FakeOpenAI(faults=always("500")) as server:
        (failure,) = pool_for(fake=openai(server, attempts=3)).ask([request()])
    assert (failure.reason, failure.attempts) == ("server_error", 3)
    # One more, a small one, to see whether the endpoint answers anything.
    assert [body["messages"][0]["content"] == "Reply with OK." for body in server.bodies] == 3 * [False] + [True]
    assert len(events) == 4


def test_retry_after_pauses_all_requests(pool_for):
    with FakeOpenAI(faults=script("429"), retry_after="0.4") as server:
        pool_for(fake=openai(server, concurrency=1)).ask([request(str(i)) for i in range(3)])
        assert server.times[1] - server.times[0] >= 0.39
        assert len(server.bodies) == 4


@pytest.mark.parametrize(("status", "retry_after"), [(503, "0.4"), (503, "0"), (429, "0"), (503, None)])
def test_a_request_that_failed_waits_before_it_is_sent_again(pool_for, monkeypatch, status, retry_after):
    """Not at once, whatever the server states: its attempts are used up before it can recover."""
    monkeypatch.setattr(circuit_breaker, "BACKOFF", Backoff(first_s=0.2, jitter=0.0))
    headers = {} if retry_after is None else {"Retry-After": retry_after}
    answers = [json_response({"error": "busy"}, status, headers)]
    with FakeOpenAI(respond_as=lambda arrival, answer: answers.pop() if answers else None) as server:
        (reply,) = pool_for(fake=openai(server)).ask([request()])
        assert isinstance(reply, ChatReply)
        assert server.times[1] - server.times[0] >= (float(retry_after or 0) or 0.2) - 0.01


@pytest.mark.slow
@pytest.mark.parametrize("states", ["openai", "mistral", ""])
def test_a_limit_of_fifty_a_second_is_kept_with_few_refusals(pool_for, states):
    with FakeOpenAI(limit=(50, 50), states=states, retry_after="1", delay_s=0.02) as server:
        results = pool_for(fake=openai(server, concurrency=256, attempts=9)).ask([request(str(i)) for i in range(150)])
    assert all(isinstance(result, ChatReply) for result in results)
    # Without a rate limiter all 150 are sent at once: 100 refusals, and 50 again a second later.
    assert server.statuses["429"] <= (0 if states else 100)


def test_no_request_is_sent_twice(pool_for, events):
    with FakeOpenAI(delay_s=0.05) as server:
        config = openai(server)
        first = pool_for(fake=config).ask([request("same"), request("same"), request("other")])
        assert len(server.bodies) == 2
        second = pool_for(fake=config).ask([request("same"), request("other", temperature=0.5)])
        assert len(server.bodies) == 3
    assert second[0].text == first[0].text == first[1].text
    assert (second[0].cached, second[1].cached) == (True, False)
    assert [event["attempt"] for event in events if event["cached"]] == [0, 0]


def test_the_label_of_a_request_does_not_change_its_digest_but_its_constraint_does(pool_for):
    with FakeOpenAI() as server:
        pool = pool_for(fake=openai(server, structured="grammar"), plain=openai(server, structured="none"))
        pool.ask([request(purpose="judge", tag="a"), request(purpose="teacher", tag="b")])
        assert len(server.bodies) == 1
        pool.ask([request(grammar="root ::= [a-z]", schema={"type": "object"})])
        assert server.bodies[-1]["grammar"] == "root ::= [a-z]"
        assert "response_format" not in server.bodies[-1]
        pool.ask([request(endpoint="plain", grammar="root ::= [a-z]", schema={"type": "object"})])
        assert len(server.bodies) == 2, "without a constraint it is the first request again"


def test_a_schema_is_sent_where_the_endpoint_takes_one(pool_for):
    with FakeOpenAI() as server:
        pool_for(fake=openai(server)).ask([request(grammar="root ::= [a-z]", schema={"type": "object"})])
        assert server.bodies[0]["response_format"]["json_schema"]["schema"] == {"type": "object"}
        assert "grammar" not in server.bodies[0]


def test_the_budget_stops_before_it_is_overrun_and_holds_over_restarts(pool_for):
    prices = {"dollars_per_million_in": 0.0, "dollars_per_million_out": 1e6}  # a dollar a token, 20 allowed
    with FakeOpenAI(reply=lambda body: "four words of reply", per_million=(0.0, 1e6)) as server:
        pool = pool_for(budget=50.0, fake=openai(server, **prices))
        results = pool.ask([request(str(i)) for i in range(30)])
        assert pool._endpoints["fake"].rate_limiter.sent_count == len(server.bodies), "what is refused is not sent"
        kept = [result for result in results if isinstance(result, ChatReply)]
        assert {result.reason for result in results if isinstance(result, ChatFailure)} == {"budget"}
        assert server.dollars == 4 * len(kept)
        assert 30 < server.dollars <= 50
        raise_for_outage(results, unpaid_allowed=True)
        with pytest.raises(ConfigError, match=r"of the budget, .* are spent; raise it"):
            raise_for_outage(results)
        (late,) = pool_for(budget=50.0, fake=openai(server, **prices)).ask([request("late")])
        assert late.reason == "budget"
        assert len(server.bodies) == len(kept)


def test_a_missing_server_is_an_outage_and_is_tried_again_by_the_next_call(pool_for):
    with FakeOpenAI() as server:
        gone = openai(server, concurrency=2, attempts=9)
    pool = pool_for(fake=gone)
    results = pool.ask([request(str(i)) for i in range(30)])
    assert {result.reason for result in results} <= {"outage", "connection"}
    assert results[-1].reason == "outage"
    with pytest.raises(Retryable, match=gone.url):
        raise_for_outage(results)
    assert pool.ask([request("again")])[0].attempts > 0, "a new call gives it a new chance"


def test_an_outage_that_passes_costs_nothing(pool_for, monkeypatch):
    monkeypatch.setattr(circuit_breaker, "OUTAGE_S", 30.0)
    with FakeOpenAI(faults=lambda arrival: "500" if 3 <= arrival < 12 else None) as server:
        pool = pool_for(fake=openai(server, concurrency=3))
        results = pool.ask([request(str(i)) for i in range(20)])
    assert all(isinstance(result, ChatReply) for result in results)


def test_a_wrong_key_stops_everything_at_once(pool_for, events, monkeypatch):
    monkeypatch.setenv("FAKE_KEY", KEY)
    with FakeOpenAI(key="another") as server:
        pool = pool_for(fake=openai(server, key_variable="FAKE_KEY", concurrency=2))
        results = pool.ask([request(str(i)) for i in range(20)])
        assert {result.reason for result in results} == {"misconfigured"}
        assert len(events) <= 2
        with pytest.raises(ConfigError, match="Incorrect API key"):
            raise_for_outage(results)
        with pytest.raises(ConfigError, match="Incorrect API key"):
            pool.check()


@pytest.mark.parametrize("fault", ["cut", "close", "not_chat", pytest.param("hang", marks=pytest.mark.slow)])
def test_what_an_attempt_without_a_reply_may_have_cost_is_booked_apart_and_kept(pool_for, events, tmp_path, fault):
    prices = {"dollars_per_million_in": 0.0, "dollars_per_million_out": 1e6}  # a dollar a token, 20 allowed
    with FakeOpenAI(faults=script(fault), reply=lambda body: "two words", per_million=(0.0, 1e6)) as server:
        config = openai(server, **prices, timeout_s=4.0 if fault == "hang" else 60.0)
        pool = pool_for(budget=50.0, fake=config)
        (reply,) = pool.ask([request()])
        assert isinstance(reply, ChatReply)
        assert (pool.spent, pool.unknown) == (2.0, 20.0)
        assert [event.get("unknown_dollars") for event in events] == [20.0, None]
        assert [event["dollars"] for event in events] == [0.0, 2.0], "what is certain"
        assert [(row["dollars"], row["reason"]) for row in unknown_rows(tmp_path / "replies")] == [
            (20.0, events[0]["status"])
        ]
        again = pool_for(budget=50.0, fake=config)
        assert (again.spent, again.unknown) == (2.0, 20.0)
        late = again.ask([request(str(i), max_tokens=10) for i in range(20)])
    spent = sum(isinstance(reply, ChatReply) for reply in late)
    assert {result.reason for result in late if isinstance(result, ChatFailure)} == {"budget"}
    assert 2.0 + 20.0 + 2.0 * spent <= 50.0


@pytest.mark.parametrize("fault", ["429", "500", "400"])
def test_an_attempt_that_was_refused_costs_nothing(pool_for, tmp_path, fault):
    prices = {"dollars_per_million_in": 1.0, "dollars_per_million_out": 1.0}
    with FakeOpenAI(faults=script(fault)) as server:
        pool = pool_for(fake=openai(server, **prices))
        pool.ask([request()])
    assert pool.unknown == 0.0
    assert not unknown_rows(tmp_path / "replies")


@pytest.mark.parametrize("kind", ["openai", "mistral"])
def test_a_key_that_no_header_can_hold_is_not_shown(pool_for, monkeypatch, kind):
    monkeypatch.setenv("FAKE_KEY", KEY + "\n\u20ac")
    with FakeOpenAI() as server:
        config = openai(server, key_variable="FAKE_KEY", attempts=2).model_copy(update={"kind": kind})
        (failure,) = pool_for(fake=config).ask([request()])
    assert failure.reason == "misconfigured"
    assert KEY not in failure.message
    assert not server.bodies


def test_without_a_key_variable_no_key_is_sent(pool_for, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with FakeOpenAI() as server:
        pool_for(fake=openai(server)).ask([request()])
        assert "authorization" not in server.headers[0]


def test_check_names_what_is_wrong_before_anything_is_sent(pool_for, monkeypatch):
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with FakeOpenAI() as server:
        with pytest.raises(ConfigError, match="NO_SUCH_KEY"):
            pool_for(fake=openai(server, key_variable="NO_SUCH_KEY")).check()
        with pytest.raises(ConfigError, match="key_variable"):
            pool_for(fake=EndpointConfig(kind="mistral", model="fake", url=server.url)).check()
        with pytest.raises(ConfigError, match=r"no model 'other'.*fake"):
            pool_for(fake=openai(server).model_copy(update={"model": "other"})).check()
        with pytest.raises(ConfigError, match="not an http"):
            pool_for(fake=openai(server).model_copy(update={"url": "localhost:80"})).check()
        with pytest.raises(ConfigError, match="the model of kind"):
            pool_for(fake=EndpointConfig(kind="embedded", model="gpt-oss-120b")).check()
        pool_for(fake=openai(server)).check()
        assert not server.bodies
    with pytest.raises(Retryable, match=server.url):
        pool_for(fake=openai(server)).check()


@pytest.mark.parametrize(
    ("listed", "known"),
    [
        ([{"id": "fake"}], True), ({"data": [{"id": "models/fake"}]}, True), ([{"id": "other"}, {"id": 7}], False),
        ({"data": [{"id": None}, {"id": "fake"}, None]}, True), ({"data": [{"id": "other", "created": "x"}]}, False),
        (["fake"], True), ({"data": [{"name": "fake"}]}, True), ({"models": [{"id": "x"}]}, True),
        ({"data": "fake"}, True), (7, True), (None, True),
    ],
)  # fmt: skip
def test_check_reads_the_models_of_other_vendors_in_any_form(pool_for, listed, known):
    """What cannot be read says nothing about a model."""

    class Listing(FakeOpenAI):
        def respond(self, request):
            return json_response(listed) if request.path == "/v1/models" else super().respond(request)

    with Listing() as server:
        pool = pool_for(fake=openai(server))
        with nullcontext() if known else pytest.raises(ConfigError, match=r"no model 'fake'.*there are other"):
            pool.check()


@pytest.mark.parametrize("card", [{"type": "base"}, {"type": "new"}, {"type": "new", "aliases": ["newest"]}])
def test_check_reads_the_models_of_mistral_whatever_their_type(pool_for, monkeypatch, card):
    monkeypatch.setenv("FAKE_KEY", KEY)
    with FakeOpenAI(card=card) as server:
        config = openai(server, key_variable="FAKE_KEY").model_copy(update={"kind": "mistral"})
        for name in ("fake", *card.get("aliases", ())):
            pool_for(fake=config.model_copy(update={"model": name})).check()
        with pytest.raises(ConfigError, match=r"no model 'other'.*fake"):
            pool_for(fake=config.model_copy(update={"model": "other"})).check()


def test_the_window_follows_the_endpoint_that_takes_most(pool_for):
    with FakeOpenAI() as server:
        live, batch = openai(server, concurrency=5000), openai(server, mode="batch")
        pool = pool_for(live=live, batch=batch)
        assert pool.window(["live"]) == 20_000
        assert pool.window(["live", "batch"]) == 50_000


def test_a_ledger_row_has_the_parameters_of_the_request(pool_for, events):
    with FakeOpenAI() as server:
        pool_for(fake=openai(server)).ask([request(seed=3, schema={"type": "object"})])
    assert events[0]["parameters"] == {"max_tokens": 20, "temperature": 0.0, "seed": 3, "bound": "schema"}


def test_an_unknown_endpoint_is_refused(pool_for):
    with pytest.raises(ConfigError, match=r"no endpoint 'other'.*fake"):
        pool_for(fake=EndpointConfig(kind="embedded", model="x")).ask([request(endpoint="other")])


def test_an_error_of_the_listener_reaches_the_caller(pool_for):
    def fails(index, result):
        raise RuntimeError("listener")

    with FakeOpenAI() as server:
        pool = pool_for(fake=openai(server))
        with pytest.raises(RuntimeError, match="listener"):
            pool.ask([request()], fails)
        assert isinstance(pool.ask([request()])[0], ChatReply)


@pytest.mark.parametrize("kind", ["openai", "mistral"])
def test_an_account_without_money_stops_everything_also_after_replies(pool_for, monkeypatch, kind):
    """Refused one by one, all prompts that are left would be rejected for good."""
    monkeypatch.setenv("FAKE_KEY", KEY)
    with FakeOpenAI(faults=lambda arrival: "402" if arrival >= 3 else None) as server:
        config = openai(server, key_variable="FAKE_KEY", concurrency=1).model_copy(update={"kind": kind})
        results = pool_for(fake=config).ask([request(str(number)) for number in range(30)])
        assert len(server.bodies) == 4
    assert sum(isinstance(result, ChatReply) for result in results) == 3
    with pytest.raises(ConfigError, match="402"):
        raise_for_outage(results)


def test_closing_cancels_the_requests_of_other_threads(pool_for):
    with FakeOpenAI(faults=always("hang")) as server:
        pool = pool_for(fake=openai(server))
        ended = []

        def ask():
            try:
                pool.ask([request()])
            except CancelledError as error:
                ended.append(error)

        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        while not server.bodies:
            time.sleep(0.01)
        pool.close()
        asking.join(120)
    assert len(ended) == 1


def test_replies_that_have_arrived_are_kept_when_the_pool_is_closed(tmp_path, monkeypatch):
    """The second one arrives while the first is being written, and the requests are cancelled before it is its turn."""
    arrived, record = [], ReplyCache.record
    writing, may_write = threading.Event(), threading.Event()

    async def counted(self, *arguments, **fields):
        arrived.append(arguments)
        await record(self, *arguments, **fields)

    def emit(kind, **fields):
        writing.set()
        may_write.wait()

    def answer(body):
        if body["messages"][0]["content"] == "second":
            writing.wait()
        return "text"

    def ask():
        with suppress(CancelledError):
            pool.ask([request("first"), request("second")])

    monkeypatch.setattr(ReplyCache, "record", counted)
    with FakeOpenAI(reply=answer) as server:
        pool = EndpointPool({"fake": openai(server)}, tmp_path / "replies", emit)
        asking, closing = (threading.Thread(target=target, daemon=True) for target in (ask, pool.close))
        asking.start()
        while len(arrived) < 2:
            time.sleep(0.01)
        closing.start()
        asking.join()
        may_write.set()
        closing.join()
    assert len(reply_rows(tmp_path / "replies")) == server.answered == 2
