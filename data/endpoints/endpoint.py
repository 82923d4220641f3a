"""One endpoint of a pool: its checks, clients and own server, and the retry loop of a request."""

import asyncio
import logging
import os
import time
from dataclasses import replace
from urllib.parse import urlsplit

from common.errors import ConfigError, Retryable
from common.retry import retry_async
from configs.endpoint import EndpointConfig
from data.endpoints import checker, circuit_breaker, embedded
from data.endpoints.budget import NO_USAGE, Budget, SpendingLimit
from data.endpoints.chat_types import (
    UNKNOWN_COST,
    CallError,
    ChatFailure,
    ChatReply,
    ChatRequest,
    actual_usage,
    call_row,
    max_usage,
    reply_cost,
)
from data.endpoints.circuit_breaker import CircuitBreaker, Permit
from data.endpoints.clients import Client, OnHeaders, RawReply, check_key
from data.endpoints.own_server import OwnServer, ServerProgram
from data.endpoints.rate_limit import RateLimiter
from data.endpoints.reply_cache import ReplyCache

logger = logging.getLogger(__name__)

FIRST_REFUSALS = 8  # if this many of the first requests are all refused, the configuration is at fault, not a request
PROGRAMS: dict[str, ServerProgram] = {"embedded": embedded.PROGRAM, "checker": checker.PROGRAM}  # by kind
CHECK_ATTEMPTS, CHECK_TIMEOUT_S, CHECK_PAUSE_S = 3, 8.0, 5.0  # when an endpoint is checked before anything is sent


def client_for(config: EndpointConfig, url: str, on_headers: OnHeaders) -> Client:
    """The client of an endpoint at `url`."""
    # Imported late: OpenAI's SDK takes 1.6 s of a core and Mistral's 1.1 s, and most commands send no request.
    if config.kind == "mistral":
        from data.endpoints.mistral_client import MISTRAL_URL, MistralClient

        return MistralClient(config, url or MISTRAL_URL, on_headers)
    from data.endpoints.openai_client import OpenAIClient

    return OpenAIClient(config, url, on_headers)


class Endpoint:
    """One endpoint with its clients, rate limiter, circuit breaker and budget. Used in the pool's event loop.

    An endpoint of an own kind ("embedded", "checker") also has a server, whose processes it starts. `own` is its
    spending limit, `shared` the pool's.
    """

    def __init__(self, name: str, config: EndpointConfig, own: SpendingLimit, shared: SpendingLimit) -> None:
        self.name, self.config, self.budget, self._own_limit = name, config, Budget(own, shared), own
        self._program = PROGRAMS.get(config.kind)  # None: the server is not ours to start
        self.concurrency = config.concurrency
        if self._program is not None and self._program.replicated:
            self.concurrency = min(config.concurrency, os.cpu_count() or 1)
        self.rate_limiter = RateLimiter(config.requests_per_minute, config.tokens_per_minute)
        # When a server goes down, all requests in flight fail; the threshold must not be reached by that alone.
        self.circuit_breaker = CircuitBreaker(self.rate_limiter, threshold=max(5, self.concurrency))
        self.has_answered = False  # whether any request of this execution got a reply
        self._refusals = 0
        self._server: OwnServer | None = None
        self._clients: list[Client] = []
        self._idle: asyncio.Queue[Client] = asyncio.Queue()  # own server: each client once per request it can take
        self._starting = asyncio.Lock()

    def check_config(self) -> None:
        """Check address, key and files without sending anything. Raises `ConfigError`."""
        config = self.config
        if self._program is not None:
            if config.model != (served := self._program.model):
                raise ConfigError(
                    f"endpoint {self.name!r}: the model of kind {config.kind!r} is {served!r}, not {config.model!r}"
                )
            self._program.arguments()
            return
        parts = urlsplit(config.url)
        if config.url and (parts.scheme not in ("http", "https") or not parts.hostname):
            raise ConfigError(f"endpoint {self.name!r}: `url` {config.url!r} is not an http(s) address")
        check_key(self.name, config)

    async def check_reachable(self) -> None:
        """Check that the endpoint answers, accepts the key and has the model; an own server is started instead.

        Raises `ConfigError`, `Retryable` naming the URL if it does not answer, or `OwnServerError`.
        """
        if self._program is not None:
            await self._start_server()
            return
        client = await self._client()
        where = f"endpoint {self.name!r} at {client.url}"

        async def list_models() -> list[str] | None:
            try:
                async with asyncio.timeout(CHECK_TIMEOUT_S):
                    return await client.models()
            except TimeoutError:
                raise CallError("timeout", f"no answer within {CHECK_TIMEOUT_S:g} s") from None

        try:
            names = await retry_async(
                list_models,
                replace(
                    circuit_breaker.BACKOFF,
                    attempts=CHECK_ATTEMPTS,
                    longest_s=CHECK_PAUSE_S,
                    longest_retry_after_s=CHECK_PAUSE_S,
                ),
                should_retry=lambda e: isinstance(e, CallError) and e.retryable and e.reason != "invalid_reply",
                retry_after_s=lambda e: e.retry_after if isinstance(e, CallError) else None,
            )
        except CallError as error:
            if error.reason == "invalid_reply":
                return  # it is reachable, but does not support this request
            if error.retryable:
                raise Retryable(f"{where} does not answer: {error.message}") from None
            raise ConfigError(f"{where}: {error.message}") from None
        if names and self.config.model not in names:
            models = ", ".join(sorted(names)[:12])
            raise ConfigError(
                f"endpoint {self.name!r}: no model {self.config.model!r} at {client.url}; there are {models}"
            )

    async def complete(self, request: ChatRequest) -> RawReply:
        """Send a request once. Raises `CallError` or `OwnServerError`."""
        if self._program is None:
            try:
                check_key(self.name, self.config)
            except ConfigError as error:
                raise CallError("misconfigured", str(error), "no key") from None
            return await (await self._client()).complete(request)
        try:
            await self._start_server()
        except ConfigError as error:
            raise CallError("misconfigured", str(error), "not started") from None
        client = await self._idle.get()
        try:
            return await client.complete(request)
        finally:
            if client in self._clients:  # unless its process was restarted meanwhile
                self._idle.put_nowait(client)

    def judge_refusal(self, error: CallError) -> CallError:
        """Classify a refusal: an endpoint that refuses all of its first requests is misconfigured."""
        if error.reason == "refused" and not self.has_answered:
            self._refusals += 1
            if self._refusals >= FIRST_REFUSALS:
                message = f"it has refused all of the first {self._refusals} requests; the last: {error.message}"
                return CallError("misconfigured", f"{message}. See its `extra`, `omit`, `token_limit`", error.status)
        return error

    def report_error(self, permit: Permit, error: CallError) -> None:
        """Return the permit of a failed attempt, and tell the circuit breaker what the failure means."""
        if error.reason == "misconfigured":
            self.circuit_breaker.fail_all(error)
        if error.reason == "rate_limited":
            self.circuit_breaker.on_rate_limit(permit, error.retry_after or 0.0)
        elif error.reason in ("connection", "timeout", "server_error", "cut"):
            self.circuit_breaker.on_failure(permit, error)
        else:
            self.circuit_breaker.on_reply(permit)

    def outage_failure(self, attempts: int) -> ChatFailure:
        """The failure of a request that is not sent because the circuit breaker has declared an outage."""
        error = self.circuit_breaker.outage
        assert error is not None
        if error.reason == "misconfigured":
            return ChatFailure("misconfigured", f"endpoint {self.name!r}: {error.message}", attempts)
        return ChatFailure("outage", f"endpoint {self.name!r} has stopped answering: {error.message}", attempts)

    def budget_failure(self, limit: SpendingLimit, attempts: int) -> ChatFailure:
        """The failure of a request that does not fit into a spending limit any more."""
        return ChatFailure("endpoint_budget" if limit is self._own_limit else "budget", str(limit), attempts)

    async def close(self) -> None:
        for client in self._clients:
            await client.close()
        if self._server is not None:
            self._server.close()

    async def _client(self) -> Client:
        if not self._clients:
            self._clients = [client_for(self.config, self.config.url, self.rate_limiter.on_headers)]
        return self._clients[0]

    async def _start_server(self) -> None:
        """Start the endpoint's own server on first use, and again if one of its processes has died."""
        assert self._program is not None
        async with self._starting:
            if self._server is None:
                self._server = OwnServer(self._program, self.concurrency)
            elif self._server.alive and self._clients:
                return
            else:
                logger.warning("endpoint %r: restarting its server, one of its processes has died", self.name)
            # Spawn in this thread, not in a worker: the processes die with the thread that started them, and this one
            # lives as long as the pool.
            self._server.spawn()
            urls = await asyncio.to_thread(self._server.wait)
            for client in self._clients:
                await client.close()
            self._clients = [client_for(self.config, url, self.rate_limiter.on_headers) for url in urls]
            # The queue has clients of the old processes; those in use at this moment are not put back (`complete`).
            while not self._idle.empty():
                self._idle.get_nowait()
            for client in self._clients:
                for _ in range(self.concurrency // len(self._clients)):
                    self._idle.put_nowait(client)


def reply_of(raw: RawReply, digest: str, endpoint: str, latency_s: float | None) -> ChatReply:
    """Complete a client's `RawReply` to a `ChatReply`."""
    return ChatReply(
        text=raw.text,
        finish=raw.finish,
        tokens_in=raw.tokens_in,
        tokens_out=raw.tokens_out,
        latency_s=latency_s,
        cached=False,
        digest=digest,
        endpoint=endpoint,
        tokens_reasoning=raw.tokens_reasoning,
    )


async def send_request(
    endpoint: Endpoint, request: ChatRequest, digest: str, cache: ReplyCache, *, has_fallback: bool
) -> ChatReply | ChatFailure:
    """Send a request, with retries, until it has a reply or no attempt is left.

    `has_fallback`: another endpoint can take it. The reply is on disk when this returns. Raises `OSError` if it cannot
    be written.
    """
    config, breaker = endpoint.config, endpoint.circuit_breaker
    reserved = max_usage(config, request)
    error = CallError("outage", "it is down, and another request probes it")
    for attempt in range(1, config.attempts + 1):
        # First the permit, then the budget: a reservation that waits for a permit would block other requests.
        permit = await breaker.acquire(reserved.tokens, has_fallback=has_fallback)
        if permit is None:
            return endpoint.outage_failure(attempt - 1)
        if permit == "use_fallback":
            return ChatFailure("outage", f"endpoint {endpoint.name!r}: {error.message}", attempt - 1)
        try:
            if (spent_limit := await endpoint.budget.reserve(reserved)) is not None:
                breaker.release(permit)
                return endpoint.budget_failure(spent_limit, attempt - 1)
        except asyncio.CancelledError:
            breaker.release(permit)
            raise
        # From here on the reservation is settled in any case, even if this task is cancelled.
        # Until the attempt has ended, all of it counts as spent: the vendor may charge for a cancelled request.
        spent, unknown, start_time = NO_USAGE, reserved, time.monotonic()
        try:
            result = await _attempt(endpoint, request, digest, permit)
            latency = time.monotonic() - start_time
            unknown = reserved if isinstance(result, CallError) and result.reason in UNKNOWN_COST else NO_USAGE
            if isinstance(result, ChatReply):
                cost = reply_cost(config, result.tokens_in, result.tokens_out)
                spent = actual_usage(result, cost, reserved)
                row = call_row(
                    request, digest, endpoint.name, config, result, attempt=attempt, latency_s=latency, cost=cost
                )
                await cache.record(row, result, spent)
                return result
            error = result
            row = call_row(
                request, digest, endpoint.name, config, error, attempt=attempt, latency_s=latency, unknown=unknown
            )
            await cache.record(row, spent=unknown)
        finally:
            await asyncio.shield(endpoint.budget.settle(reserved, spent, unknown))
        if not error.retryable:
            return ChatFailure(error.reason, f"endpoint {endpoint.name!r}: {error.message}", attempt)
        # After a Retry-After, or with an open breaker, the next permit comes with a delay of its own.
        if attempt < config.attempts and error.retry_after is None and not breaker.is_open:
            await asyncio.sleep(circuit_breaker.BACKOFF.pause_s(attempt))
    return ChatFailure(error.reason, f"endpoint {endpoint.name!r}: {error.message}", config.attempts)


async def _attempt(endpoint: Endpoint, request: ChatRequest, digest: str, permit: Permit) -> ChatReply | CallError:
    """Send a request once; the permit is returned in any case."""
    start_time = time.monotonic()
    try:
        raw = await endpoint.complete(request)
    except CallError as raised:
        error = endpoint.judge_refusal(raised)
        endpoint.report_error(permit, error)
        return error
    except BaseException:
        endpoint.circuit_breaker.release(permit)
        raise
    endpoint.has_answered = True
    tokens = None if raw.tokens_in is None or raw.tokens_out is None else raw.tokens_in + raw.tokens_out
    endpoint.circuit_breaker.on_reply(permit, tokens)
    latency = time.monotonic() - start_time
    return reply_of(raw, digest, endpoint.name, latency)
