"""Read what a server answers: the reply in the body of a chat completion, or the error that stands in its place.

Vendors differ in all that surrounds a reply, so only its text must be readable: what is paid for is kept, and a count
that is none is not known. An error may come with any status, 200 included, and in many forms.
"""

import json
import math
import re
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
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
MOST_STARTS = 8  # places where JSON may begin
# Other words for the end of an answer, for the end at the token limit, and for an answer that the vendor holds back.
_STOP = {"eos", "eos_token", "end_turn", "stop_sequence", "complete", "completed"}
_LENGTH = {
    *("length", "max_tokens", "model_length", "max_output_tokens", "max_completion_tokens", "max_new_tokens"),
    *("max_length", "token_limit", "incomplete", "context_length", "model_context_window_exceeded", "error_limit"),
    "time_limit",
}
_FILTERED = {
    *("content_filter", "content_filtered", "safety", "recitation", "blocklist", "prohibited_content", "spii"),
    *("sensitive", "guardrail_intervened", "error_toxic"),
}
_BROKEN = {  # the vendor has stopped in the middle
    *("error", "abort", "aborted", "cancelled", "canceled", "user_cancel", "failed", "timeout", "network_error"),
    "insufficient_system_resource",
}
_NO_ERROR = {"none", "null", "ok", "success", "no error", "false", "0", "200", ""}  # where the name of an error stands
_THINKING = {"thinking", "reasoning", "redacted_thinking"}  # types of parts of the content
_THOUGHTS = ("reasoning_content", "reasoning", "reasoning_details")
_TEXTS = ("content", "reasoning", "reasoning_content", "refusal")  # fields of a message that come in pieces
_MESSAGE_FIELDS = (
    *("error", "errors", "detail", "details", "message", "msg", "error_message", "error_msg", "status_msg"),
    *("base_resp", "fault", "faultstring", "reason", "title", "description"),
)
_CODE_FIELDS = ("code", "status", "status_code", "error_code", "type")
# In the code or message of an error of any status. Refusals for the rate mention plans and payments as well.
_NO_MONEY = (
    r"insufficient.{0,8}(?:quota|balance|credit|fund)|exceeded_current_quota|billing_(?:hard_limit|not_active)"
    r"|arrearage|overdue"
)
_REASONS: tuple[tuple[str, FailureReason], ...] = (  # by words in a code, else in the message; the first that matches
    (_NO_MONEY, "misconfigured"),
    (r"rate.?limit|too.?many|throttl|resource.?exhausted", "rate_limited"),
    (r"billing|credit|balance|payment", "misconfigured"),
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
    model: str | None = field(default=None, compare=False)  # that has answered, as the server says


def parse_reply_body(
    content: bytes, url: str, config: EndpointConfig, headers: Mapping[str, str] | None = None
) -> RawReply:
    """Parse the body of a chat completion. Raises `CallError` if it is none, or an error."""
    charset = re.search(r"charset=[\"']?([\w.-]+)", (headers or {}).get("content-type", ""))
    try:
        body, damaged = json_of(content, charset[1] if charset else "")
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
    choice = _choice_of(reply)
    if (error := _error_in(reply, choice)) is not None:
        raise error
    if choice is None:
        raise LookupError("no choices")
    finish = _finish_of(choice)
    message = choice.get("message", choice.get("delta"))
    if message is None:
        # What was held back, or cut before its text began, may come without a message.
        message = {"content": choice.get("text") if finish in ("length", "content_filter") else choice["text"]}
    content = message.get("content")
    text, parts = _text_of(content), content if isinstance(content, list) else []
    refusals = [message.get("refusal"), *(part.get("refusal") for part in parts if isinstance(part, dict))]
    refusal = next((words for words in refusals if isinstance(words, str) and words), "")
    if not text and refusal:
        text, finish = refusal, "refusal"
    elif not text and finish == "stop":
        thoughts = any(message.get(name) for name in _THOUGHTS) or any(map(_is_thinking, parts))
        finish = "length" if thoughts else finish
    if repeats_key(text, config) or repeats_key(finish, config):
        raise CallError("leaked_key", "the reply repeats the API key, so it is not kept")
    model = reply.get("model")
    return RawReply(text, finish, *_counts(reply.get("usage"), text), model if isinstance(model, str) else None)


def error_of_status(status: int, content: bytes | str, headers: Mapping[str, str], url: str) -> CallError:
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
    if re.search(_NO_MONEY, f"{error.get('code')} {error.get('type')} {message}".lower()):
        reason = "misconfigured"
    note = f" - {message}" if message else ""
    return CallError(reason, f"Error code: {status}{note}", str(status), retry_after(headers))


def parse_result_line(line: bytes, batch: BatchInterface) -> tuple[str, dict[str, Any] | CallError]:
    """Parse a line of a batch job's result file: (digest, body of the reply or the error).

    Raises `ValueError`, `LookupError`, `TypeError` or `AttributeError` if it is no such line.
    """
    row, _ = json_of(line)
    response, error, digest = row.get("response") or {}, row.get("error"), row["custom_id"]
    if not isinstance(digest, str):
        raise TypeError("not the id of a request")
    try:
        status = int(response.get("status_code") or 0)
    except (TypeError, ValueError, OverflowError):  # "OK"
        status = 0
    if isinstance(response.get("body"), str):  # JSON in JSON
        response = response | {"body": json_of(response["body"].encode())[0]}
    if not _is_error(error) and (200 <= status < 300 or (not status and response.get("body"))):
        return digest, response["body"]
    body = error or response.get("body")
    code, message = error_fields(body).get("code"), message_of(body)
    if code in batch.lost_rows or not status:
        note = message or code or "no reason given"
        return digest, CallError("expired", f"the batch job ended without it ({note})")
    # A row's 404 or 403 concerns that row alone, because the job itself was accepted.
    reason = "refused" if reason_of(status) == "misconfigured" else reason_of(status)
    return digest, CallError(reason, str(message or code or status), str(status))


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


def json_of(content: bytes, charset: str = "") -> tuple[Any, bool]:
    """The JSON data of a body, and whether some of its bytes cannot be read. Raises `ValueError`, `RecursionError`.

    `charset`: what the header states, for a body that is not in one of Unicode's encodings, as JSON should be.
    """
    damaged = True
    for encoding in filter(None, (json.detect_encoding(content), charset)):
        with suppress(UnicodeDecodeError, LookupError):
            text, damaged = content.decode(encoding), False
            break
    if damaged:
        text = content.decode("utf-8", "replace")
    text = text.lstrip("\ufeff \t\r\n")
    if text.startswith(("data:", "event:", "id:", "retry:", ":")):
        return _stream(text), damaged
    # What stands before and behind the value is left out: a warning of the server's language, a null byte, a note.
    decoder, found, position = json.JSONDecoder(parse_int=_number), list[Any](), 0
    for _ in range(MOST_STARTS):
        try:
            value, end = decoder.raw_decode(text, position)
        except ValueError:
            # An object inside a broken one is not what the server has answered.
            if position == 0 and re.match(r"\{|\[\s*[\[{]", text):
                raise
            end = position + 1
        else:
            found.append(value)
            if has_choices(value):
                choice = _choice_of(value) if isinstance(value, dict) else None
                if isinstance(choice, dict) and "delta" in choice and text[end:].lstrip()[:1] == "{":
                    return _stream(re.sub("^", "data:", text, flags=re.MULTILINE)), damaged
                break
        if (position := text.find("{", end)) < 0:
            break
    # Objects in a web page are parts of its styles and programs.
    if not found or (text[0] == "<" and not has_choices(found[-1])):
        raise ValueError("no JSON")
    return found[-1] if has_choices(found[-1]) else found[0], damaged


def has_choices(body: Any) -> bool:
    """Whether JSON data looks like a completion, and not like an error or a note."""
    body = body[0] if isinstance(body, list) and body else body
    return isinstance(body, dict) and "choices" in body


def is_page(content: bytes) -> bool:
    """Whether the body of a success that is called HTML is a web page; some servers send JSON under this type."""
    try:
        json_of(content)
    except (ValueError, RecursionError):
        return True
    return False


def _number(digits: str) -> int | float:
    return int(digits) if len(digits) <= LONGEST_NUMBER else math.inf


def _stream(text: str) -> dict[str, Any]:
    """As `_assembled`. Raises `ValueError` for a stream of anything else."""
    try:
        return _assembled(text)
    except (AttributeError, TypeError, LookupError):
        raise ValueError("no stream of a completion") from None


def _assembled(text: str) -> dict[str, Any]:
    """The body of the completion in a stream of events, which some servers send although none was asked for."""
    body: dict[str, Any] = {}
    ended: dict[str, Any] = {}  # fields of the choice
    whole: dict[str, Any] = {}  # the message, which some servers send once more at the end
    pieces: dict[str, str] = defaultdict(str)  # of the message, by field
    is_done, index = False, None
    for line in re.split(r"\r\n?|\n", text):  # not `splitlines`: a text may contain other ends of lines
        data = line[5:].strip() if line.startswith("data:") else ""
        is_done = is_done or data == "[DONE]"
        event = json.JSONDecoder(parse_int=_number).decode(data) if data not in ("", "[DONE]") else None
        if not isinstance(event, dict):
            continue
        body |= {name: value for name, value in event.items() if value}
        choice = _choice_of(event)
        index = choice.get("index") if choice and index is None else index
        if choice is None or choice.get("index") not in (index, None):
            continue
        ended |= {name: choice[name] for name in ("finish_reason", "error") if choice.get(name)}
        body["usage"] = choice.get("usage") or body.get("usage")
        message = choice.get("message") or {}
        whole = message if _text_of(message.get("content")) else whole
        part = choice.get("delta") or message or {"content": choice.get("text")}
        for name in _TEXTS:
            pieces[name] += _text_of(part.get(name)) if name == "content" or isinstance(part.get(name), str) else ""
    if not pieces:
        if not body:
            raise ValueError("no event")
        return body  # perhaps an error
    if "error" in body:
        ended.setdefault("error", body.pop("error"))
    if not ended and not is_done:
        raise ValueError("the stream ended early")
    message = whole or {name: piece for name, piece in pieces.items() if piece}
    return body | {"choices": [{"message": message, **ended}]}


def _choice_of(body: dict[str, Any]) -> Any:
    """The first completion in a body; None if there is none."""
    choices = body.get("choices")
    if not isinstance(choices, list) or not choices:
        return None
    return next((choice for choice in choices if isinstance(choice, dict) and choice.get("index") == 0), choices[0])


def _finish_of(choice: dict[str, Any]) -> str:
    """The reason of a completion's end, in one word for all vendors."""
    finish = choice.get("finish_reason")
    if not isinstance(finish, str) or not finish:
        return "stop"
    finish = re.sub(r"^finish_?reason[._]", "", finish.lower())
    words = {"stop": _STOP, "length": _LENGTH, "content_filter": _FILTERED}
    return next((word for word, others in words.items() if finish in others), finish)


def _is_thinking(part: Any) -> bool:
    return isinstance(part, dict) and str(part.get("type")) in _THINKING


def _text_of(content: Any) -> str:
    """The text of a message's content: text, or a list of parts, without those of thinking. Raises `TypeError`."""
    if content is None:
        return ""
    if isinstance(content, dict):
        content = [content["text"]]
    if isinstance(content, list):
        texts = [part.get("text") if isinstance(part, dict) else part for part in content if not _is_thinking(part)]
        return "".join(text["value"] if isinstance(text, dict) else text for text in texts if text)
    if not isinstance(content, str):
        raise TypeError("not text")
    return content


def _counts(usage: Any, text: str) -> tuple[int | None, int | None, int | None]:
    """(prompt, completion, reasoning) tokens as far as they are stated and whole numbers.

    Zero tokens of a text that is there were not counted. Some vendors charge for reasoning that only their total has.
    """
    if not isinstance(usage, dict):
        return None, None, None
    details = usage.get("completion_tokens_details")
    reasoning = token_count(details.get("reasoning_tokens")) if isinstance(details, dict) else None
    prompt, completion = (
        next((usage[name] for name in names if usage.get(name) is not None), None)
        for names in (("prompt_tokens", "input_tokens"), ("completion_tokens", "output_tokens"))
    )
    prompt, completion = token_count(prompt) or None, token_count(completion)
    completion = None if text and not completion else completion
    if prompt is not None and completion is not None:
        beyond = completion + reasoning if reasoning is not None and reasoning > completion else completion
        completion = max(beyond, (token_count(usage.get("total_tokens")) or 0) - prompt)
    return prompt, completion, reasoning


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
        if _is_error(error) or _finish_of(choice) in _BROKEN:
            # The vendor may charge for what there is of the reply.
            return _call_error([error], f"the reply ended as {finish!r}", partial=bool(choice.get("message")))
    if _is_error(body.get("error")):
        return _call_error([body["error"], body], "an error")
    if choice is None and (body.get("object") == "error" or any(body.get(name) for name in _MESSAGE_FIELDS)):
        return _call_error([body], "an error")
    return None


def _is_error(error: Any) -> bool:
    """Whether a field `error` holds one; some vendors send it with every answer, empty or with a word for success."""
    values = error.values() if isinstance(error, dict) else [error]
    return any(value and str(value).strip().lower() not in _NO_ERROR for value in values)


def _call_error(sources: list[Any], default: str, *, partial: bool = False) -> CallError:
    """The error that `sources` describe, by a code, else by their words; a passing one of the server if unknown."""
    codes = [source.get(name) for source in sources if isinstance(source, dict) for name in _CODE_FIELDS]
    message = next(filter(None, map(message_of, sources)), default)
    for code in codes:
        number = int(code) if isinstance(code, str) and re.fullmatch(r"[45]\d\d", code) else code
        if type(number) is int and 400 <= number < 600:
            return CallError(reason_of(number), message, str(number), partial=partial)
    words = " ".join(code for code in codes if isinstance(code, str)).lower()
    unknown: FailureReason = "server_error"
    matches = (reason for said in (words, message.lower()) for pattern, reason in _REASONS if re.search(pattern, said))
    reason = next(matches, unknown)
    return CallError(reason, message, "error in the reply", partial=partial)
