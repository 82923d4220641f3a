"""Chat requests, replies and failures as plain values, what they cost, and their rows on disk.

A request's digest identifies its reply: the same digest is never paid for twice.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from configs.base import fingerprint
from configs.endpoint import EndpointConfig
from data.endpoints.budget import NO_USAGE, Usage
from data.endpoints.outgoing import break_markers

FailureReason = Literal[
    "rate_limited",  # 429 in every attempt
    "server_error",  # 5xx
    "connection",  # refused, unreachable, reset
    "cut",  # the body broke off
    "timeout",
    "invalid_reply",  # 200, but no chat completion in it
    "refused",  # this request is not accepted (400, 413, 422, …)
    "misconfigured",  # no request is accepted: key, model or address (401, 403, 404)
    "outage",  # the endpoint answers nobody any more
    "expired",  # a batch job ended without it
    "budget",  # the dollars or tokens are spent
    "endpoint_budget",  # those of this endpoint alone
    "leaked_key",  # the reply repeats an API key, so it must not be kept
]
TRANSIENT = frozenset(
    {"rate_limited", "server_error", "connection", "cut", "timeout", "invalid_reply", "outage", "expired"}
)
UNPAID = frozenset({"budget", "endpoint_budget"})
UNKNOWN_COST = frozenset({"cut", "timeout", "invalid_reply", "leaked_key"})  # the vendor may charge for the reply


@dataclass(frozen=True)
class ChatRequest:
    """A request to an endpoint, named as in `[endpoints]`.

    `schema` (JSON schema) and `grammar` (GBNF) constrain the reply; the endpoint's `structured` decides which one is
    sent, and both may be given. `purpose` ("teacher", "judge", "evaluate") and `tag` only label the ledger. Chat
    markers in the messages are broken: no text that is passed on can end its message.
    """

    endpoint: str
    messages: tuple[dict[str, str], ...]
    max_tokens: int
    temperature: float = 0.0
    seed: int = 0
    schema: dict | None = None
    grammar: str | None = None
    purpose: str = ""
    tag: str = ""

    def __post_init__(self) -> None:
        broken = tuple({**message, "content": break_markers(message["content"])} for message in self.messages)
        object.__setattr__(self, "messages", broken)


@dataclass(frozen=True)
class ChatReply:
    """A reply. `finish`: "stop", "length", "refusal", "content_filter", …; token counts are None where the endpoint
    stated none, and `tokens_reasoning` are a part of `tokens_out`; `cached`: it comes from the reply cache, and
    `reused`: another execution paid for it; `latency_s` is None for a batch job's. `digest` is that of the request, and
    `endpoint` the one that answered, which with fallbacks may be another than the one in the request."""

    text: str
    finish: str
    tokens_in: int | None
    tokens_out: int | None
    latency_s: float | None
    cached: bool
    digest: str
    endpoint: str = ""
    reused: bool = False
    tokens_reasoning: int | None = None


@dataclass(frozen=True)
class ChatFailure:
    """No reply, and why, after `attempts` requests were sent."""

    reason: FailureReason
    message: str
    attempts: int


@dataclass
class CallError(Exception):
    """An attempt without a reply. `status`: the HTTP status, or the reason where there was none."""

    reason: FailureReason
    message: str
    status: str = ""
    retry_after: float | None = None

    def __post_init__(self) -> None:
        self.status = self.status or self.reason

    @property
    def retryable(self) -> bool:
        return self.reason in TRANSIENT


def request_digest(request: ChatRequest, config: EndpointConfig) -> str:
    """sha256 of all that decides the reply: model, messages, sampling, constraint, the endpoint's own fields of
    requests. Not where the model is served."""
    sampling = [request.max_tokens, request.temperature, request.seed]
    identity = [config.kind, config.model, list(request.messages), sampling, output_constraint(request, config)]
    # Left out where it is not set, so that the replies of configurations without it are found.
    form = {"extra": config.extra, "token_limit": config.token_limit, "omit": config.omit and sorted(config.omit)}
    if form := {name: value for name, value in form.items() if value}:
        identity.append(form)
    return fingerprint(identity)


def output_constraint(request: ChatRequest, config: EndpointConfig) -> dict[str, Any]:
    """The constraint on the reply that is sent to this endpoint: a grammar, a schema or none."""
    if config.structured == "grammar" and request.grammar:
        return {"grammar": request.grammar}
    if config.structured != "none" and request.schema:
        return {"schema": request.schema}
    return {}


def reply_cost(config: EndpointConfig, tokens_in: int | None, tokens_out: int | None) -> float | None:
    """Dollars of a reply, a batch job's at its discount; None if its tokens are not known and cost something."""
    if not (config.dollars_per_million_in or config.dollars_per_million_out):
        return 0.0
    if tokens_in is None or tokens_out is None:
        return None
    full = (tokens_in * config.dollars_per_million_in + tokens_out * config.dollars_per_million_out) / 1e6
    return full * config.batch.price_factor if config.mode == "batch" else full


def max_usage(config: EndpointConfig, request: ChatRequest) -> Usage:
    """The most a reply may use: all tokens it is allowed, and a generous guess (3 bytes a token) of the prompt's."""
    size = sum(len(message["content"].encode()) // 3 + 8 for message in request.messages)
    return Usage(reply_cost(config, size, request.max_tokens) or 0.0, size + request.max_tokens)


def actual_usage(reply: ChatReply, cost: float | None, reserved: Usage) -> Usage:
    """What a reply used; what was reserved for it where the endpoint stated no counts."""
    counted = reply.tokens_in is not None and reply.tokens_out is not None
    tokens = (reply.tokens_in or 0) + (reply.tokens_out or 0) if counted else reserved.tokens
    return Usage(reserved.dollars if cost is None else cost, tokens)


def call_row(
    request: ChatRequest,
    digest: str,
    endpoint: str,
    config: EndpointConfig,
    result: ChatReply | CallError,
    *,
    attempt: int = 0,
    latency_s: float | None = 0.0,
    cost: float | None = 0.0,
    unknown: Usage = NO_USAGE,
    **more: Any,
) -> dict[str, Any]:
    """The ledger row of an attempt at an endpoint; attempt 0 is a cached reply, which costs nothing.

    `unknown`: what an attempt without a reply may have cost.
    """
    parameters = {"max_tokens": request.max_tokens, "temperature": request.temperature, "seed": request.seed}
    row: dict[str, Any] = {
        "endpoint": endpoint,
        "model": config.model,
        "purpose": request.purpose,
        "tag": request.tag,
        "digest": digest,
        "attempt": attempt,
        "cached": isinstance(result, ChatReply) and result.cached,
        "latency_s": latency_s,
        "dollars": cost,
        "parameters": {
            **{name: value for name, value in parameters.items() if name not in (config.omit or ())},
            "bound": next(iter(output_constraint(request, config)), None),
            **({"extra": config.extra} if config.extra else {}),
        },
        **more,
    }
    if request.endpoint != endpoint:
        row["in_place_of"] = request.endpoint
    if isinstance(result, CallError):
        charged = {"unknown_dollars": unknown.dollars, "unknown_tokens": unknown.tokens} if unknown != NO_USAGE else {}
        return {**row, "status": result.status, "error": result.message, "dollars": 0.0, **charged}
    text_digest = hashlib.sha256(result.text.encode("utf-8", "replace")).hexdigest()
    counts = {"tokens_in": result.tokens_in, "tokens_out": result.tokens_out}
    if result.tokens_reasoning is not None:
        counts["tokens_reasoning"] = result.tokens_reasoning
    return {**row, **counts, "status": "ok", "finish": result.finish, "reply": text_digest}


def reply_to_row(reply: ChatReply, spent: Usage, execution: str) -> dict[str, Any]:
    """A reply as it is cached; what the cache adds up comes first, so that it need not parse the text."""
    return {
        "digest": reply.digest,
        "endpoint": reply.endpoint,
        "dollars": spent.dollars,
        "tokens": spent.tokens,
        "execution": execution,  # that paid for it
        "tokens_in": reply.tokens_in,
        "tokens_out": reply.tokens_out,
        **({} if reply.tokens_reasoning is None else {"tokens_reasoning": reply.tokens_reasoning}),
        "finish": reply.finish,
        "latency_s": reply.latency_s,
        "text": reply.text,
    }


def reply_from_row(row: Mapping[str, Any]) -> ChatReply:
    """A cached reply."""
    return ChatReply(
        text=row["text"],
        finish=row["finish"],
        tokens_in=row["tokens_in"],
        tokens_out=row["tokens_out"],
        latency_s=row["latency_s"],
        cached=True,
        digest=row["digest"],
        endpoint=row.get("endpoint", ""),
        tokens_reasoning=row.get("tokens_reasoning"),
    )
