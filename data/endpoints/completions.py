"""Read what a server answers: the reply in the body of a chat completion, or the error that stands in its place.

Vendors differ in all that surrounds a reply, so only its text must be readable: what is paid for is kept, and a count
that is none is not known. An error may come with any status, 200 included, and in many forms.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from nautile.common.files import parse_json
from nautile.common.retry import retry_after
from nautile.configs.endpoint import EndpointConfig
from nautile.configs.vendors import BatchInterface
from nautile.data.endpoints.chat_types import CallError, FailureReason
from nautile.data.endpoints.circuit_breaker import reason_of
from nautile.data.endpoints.keys import repeats_key

MOST_TOKENS = 2**40  # a larger count is none
LONGEST_NUMBER = 18  # digits; Python refuses to read thousands of them
MOST_MESSAGES = 3  # of a list of errors
MOST_STARTS = 8  # places where JSON behind other text may begin
# Other words for the end at the token limit, and for an answer that the vendor holds back.
_LENGTH = {"length", "max_tokens", "model_length", "max_output_tokens", "max_length", "token_limit", "incomplete"}
_FILTERED = {"content_filter", "content_filtered", "safety", "recitation", "blocklist", "prohibited_content", "spii"}
_BROKEN = {"error", "abort", "aborted", "cancelled", "canceled", "failed"}  # the vendor has stopped in the middle
_MESSAGE_FIELDS = (
    *("error", "errors", "detail", "details", "message", "msg", "error_message", "error_msg", "status_msg"),
    *("base_resp", "fault", "faultstring", "reason", "title", "description"),
)
_CODE_FIELDS = ("code", "status", "status_code", "error_code", "type")
_REASONS: tuple[tuple[str, FailureReason], ...] = (  # by words in a code; the first that matches
    (r"insufficient.?quota|billing|credit|balance|payment", "misconfigured"),
    (r"rate.?limit|too.?many|throttl|resource.?exhausted", "rate_limited"),
    (r"api.?key|authenticat|unauthori[sz]ed|permission|forbidden|model.?not.?found", "misconfigured"),
    (r"context.?length|invalid.?request|bad.?request|content.?policy|moderation|invalid.?argument", "refused"),
)


@dataclass(frozen=True)
class RawReply:
    """A completion as the endpoint sent it. Token counts are None if it stated none; `text` is empty without content.

    For a reply with the field `refusal`, `text` is that field and `finish` is "refusal". A reply that ended before its
    reasoning did has no text, and `finish` is "length".
    """

    text: str
    finish: str
    tokens_in: int | None
    tokens_out: int | None
    tokens_reasoning: int | None = None


def parse_reply_body(
    content: bytes, url: str, config: EndpointConfig, headers: Mapping[str, str] | None = None
) -> RawReply:
    """Parse the body of a chat completion. Raises `CallError` if it is none, or an error."""
    try:
        body, damaged = json_of(content)
    except (ValueError, RecursionError):
        raise CallError("invalid_reply", f"the answer of {url} is not JSON of a chat completion") from None
    try:
        reply = parse_completion(body, config)
    except CallError as error:
        error.retry_after = retry_after(headers or {})
        raise
    except (AttributeError, TypeError, LookupError):
        message = message_of(body)
        note = f" ({message})" if message else ""
        raise CallError("invalid_reply", f"no chat completion in the answer of {url}{note}") from None
    if damaged and "\ufffd" in reply.text:
        raise CallError("invalid_reply", f"the text in the answer of {url} is not valid UTF-8")
    return reply


def parse_completion(reply: Any, config: EndpointConfig) -> RawReply:
    """Parse a chat completion, given as JSON data.

    Raises `TypeError`, `LookupError` or `AttributeError` if it is none, `CallError` if it is an error, or contains the
    endpoint's key.
    """
    reply = reply[0] if isinstance(reply, list) else reply
    choices = reply.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    if (error := _error_in(reply, choice)) is not None:
        raise error
    if choice is None:
        raise LookupError("no choices")
    message = choice.get("message", choice.get("delta"))
    message = {"content": choice["text"]} if message is None else message
    finish = choice.get("finish_reason")
    finish = finish.lower() if isinstance(finish, str) and finish else "stop"
    finish = "length" if finish in _LENGTH else "content_filter" if finish in _FILTERED else finish
    text = _text_of(message.get("content"))
    if not text and isinstance(message.get("refusal"), str) and message["refusal"]:
        text, finish = message["refusal"], "refusal"
    elif not text and finish == "stop" and (message.get("reasoning_content") or message.get("reasoning")):
        finish = "length"
    if repeats_key(text, config) or repeats_key(finish, config):
        raise CallError("leaked_key", "the reply repeats the API key, so it is not kept")
    return RawReply(text, finish, *_counts(reply.get("usage")))


def error_of_status(status: int, content: bytes | str, headers: Mapping[str, str], url: str) -> CallError:
    """The error of a response with a status other than success."""
    if 300 <= status < 400:
        # Not followed: the key would go to another address than the configured one.
        target = headers.get("location", "another address").partition("?")[0].removesuffix("/chat/completions")
        return CallError("misconfigured", f"{url} has moved to {target} (status {status}): set `url`", str(status))
    try:
        body = json_of(content if isinstance(content, bytes) else content.encode("utf-8", "replace"))[0]
    except (ValueError, RecursionError):
        body = content.decode("utf-8", "replace") if isinstance(content, bytes) else content
    message = message_of(body)
    reason = reason_of(status)
    error = error_fields(body)
    # Some vendors say so with 429 or 400, but waiting does not help.
    if "insufficient_quota" in (error.get("code"), error.get("type")):
        reason = "misconfigured"
    note = f" - {message}" if message else ""
    return CallError(reason, f"Error code: {status}{note}", str(status), retry_after(headers))


def parse_result_line(line: bytes, batch: BatchInterface) -> tuple[str, dict[str, Any] | CallError]:
    """Parse a line of a batch job's result file: (digest, body of the reply or the error).

    Raises `ValueError`, `LookupError`, `TypeError` or `AttributeError` if it is no such line.
    """
    row, _ = json_of(line)
    response, error = row.get("response") or {}, row.get("error")
    status = int(response.get("status_code") or 0)
    if status == 200 and not error:
        return row["custom_id"], response["body"]
    body = error or response.get("body")
    code, message = error_fields(body).get("code"), message_of(body)
    if code in batch.lost_rows or not status:
        note = message or code or "no reason given"
        return row["custom_id"], CallError("expired", f"the batch job ended without it ({note})")
    # A row's 404 or 403 concerns that row alone, because the job itself was accepted.
    reason = "refused" if reason_of(status) == "misconfigured" else reason_of(status)
    return row["custom_id"], CallError(reason, str(message or code or status), str(status))


def refused_field(content: bytes) -> str | None:
    """The name of the field for which a request was refused, if the body of the error states it."""
    field = error_fields(parse_json(content)).get("param")
    return field if isinstance(field, str) else None


def error_fields(body: Any) -> dict[str, Any]:
    """The fields of the error in a body, which are in its `error` or its own; empty if there are none."""
    error = body.get("error", body) if isinstance(body, dict) else None
    return error if isinstance(error, dict) else {}


def message_of(body: Any) -> str:
    """The message of an error in a body: text, JSON data of any known form, or a web page. Empty if there is none."""
    if isinstance(body, str):
        if body.lstrip()[:1] == "<":
            body = re.sub(r"(?is)<(script|style|head)\b.*?</\1\s*>|<[^>]*>", " ", body)
        return " ".join(body.split())
    if isinstance(body, list):
        return "; ".join(dict.fromkeys(filter(None, map(message_of, body[:MOST_MESSAGES]))))
    if not isinstance(body, dict):
        return ""
    fields = {str(name).lower(): value for name, value in body.items()}
    message = next(filter(None, (message_of(fields.get(name)) for name in _MESSAGE_FIELDS)), "")
    place = fields.get("loc")
    if message and isinstance(place, list):
        message = f"{'.'.join(map(str, place))}: {message}"
    # OpenRouter's message is "Provider returned error"; what the provider said stands here.
    raw = fields["metadata"].get("raw") if isinstance(fields.get("metadata"), dict) else None
    return f"{message}: {raw}" if message and isinstance(raw, str) and raw else message


def json_of(content: bytes) -> tuple[Any, bool]:
    """The JSON data of a body, and whether it has bytes that are not UTF-8. Raises `ValueError`, `RecursionError`."""
    damaged = False
    try:
        text = content.decode(json.detect_encoding(content))
    except UnicodeDecodeError:
        text, damaged = content.decode("utf-8", "replace"), True
    text = text.lstrip("\ufeff \t\r\n")
    if text.startswith(("data:", "event:", ":")):
        return _assembled(text), damaged
    # What stands before and behind the value is left out: a warning of the server's language, a null byte, a note.
    decoder = json.JSONDecoder(parse_int=_number)
    starts = [0, *(match.start() for match in re.finditer("{", text))] if text[:1] not in ("{", "[", "<") else [0]
    for start in starts[:MOST_STARTS]:
        with suppress(ValueError):
            return decoder.raw_decode(text, start)[0], damaged
    raise ValueError("no JSON")


def _number(digits: str) -> int | float:
    return int(digits) if len(digits) <= LONGEST_NUMBER else math.inf


def _assembled(text: str) -> dict[str, Any]:
    """The completion in a stream of events, which some servers send although none was asked for."""
    content, finish, usage, error, seen = "", None, None, None, False
    for event in _events(text):
        usage, error = event.get("usage") or usage, event.get("error") or error
        choices = event.get("choices")
        if not isinstance(choices, list) or not choices:
            continue
        seen = True
        choice = choices[0]
        part = choice.get("delta") or choice.get("message") or {}
        content += _text_of(part.get("content"))
        finish, error = choice.get("finish_reason") or finish, choice.get("error") or error
    if error is not None:
        return {"error": error}
    if not seen or finish is None:
        raise ValueError("the stream ended early")
    return {"choices": [{"message": {"content": content}, "finish_reason": finish}], "usage": usage}


def _events(text: str) -> Iterator[dict[str, Any]]:
    for line in text.splitlines():
        if line.startswith("data:") and (data := line[5:].strip()) != "[DONE]":
            event = json.JSONDecoder(parse_int=_number).decode(data)
            if isinstance(event, dict):
                yield event


def _text_of(content: Any) -> str:
    """The text of a message's content: text, or a list of parts, without those of thinking. Raises `TypeError`."""
    if content is None:
        return ""
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) else part for part in content]
        return "".join(part["value"] if isinstance(part, dict) else part for part in parts if part)
    if not isinstance(content, str):
        raise TypeError("not text")
    return content


def _counts(usage: Any) -> tuple[int | None, int | None, int | None]:
    """(prompt, completion, reasoning) tokens as far as they are stated and whole numbers."""
    if not isinstance(usage, dict):
        return None, None, None
    details = usage.get("completion_tokens_details")
    reasoning = details.get("reasoning_tokens") if isinstance(details, dict) else None
    prompt = usage.get("prompt_tokens", usage.get("input_tokens"))
    completion = usage.get("completion_tokens", usage.get("output_tokens"))
    return token_count(prompt), token_count(completion), token_count(reasoning)


def token_count(value: Any) -> int | None:
    """A stated number of tokens; None if it is no whole number, negative or absurd."""
    if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) <= LONGEST_NUMBER:
        value = int(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if type(value) is int and 0 <= value <= MOST_TOKENS else None


def _error_in(body: dict[str, Any], choice: Any) -> CallError | None:
    """The error in a body that came with status 200, if there is any."""
    if choice is not None:
        finish, error = choice.get("finish_reason"), choice.get("error")
        if _is_error(error) or (isinstance(finish, str) and finish.lower() in _BROKEN):
            # The vendor may charge for what there is of the reply.
            return _call_error([error], f"the reply ended as {finish!r}", partial=bool(choice.get("message")))
    if _is_error(body.get("error")):
        return _call_error([body["error"], body], "an error")
    if choice is None and (body.get("object") == "error" or any(body.get(name) for name in _MESSAGE_FIELDS)):
        return _call_error([body], "an error")
    return None


def _is_error(error: Any) -> bool:
    """Whether a field `error` holds one; some vendors send it empty with every answer."""
    return any(error.values()) if isinstance(error, dict) else bool(error)


def _call_error(sources: list[Any], default: str, *, partial: bool = False) -> CallError:
    """The error that `sources` describe, by a code, else by their words; a passing one of the server if unknown."""
    codes = [source.get(name) for source in sources if isinstance(source, dict) for name in _CODE_FIELDS]
    message = next(filter(None, map(message_of, sources)), default)
    for code in codes:
        number = int(code) if isinstance(code, str) and re.fullmatch(r"[45]\d\d", code) else code
        if type(number) is int and 400 <= number < 600:
            return CallError(reason_of(number), message, str(number), partial=partial)
    words = " ".join([*(code for code in codes if isinstance(code, str)), message]).lower()
    unknown: FailureReason = "server_error"
    reason = next((reason for pattern, reason in _REASONS if re.search(pattern, words)), unknown)
    return CallError(reason, message, "error in the reply", partial=partial)
