"""The form of requests and replies that an endpoint has for itself: more fields, other names, fields left out."""

import pytest
from pydantic import ValidationError

from nautile.common.errors import ConfigError
from nautile.configs.endpoint import EndpointConfig
from nautile.data.endpoints.chat_types import ChatFailure, ChatReply, ChatRequest, request_digest
from nautile.data.endpoints.mistral_client import MistralClient
from nautile.data.endpoints.pool import raise_for_outage
from tests.support.samples.replies import reply_rows, unknown_rows
from tests.support.servers.fake_openai import FakeOpenAI, always
from tests.support.servers.http_server import Response

REQUEST = ChatRequest("fake", ({"role": "user", "content": "hello there"},), 20)


def openai(server, **fields):
    return EndpointConfig(kind="openai", model="fake", url=server.url, **fields)


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


@pytest.mark.parametrize("kind", ["openai", "mistral"])
def test_a_reply_without_content_is_told_apart_from_a_refusal(pool_for, kind):
    with FakeOpenAI(message=lambda body: {"content": None}) as server:
        config = openai(server, key_variable="FAKE_KEY").model_copy(update={"kind": kind})
        (reply,) = pool_for(fake=config).ask([REQUEST])
        assert (reply.text, reply.finish) == ("", "stop")
    if kind == "openai":
        with FakeOpenAI(message=lambda body: {"content": None, "refusal": "I will not."}) as server:
            (reply,) = pool_for(fake=openai(server)).ask(many(1))
        assert (reply.text, reply.finish) == ("I will not.", "refusal")


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


@pytest.mark.parametrize("usage", [{"total_tokens": 9}, {"prompt_tokens": 5}, {"completion_tokens": 4}])
def test_a_reply_without_one_of_the_token_counts_is_kept(pool_for, events, usage):
    """It is paid for, and the counts are only statistics: asked again it would cost again, and have no more of them."""
    with FakeOpenAI(reshape=lambda arrival, answer: {**answer, "usage": usage}) as server:
        (reply,) = pool_for(fake=openai(server)).ask([REQUEST])
        assert len(server.bodies) == 1
    assert isinstance(reply, ChatReply)
    assert (reply.tokens_in, reply.tokens_out) == (usage.get("prompt_tokens"), usage.get("completion_tokens"))
    assert [event["status"] for event in events] == ["ok"]


def test_the_fake_server_takes_content_as_a_list_of_parts():
    """As real clients send it."""
    import openai as sdk

    parts = [{"type": "text", "text": "hello "}, {"type": "text", "text": "there"}]
    with FakeOpenAI() as server:
        client = sdk.OpenAI(base_url=server.url, api_key="none", max_retries=0)
        answers = [
            client.chat.completions.create(model="fake", messages=[{"role": "user", "content": content}], max_tokens=20)
            for content in (parts, "hello there")
        ]
    assert [answer.usage.prompt_tokens for answer in answers] == [2, 2]
    assert server.answers == {"hello there": 2}


def test_parameters_of_mistrals_sdk_are_no_fields_of_a_request():
    """`server_url` would send the request, and the key, to another address."""
    for extra in ({"server_url": "http://elsewhere"}, {"http_headers": {"a": "b"}}, {"retries": 3}, {"timeout_ms": 1}):
        config = EndpointConfig(kind="mistral", model="m", key_variable="FAKE_KEY", extra=extra)
        with pytest.raises(ConfigError, match="Mistral's API has no such field"):
            MistralClient(config, "http://127.0.0.1:9", lambda headers: None)


@pytest.mark.parametrize("kind", ["openai", "mistral"])
@pytest.mark.parametrize(
    "usage",
    [None, {}, [], {"prompt_tokens": 1.5, "completion_tokens": "x"}, {"prompt_tokens": -1, "completion_tokens": None}],
)
def test_a_reply_is_paid_for_once_whatever_its_counts_are(pool_for, kind, usage):
    with FakeOpenAI(reshape=lambda arrival, answer: {**answer, "usage": usage}) as server:
        config = openai(server, key_variable="FAKE_KEY").model_copy(update={"kind": kind})
        (reply,) = pool_for(fake=config).ask([REQUEST])
        (cached,) = pool_for(fake=config).ask([REQUEST])
        assert len(server.bodies) == 1
    assert (reply.text, reply.tokens_in, reply.tokens_out) == (cached.text, None, None)


@pytest.mark.parametrize("kind", ["openai", "mistral"])
@pytest.mark.parametrize("place", ["body", "choice", "finish"])
def test_an_error_inside_a_success_is_sent_again_and_never_kept(pool_for, events, tmp_path, kind, place):
    error = {"message": "the provider is busy", "code": 429 if place == "body" else 502}

    def reshape(arrival, answer):
        if arrival:
            return answer
        choice = {**answer["choices"][0], **({"finish_reason": "error"} if place == "finish" else {"error": error})}
        return {"error": error} if place == "body" else {**answer, "choices": [choice]}

    with FakeOpenAI(reshape=reshape) as server:
        config = openai(server, key_variable="FAKE_KEY").model_copy(update={"kind": kind})
        pool = pool_for(fake=config)
        (reply,) = pool.ask([REQUEST])
        assert (isinstance(reply, ChatReply), len(server.bodies)) == (True, 2)
    assert pool._endpoints["fake"].rate_limiter.refused_count == (place == "body"), (
        "a refusal for the rate slows the endpoint"
    )
    assert events[0]["status"] == {"body": "429", "choice": "502", "finish": "error in the reply"}[place]
    assert place == "finish" or events[0]["error"] == "the provider is busy"
    assert len(reply_rows(tmp_path / "replies")) == 1
    assert len(unknown_rows(tmp_path / "replies")) == (place != "body"), "of a part the cost is not known"


@pytest.mark.parametrize("kind", ["openai", "mistral"])
def test_an_endpoint_that_has_moved_is_named(pool_for, kind):
    moved = Response(status=308, headers={"Location": "https://new.example/v1/chat/completions"})
    with FakeOpenAI(respond_as=lambda arrival, answer: moved) as server:
        config = openai(server, key_variable="FAKE_KEY").model_copy(update={"kind": kind})
        results = pool_for(fake=config).ask(many(10))
    with pytest.raises(ConfigError, match=r"has moved to https://new\.example/v1 \(status 308\): set `url`"):
        raise_for_outage(results)
