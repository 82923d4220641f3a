"""What is paid for is kept and used: after a change of limits, on a full disk, and for the budget that it counts in."""

import os

import pytest

from nautile.common.errors import ConfigError, Retryable
from nautile.common.processes import free_port
from nautile.configs.endpoint import EndpointConfig
from nautile.data.endpoints import rate_limit
from nautile.data.endpoints.chat_types import ChatFailure, ChatReply, ChatRequest, limits_of
from tests.support.samples.replies import reply_rows
from tests.support.servers.fake_openai import FakeOpenAI, openai, script

pytestmark = pytest.mark.usefixtures("quick_retries")


def request(text="hello", max_tokens=20, **fields):
    return ChatRequest("fake", ({"role": "user", "content": text},), max_tokens, **fields)


def test_a_finished_reply_is_not_bought_again_with_another_token_limit(pool_for, events):
    with FakeOpenAI(reply=lambda body: "one two three four five") as server:
        pool = pool_for(fake=openai(server))
        (first,) = pool.ask([request()])
        for limit in (40, 4000, 5):
            for again in (pool, pool_for(fake=openai(server))):
                (reply,) = again.ask([request(max_tokens=limit)])
                assert (reply.text, reply.cached, reply.digest) == (first.text, True, first.digest)
        assert len(server.bodies) == 1
        (shorter,) = pool.ask([request(max_tokens=4)])
        assert (shorter.finish, len(server.bodies)) == ("length", 2), "it has five tokens"
        (other,) = pool.ask([request("other", max_tokens=40)])
        assert (other.cached, len(server.bodies)) == (False, 3)
    assert {event["digest"] for event in events if event["cached"]} == {first.digest}


def test_a_reply_that_was_cut_is_asked_again_with_more_tokens(pool_for):
    with FakeOpenAI(reply=lambda body: "one two three four five") as server:
        assert pool_for(fake=openai(server)).ask([request(max_tokens=3)])[0].finish == "length"
        (reply,) = pool_for(fake=openai(server)).ask([request(max_tokens=30)])
        assert (reply.text, reply.finish, reply.cached) == ("one two three four five", "stop", False)
        (reply,) = pool_for(fake=openai(server)).ask([request(max_tokens=10)])
        assert (reply.finish, reply.cached, len(server.bodies)) == ("stop", True, 2)


def test_the_name_of_the_limit_and_labels_do_not_change_a_reply_but_sampling_does(pool_for):
    with FakeOpenAI() as server:
        (first,) = pool_for(fake=openai(server)).ask([request()])
        labels = {"user": "someone", "service_tier": "flex", "metadata": {"run": '"7"'}, "store": False}
        same = [{"token_limit": "max_completion_tokens"}, {"extra": labels}, {"extra": {"user": "another"}}]
        for fields in same:
            (reply,) = pool_for(fake=openai(server, **fields)).ask([request(max_tokens=30)])
            assert (reply.text, reply.cached) == (first.text, True)
        assert len(server.bodies) == 1
        pool_for(fake=openai(server, extra={"user": "x", "top_k": 3})).ask([request()])
        pool_for(fake=openai(server)).ask([request(temperature=0.5), request(seed=7)])
        assert len(server.bodies) == 4
        (reply,) = pool_for(fake=openai(server, extra={"top_k": 3})).ask([request(max_tokens=30)])
        assert reply.cached


def test_the_limits_of_a_reply_are_read_from_every_form_of_its_line(pool_for, tmp_path):
    with FakeOpenAI(reply=lambda body: 'text that ends in "') as server:
        config = openai(server, extra={"metadata": {"a": '"\\'}}, token_limit="max_tokens")
        pool_for(fake=config).ask([request()])
        (row,) = reply_rows(tmp_path / "replies")
        assert row["limits"] == limits_of(request(), config)
        assert pool_for(fake=openai(server)).ask([request(max_tokens=99)])[0].cached


def test_an_error_that_an_earlier_version_kept_as_a_reply_is_asked_again(pool_for, tmp_path):
    with FakeOpenAI() as server:
        (first,) = pool_for(fake=openai(server)).ask([request()])
        (path,) = (tmp_path / "replies" / "fake").glob("*.jsonl")
        path.write_text(path.read_text().replace('"finish": "stop"', '"finish": "error"'))
        (again,) = pool_for(fake=openai(server)).ask([request()])
    assert (again.cached, again.text, server.answered) == (False, first.text, 2)


@pytest.mark.parametrize("models", [1, 2])
def test_after_a_write_that_failed_no_request_is_sent(pool_for, monkeypatch, models):
    """Also not to another model, and none that waits for its next attempt. What was in flight is lost."""
    write, full = os.write, []

    def refuse(descriptor, content):
        if full or b'"digest": ' not in content:
            return write(descriptor, content)
        full.append(len(server.bodies))
        raise OSError(28, "No space left on device")

    names = ["fake", "other"][:models]
    with FakeOpenAI(delay_s=0.01, models=names, faults=script("500", None, None, "500")) as server:
        configs = {name: openai(server, concurrency=4).model_copy(update={"model": name}) for name in names}
        pool = pool_for(**configs)
        asked = [ChatRequest(name, ({"role": "user", "content": str(i)},), 20) for i in range(100) for name in names]
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", refuse)
            with pytest.raises(OSError, match="No space left on device"):
                pool.ask(asked)
        assert len(server.bodies) <= full[0] + 4 * models, "those in flight when the write failed"
        assert all(isinstance(result, ChatReply) for result in pool.ask(asked)), "once there is room it goes on"


@pytest.mark.parametrize("concurrency", [1, 8])
def test_a_vendor_that_counts_more_than_was_asked_for_raises_the_next_reservations(pool_for, monkeypatch, concurrency):
    """Ten times the tokens: only the requests in flight at first can exceed the budget, not those that wait."""
    monkeypatch.setattr(rate_limit, "FIRST_IN_FLIGHT", 1)
    prices = {"dollars_per_million_in": 0.0, "dollars_per_million_out": 1e6}  # a dollar a token, 20 allowed
    with FakeOpenAI(usage={"completion_tokens": 200}, per_million=(0.0, 1e6)) as server:
        pool = pool_for(budget=1000.0, fake=openai(server, **prices, concurrency=concurrency))
        results = pool.ask([request(str(i)) for i in range(40)])
    assert {result.reason for result in results if isinstance(result, ChatFailure)} == {"budget"}
    assert pool.spent == server.dollars == 1000.0


@pytest.mark.parametrize(
    ("budget", "own", "price", "key", "said"),
    [(5.0, 0.0, 0.0, "K", True), (0.0, 5.0, 0.0, "K", True), (5.0, 0.0, 1.0, "K", False), (5.0, 0.0, 0.0, "", False),
     (0.0, 0.0, 0.0, "K", False)],
)  # fmt: skip
def test_a_budget_in_dollars_that_limits_nothing_is_named(pool_for, caplog, budget, own, price, key, said):
    prices = {"dollars_per_million_out": price, "budget_dollars": own}
    pool_for(
        budget=budget, fake=EndpointConfig(kind="openai", model="m", url="http://x/v1", key_variable=key, **prices)
    )
    assert ("'fake' has no price, so no budget in dollars limits it" in caplog.text) == said


def test_a_schema_and_extra_fields_are_reserved_too():
    from nautile.data.endpoints.chat_types import max_usage

    config = EndpointConfig(kind="openai", model="m", url="http://x/v1")
    plain = max_usage(config, request()).tokens
    assert max_usage(config, request(schema={"enum": ["x" * 3000]})).tokens > plain + 1000
    assert max_usage(config.model_copy(update={"extra": {"tools": "x" * 3000}}), request()).tokens > plain + 1000


@pytest.mark.parametrize("kind", ["openai", "mistral"])
@pytest.mark.parametrize(
    ("variable", "proxy"),
    [("http_proxy", "http://127.0.0.1:9"), ("ALL_PROXY", "socks5://127.0.0.1:9"), ("HTTPS_PROXY", "nonsense://x")],
)
def test_a_server_of_this_machine_is_never_reached_through_a_proxy(pool_for, monkeypatch, kind, variable, proxy):
    monkeypatch.setenv("FAKE_KEY", "sk-planted-0123456789abcdef")
    monkeypatch.setenv(variable, proxy)
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    with FakeOpenAI() as server:
        config = openai(server, key_variable="FAKE_KEY", attempts=1).model_copy(update={"kind": kind})
        pool = pool_for(fake=config)
        pool.check()
        assert isinstance(pool.ask([request()])[0], ChatReply)


@pytest.mark.parametrize("proxy", ["http://user:hunter2@127.0.0.1:port", "nonsense://user:hunter2@x"])
def test_a_proxy_that_cannot_be_used_is_named_without_its_password(pool_for, monkeypatch, proxy):
    monkeypatch.setenv("ALL_PROXY", proxy)
    config = EndpointConfig(kind="openai", model="m", url="http://api.example.invalid/v1")
    with pytest.raises(ConfigError, match="the proxy of HTTP_PROXY, HTTPS_PROXY or ALL_PROXY") as refused:
        pool_for(fake=config).check()
    assert "hunter2" not in str(refused.value)


def test_a_socks_proxy_is_used(pool_for, monkeypatch):
    """Nothing listens there, so the endpoint cannot be reached: that passes, and is no fault of the configuration."""
    monkeypatch.setenv("ALL_PROXY", f"socks5://user:hunter2@127.0.0.1:{free_port()}")
    config = EndpointConfig(kind="openai", model="m", url="http://api.example.invalid/v1")
    with pytest.raises(Retryable, match="does not answer") as unreached:
        pool_for(fake=config).check()
    assert "hunter2" not in str(unreached.value)
