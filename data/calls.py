"""What goes to a chat endpoint and what comes back, as plain values. A request's digest is its reply's identity."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from configs.schema import EndpointConfig
from configs.section import fingerprint

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
    "budget",  # the money is spent
]
TRANSIENT = frozenset({"rate_limited", "server_error", "connection", "cut", "timeout", "invalid_reply", "outage"})


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
    now but remembered. `digest` is that of the request."""

    text: str
    finish: str
    tokens_in: int | None
    tokens_out: int | None
    latency_s: float
    cached: bool
    digest: str


@dataclass(frozen=True)
class ChatFailure:
    """No answer, and why, after `attempts` requests were sent."""

    reason: FailureReason
    message: str
    attempts: int


def request_digest(request: ChatRequest, config: EndpointConfig) -> str:
    """sha256 of all that decides the reply: model, messages, sampling, bounds. Not where the model is served."""
    sampling = [request.max_tokens, request.temperature, request.seed]
    return fingerprint([config.kind, config.model, list(request.messages), sampling, bounds(request, config)])


def bounds(request: ChatRequest, config: EndpointConfig) -> dict[str, Any]:
    """The bound on the reply's form that is really sent: a grammar, a schema or nothing."""
    if config.structured == "grammar" and request.grammar:
        return {"grammar": request.grammar}
    if config.structured != "none" and request.schema:
        return {"schema": request.schema}
    return {}


def dollars(config: EndpointConfig, tokens_in: int | None, tokens_out: int | None) -> float | None:
    """Price of a reply; None when its tokens are not known and cost something."""
    if not (config.dollars_per_million_in or config.dollars_per_million_out):
        return 0.0
    if tokens_in is None or tokens_out is None:
        return None
    return (tokens_in * config.dollars_per_million_in + tokens_out * config.dollars_per_million_out) / 1e6


def most_dollars(config: EndpointConfig, request: ChatRequest) -> float:
    """What a reply may cost: every token allowed, and a generous guess (3 bytes a token) of the prompt's length."""
    size = sum(len(message["content"].encode()) // 3 + 8 for message in request.messages)
    cost = dollars(config, size, request.max_tokens)
    return cost or 0.0


def as_row(reply: ChatReply, cost: float | None) -> dict[str, Any]:
    """The reply as it is remembered."""
    return {
        "digest": reply.digest,
        "text": reply.text,
        "finish": reply.finish,
        "tokens_in": reply.tokens_in,
        "tokens_out": reply.tokens_out,
        "latency_s": reply.latency_s,
        "dollars": cost,
    }


def from_row(row: Mapping[str, Any]) -> ChatReply:
    """A remembered reply."""
    return ChatReply(
        row["text"], row["finish"], row["tokens_in"], row["tokens_out"], row["latency_s"], True, row["digest"]
    )
