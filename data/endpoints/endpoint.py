"""One endpoint of a pool: how it is checked, reached, asked, and what its failures mean for the other requests."""

import asyncio
import logging
import os
import time
from urllib.parse import urlsplit

from common.errors import ConfigError, Retryable
from configs.endpoint import EndpointConfig
from data.endpoints.budget import NO_USAGE, Budget, SpendingLimit
from data.endpoints.chat_types import (
    CallError,
    ChatFailure,
    ChatReply,
    ChatRequest,
    actual_usage,
    call_row,
    max_usage,
    reply_cost,
)
from data.endpoints.circuit_breaker import CircuitBreaker, Permit, backoff
from data.endpoints.clients import Client, RawReply, check_key, client_for
from data.endpoints.embedded import MODEL, EmbeddedServer, model_file
from data.endpoints.rate_limit import RateLimiter
from data.endpoints.reply_cache import ReplyCache

log = logging.getLogger(__name__)

CHECKS, REACH_S = 3, 8.0  # tries to reach an endpoint before anything is sent, and how long one waits


class Endpoint:
    """One endpoint: its client or, embedded, its replicas and their clients; its gate and its money.

    `own` is its budget, `shared` the pool's. Lives in the pool's loop.
    """

    def __init__(self, name: str, config: EndpointConfig, own: SpendingLimit, shared: SpendingLimit) -> None:
        self.name, self.config, self.purse = name, config, Budget(own, shared)
        embedded = config.kind == "embedded"
        self.concurrency = min(config.concurrency, os.cpu_count() or 1) if embedded else config.concurrency
        # Many in flight fail together when a server goes down: that is one breakdown, not many in a row.
        self.pace = RateLimiter(config.requests_per_minute, config.tokens_per_minute)
        self.gate = CircuitBreaker(self.pace, threshold=max(5, self.concurrency))
        self._local: EmbeddedServer | None = None
        self._clients: list[Client] = []
        self._free: asyncio.Queue[Client] = asyncio.Queue()
        self._starting = asyncio.Lock()

    def check(self) -> None:
        """What can be seen without asking. Raises `ConfigError`."""
        config = self.config
        if config.kind == "embedded":
            if config.model != MODEL:
                raise ConfigError(f"endpoint {self.name!r}: the embedded model is {MODEL!r}, not {config.model!r}")
            model_file()
            return
        parts = urlsplit(config.url)
        if config.url and (parts.scheme not in ("http", "https") or not parts.hostname):
            raise ConfigError(f"endpoint {self.name!r}: `url` {config.url!r} is not an http(s) address")
        check_key(self.name, config)

    async def reach(self) -> None:
        """Whether the endpoint answers, takes the key and has the model. Embedded ones are started instead."""
        if self.config.kind == "embedded":
            await self._started()
            return
        for attempt in range(1, CHECKS + 1):
            try:
                client = await self._client()
                async with asyncio.timeout(REACH_S):
                    names = await client.models()
            except (CallError, TimeoutError) as caught:
                error = caught if isinstance(caught, CallError) else CallError("timeout", f"silent for {REACH_S:g} s")
                if error.reason == "invalid_reply":
                    return  # it answers, if not to this question
                if not error.worth_another:
                    raise ConfigError(f"endpoint {self.name!r} at {client.url}: {error.message}") from None
                if attempt == CHECKS:
                    where = f"endpoint {self.name!r} at {client.url}"
                    raise Retryable(f"{where} does not answer: {error.message}") from None
                await asyncio.sleep(min(5.0, error.retry_after or backoff(attempt)))
                continue
            if names and self.config.model not in names:
                known = ", ".join(sorted(names)[:12])
                raise ConfigError(f"endpoint {self.name!r}: no model {self.config.model!r} at {client.url}; {known}")
            return

    async def complete(self, request: ChatRequest) -> RawReply:
        """Ask once. Raises `CallError`."""
        if self.config.kind != "embedded":
            try:
                check_key(self.name, self.config)
            except ConfigError as error:
                raise CallError("misconfigured", str(error), "no key") from None
            return await (await self._client()).complete(request)
        try:
            await self._started()
        except (ConfigError, Retryable) as error:
            raise CallError("connection", str(error), "not started") from None
        client = await self._free.get()
        try:
            return await client.complete(request)
        finally:
            if client in self._clients:  # not if its replicas were started anew meanwhile
                self._free.put_nowait(client)

    def tell_gate(self, turn: Permit, error: CallError) -> None:
        """What a failed attempt means for the other requests. Ends the turn."""
        if error.reason == "misconfigured":
            self.gate.give_up(error)
        if error.reason == "rate_limited":
            self.gate.refused(turn, error.retry_after or 0.0)
        elif error.reason in ("connection", "timeout", "server_error", "cut"):
            self.gate.failed(turn, error)
        else:
            self.gate.answered(turn)

    def given_up(self, attempts: int) -> ChatFailure:
        """The failure of a request that is not sent any more."""
        error = self.gate.given_up
        assert error is not None
        if error.reason == "misconfigured":
            return ChatFailure("misconfigured", f"endpoint {self.name!r}: {error.message}", attempts)
        return ChatFailure("outage", f"endpoint {self.name!r} has stopped answering: {error.message}", attempts)

    async def close(self) -> None:
        for client in self._clients:
            await client.close()
        if self._local is not None:
            self._local.close()

    async def _client(self) -> Client:
        if not self._clients:
            self._clients = [client_for(self.config, self.config.url, self.pace.told)]
        return self._clients[0]

    async def _started(self) -> None:
        """The embedded endpoint, running: started when first needed, and anew when one of its processes has died."""
        async with self._starting:
            if self._local is None:
                self._local = EmbeddedServer(self.concurrency)
            elif self._local.alive and self._clients:
                return
            else:
                log.warning("endpoint %r: a process of the embedded model has ended; it is started again", self.name)
            self._local.spawn()  # in this thread, which stays as long as the pool
            urls = await asyncio.to_thread(self._local.wait)
            for client in self._clients:
                await client.close()
            self._clients = [client_for(self.config, url, self.pace.told) for url in urls]
            while not self._free.empty():
                self._free.get_nowait()
            for client in self._clients:
                self._free.put_nowait(client)


async def ask_now(
    endpoint: Endpoint, request: ChatRequest, digest: str, ledger: ReplyCache, *, elsewhere: bool
) -> ChatReply | ChatFailure:
    """Ask until there is a reply, or no point in asking again. `elsewhere`: another endpoint can be asked instead.

    The reply is on disk when this returns. Raises `OSError` if it cannot be kept.
    """
    config, gate = endpoint.config, endpoint.gate
    reserved = max_usage(config, request)
    error = CallError("outage", "it is down and waits for a probe")
    for attempt in range(1, config.attempts + 1):
        turn = await gate.admit(reserved.tokens, elsewhere=elsewhere)
        if turn is None:
            return endpoint.given_up(attempt - 1)
        if turn == "elsewhere":
            return ChatFailure("outage", f"endpoint {endpoint.name!r}: {error.message}", attempt - 1)
        try:
            if (spent_up := await endpoint.purse.reserve(reserved)) is not None:
                gate.abandoned(turn)
                return ChatFailure("budget", str(spent_up), attempt - 1)
        except asyncio.CancelledError:
            gate.abandoned(turn)
            raise
        spent, began = NO_USAGE, time.monotonic()
        try:
            outcome = await _attempt(endpoint, request, digest, turn)
            latency = time.monotonic() - began
            if isinstance(outcome, ChatReply):
                cost = reply_cost(config, outcome.tokens_in, outcome.tokens_out)
                spent = actual_usage(outcome, cost, reserved)
                row = call_row(
                    request, digest, endpoint.name, config, outcome, attempt=attempt, latency_s=latency, cost=cost
                )
                await ledger.record(row, outcome, spent)
                return outcome
        finally:
            await asyncio.shield(endpoint.purse.settle(reserved, spent))
        error = outcome
        row = call_row(request, digest, endpoint.name, config, error, attempt=attempt, latency_s=latency)
        await ledger.record(row)
        if not error.worth_another:
            return ChatFailure(error.reason, f"endpoint {endpoint.name!r}: {error.message}", attempt)
        if attempt < config.attempts and error.retry_after is None and not gate.open:
            await asyncio.sleep(backoff(attempt))  # else the gate makes it wait
    return ChatFailure(error.reason, f"endpoint {endpoint.name!r}: {error.message}", config.attempts)


async def _attempt(endpoint: Endpoint, request: ChatRequest, digest: str, turn: Permit) -> ChatReply | CallError:
    """Ask once; the turn is ended, whatever comes."""
    began = time.monotonic()
    try:
        said = await endpoint.complete(request)
    except CallError as error:
        endpoint.tell_gate(turn, error)
        return error
    except BaseException:
        endpoint.gate.abandoned(turn)
        raise
    total = None if said.tokens_in is None or said.tokens_out is None else said.tokens_in + said.tokens_out
    endpoint.gate.answered(turn, total)
    latency = time.monotonic() - began
    return ChatReply(said.text, said.finish, said.tokens_in, said.tokens_out, latency, False, digest, endpoint.name)
