"""One endpoint of a pool: how it is checked, reached, asked, and what its failures mean for the other requests."""

import asyncio
import logging
import os
from urllib.parse import urlsplit

from configs.endpoint import EndpointConfig
from configs.section import ConfigError, Retryable
from data.budget import Budget, Purse
from data.calls import CallError, ChatFailure, ChatRequest
from data.clients import Answered, Client, check_key, client_for
from data.local_endpoint import MODEL, LocalEndpoint, model_file
from data.pace import Pace
from data.retry import Gate, Turn, backoff

log = logging.getLogger(__name__)

CHECKS, REACH_S = 3, 8.0  # tries to reach an endpoint before anything is sent, and how long one waits


class Endpoint:
    """One endpoint: its client or, embedded, its replicas and their clients; its gate and its money.

    `own` is its budget, `shared` the pool's. Lives in the pool's loop.
    """

    def __init__(self, name: str, config: EndpointConfig, own: Budget, shared: Budget) -> None:
        self.name, self.config, self.purse = name, config, Purse(own, shared)
        embedded = config.kind == "embedded"
        self.concurrency = min(config.concurrency, os.cpu_count() or 1) if embedded else config.concurrency
        # Many in flight fail together when a server goes down: that is one breakdown, not many in a row.
        self.pace = Pace(config.requests_per_minute, config.tokens_per_minute)
        self.gate = Gate(self.pace, threshold=max(5, self.concurrency))
        self._local: LocalEndpoint | None = None
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

    async def complete(self, request: ChatRequest) -> Answered:
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

    def tell_gate(self, turn: Turn, error: CallError) -> None:
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
                self._local = LocalEndpoint(self.concurrency)
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
