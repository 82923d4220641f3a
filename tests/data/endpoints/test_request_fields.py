"""The form of requests and replies that an endpoint has for itself: more fields, other names, fields left out."""

import pytest
from pydantic import ValidationError

from nautile.common.errors import ConfigError
from nautile.configs.endpoint import EndpointConfig
from nautile.data.endpoints.chat_types import ChatFailure, ChatReply, ChatRequest, request_digest
from nautile.data.endpoints.mistral_client import MistralClient
from nautile.data.endpoints.pool import raise_for_outage
from tests.support.samples.replies import reply_rows, unknown_rows
from tests.support.servers.fake_openai import FakeOpenAI, always, openai
from tests.support.servers.http_server import Response

REQUEST = ChatRequest("fake", ({"role": "user", "content": "hello there"},), 20)


@pytest.fixture(autouse=True)
def _key(monkeypatch):
    monkeypatch.setenv("FAKE_KEY", "sk-planted-0123456789abcdef")


def test_the_digest_of_a_request_without_fields_of_its_own_is_as_it_was():
    """Replies that were paid for before the fields existed are found by it."""
    plain = EndpointConfig(kind="openai", model="fake", url="http://127.0.0.1/v1")
    assert request_digest(REQUEST, plain) == "b582d5bd77394ab87fe635fea54936df230f9db64ed09aec0612eeff307959a9"
    changed = [{"extra": {"reasoning_effort": "low"}}, {"token_limit": "max_completion_tokens"}, {"omit": ("seed",)}]
    digests = {request_digest(REQUEST, plain.model_copy(update=fields)) for fields in [{}, {"extra": {}}, *changed]}
    assert len(digests) == 4


def test_an_endpoint_sends_its_own_fields_and_leaves_out_what_the_model_refuses(pool_for, events):
    extra = {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}}
    fields = {"extra": extra, "token_limit": "max_completion_tokens", "omit": ("temperature", "seed")}
    with FakeOpenAI(refuses=["max_tokens", "temperature", "seed"]) as server:
        (reply,) = pool_for(fake=openai(server, **fields)).ask([REQUEST])
        (refused,) = pool_for(fake=openai(server)).ask([REQUEST])
    assert isinstance(reply, ChatReply)
    assert server.bodies[0] == {
        "model": "fake", "messages": list(REQUEST.messages), "max_completion_tokens": 20, **extra
    }  # fmt: skip
    assert events[0]["parameters"] == {"max_tokens": 20, "bound": None, "extra": extra}
    assert refused.reason == "misconfigured"


@pytest.mark.parametrize("kind", ["openai", "mistral"])
def test_mistral_takes_the_fields_of_its_api_alone(pool_for, kind):
    config = {"kind": kind, "key_variable": "FAKE_KEY"}
    with FakeOpenAI() as server:
        known = openai(server).model_copy(update={**config, "extra": {"reasoning_effort": "low"}})
        (reply,) = pool_for(fake=known).ask([REQUEST])
        assert isinstance(reply, ChatReply)
        assert server.bodies[0]["reasoning_effort"] == "low"
        unknown = known.model_copy(update={"extra": {"enable_thinking": False}})
        if kind == "mistral":
            with pytest.raises(ConfigError, match="`extra` sets enable_thinking, but Mistral's API has no such field"):
                pool_for(fake=unknown).check()


def test_fields_that_every_request_has_are_refused():
    with pytest.raises(ValidationError, match="`extra` may not set max_tokens, stream"):
        EndpointConfig(kind="openai", model="m", url="http://x/v1", extra={"stream": True, "max_tokens": 3})
    with pytest.raises(ValidationError, match="`token_limit` cannot be set"):
        EndpointConfig(kind="mistral", model="m", token_limit="max_completion_tokens")


def many(count):
    return [ChatRequest("fake", ({"role": "user", "content": f"number {i}"},), 20) for i in range(count)]


def test_a_server_that_refuses_an_extra_field_is_one_message_and_costs_nothing(pool_for, tmp_path):
    """Where the answer names the field after the first request, else after the first eight."""
    extra = {"extra": {"reasoning_effort": "max"}, "concurrency": 1}
    with FakeOpenAI(refuses=["reasoning_effort"]) as server:
        results = pool_for(fake=openai(server, **extra)).ask(many(40))
        with pytest.raises(ConfigError, match="Unsupported parameter: 'reasoning_effort'"):
            raise_for_outage(results)
        assert len(server.bodies) == 1
    with FakeOpenAI(faults=always("400")) as server:
        results = pool_for(fake=openai(server, **extra)).ask(many(40))
        with pytest.raises(ConfigError, match=r"refused all of the first 8 requests.*See its `extra`"):
            raise_for_outage(results)
        assert len(server.bodies) == 8
    with FakeOpenAI(faults=lambda arrival: "400" if arrival else None) as server:
        results = pool_for(fake=openai(server, **extra)).ask(many(40))
        raise_for_outage(results)
        assert sum(isinstance(result, ChatFailure) for result in results) == 39, "a refused prompt is one prompt"
    assert not unknown_rows(tmp_path / "replies")


@pytest.mark.parametrize("kind", ["openai", "mistral"])
def test_an_endpoint_that_answers_with_a_web_page_is_one_message_and_costs_nothing(pool_for, tmp_path, kind):
    with FakeOpenAI(html=True) as server:
        config = openai(server, concurrency=2, key_variable="FAKE_KEY").model_copy(update={"kind": kind})
        pool = pool_for(fake=config)
        with pytest.raises(ConfigError, match=r"answers with a web page \(HTML\), not as a chat API: check `url`"):
            pool.check()
        results = pool.ask(many(20))
        with pytest.raises(ConfigError, match="web page"):
            raise_for_outage(results)
    assert {result.reason for result in results} == {"misconfigured"}
    assert sum(result.attempts for result in results) <= 2
    assert not unknown_rows(tmp_path / "replies")


def test_reasoning_tokens_are_counted_also_from_the_cache(pool_for, events, tmp_path):
    with FakeOpenAI(usage={"completion_tokens_details": {"reasoning_tokens": 3}}) as server:
        (reply,) = pool_for(fake=openai(server)).ask([REQUEST])
        (cached,) = pool_for(fake=openai(server)).ask([REQUEST])
        assert reply.tokens_reasoning == cached.tokens_reasoning == 3
        server.usage = {}
        (reply,) = pool_for(fake=openai(server)).ask(many(1))
        assert reply.tokens_reasoning is None, "not stated"
    assert [event.get("tokens_reasoning") for event in events] == [3, 3, None]
    assert sorted("tokens_reasoning" in row for row in reply_rows(tmp_path / "replies")) == [False, True]


def test_parameters_of_mistrals_sdk_are_no_fields_of_a_request():
    """`server_url` would send the request, and the key, to another address."""
    for extra in ({"server_url": "http://elsewhere"}, {"http_headers": {"a": "b"}}, {"retries": 3}, {"timeout_ms": 1}):
        config = EndpointConfig(kind="mistral", model="m", key_variable="FAKE_KEY", extra=extra)
        with pytest.raises(ConfigError, match="Mistral's API has no such field"):
            MistralClient(config, "http://127.0.0.1:9", lambda headers: None)


@pytest.mark.parametrize("kind", ["openai", "mistral"])
def test_an_endpoint_that_has_moved_is_named(pool_for, kind):
    moved = Response(status=308, headers={"Location": "https://new.example/v1/chat/completions?token=abc"})
    with FakeOpenAI(respond_as=lambda arrival, answer: moved) as server:
        config = openai(server, key_variable="FAKE_KEY").model_copy(update={"kind": kind})
        results = pool_for(fake=config).ask(many(10))
    with pytest.raises(ConfigError, match=r"has moved to https://new\.example/v1 \(status 308\): set `url`"):
        raise_for_outage(results)
