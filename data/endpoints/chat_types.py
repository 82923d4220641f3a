"""Data types of the chat endpoints: requests, replies, failures, their cost, and their rows on disk.

A request's digest identifies its reply in the cache, so that no request is paid for twice.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from nautile.configs.base import canonical, fingerprint
from nautile.configs.endpoint import EndpointConfig
from nautile.data.endpoints.budget import NO_USAGE, Usage
from nautile.data.endpoints.outgoing import break_markers

FailureReason = Literal[
    "rate_limited",  # 429 in every attempt
    "server_error",  # 5xx
    "connection",  # refused, unreachable, reset
    "cut",  # the body ended early
    "timeout",
    "invalid_reply",  # 200, but the body is no chat completion
    "refused",  # this request is not accepted (400, 413, 422, …)
    "misconfigured",  # no request is accepted: no money, or wrong key, model or address (401 to 404)
    "outage",  # the endpoint has stopped answering
    "expired",  # a batch job ended without a result for this request
    "budget",  # the pool's dollars or tokens are spent
    "endpoint_budget",  # the endpoint's own dollars or tokens are spent
    "leaked_key",  # the reply contains an API key, so it must not be stored
]
TRANSIENT = frozenset(
    {"rate_limited", "server_error", "connection", "cut", "timeout", "invalid_reply", "outage", "expired"}
)
# Fields of `extra` that label a request for the vendor, and do not change the reply.
LABELS = frozenset(
    {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}
)
UNPAID = frozenset({"budget", "endpoint_budget"})
UNKNOWN_COST = frozenset({"cut", "timeout", "invalid_reply", "leaked_key"})  # the vendor may charge for the reply


@dataclass(frozen=True)
class ChatRequest:
    """A request to an endpoint of `[endpoints]`, given by name.

    `schema` (JSON schema) and `grammar` (GBNF) constrain the reply; both may be given, and the endpoint's `structured`
    decides which one is sent. `purpose` ("teacher", "judge", "evaluate") and `tag` only label the ledger. Chat markers
    in the messages are broken (`break_markers`), so that quoted text cannot end its message. Half of a surrogate pair,
    which JSON data may contain and UTF-8 cannot, becomes a question mark.
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
        messages = tuple(
            {**message, "content": break_markers(message["content"].encode("utf-8", "replace").decode())}
            for message in self.messages
        )
        object.__setattr__(self, "messages", messages)


@dataclass(frozen=True)
class ChatReply:
    """A reply.

    `finish`: "stop", "length", "refusal", "content_filter", …. Token counts are None if the endpoint stated none;
    `tokens_reasoning` is included in `tokens_out`. `cached`: from the reply cache; `reused`: paid for by another
    execution. `latency_s` is None for a batch job. `digest`: of the request; `endpoint`: the one that answered, which
    may be a fallback.
    """

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
    """A request that got no reply after `attempts` attempts, with the reason.

    `own`, of a temporary reason: True if the endpoint answered another request meanwhile, so that the request itself is
    at fault and no outage; False if it answered none, so that it may be down; None if neither is known.
    """

    reason: FailureReason
    message: str
    attempts: int
    own: bool | None = None

    @property
    def unfinished(self) -> bool:
        """Whether the request may still be answered another time, so that it is neither answered nor refused."""
        return self.reason in TRANSIENT


@dataclass
class CallError(Exception):
    """An attempt without a reply. `status`: the HTTP status, or the reason if there was no response.

    `partial`: the vendor has generated a part of the reply, which it may charge for.
    """

    reason: FailureReason
    message: str
    status: str = ""
    retry_after: float | None = None
    partial: bool = False

    def __post_init__(self) -> None:
        self.status = self.status or self.reason

    @property
    def retryable(self) -> bool:
        return self.reason in TRANSIENT

    @property
    def may_cost(self) -> bool:
        """Whether the vendor may charge for the attempt."""
        return self.partial or self.reason in UNKNOWN_COST


def request_digest(request: ChatRequest, config: EndpointConfig) -> str:
    """sha256 of all that determines the reply: model, messages, sampling, constraint, extra fields; not the address."""
    sampling = [request.max_tokens, request.temperature, request.seed]
    identity = [config.kind, config.model, list(request.messages), sampling, output_constraint(request, config)]
    # Fields that are not set are left out, so that replies cached before these fields existed are still found.
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
    """Dollars of a reply, at the discount of batch mode; None if tokens are charged for and their number is unknown."""
    if not config.has_price:
        return 0.0  # a free endpoint need not count tokens
    if tokens_in is None or tokens_out is None:
        return None
    full = (tokens_in * config.dollars_per_million_in + tokens_out * config.dollars_per_million_out) / 1e6
    batch = config.vendor.batch if config.mode == "batch" else None
    return full * batch.price_factor if batch else full


def max_usage(config: EndpointConfig, request: ChatRequest) -> Usage:
    """What a request allows: `max_tokens`, and a high estimate of the prompt (3 bytes a token) with its schema.

    No hard bound: a vendor may count otherwise, charge for reasoning beyond `max_tokens`, or add a prompt of its own.
    """
    # 8: a message's role and the markers around it.
    size = sum(len(message["content"].encode()) // 3 + 8 for message in request.messages)
    if constraint := output_constraint(request, config):
        size += len(canonical(constraint)) // 3
    if config.extra:
        size += len(canonical(config.extra)) // 3
    return Usage(reply_cost(config, size, request.max_tokens) or 0.0, size + request.max_tokens)


def actual_usage(reply: ChatReply, cost: float | None, reserved: Usage) -> Usage:
    """The usage of a reply; the reservation where the endpoint stated no token counts."""
    has_counts = reply.tokens_in is not None and reply.tokens_out is not None
    tokens = (reply.tokens_in or 0) + (reply.tokens_out or 0) if has_counts else reserved.tokens
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
    **extra_fields: Any,
) -> dict[str, Any]:
    """The ledger row of an attempt at an endpoint; attempt 0 is a cached reply, which costs nothing.

    `unknown`: the maximum cost of an attempt without a reply.
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
        **extra_fields,
    }
    if request.endpoint != endpoint:  # a fallback
        row["in_place_of"] = request.endpoint
    if isinstance(result, CallError):
        charged = {"unknown_dollars": unknown.dollars, "unknown_tokens": unknown.tokens} if unknown != NO_USAGE else {}
        return {**row, "status": result.status, "error": result.message, "dollars": 0.0, **charged}
    # The ledger has a digest of the reply; the text itself is in the reply cache.
    text_digest = hashlib.sha256(result.text.encode("utf-8", "replace")).hexdigest()
    counts = {"tokens_in": result.tokens_in, "tokens_out": result.tokens_out}
    if result.tokens_reasoning is not None:
        counts["tokens_reasoning"] = result.tokens_reasoning
    return {**row, **counts, "status": "ok", "finish": result.finish, "reply": text_digest}


def limits_of(request: ChatRequest, config: EndpointConfig) -> str:
    """The part of a request that a finished reply does not depend on, as JSON: the token limit, and labels in `extra`.

    A reply to the same request with other limits serves as well, if it is finished and no longer than this one allows.
    """
    labels = {name: value for name, value in (config.extra or {}).items() if name in LABELS}
    return canonical([request.max_tokens, config.token_limit, labels])


def with_limits(request: ChatRequest, config: EndpointConfig, limits: str) -> tuple[ChatRequest, EndpointConfig]:
    """The request, and its endpoint, with the limits that `limits_of` gave for another one."""
    max_tokens, token_limit, labels = json.loads(limits)
    extra = {name: value for name, value in (config.extra or {}).items() if name not in LABELS} | labels
    changed = config.model_copy(update={"token_limit": token_limit, "extra": extra or None})
    return replace(request, max_tokens=max_tokens), changed


def is_finished(reply: ChatReply, max_tokens: int, limits: str) -> bool:
    """Whether a reply to a request with these limits is also one to a request with `max_tokens`."""
    if reply.finish == "length" or not reply.text:
        return False
    earlier = json.loads(limits)[0]
    return earlier <= max_tokens or (reply.tokens_out is not None and reply.tokens_out <= max_tokens)


def reply_to_row(reply: ChatReply, spent: Usage, execution: str, limits: str = "") -> dict[str, Any]:
    """A reply as a row of the cache. The fields that are added up come first, so that the text need not be parsed."""
    return {
        "digest": reply.digest,
        "endpoint": reply.endpoint,
        "dollars": spent.dollars,
        "tokens": spent.tokens,
        "execution": execution,  # the one that paid
        **({"limits": limits} if limits else {}),
        "tokens_in": reply.tokens_in,
        "tokens_out": reply.tokens_out,
        **({} if reply.tokens_reasoning is None else {"tokens_reasoning": reply.tokens_reasoning}),
        "finish": reply.finish,
        "latency_s": reply.latency_s,
        "text": reply.text,
    }


def reply_from_row(row: Mapping[str, Any]) -> ChatReply:
    names = ("text", "finish", "tokens_in", "tokens_out", "latency_s", "digest", "endpoint")
    return ChatReply(**{name: row[name] for name in names}, cached=True, tokens_reasoning=row.get("tokens_reasoning"))
