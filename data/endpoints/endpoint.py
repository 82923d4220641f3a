"""One endpoint of a pool: its checks, clients and own server, and the retry loop of a request."""

import asyncio
import logging
import math
import os
import pkgutil
import time
from collections.abc import Awaitable
from dataclasses import replace
from urllib.parse import urlsplit

from nautile.common.errors import ConfigError, Retryable
from nautile.common.retry import retry_async
from nautile.configs.endpoint import EndpointConfig
from nautile.data.endpoints import circuit_breaker
from nautile.data.endpoints.budget import NO_USAGE, Budget, SpendingLimit, Usage
from nautile.data.endpoints.chat_types import (
    CallError,
    ChatFailure,
    ChatReply,
    ChatRequest,
    actual_usage,
    call_row,
    limits_of,
    max_usage,
    reply_cost,
    request_digest,
)
from nautile.data.endpoints.circuit_breaker import CircuitBreaker, Permit
from nautile.data.endpoints.clients import WEB_PAGE, Client, OnHeaders
from nautile.data.endpoints.completions import RawReply
from nautile.data.endpoints.keys import check_key, redact_key
from nautile.data.endpoints.own_server import OwnServer, OwnServerError, ServerCommand, ServerProgram, program_of
from nautile.data.endpoints.rate_limit import RateLimiter
from nautile.data.endpoints.reply_cache import ReplyCache

logger = logging.getLogger(__name__)

WAIT_SAID_EVERY_S = 600.0  # at most so often the log says that an endpoint refuses requests, or does not answer
FIRST_REFUSALS = 8  # if this many of the first requests are all refused, the configuration is at fault, not a request
FIRST_UNREADABLE = 6  # the same for requests with replies that are no chat completion, which may be charged for
CONFIRM_S = 30.0  # within which a request that is sent to see whether the endpoint answers must be answered
CONFIRM_TOKENS = 16
MOST_REFUSALS = 30  # for the rate, of one request
POLL_S = 0.05  # between two looks at whether other requests are answered
CHECK_ATTEMPTS, CHECK_TIMEOUT_S, CHECK_PAUSE_S = 3, 8.0, 5.0  # when an endpoint is checked before anything is sent


def client_for(config: EndpointConfig, on_headers: OnHeaders, url: str = "") -> Client:
    """The client of an endpoint: at its address, or at the `url` of a server that was started for it."""
    # Imported only now: a vendor's SDK takes 1 to 2 s of a core, and most commands send no request.
    client: Client = pkgutil.resolve_name(config.vendor.client)(config, url or config.address, on_headers)
    return client


async def lists_model(name: str, config: EndpointConfig, client: Client) -> bool:
    """Whether the server of an endpoint lists the endpoint's model; False if it does not list its models at all.

    Raises `ConfigError` if it refuses the key or lists other models, `Retryable` naming the URL if it does not answer.
    """
    where = f"endpoint {name!r} at {client.url}"

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
            return False  # it is reachable, but does not support this request
        if error.retryable:
            raise Retryable(f"{where} does not answer: {error.message}") from None
        raise ConfigError(f"{where}: {error.message}") from None
    if names and config.model not in names:
        models = redact_key(", ".join(sorted(names)[:12]), config)
        raise ConfigError(f"endpoint {name!r}: no model {config.model!r} at {client.url}; there are {models}")
    return bool(names)


class Endpoint:
    """One endpoint with its clients, rate limiter, circuit breaker and budget. Used in the pool's event loop.

    If its vendor is a program of this machine, it also has a server, whose processes it starts. `own` is its spending
    limit, `shared` the pool's; `cache` has the replies of its model.
    """

    def __init__(
        self, name: str, config: EndpointConfig, own: SpendingLimit, shared: SpendingLimit, cache: ReplyCache
    ) -> None:
        self.name, self.config, self.budget, self._own_limit = name, config, Budget(own, shared), own
        self.cache = cache
        self._program: ServerProgram | ServerCommand | None = None
        if config.command:
            self._program = ServerCommand.of(config)
        elif config.vendor.program:
            self._program = program_of(config.kind)
        self.concurrency = config.concurrency
        if isinstance(self._program, ServerProgram) and self._program.replicated:
            self.concurrency = min(config.concurrency, os.cpu_count() or 1)
        self.rate_limiter = RateLimiter(config.requests_per_minute, config.tokens_per_minute)
        # When a server goes down, all requests in flight fail; the threshold must not be reached by that alone.
        self.circuit_breaker = CircuitBreaker(self.rate_limiter, threshold=max(5, self.concurrency))
        self.circuit_breaker.confirm = self._confirm_outage
        self.has_answered = False  # whether any request of this execution got a reply
        self.active_count = 0  # requests that are being sent, or wait for their next attempt
        self._excess = 1.0  # the largest cost of a reply, as a multiple of what its request allows
        self._refusals = 0  # since the last reply
        self._unreadable: list[str] = []  # digests of requests, once for each reply that could not be read
        self._confirming = asyncio.Lock()
        self._silent_at = -math.inf  # when the endpoint last did not answer a request that was sent to see that
        self._wait_said_at = -math.inf  # when the log last said why requests wait
        self._confirmations: set[asyncio.Task[None]] = set()
        self._server: OwnServer | None = None
        self._clients: list[Client] = []
        self._idle: asyncio.Queue[Client] = asyncio.Queue()  # own server: each client once per request it can take
        self._starting = asyncio.Lock()

    def check_config(self) -> None:
        """Check address, key and files without sending anything. Raises `ConfigError`."""
        config = self.config
        if isinstance(self._program, ServerCommand):
            for fault in self._program.faults():
                raise ConfigError(f"endpoint {self.name!r}: {fault}")
        elif self._program is not None:
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
        if isinstance(self._program, ServerCommand):
            try:
                await self._start_server()
            except OwnServerError as error:  # a word of the command, or a machine that has no room for the model
                raise ConfigError(f"endpoint {self.name!r}: `command`: {error}") from None
            await lists_model(self.name, self.config, self._clients[0])
            return
        if self._program is not None:
            await self._start_server()
            return
        await lists_model(self.name, self.config, await self._client())

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

    def judge_error(self, error: CallError, digest: str) -> CallError:
        """Decide whether an error concerns one request, or the endpoint as it is configured.

        An endpoint that refuses all of its first requests, or whose first replies are all unreadable, is misconfigured.
        One that has answered is not, if a request is forbidden or finds nothing, or a web page comes in between.
        """
        status = error.status
        if error.reason == "misconfigured" and self.has_answered:
            if status == WEB_PAGE or status.startswith("3"):
                return replace(error, reason="server_error")
            if status in ("403", "404"):
                self._refusals += 1
                return replace(error, reason="refused") if self._refusals < FIRST_REFUSALS else error
        if self.has_answered or error.reason not in ("refused", "invalid_reply"):
            return error
        if error.reason == "refused":
            self._refusals += 1
            if self._refusals < FIRST_REFUSALS:
                return error
            message = f"it has refused all of the first {self._refusals} requests; the last: {error.message}"
            return CallError("misconfigured", f"{message}. See its `extra`, `omit`, `token_limit`", status)
        self._unreadable.append(digest)
        count, requests = len(self._unreadable), len(set(self._unreadable))
        many = requests >= FIRST_UNREADABLE or (requests > 1 and count >= 2 * FIRST_UNREADABLE)
        return self.unreadable(error) if many else error

    def unreadable(self, error: CallError) -> CallError:
        message = f"none of its first {len(self._unreadable)} replies can be read; the last: {error.message}"
        return CallError("misconfigured", f"{message}. Check its `url` and `kind`", error.status, partial=True)

    def on_answered(self) -> None:
        self.has_answered = True
        self._refusals = 0

    def reservation(self, request: ChatRequest) -> Usage:
        """What a request may cost: what it allows, times the most that a reply has exceeded that so far."""
        bound = max_usage(self.config, request)
        return Usage(self._excess * bound.dollars, math.ceil(self._excess * bound.tokens))

    def learn_cost(self, request: ChatRequest, reply: ChatReply) -> None:
        """Learn from the cost of a reply that exceeds what the request allows, so that the next ones reserve more."""
        if reply.tokens_in is None or reply.tokens_out is None:
            return
        bound = max_usage(self.config, request)
        spent = actual_usage(reply, reply_cost(self.config, reply.tokens_in, reply.tokens_out), bound)
        tokens = spent.tokens / bound.tokens
        dollars = spent.dollars / bound.dollars if bound.dollars else 0.0
        self._excess = max(self._excess, tokens, dollars)

    async def book(
        self,
        call: Awaitable[ChatReply | CallError],
        request: ChatRequest,
        digest: str,
        reserved: Usage,
        attempt: int,
        limits: str = "",
    ) -> ChatReply | CallError:
        """Await an attempt at a request, for which `reserved` is reserved; record its result and settle its cost.

        `limits`: of the request (`limits_of`), if its reply may serve one with others. Raises `OSError`.
        """
        # The reservation is settled in any case, even if this task is cancelled.
        # Until the attempt has ended, all of it counts as spent: the vendor may charge for a cancelled request.
        spent, unknown, start_time = NO_USAGE, reserved, time.monotonic()
        try:
            result = await call
            latency = time.monotonic() - start_time
            unknown = reserved if isinstance(result, CallError) and result.may_cost else NO_USAGE
            reply = result if isinstance(result, ChatReply) else None
            cost = None if reply is None else reply_cost(self.config, reply.tokens_in, reply.tokens_out)
            if reply is not None:
                spent = actual_usage(reply, cost, reserved)
            row = call_row(
                *(request, digest, self.name, self.config, result),
                attempt=attempt, latency_s=latency, cost=cost, unknown=unknown,
            )  # fmt: skip
            await self.cache.record(row, reply, spent + unknown, limits)
            return result
        finally:
            await asyncio.shield(self.budget.settle(reserved, spent, unknown))

    def report_error(self, permit: Permit, error: CallError) -> None:
        """Return the permit of a failed attempt, and tell the circuit breaker what the failure means."""
        if error.reason == "misconfigured":
            self.circuit_breaker.fail_all(error)
        if error.reason == "rate_limited":
            self.circuit_breaker.on_rate_limit(permit, error.retry_after or 0.0)
        elif error.reason in ("connection", "timeout", "server_error", "cut", "invalid_reply"):
            self.circuit_breaker.on_failure(permit, error)
        else:
            self.circuit_breaker.on_reply(permit)
        now = time.monotonic()
        if now - self._wait_said_at > WAIT_SAID_EVERY_S and (reason := self.circuit_breaker.waits_for()):
            self._wait_said_at = now
            logger.warning("endpoint %r %s", self.name, reason)

    async def is_own_failure(self, error: CallError, sent_before: int, *, has_fallback: bool) -> bool | None:
        """Whether a request that has failed for a temporary reason has failed for its own (see `ChatFailure.own`).

        It has if the endpoint answers one that was sent since it first failed (`sent_before` were sent before). If none
        is, another one is sent: of those that wait, or a small one of this endpoint's own.
        """
        breaker = self.circuit_breaker
        if breaker.answered > sent_before:
            return None if error.reason in ("connection", "rate_limited") else True
        if has_fallback:
            return None
        if error.reason in ("connection", "rate_limited"):
            return False
        self.active_count -= 1
        try:
            answered = await self._others_are_answered(sent_before)
        finally:
            self.active_count += 1
        # Replies that cannot be read are the endpoint's fault, as long as none could (`unreadable`).
        can_tell = self.has_answered or error.reason != "invalid_reply"
        return answered or (can_tell and await self.answers_another(sent_before))

    async def _others_are_answered(self, sent_before: int) -> bool:
        breaker = self.circuit_breaker
        another: asyncio.Task[None] | None = None
        while breaker.outage is None and breaker.answered <= sent_before:
            if another is None or another.done():
                another = breaker.start_another()
            if another is None and not self.active_count:
                break
            await asyncio.sleep(POLL_S)
        return breaker.answered > sent_before

    async def answers_another(self, sent_before: int) -> bool:
        """Send a small request to see whether the endpoint answers at all; its cost is booked like any other's."""
        breaker = self.circuit_breaker
        async with self._confirming:
            if breaker.answered > sent_before:
                return True
            if time.monotonic() - self._silent_at < circuit_breaker.OUTAGE_S:
                return False
            message = {"role": "user", "content": "Reply with OK."}
            request = ChatRequest(self.name, (message,), CONFIRM_TOKENS, purpose="check", tag="is the endpoint down?")
            reserved = self.reservation(request)
            if await self.budget.reserve(reserved) is not None:
                return True  # nothing more is paid for anyway
            digest, start_time = request_digest(request, self.config), time.monotonic()

            async def ask() -> ChatReply | CallError:
                try:
                    async with asyncio.timeout(CONFIRM_S):
                        raw = await self.complete(request)
                except TimeoutError:
                    return CallError("timeout", f"no answer within {CONFIRM_S:g} s")
                except CallError as error:
                    return error
                return reply_of(raw, digest, self.name, time.monotonic() - start_time)

            result = await self.book(ask(), request, digest, reserved, 1)
            if isinstance(result, ChatReply):
                self.on_answered()
            if isinstance(result, ChatReply) or result.reason == "refused":
                breaker.on_answer()
                return True
            self._silent_at = time.monotonic()
            return False

    def _confirm_outage(self, error: CallError) -> None:
        """See in a task of its own whether the endpoint is down, before the circuit breaker declares that."""

        async def confirm() -> None:
            breaker = self.circuit_breaker
            before = breaker.sent
            try:
                answers = await self.answers_another(before)
            except (OSError, OwnServerError):
                answers = False
            if not answers and breaker.is_open and breaker.answered <= before:
                unreadable = error.reason == "invalid_reply" and not self.has_answered
                breaker.fail_all(self.unreadable(error) if unreadable else error)

        task = asyncio.get_running_loop().create_task(confirm())
        self._confirmations.add(task)
        task.add_done_callback(self._confirmations.discard)

    def outage_failure(self, attempts: int) -> ChatFailure:
        """The failure of a request that is not sent because the circuit breaker has declared an outage."""
        error = self.circuit_breaker.outage
        assert error is not None
        if error.reason == "misconfigured":
            return ChatFailure("misconfigured", f"endpoint {self.name!r}: {error.message}", attempts)
        return ChatFailure("outage", f"endpoint {self.name!r} has stopped answering: {error.message}", attempts)

    def budget_failure(self, limit: SpendingLimit, attempts: int) -> ChatFailure:
        return ChatFailure("endpoint_budget" if limit is self._own_limit else "budget", str(limit), attempts)

    async def close(self) -> None:
        for client in self._clients:
            await client.close()
        if self._server is not None:
            self._server.close()

    async def _client(self) -> Client:
        if not self._clients:
            self._clients = [client_for(self.config, self.rate_limiter.on_headers)]
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
            self._clients = [client_for(self.config, self.rate_limiter.on_headers, url) for url in urls]
            # The queue has clients of the old processes; those in use at this moment are not put back (`complete`).
            while not self._idle.empty():
                self._idle.get_nowait()
            for client in self._clients:
                for _ in range(self.concurrency // len(self._clients)):
                    self._idle.put_nowait(client)


def reply_of(raw: RawReply, digest: str, endpoint: str, latency_s: float | None) -> ChatReply:
    fields = {name: value for name, value in vars(raw).items() if name != "model"}  # a reply is known by its request
    return ChatReply(**fields, latency_s=latency_s, cached=False, digest=digest, endpoint=endpoint)


async def send_request(
    endpoint: Endpoint, request: ChatRequest, digest: str, *, has_fallback: bool
) -> ChatReply | ChatFailure:
    """Send a request, with retries, until it has a reply or no attempt is left.

    `has_fallback`: another endpoint can take it. The reply is on disk when this returns. Raises `OSError` if it cannot
    be written.
    """
    endpoint.active_count += 1
    try:
        return await _send_with_retries(endpoint, request, digest, has_fallback=has_fallback)
    finally:
        endpoint.active_count -= 1


async def _send_with_retries(
    endpoint: Endpoint, request: ChatRequest, digest: str, *, has_fallback: bool
) -> ChatReply | ChatFailure:
    config, breaker, cache = endpoint.config, endpoint.circuit_breaker, endpoint.cache
    limits = limits_of(request, config)
    sent_before: int | None = None  # at the first failed attempt
    error = CallError("outage", "it is down, and another request probes it")
    # What has failed for its own reason in an earlier process, or an earlier call, gets one attempt more.
    given_up = digest in cache.given_up
    attempts = 1 if given_up else config.attempts
    attempt = refusals = 0
    while True:
        attempt += 1
        reserved = endpoint.reservation(request)
        # First the permit, then the budget: a reservation that waits for a permit would block other requests.
        permit = await breaker.acquire(reserved.tokens, has_fallback=has_fallback, request=digest)
        if permit is None:
            return endpoint.outage_failure(attempt - 1)
        if permit == "use_fallback":
            return ChatFailure("outage", f"endpoint {endpoint.name!r}: {error.message}", attempt - 1)
        try:
            cache.check_writable()
            reserved = endpoint.reservation(request)  # a reply that came meanwhile may have cost more than it should
            if (spent_limit := await endpoint.budget.reserve(reserved)) is not None:
                breaker.release(permit)
                return endpoint.budget_failure(spent_limit, attempt - 1)
        except (asyncio.CancelledError, OSError):
            breaker.release(permit)
            raise
        call = _attempt(endpoint, request, digest, permit)
        result = await endpoint.book(call, request, digest, reserved, attempt, limits)
        if isinstance(result, ChatReply):
            return result
        error = result
        message = f"endpoint {endpoint.name!r}: {error.message}"
        if not error.retryable:
            return ChatFailure(error.reason, message, attempt)
        sent_before = breaker.sent if sent_before is None else sent_before
        own: bool | None = None
        if error.reason == "rate_limited" and not has_fallback:
            # It says nothing about the request, which is sent again for as long as any is answered. But vendors also
            # refuse one that alone exceeds the limit.
            refusals += 1
            if breaker.refuses_for_long(config.attempts):
                own = endpoint.has_answered and await endpoint.answers_another(breaker.sent)
                break
            if refusals >= MOST_REFUSALS and breaker.answered > sent_before:
                break
        elif attempt - refusals >= attempts:
            is_known = given_up and error.reason != "connection"
            own = is_known or await endpoint.is_own_failure(error, sent_before, has_fallback=has_fallback)
            break
        # With an open breaker, or after a pause that the rate limiter keeps, the next permit comes with its own delay.
        if not breaker.is_open and not (error.reason == "rate_limited" and error.retry_after):
            await asyncio.sleep(circuit_breaker.BACKOFF.pause_s(attempt, error.retry_after or None))
    failure = ChatFailure(error.reason, message, attempt, own)
    if own and not given_up:
        await cache.give_up(digest, endpoint.name, failure.reason, failure.attempts)
    elif own is False and error.reason == "invalid_reply" and not endpoint.has_answered:
        breaker.fail_all(endpoint.unreadable(error))
        return endpoint.outage_failure(attempt)
    elif own is False and (endpoint.has_answered or error.reason == "rate_limited"):
        breaker.fail_all(error)
        return endpoint.outage_failure(attempt)
    return failure


async def _attempt(endpoint: Endpoint, request: ChatRequest, digest: str, permit: Permit) -> ChatReply | CallError:
    """Send a request once; the permit is returned in any case."""
    start_time = time.monotonic()
    try:
        raw = await endpoint.complete(request)
    except CallError as raised:
        error = endpoint.judge_error(raised, digest)
        endpoint.report_error(permit, error)
        return error
    except BaseException:
        endpoint.circuit_breaker.release(permit, sent=True)
        raise
    endpoint.on_answered()
    tokens = None if raw.tokens_in is None or raw.tokens_out is None else raw.tokens_in + raw.tokens_out
    endpoint.circuit_breaker.on_reply(permit, tokens)
    reply = reply_of(raw, digest, endpoint.name, time.monotonic() - start_time)
    endpoint.learn_cost(request, reply)
    return reply
