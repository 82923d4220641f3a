"""What vendors put around a reply, and the errors that stand in its place."""

import json
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nautile.configs.endpoint import EndpointConfig
from nautile.data.endpoints.chat_types import CallError
from nautile.data.endpoints.completions import error_of_status, is_page, message_of, parse_reply_body

CONFIG = EndpointConfig(kind="openai", model="m", url="http://127.0.0.1/v1", key_variable="FAKE_KEY")
MESSAGE = {"role": "assistant", "content": "the text"}
USAGE = {"prompt_tokens": 5, "completion_tokens": 7}
ANSWER = {"choices": [{"message": MESSAGE, "finish_reason": "stop"}], "usage": USAGE}


def parsed(body, **headers):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return parse_reply_body(content, "http://there/v1", CONFIG, headers)


def refused(body, **headers):
    with pytest.raises(CallError) as caught:
        parsed(body, **headers)
    return caught.value


def with_choice(**fields):
    return {**ANSWER, "choices": [{**ANSWER["choices"][0], **fields}]}


@pytest.mark.parametrize(
    ("usage", "text", "expected"),
    [
        ({"prompt_tokens": 0, "completion_tokens": 0}, "the text", (None, None)),
        ({"prompt_tokens": 5, "completion_tokens": 0}, "the text", (5, None)),
        ({"prompt_tokens": 5, "completion_tokens": 0}, "", (5, 0)),
        # Reasoning that is charged for, but stands in the total alone, or beside the completion.
        ({"prompt_tokens": 5, "completion_tokens": 7, "total_tokens": 112}, "the text", (5, 107)),
        (
            {"prompt_tokens": 5, "completion_tokens": 7, "completion_tokens_details": {"reasoning_tokens": 100}},
            "the text",
            (5, 107),
        ),
        ({"prompt_tokens": 5, "completion_tokens": 7, "total_tokens": 3}, "the text", (5, 7)),
        ({"prompt_tokens": None, "input_tokens": 5, "output_tokens": 7}, "the text", (5, 7)),
        *((usage, "the text", (None, None)) for usage in (None, [], "none", 7, {}, {"completion_tokens_details": "x"})),
        *(({"prompt_tokens": count, "completion_tokens": 7}, "the text", (5, 7)) for count in (5.0, "5")),
        *(
            ({"prompt_tokens": count, "completion_tokens": 7}, "the text", (None, 7))
            for count in ("0", 5.5, -1, "five", True, [], float("nan"), 10**400, "9" * 5000)
        ),
    ],
)
def test_what_is_charged_for_is_counted_and_zero_is_no_count(usage, text, expected):
    reply = parsed(with_choice(message={"content": text}) | {"usage": usage})
    assert (reply.tokens_in, reply.tokens_out) == expected


@given(st.recursive(st.none() | st.booleans() | st.floats() | st.integers() | st.text(), st.lists, max_leaves=4))
def test_a_reply_is_kept_whatever_stands_beside_its_text(value):
    message = {**MESSAGE, "reasoning": value, "refusal": value, "tool_calls": value, "annotations": value}
    choice = {"message": message, "finish_reason": "stop", "logprobs": value, "index": value}
    answer = {"choices": [choice], "usage": value, "id": value, "created": value, "model": value, "warnings": value}
    assert parsed(answer).text == "the text"


@pytest.mark.parametrize(
    "body",
    [
        b"\xef\xbb\xbf" + json.dumps(ANSWER).encode(),
        json.dumps(ANSWER).encode("utf-16"),
        b"\n \n" + json.dumps(ANSWER).encode() + b"\n\n",
        json.dumps(ANSWER).encode() + b"\x00\x00",
        json.dumps(ANSWER).encode() + json.dumps({"note": 1}).encode(),
        b"Warning: deprecated {option} in line 3\n" + json.dumps(ANSWER).encode(),
        b"<br />\n<b>Warning</b>: {option} in <b>x.php</b><br />\n" + json.dumps(ANSWER).encode(),
        b"[2026-11-27 04:00:00] INFO: sent\n" + json.dumps(ANSWER).encode(),
        b'{"status": "processing"}\n' + json.dumps(ANSWER).encode(),
        b'{"usage": null, "usage": {"prompt_tokens": 5, "completion_tokens": 7}, ' + json.dumps(ANSWER).encode()[1:],
        b'{"id": ' + b"9" * 6000 + b", " + json.dumps(ANSWER).encode()[1:],
        b'{"created": NaN, "id": "\xff\xfe", ' + json.dumps(ANSWER).encode()[1:],
        json.dumps([ANSWER]).encode(),
    ],
)
def test_a_reply_is_kept_whatever_its_encoding_is(body):
    assert parsed(body).text == "the text"


@pytest.mark.parametrize(("charset", "text"), [("gbk", "中文"), ('"ISO-8859-1"', "é"), ("klingon", None), ("", None)])
def test_a_reply_in_the_encoding_of_its_header_is_kept(charset, text):
    body = json.dumps(with_choice(message={"content": text or "é"}), ensure_ascii=False)
    body = body.encode(charset.strip('"') if text else "latin-1")
    headers = {"content-type": f"application/json; charset={charset}"}
    if text is None:
        assert refused(body, **headers).reason == "invalid_reply"
    else:
        assert parsed(body, **headers).text == text


def stream(*events, end="\n\n", ended="data: [DONE]"):
    lines = [": PROCESSING", *(f"data: {json.dumps(event, ensure_ascii=False)}" for event in events), ended, ""]
    return end.join(lines).encode()


def piece(text=None, finish=None, field="content", **fields):
    return {"choices": [{"delta": {} if text is None else {field: text}, "finish_reason": finish, **fields}]}


THE, TEXT, STOP = piece("the ", index=0), piece("text"), piece(finish="stop")


@pytest.mark.parametrize(
    ("body", "text", "finish", "tokens"),
    [
        (stream(THE, TEXT, STOP, {"choices": [], "usage": USAGE}), "the text", "stop", 7),
        (stream(THE, TEXT, STOP, end="\r\n\r\n"), "the text", "stop", None),
        (stream(THE, TEXT, STOP, ended="data:"), "the text", "stop", None),
        (b"id: 1\nretry: 5\n" + stream(THE, TEXT), "the text", "stop", None),
        (stream(piece("the\u2028text\x85"), STOP), "the\u2028text\x85", "stop", None),
        (stream(THE, piece("no", index=1), piece("text", "length")), "the text", "length", None),
        (stream(THE, TEXT, piece(finish="stop", message=MESSAGE, usage=USAGE)), "the text", "stop", 7),
        (stream({"choices": [{"text": "the "}]}, {"choices": [{"text": "text", "finish_reason": "stop"}]}),
         "the text", "stop", None),
        (stream(piece("hm", field="reasoning_content"), STOP), "", "length", None),
        (b"\n".join(json.dumps(event).encode() for event in (THE, TEXT, STOP)), "the text", "stop", None),
        (stream(piece("I will ", field="refusal"), piece("not", field="refusal"), STOP), "I will not", "refusal", None),
    ],
)  # fmt: skip
def test_a_stream_that_nobody_asked_for_is_put_together(body, text, finish, tokens):
    reply = parsed(body)
    assert (reply.text, reply.finish, reply.tokens_out) == (text, finish, tokens)


@pytest.mark.parametrize(
    ("body", "reason", "may_cost"),
    [
        (stream(THE, TEXT, ended=""), "invalid_reply", True),
        (stream(THE, piece(7), STOP), "invalid_reply", True),
        (stream({"choices": [7]}), "invalid_reply", True),
        (b"\n".join(json.dumps(event).encode() for event in (THE, TEXT)), "invalid_reply", True),
        (stream(THE) + b"data: {\n\n" + stream(STOP), "invalid_reply", True),
        (stream({"error": {"message": "slow", "code": 429}}), "rate_limited", False),
        (stream({"object": "error", "message": "slow", "code": 429}), "rate_limited", False),
        (stream(THE, {"error": {"message": "slow", "code": 502}}), "server_error", True),
        (stream(THE, piece(finish="error")), "server_error", True),
    ],
)
def test_a_stream_that_ends_early_or_in_an_error_is_no_reply(body, reason, may_cost):
    assert (refused(body).reason, refused(body).may_cost) == (reason, may_cost)


@pytest.mark.parametrize("finish", ["length", "content_filter"])
@pytest.mark.parametrize("choice", [{}, {"message": None}, {"message": {"role": "assistant"}}])
def test_what_was_held_back_or_cut_before_its_text_is_paid_for_once(finish, choice):
    reply = parsed({"choices": [{"finish_reason": finish, **choice}], "usage": USAGE})
    assert (reply.text, reply.finish, reply.tokens_out) == ("", finish, 7)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ([{"type": "text", "text": "the "}, {"type": "text", "text": "text"}], "the text"),
        ([{"type": "thinking", "thinking": [{"type": "text", "text": "no"}]}, {"type": "text", "text": "the"}], "the"),
        (["the ", "text"], "the text"),
        ([{"type": "reasoning", "text": "no"}, {"type": "text", "text": "the text"}], "the text"),
        ([{"type": "refusal", "refusal": "the text"}], "the text"),
        ({"type": "text", "text": "the text"}, "the text"),
        ([{"type": "text", "text": {"value": "the text", "annotations": []}}], "the text"),
        ([], ""), (None, ""), ("", ""),
    ],
)  # fmt: skip
def test_content_may_come_as_parts(content, text):
    assert parsed(with_choice(message={"content": content})).text == text


def test_a_refusal_is_told_apart_from_a_reply_without_content():
    reply = parsed(with_choice(message={"content": None, "refusal": "I will not."}))
    assert (reply.text, reply.finish) == ("I will not.", "refusal")


@pytest.mark.parametrize(
    ("finish", "expected"),
    [
        ("stop", "stop"), (None, "stop"), ("", "stop"), (3, "stop"), ({}, "stop"), ("STOP", "stop"),
        ("max_tokens", "length"), ("MAX_TOKENS", "length"), ("model_length", "length"), ("length", "length"),
        ("max_output_tokens", "length"), ("content_filter", "content_filter"), ("SAFETY", "content_filter"),
        ("tool_calls", "tool_calls"), ("eos", "stop"), ("end_turn", "stop"), ("FINISH_REASON_STOP", "stop"),
        ("FinishReason.MAX_TOKENS", "length"), ("model_context_window_exceeded", "length"), ("time_limit", "length"),
        ("sensitive", "content_filter"), ("guardrail_intervened", "content_filter"),
    ],
)  # fmt: skip
def test_the_reason_of_the_end_is_one_of_few_words(finish, expected):
    assert parsed(with_choice(finish_reason=finish)).finish == expected


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
@pytest.mark.parametrize("content", [None, "", [{"type": "thinking", "thinking": "hm"}]])
def test_reasoning_without_an_answer_is_unfinished(name, content):
    reply = parsed(with_choice(message={"content": content, name: "Let me think"}))
    assert (reply.text, reply.finish) == ("", "length")
    assert parsed(with_choice(message={"content": "x", name: "Let me think"})).finish == "stop"


@pytest.mark.parametrize(
    ("error", "reason", "status"),
    [
        ({"message": "m", "code": 429}, "rate_limited", "429"),
        ({"message": "m", "code": "429"}, "rate_limited", "429"),
        ({"message": "m", "status": 503}, "server_error", "503"),
        ({"message": "m", "code": 400}, "refused", "400"),
        ({"message": "m", "code": 402}, "misconfigured", "402"),
        ({"message": "m", "type": "rate_limit_error"}, "rate_limited", "error in the reply"),
        ({"message": "m", "code": "insufficient_quota"}, "misconfigured", "error in the reply"),
        ({"message": "m", "code": "context_length_exceeded"}, "refused", "error in the reply"),
        ({"message": "m", "type": "overloaded_error"}, "server_error", "error in the reply"),
        ({"message": "m", "code": "rate_limit_exceeded", "type": "billing"}, "rate_limited", "error in the reply"),
        ("m", "server_error", "error in the reply"),
        (["m"], "server_error", "error in the reply"),
    ],
)
def test_an_error_inside_a_success_is_an_error_of_its_own_kind(error, reason, status):
    for body in ({"error": error}, {**ANSWER, "error": error}, {"error": error, "choices": []}, [{"error": error}]):
        caught = refused(body, **{"retry-after": "7"})
        assert (caught.reason, caught.message, caught.status, caught.retry_after) == (reason, "m", status, 7.0)
        assert not caught.may_cost
    caught = refused(with_choice(error=error))
    assert (caught.reason, caught.message, caught.may_cost) == (reason, "m", True)


@pytest.mark.parametrize(
    "finish", ["error", "ERROR", "abort", "cancelled", "insufficient_system_resource", "network_error"]
)
def test_a_reply_that_was_broken_off_is_no_answer(finish):
    caught = refused(with_choice(finish_reason=finish, message={"content": ""}))
    assert (caught.reason, caught.retryable, caught.may_cost) == ("server_error", True, True)
    assert finish in caught.message


@pytest.mark.parametrize(
    "error",
    [
        None,
        False,
        "",
        {},
        [],
        {"code": None, "message": ""},
        "none",
        {"code": 200, "message": "Success"},
        {"code": "0"},
    ],
)
def test_an_empty_error_beside_a_reply_is_none(error):
    assert parsed({**ANSWER, "error": error}).text == parsed(with_choice(error=error)).text == "the text"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"error": {"message": "why"}}, "why"),
        ({"error": "why"}, "why"),
        ({"error": True, "message": "why"}, "why"),
        ([{"error": {"message": "why"}}], "why"),
        ({"errors": [{"message": "why"}, {"message": "why else"}]}, "why; why else"),
        ({"detail": "why"}, "why"),
        ({"detail": [{"loc": ["body", "seed"], "msg": "why", "type": "x"}]}, "body.seed: why"),
        ({"object": "error", "message": "why", "code": 400}, "why"),
        ({"Message": "why"}, "why"),
        ({"base_resp": {"status_code": 1002, "status_msg": "why"}}, "why"),
        ({"fault": {"faultstring": "why"}}, "why"),
        ({"error": {"message": "Provider returned error", "metadata": {"raw": "why"}}}, "Provider returned error: why"),
        ("why", "why"),
        ("<html><head><title>no</title><style>p {}</style></head><body><p>why</p></body></html>", "why"),
        ({}, ""), (None, ""), (7, ""), ([], ""),
    ],
)  # fmt: skip
def test_the_message_of_an_error_is_found_in_every_form(body, message):
    assert message_of(body) == message
    content = body.encode() if isinstance(body, str) else json.dumps(body).encode()
    error = error_of_status(422, content, {}, "http://there/v1")
    assert error.message == (f"Error code: 422 - {message}" if message else "Error code: 422")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        ({"code": "insufficient_quota"}, "misconfigured"),
        ({"code": "billing_not_active"}, "misconfigured"),
        ({"type": "exceeded_current_quota_error"}, "misconfigured"),
        ({"code": "1113", "message": "Insufficient balance or no resource package. Please recharge."}, "misconfigured"),
        # Limits a minute that come with advertisements.
        ({"message": "You exceeded your current quota, please check your plan and billing details"}, "rate_limited"),
        ({"message": "Rate limit reached. Add a payment method: /account/billing"}, "rate_limited"),
    ],
)
@pytest.mark.parametrize("inside", [False, True])
def test_an_account_without_money_is_told_apart_from_a_rate(error, reason, inside):
    if inside:
        error = {"code": "rate_limit_exceeded", **error} if reason == "rate_limited" else error
        assert refused({"error": error}).reason == reason
    else:
        assert error_of_status(429, json.dumps({"error": error}).encode(), {}, "http://there/v1").reason == reason


@pytest.mark.parametrize(
    ("body", "page"),
    [
        (b"<!doctype html><script>let a = {}</script>", True), (b"Welcome", True), (b"", True),
        (json.dumps(ANSWER).encode(), False), (b"\xef\xbb\xbf" + json.dumps(ANSWER).encode(), False),
        (b"<br />\n<b>Warning</b>: old<br />\n" + json.dumps(ANSWER).encode(), False), (stream(THE, STOP), False),
        (b'{"object": "list", "data": []}', False),
    ],
)  # fmt: skip
def test_json_that_is_called_html_is_no_page(body, page):
    assert is_page(body) == page


@pytest.mark.parametrize("body", [b"", b"null", b"7", b"[]", b"{}", b'"text"', b"[" * 100_000, b"\xff", b"{", b"data:"])
def test_what_is_no_completion_is_one(body):
    assert refused(body).reason == "invalid_reply"


@given(st.binary(max_size=40))
def test_any_bytes_are_a_reply_or_an_error(content):
    with suppress(CallError):
        assert parsed(content).finish
