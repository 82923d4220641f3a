"""A key of any length is in nothing that is written; a word in the place of a key is none."""

import base64
import json
import logging

import pytest

from nautile.common.errors import ConfigError
from nautile.configs.endpoint import EndpointConfig
from nautile.data.endpoints.chat_types import ChatReply, ChatRequest
from nautile.data.endpoints.keys import check_key, redact_key, repeats_key
from tests.support.servers.fake_openai import FakeOpenAI

SHORT = ["k3yS", "hunter2", "abc-123", "s3cret-of-15-ch", "sk-1", 'a"b\\c/d&e']


pytestmark = pytest.mark.usefixtures("quick_retries")


def config(server, kind="openai"):
    return EndpointConfig(kind=kind, model="fake", url=server.url, key_variable="FAKE_KEY", timeout_s=60.0)


def requests(*texts):
    return [ChatRequest("fake", ({"role": "user", "content": text},), 20) for text in texts]


def written(folder, events):
    return json.dumps(events) + "".join(path.read_text() for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("kind", ["openai", "mistral"])
@pytest.mark.parametrize("key", SHORT)
def test_a_short_key_that_a_server_repeats_is_written_nowhere(pool_for, events, monkeypatch, tmp_path, kind, key):
    monkeypatch.setenv("FAKE_KEY", key)
    faults = {0: "500", 1: "400"}
    replies = {"say it": f"it is {key}", "no": "nothing"}
    server = FakeOpenAI(
        key=key,
        faults=faults.get,
        fault_message=f"no, {key}",
        reply=lambda body: replies[body["messages"][0]["content"]],
    )
    with server:
        pool = pool_for(fake=config(server, kind).model_copy(update={"concurrency": 1}))
        results = pool.ask(requests("no", "say it", "no"))
        monkeypatch.setenv("FAKE_KEY", f"{key}x")
        results += pool_for(fake=config(server, kind), cache="other").ask(requests("no"))
    assert [getattr(result, "reason", "ok") for result in results] == ["refused", "leaked_key", "ok", "misconfigured"]
    text = written(tmp_path, events) + repr(results)
    assert key not in text
    assert json.dumps(key)[1:-1] not in text
    assert "[key]" in text, "the server did repeat it"


@pytest.mark.parametrize("key", ["EMPTY", "none", "ollama", "sk-no-key-required", "lm-studio", "x"])
def test_a_word_in_the_place_of_a_key_is_no_secret(monkeypatch, key):
    monkeypatch.setenv("FAKE_KEY", key)
    endpoint = EndpointConfig(kind="openai", model="m", url="http://x/v1", key_variable="FAKE_KEY")
    check_key("t", endpoint)
    text = f"there are {key} of them"
    assert not repeats_key(text, endpoint)
    assert redact_key(text, endpoint) == text


@pytest.mark.parametrize("key", ["q", "7q", "abc"])
def test_a_key_that_cannot_be_told_from_text_is_refused(monkeypatch, key):
    monkeypatch.setenv("FAKE_KEY", key)
    endpoint = EndpointConfig(kind="openai", model="m", url="http://x/v1", key_variable="FAKE_KEY")
    with pytest.raises(ConfigError, match="fewer than 4 characters") as refused:
        check_key("t", endpoint)
    assert f" {key} " not in str(refused.value)


@pytest.mark.parametrize("place", ["finish_reason", "error", "location"])
def test_a_key_in_the_odd_places_of_an_answer_is_not_written(pool_for, events, monkeypatch, tmp_path, place):
    monkeypatch.setenv("FAKE_KEY", key := "hunter2!")

    def reshape(arrival, answer):
        choice = answer["choices"][0]
        if place == "finish_reason":
            return {**answer, "choices": [{**choice, "finish_reason": f"stop {key}"}]}
        return {**answer, "error": {"message": f"who is {key}?", "code": 400}}

    with FakeOpenAI(reshape=reshape) as server:
        (result,) = pool_for(fake=config(server)).ask(requests("text"))
    assert not isinstance(result, ChatReply)
    assert key not in written(tmp_path, events) + repr(result)


@pytest.mark.parametrize("form", [r"a+b\/c=", "a%2bb%2fc%3d", "a%2Bb/c%3D", "a%2Bb%2Fc%3D"])
def test_a_key_is_found_as_other_programs_escape_it(monkeypatch, form):
    monkeypatch.setenv("TEACHER_KEY", "a+b/c=")
    config = EndpointConfig(kind="openai", model="m", url="http://h/v1", key_variable="TEACHER_KEY")
    assert repeats_key(f"<{form}>", config)
    assert redact_key(f"<{form}>", config) == "<[key]>"


def test_a_list_of_models_does_not_show_a_key(pool_for, monkeypatch):
    monkeypatch.setenv("FAKE_KEY", "hunter2!")
    names = ["model-of-hunter2!"]
    with FakeOpenAI(models=names) as server, pytest.raises(ConfigError, match=r"model-of-\[key\]") as refused:
        pool_for(fake=config(server)).check()
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize("kind", ["openai", "mistral"])
def test_no_logger_at_any_level_writes_a_key_a_prompt_or_a_reply(pool_for, monkeypatch, caplog, kind):
    monkeypatch.setenv("FAKE_KEY", key := "hunter2-hunter2!")
    prompt, said = "what is asked of the sea", "what the sea answers"
    caplog.set_level(logging.DEBUG)
    for name in list(logging.root.manager.loggerDict):
        caplog.set_level(logging.DEBUG, logger=name)
    server = FakeOpenAI(
        key=key, faults={0: "500", 1: "400"}.get, fault_message=f"no: {prompt} {key}", reply=lambda body: said
    )
    with server:
        pool_for(fake=config(server, kind)).ask(requests(prompt))
        (reply,) = pool_for(fake=config(server, kind), cache="other").ask(requests(prompt))
    assert reply.text == said
    assert any(record.name.startswith("httpcore") for record in caplog.records), "the libraries were heard"
    assert [text for text in (key, said, prompt) if text in caplog.text] == []


@pytest.mark.parametrize("user", ["", "u", "ab", "user"])
def test_a_key_in_base64_or_hexadecimal_digits_is_a_key(monkeypatch, user):
    endpoint = EndpointConfig(kind="openai", model="fake", url="http://127.0.0.1:1", key_variable="FAKE_KEY")
    for key in ("s3cret-of-15-ch", "sk-1234567890abcdef", "~~>?~~>?~~"):
        monkeypatch.setenv("FAKE_KEY", key)
        pair = f"{user}:{key}".encode()
        for form in (base64.b64encode(pair), base64.urlsafe_b64encode(pair), pair.hex().encode()):
            assert repeats_key(f"Authorization: Basic {form.decode()}", endpoint)
            assert "[key]" in redact_key(form.decode(), endpoint)
        assert not repeats_key(base64.b64encode(b"any other secret text").decode(), endpoint)
