"""Shared code of the vendors' clients: HTTP connections, keys, request JSON, parsing of replies and errors.

A client sends one chat completion and returns a `RawReply`, or raises a `CallError` that says whether to try again. The
SDKs' own retries are disabled, because the pool counts, rate-limits and pays for every attempt. Keys are read from the
environment when a request is sent; a reply that contains the key is rejected, and messages are written without it.

Each HTTP client gets only 8 connections, because httpcore looks at all connections of a client for every request
(bench/corpus/endpoints.py, 1,000 requests with 256 in flight, a server that takes 50 ms: one client 415 requests/s and
2.4 ms of a core each, 32 clients 889/s and 1.1 ms).
"""

import asyncio
import functools
import json
import os
import ssl
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import httpx2

from common.errors import ConfigError
from configs.endpoint import OWN_KINDS, EndpointConfig
from data.endpoints.chat_types import CallError, ChatRequest, output_constraint

CONNECT_S = 5.0
MAX_MESSAGE = 300  # characters of an error message
CONNECTIONS_PER_CLIENT = 8
SHORTEST_KEY = 16  # characters; a shorter one ("EMPTY", "none") is no secret and occurs in ordinary text
Result = TypeVar("Result")
OnHeaders = Callable[[Mapping[str, str]], None]  # called with the headers of every response


@dataclass(frozen=True)
class RawReply:
    """A completion as the endpoint sent it. Token counts are None if it stated none; `text` is empty without content.

    For a reply with the field `refusal`, `text` is that field and `finish` is "refusal".
    """

    text: str
    finish: str
    tokens_in: int | None
    tokens_out: int | None
    tokens_reasoning: int | None = None


class Client(Protocol):
    """One endpoint at one address. The calls raise `CallError`."""

    url: str

    async def complete(self, request: ChatRequest) -> RawReply: ...

    async def models(self) -> list[str] | None: ...  # None: the server does not list them, or accepts any name

    async def close(self) -> None: ...


def http_clients(config: EndpointConfig, on_headers: OnHeaders) -> list[httpx2.AsyncClient]:
    """Create HTTP clients with `concurrency` connections in all; `on_headers` sees every response."""

    async def on_response(response: httpx2.Response) -> None:
        on_headers(response.headers)
        if response.status_code == 200 and response.headers.get("content-type", "").startswith("text/html"):
            message = f"{response.url} answers with a web page (HTML), not as a chat API: check `url`"
            raise CallError("misconfigured", message, "html")

    trust_environment = config.kind not in OWN_KINDS  # no proxy settings for a server that we start ourselves
    return [
        httpx2.AsyncClient(
            timeout=httpx2.Timeout(config.timeout_s, connect=CONNECT_S),
            # No limit of connections: the breaker bounds the requests in flight, and one that waited here for a
            # connection would spend its timeout on that.
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=2 * CONNECTIONS_PER_CLIENT),
            verify=_tls_context(trust_environment),
            trust_env=trust_environment,
            event_hooks={"response": [on_response]},
        )
        for _ in range(-(-config.concurrency // CONNECTIONS_PER_CLIENT))
    ]


@functools.cache
def _tls_context(trust_environment: bool) -> ssl.SSLContext:
    """The TLS context, cached because loading the CA certificates takes 20 ms."""
    return httpx2.create_ssl_context(trust_env=trust_environment)


def check_key(name: str, config: EndpointConfig) -> None:
    """Raise `ConfigError` if the environment variable for the endpoint's key is unset or holds no valid key."""
    if config.kind == "mistral" and not config.key_variable:
        raise ConfigError(f"endpoint {name!r}: kind 'mistral' needs `key_variable`, the variable that holds its key")
    if not config.key_variable:
        return
    key = key_of(config)
    where = f"endpoint {name!r}: the environment variable {config.key_variable} (its `key_variable`)"
    if not key:
        raise ConfigError(f"{where} is not set; export it with the key, or choose another endpoint")
    if not (key.isascii() and key.isprintable() and " " not in key):
        raise ConfigError(f"{where} holds characters that no key has; export it again")


def key_of(config: EndpointConfig) -> str:
    """Read the key from the environment, without surrounding white space; empty if there is none."""
    return os.environ.get(config.key_variable, "").strip() if config.key_variable else ""


def repeats_key(text: str, config: EndpointConfig) -> bool:
    """Whether `text` contains the endpoint's key."""
    key = key_of(config)
    return len(key) >= SHORTEST_KEY and key in text


def redact_key(text: str, config: EndpointConfig) -> str:
    """Replace the endpoint's key in an error message, in case the server repeats it."""
    return text.replace(key_of(config), "[key]") if repeats_key(text, config) else text


def chat_body(request: ChatRequest, config: EndpointConfig) -> dict[str, Any]:
    """The JSON body of a request, the same for both vendors and their batch interfaces except for field names."""
    body: dict[str, Any] = {
        "model": config.model,
        "messages": list(request.messages),
        config.token_limit or "max_tokens": request.max_tokens,
        **(config.extra or {}),
    }
    omitted = config.omit or ()
    if "temperature" not in omitted:
        body["temperature"] = request.temperature
    if "seed" not in omitted:
        body["random_seed" if config.kind == "mistral" else "seed"] = request.seed
    constraint = output_constraint(request, config)
    if "grammar" in constraint and config.kind != "mistral":
        body |= constraint
    if "schema" in constraint:
        form = {"name": "reply", "schema": constraint["schema"], "strict": True}
        body["response_format"] = {"type": "json_schema", "json_schema": form}
    return body


def parse_completion(reply: Any, config: EndpointConfig) -> RawReply:
    """Parse a chat completion, given as JSON data.

    Raises `TypeError`, `LookupError` or `AttributeError` if it is none, `CallError` if it contains the endpoint's key.
    """
    choice, usage = reply["choices"][0], reply.get("usage")
    message, finish = choice["message"], choice.get("finish_reason") or "stop"
    content = message.get("content") or ""
    if isinstance(content, list):  # chunks: keep the text, drop the thinking
        content = "".join(chunk.get("text") or "" for chunk in content)
    if not content and message.get("refusal"):
        content, finish = message["refusal"], "refusal"
    # A count that is missing is not stated; the text, which is paid for, is kept.
    counts = (usage.get("prompt_tokens"), usage.get("completion_tokens")) if usage else (None, None)
    counts += (((usage or {}).get("completion_tokens_details") or {}).get("reasoning_tokens"),)
    valid_counts = all(count is None or (type(count) is int and count >= 0) for count in counts)
    if not (isinstance(content, str) and isinstance(finish, str) and valid_counts):
        raise TypeError("not text and whole numbers")
    if repeats_key(content, config):
        raise CallError("leaked_key", "the reply repeats the API key, so it is not kept")
    # Mistral says "model_length" where the context is full.
    return RawReply(content, "length" if finish == "model_length" else finish, *counts)


def parse_reply_body(content: bytes, url: str, config: EndpointConfig) -> RawReply:
    """Parse the body of a chat completion. Raises `CallError` if it is none."""
    try:
        return parse_completion(json.loads(content), config)
    except (ValueError, RecursionError):
        raise CallError("invalid_reply", f"the answer of {url} is not JSON of a chat completion") from None
    except (AttributeError, TypeError, LookupError):
        raise CallError("invalid_reply", f"no chat completion in the answer of {url}") from None


async def call_with_timeout(
    call: Awaitable[Result], config: EndpointConfig, url: str, to_call_error: Callable[[Exception], CallError | None]
) -> Result:
    """Await an SDK's call within the endpoint's timeout, which covers the whole response, slow bodies included.

    `to_call_error` translates the SDK's errors; the key is removed from the message. An error for which it returns None
    is raised unchanged.
    """
    try:
        return await asyncio.wait_for(call, config.timeout_s)
    except TimeoutError:
        raise CallError("timeout", f"{url} did not answer within {config.timeout_s:g} s") from None
    except Exception as raised:
        error = to_call_error(raised)
        if error is None:
            raise
        raise CallError(error.reason, safe_message(error.message, config), error.status, error.retry_after) from None


def safe_message(text: str, config: EndpointConfig) -> str:
    """Shorten a server's message to one line without the key."""
    return " ".join(redact_key(text, config).split())[:MAX_MESSAGE]


def transport_error(error: BaseException, url: str) -> CallError:
    """Translate an error below HTTP, or from the response hook of `http_clients`, into a `CallError`."""
    if isinstance(error, CallError):
        return error
    # A connection that was never made cost nothing, so it is no "timeout", which counts as paid for.
    if isinstance(error, httpx2.TimeoutException) and not isinstance(error, httpx2.ConnectTimeout):
        return CallError("timeout", f"{url} did not answer in time")
    if isinstance(error, (httpx2.RemoteProtocolError, httpx2.ReadError, httpx2.DecodingError)):
        return CallError("cut", f"the answer of {url} broke off ({error or type(error).__name__})")
    if isinstance(error, ValueError):
        return CallError("invalid_reply", f"the answer of {url} is not JSON of a chat completion")
    return CallError("connection", f"{url} cannot be reached ({error or type(error).__name__})")
