"""Requests: what is taken as OpenAI has it, and what is refused, by the name of its field."""

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flows.serve.protocol import ApiError, ChatRequest, CompletionRequest, parse

PLAIN = {"model": "m", "prompt": "x"}
USER = {"role": "user", "content": "why?"}
CHAT = {"model": "m", "messages": [USER]}


def refusal(kind, table):
    with pytest.raises(ApiError) as refused:
        parse(kind, json.dumps(table).encode())
    assert refused.value.status == 400
    return refused.value


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["x", ""]}, "prompt"),
        ({"prompt": [[1], []]}, "prompt"),
        ({"prompt": [[1], ["a"]]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"model": 3}, "model"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": 1.5}, "top_k"),
        ({"n": 0}, "n"),
        ({"n": True}, "n"),
        ({"seed": -1}, "seed"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": ""}, "stop"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logprobs": 6}, "logprobs"),
        ({"best_of": 3}, "best_of"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"stream_options": {"include": True}}, "stream_options"),
        ({"suffix": "y"}, "suffix"),
    ],
)
def test_a_plain_request_that_is_wrong_is_refused_by_its_field(wrong, field):
    error = refusal(CompletionRequest, {**PLAIN, **wrong})
    assert error.param == field
    assert field in error.message
    assert "\n" not in error.message


@pytest.mark.parametrize(
    ("wrong", "field", "said"),
    [
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "messages", "messages.0.role"),
        ({"messages": [USER, USER]}, "messages", "single turns"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages", "single turns"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "parts of type text"),
        ({"max_tokens": 0}, "max_tokens", "greater"),
        ({"max_tokens": 5, "max_completion_tokens": 5}, "max_tokens", "one thing"),
        ({"top_logprobs": 3}, "top_logprobs", "goes with `logprobs`"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "20"),
        ({"tools": []}, "tools", "no such field"),
    ],
)
def test_a_chat_request_that_is_wrong_is_refused_by_its_field(wrong, field, said):
    error = refusal(ChatRequest, {**CHAT, **wrong})
    assert error.param == field
    assert said in error.message


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"[" * 100_000, b"[]", b"3"])
def test_a_body_that_is_no_request_is_refused(body):
    with pytest.raises(ApiError) as refused:
        parse(CompletionRequest, body)
    assert refused.value.status == 400


SCALARS = st.none() | st.booleans() | st.floats() | st.text()
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner))


@pytest.mark.parametrize(("kind", "table"), [(CompletionRequest, PLAIN), (ChatRequest, CHAT)])
@given(value=VALUES)
def test_nothing_but_a_refusal_comes_of_any_json(kind, table, value):
    for asked in (value, {**table, "prompt": value}, {**table, "messages": value}, {**table, "stop": value}):
        with contextlib.suppress(ApiError):
            parse(kind, json.dumps(asked).encode())


def test_the_forms_of_a_prompt():
    assert parse(CompletionRequest, json.dumps(PLAIN).encode()).prompts == ["x"]
    for prompt, expected in ((["x", "y"], ["x", "y"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])):
        assert parse(CompletionRequest, json.dumps({**PLAIN, "prompt": prompt}).encode()).prompts == expected


def test_system_messages_come_before_the_question():
    parts = [{"type": "text", "text": "wh"}, {"type": "text", "text": "y?"}]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": parts}]
    assert parse(ChatRequest, json.dumps({**CHAT, "messages": messages}).encode()).query == "Be brief.\n\nwhy?"
