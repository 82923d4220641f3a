"""Requests over HTTP: OpenAI's fields are accepted, and anything else is refused with the name of its field."""

import json
from typing import Any

import pytest
from fastapi import APIRouter
from fastapi.testclient import TestClient
from hypothesis import given, settings
from hypothesis import strategies as st

from nautile.flows.serve import http
from nautile.flows.serve.http import GuardedRoute, guarded_app
from nautile.flows.serve.protocol import ChatCompletionRequest, CompletionRequest, invalid_request

PLAIN = {"model": "m", "prompt": "x"}
USER = {"role": "user", "content": "why?"}
CHAT = {"model": "m", "messages": [USER]}
router = APIRouter(route_class=GuardedRoute)


@router.post("/plain")
async def plain(request: CompletionRequest) -> dict[str, Any]:
    return {"prompts": request.prompts}


@router.post("/chat")
async def chat(request: ChatCompletionRequest) -> dict[str, Any]:
    return {"query": request.query}


CLIENT = TestClient(guarded_app(router, None), raise_server_exceptions=False)


@pytest.fixture(scope="module", autouse=True)
def client():
    """One event loop for all requests: without it the client starts a thread for each."""
    with CLIENT:
        yield


def post(path: str, body: Any):
    """Post a body, given as JSON values or as the bytes themselves; the response."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return CLIENT.post(path, content=content, headers={"Content-Type": "application/json"})


def refusal(path: str, body: Any) -> dict[str, Any]:
    response = post(path, body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    return error


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
def test_a_wrong_completion_request_is_refused_by_its_field(wrong, field):
    error = refusal("/plain", {**PLAIN, **wrong})
    assert error["param"] == field
    assert field in error["message"]
    assert "\n" not in error["message"]


@pytest.mark.parametrize(
    ("wrong", "field", "message"),
    [
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "messages", "messages.0.role"),
        ({"messages": [USER, USER]}, "messages", "single turns"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages", "single turns"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "parts of type text"),
        ({"max_tokens": 0}, "max_tokens", "greater"),
        ({"max_tokens": 5, "max_completion_tokens": 5}, "max_tokens", "mean the same"),
        ({"top_logprobs": 3}, "top_logprobs", "needs `logprobs`"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "20"),
        ({"tools": [{}]}, "tools", "not supported"),
        ({"tool_choice": "auto"}, "tool_choice", "not supported"),
        ({"store": True}, "store", "not supported"),
        ({"reasoning_effort": "low"}, "reasoning_effort", "not supported"),
        ({"tool": []}, "tool", "unknown field"),
    ],
)
def test_a_wrong_chat_request_is_refused_by_its_field(wrong, field, message):
    error = refusal("/chat", {**CHAT, **wrong})
    assert error["param"] == field
    assert message in error["message"]


@pytest.mark.parametrize(
    "harmless",
    [
        {"store": False}, {"tools": []}, {"tool_choice": "none"}, {"service_tier": "auto"}, {"safety_identifier": "a"},
        {"prompt_cache_key": "a"}, {"parallel_tool_calls": None}, {"parallel_tool_calls": True}, {"functions": []},
        {"modalities": ["text"]}, {"user": "a"}, {"stream_options": {"include_obfuscation": False}},
        {"metadata": dict.fromkeys(map(str, range(99)), "a")},
        *({name: None} for name in ("tools", "tool_choice", "store", "audio", "prediction", "verbosity", "logit_bias")),
    ],
)  # fmt: skip
def test_fields_that_ask_for_nothing_are_accepted(harmless):
    assert post("/chat", {**CHAT, **harmless}).status_code == 200


@pytest.mark.parametrize(
    ("path", "request_body", "message"),
    [
        ("/plain", {**PLAIN, "prompt": [None] * 300_000}, "prompt: must be a text"),
        ("/plain", {**PLAIN, "prompt": [[None] * 300_000]}, "prompt: must be a text"),
        ("/chat", {**CHAT, "messages": [{}] * 9_000}, "messages.0.role"),
        ("/chat", {**CHAT, "messages": [{}] * 300_000}, "has over 10000 objects and lists"),
        ("/chat", {**CHAT, "messages": [{"role": "user", "content": [3] * 300_000}]}, "messages.0.content"),
        ("/chat", {**CHAT, **{f"x{number}": 1 for number in range(100_000)}}, "an object has 100002 members"),
        ("/chat", {**CHAT, "messages": [{**USER, **{f"x{number}": 1 for number in range(99)}}]}, "has 101 members"),
        ("/chat", {**CHAT, "logit_bias": dict.fromkeys(map(str, range(99)), "x")}, "has 99 members"),
    ],
)
def test_a_million_wrong_items_give_one_error(path, request_body, message, monkeypatch):
    """Each would be a kilobyte of memory, and all of them seconds without another answer."""
    reported = []
    monkeypatch.setattr(http, "invalid_request", lambda errors: reported.append(len(errors)) or invalid_request(errors))
    assert message in refusal(path, request_body)["message"]
    assert sum(reported) <= 8


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"[" * 100_000, b"[]", b"3"])
def test_a_body_that_is_not_a_request_is_refused(body):
    assert "the body" in refusal("/plain", body)["message"]


SCALARS = st.none() | st.booleans() | st.floats() | st.text()
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner))


@pytest.mark.slow
@pytest.mark.parametrize(("path", "request_body"), [("/plain", PLAIN), ("/chat", CHAT)])
@settings(max_examples=30)
@given(value=VALUES)
def test_any_json_is_accepted_or_refused(path, request_body, value):
    for body in (value, *({**request_body, field: value} for field in ("prompt", "messages", "stop"))):
        assert post(path, body).status_code in (200, 400)


def test_the_forms_of_a_prompt():
    for prompt, expected in (
        ("x", ["x"]),
        (["x", "y"], ["x", "y"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ):
        assert post("/plain", {**PLAIN, "prompt": prompt}).json() == {"prompts": expected}


def test_system_messages_come_before_the_question():
    parts = [{"type": "text", "text": "wh"}, {"type": "text", "text": "y?"}]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": parts}]
    assert post("/chat", {**CHAT, "messages": messages}).json() == {"query": "Be brief.\n\nwhy?"}


@pytest.mark.parametrize(
    ("path", "request_body"),
    [
        ("/plain", {**PLAIN, "\ud800": 1}),
        ("/plain", {**PLAIN, "model": "\ud800", "n": 0}),
        ("/chat", {**CHAT, "messages": [{"role": "\ud800", "content": "x"}]}),
        ("/chat", {**CHAT, "response_format": {"type": "json_schema", "json_schema": {"name": "\ud800"}}}),
    ],
)
def test_half_a_surrogate_pair_is_refused_like_any_other_name(path, request_body):
    """JSON can spell it, and the answer in UTF-8 cannot."""
    assert refusal(path, request_body)["message"]
