"""What goes to a chat endpoint and what comes back, as plain values. A request's digest is its reply's identity."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from configs.base import fingerprint
from configs.endpoint import EndpointConfig
from data.endpoints.budget import Usage

FailureReason = Literal[
    "rate_limited",  # 429 in every attempt
    "server_error",  # 5xx
    "connection",  # refused, unreachable, reset
    "cut",  # the body broke off
    "timeout",
    "invalid_reply",  # 200, but no chat completion in it
    "refused",  # this request is not accepted (400, 413, 422, …)
    "misconfigured",  # no request is accepted: key, model or address (401, 403, 404)
    "outage",  # the endpoint had stopped answering anybody
    "expired",  # a batch job ended without it
    "budget",  # the money or the tokens are spent
]
TRANSIENT = frozenset(
    {"rate_limited", "server_error", "connection", "cut", "timeout", "invalid_reply", "outage", "expired"}
)


@dataclass(frozen=True)
class ChatRequest:
    """One question to an endpoint, named as in `[endpoints]`.

    `schema` (JSON schema) and `grammar` (GBNF) bound the reply where the endpoint's `structured` says that it can; both
    may be given. `purpose` ("teacher", "judge", "evaluate") and `tag` only label the ledger.
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


@dataclass(frozen=True)
class ChatReply:
    """An answer. `finish`: "stop", "length", …; token counts are None when the endpoint gave none; `cached`: not asked
    now but remembered; `latency_s` is None for a batch job's. `digest` is that of the request, and `endpoint` the one
    that answered: where there are fallbacks, perhaps another one than was asked."""

    text: str
    finish: str
    tokens_in: int | None
    tokens_out: int | None
    latency_s: float | None
    cached: bool
    digest: str
    endpoint: str = ""


@dataclass(frozen=True)
class ChatFailure:
    """No answer, and why, after `attempts` requests were sent."""

    reason: FailureReason
    message: str
    attempts: int


@dataclass
class CallError(Exception):
    """One attempt that brought no reply. `status`: the HTTP status, or the reason where there was none."""

    reason: FailureReason
    message: str
    status: str = ""
    retry_after: float | None = None

    def __post_init__(self) -> None:
        self.status = self.status or self.reason

    @property
    def worth_another(self) -> bool:
        return self.reason in TRANSIENT


def request_digest(request: ChatRequest, config: EndpointConfig) -> str:
    """sha256 of all that decides the reply: model, messages, sampling, bounds. Not where the model is served."""
    sampling = [request.max_tokens, request.temperature, request.seed]
    return fingerprint(
        [config.kind, config.model, list(request.messages), sampling, output_constraint(request, config)]
    )


def output_constraint(request: ChatRequest, config: EndpointConfig) -> dict[str, Any]:
    """The bound on the reply's form that is really sent: a grammar, a schema or nothing."""
    if config.structured == "grammar" and request.grammar:
        return {"grammar": request.grammar}
    if config.structured != "none" and request.schema:
        return {"schema": request.schema}
    return {}


def reply_cost(config: EndpointConfig, tokens_in: int | None, tokens_out: int | None) -> float | None:
    """Price of a reply, a batch job's at its discount; None when its tokens are not known and cost something."""
    if not (config.dollars_per_million_in or config.dollars_per_million_out):
        return 0.0
    if tokens_in is None or tokens_out is None:
        return None
    full = (tokens_in * config.dollars_per_million_in + tokens_out * config.dollars_per_million_out) / 1e6
    return full * config.batch.price_factor if config.mode == "batch" else full


def max_usage(config: EndpointConfig, request: ChatRequest) -> Usage:
    """What a reply may use up: every token allowed, and a generous guess (3 bytes a token) of the prompt's length."""
    size = sum(len(message["content"].encode()) // 3 + 8 for message in request.messages)
    return Usage(reply_cost(config, size, request.max_tokens) or 0.0, size + request.max_tokens)


def actual_usage(reply: ChatReply, cost: float | None, reserved: Usage) -> Usage:
    """What a reply did use up; what was set aside for it where the endpoint did not say."""
    counted = reply.tokens_in is not None and reply.tokens_out is not None
    tokens = (reply.tokens_in or 0) + (reply.tokens_out or 0) if counted else reserved.tokens
    return Usage(reserved.dollars if cost is None else cost, tokens)


def call_row(
    request: ChatRequest,
    digest: str,
    endpoint: str,
    config: EndpointConfig,
    outcome: ChatReply | CallError,
    *,
    attempt: int = 0,
    latency_s: float | None = 0.0,
    cost: float | None = 0.0,
    **more: Any,
) -> dict[str, Any]:
    """The ledger row of an attempt at an endpoint; attempt 0 is a remembered reply, which costs nothing."""
    parameters = {"max_tokens": request.max_tokens, "temperature": request.temperature, "seed": request.seed}
    row: dict[str, Any] = {
        "endpoint": endpoint,
        "model": config.model,
        "purpose": request.purpose,
        "tag": request.tag,
        "digest": digest,
        "attempt": attempt,
        "cached": isinstance(outcome, ChatReply) and outcome.cached,
        "latency_s": latency_s,
        "dollars": cost,
        "parameters": {**parameters, "bound": next(iter(output_constraint(request, config)), None)},
        **more,
    }
    if request.endpoint != endpoint:
        row["in_place_of"] = request.endpoint
    if isinstance(outcome, CallError):
        return {**row, "status": outcome.status, "error": outcome.message, "dollars": 0.0}
    said = hashlib.sha256(outcome.text.encode("utf-8", "replace")).hexdigest()
    counts = {"tokens_in": outcome.tokens_in, "tokens_out": outcome.tokens_out}
    return {**row, **counts, "status": "ok", "finish": outcome.finish, "reply": said}


def reply_to_row(reply: ChatReply, spent: Usage) -> dict[str, Any]:
    """The reply as it is remembered; what the ledger adds up comes first, so that it need not read the text."""
    return {
        "digest": reply.digest,
        "endpoint": reply.endpoint,
        "dollars": spent.dollars,
        "tokens": spent.tokens,
        "tokens_in": reply.tokens_in,
        "tokens_out": reply.tokens_out,
        "finish": reply.finish,
        "latency_s": reply.latency_s,
        "text": reply.text,
    }


def reply_from_row(row: Mapping[str, Any]) -> ChatReply:
    """A remembered reply."""
    counts = (row["tokens_in"], row["tokens_out"])
    return ChatReply(
        row["text"], row["finish"], *counts, row["latency_s"], True, row["digest"], row.get("endpoint", "")
    )
