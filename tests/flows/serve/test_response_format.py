"""`response_format` over HTTP with the `openai` client: whole and streamed answers, several at once, and its errors."""

import json
from enum import StrEnum

import jsonschema
import openai
import pytest
from pydantic import BaseModel

from tests.support.processes.serving import NAME

pytestmark = pytest.mark.slow
QUESTION = [{"role": "user", "content": "a"}]


class Mood(StrEnum):
    GOOD, BAD = "good", "bad"


class Reply(BaseModel, extra="forbid"):  # or a weak model adds properties until it is cut
    mood: Mood
    sure: bool


def schema_format(schema):
    return {"type": "json_schema", "json_schema": {"name": "reply", "schema": schema}}


@pytest.fixture(scope="module")
def ask(server):
    create = server.client().chat.completions.create
    return lambda **more: create(model=NAME, messages=QUESTION, seed=1, temperature=2.0, **more)


def test_answers_are_documents_of_the_schema(ask):
    """Several samples, behind thinking of half of what the shortest answer leaves, or none."""
    thought = ask(response_format=schema_format(Reply.model_json_schema()), n=3, max_tokens=90)
    at_once = ask(response_format=schema_format(Reply.model_json_schema()), extra_body={"thinking_budget": 0})
    for reply in (thought, at_once):
        for choice in reply.choices:
            assert choice.finish_reason == "stop"
            Reply.model_validate_json(choice.message.content)
    # The shortest takes 32 tokens of this vocabulary of bytes: 58 are left.
    assert 0 < thought.usage.completion_tokens_details.reasoning_tokens <= 3 * 29
    assert at_once.usage.completion_tokens_details.reasoning_tokens == 0


def test_the_clients_own_parsing_works(server):
    reply = server.client().chat.completions.parse(
        model=NAME, messages=QUESTION, response_format=Reply, extra_body={"thinking_budget": 0}
    )
    assert isinstance(reply.choices[0].message.parsed, Reply)


def test_a_streamed_answer_adds_up_to_the_whole_one(ask):
    form = {"response_format": schema_format(Reply.model_json_schema()), "extra_body": {"thinking_budget": 5}}
    whole = ask(**form).choices[0].message.content
    parts = [chunk.choices[0].delta.content or "" for chunk in ask(stream=True, **form)]
    assert "".join(parts) == whole
    assert len([part for part in parts if part]) > 3


def test_labels_with_their_probabilities(ask):
    """Classification: an enumeration and `logprobs`; the probabilities of what may come next sum to 1."""
    form = {"response_format": schema_format({"enum": ["yes", "no"]}), "extra_body": {"thinking_budget": 0}}
    reply = ask(logprobs=True, top_logprobs=20, **form).choices[0]
    assert json.loads(reply.message.content) in ("yes", "no")
    for token in reply.logprobs.content:
        total = sum(2.718281828**other.logprob for other in token.top_logprobs)
        assert total == pytest.approx(1, abs=1e-3)


def test_any_object_and_plain_text(ask):
    form = {"type": "json_object"}
    reply = ask(response_format=form, max_tokens=80, extra_body={"thinking_budget": 0, "top_k": 1})
    content, finish = reply.choices[0].message.content, reply.choices[0].finish_reason
    assert content.startswith("{")
    if finish == "stop":
        jsonschema.validate(json.loads(content), {"type": "object"})
    plain = [ask(max_tokens=9, **form).choices[0].message for form in ({}, {"response_format": {"type": "text"}})]
    assert plain[0] == plain[1]


@pytest.mark.parametrize(
    ("form", "param", "message"),
    [
        (schema_format({"type": "word"}), "response_format", "not a JSON schema"),
        (schema_format(False), "response_format", "allows no document"),
        (schema_format({"type": "integer", "minimum": 5, "maximum": 3}), "response_format", "is greater than maximum"),
        (schema_format({"uniqueItems": True}), "response_format", "uniqueItems"),
        (schema_format({"type": "string", "minLength": 200}), "max_tokens", "are too few"),
        ({"type": "json_schema"}, "response_format", "must be set for the type json_schema"),
        ({"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}, "response_format", "pattern"),
        ({"type": "grammar"}, "response_format", "should be"),
    ],
)
def test_what_cannot_be_met_is_refused(ask, form, param, message):
    with pytest.raises(openai.BadRequestError, match=message) as refused:
        ask(response_format=form, max_tokens=50)
    assert (refused.value.param, refused.value.type) == (param, "invalid_request_error")
