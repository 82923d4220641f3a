"""The pool of chat endpoints that distillation, judge and evaluation ask: many requests in, as many results out.

Inside it is asynchronous, in a thread of its own; outside it is a plain call. A reply is on disk before it is handed
out and is never asked for again, also after a kill -9. What one request suffers is its own `ChatFailure`; what the
whole endpoint suffers (`raise_for_outage`) is for the caller to stop at.
"""

import asyncio
import hashlib
import queue
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from configs.emit import Emit
from configs.schema import EndpointConfig
from configs.section import ConfigError, Retryable
from data.budget import Budget
from data.calls import (
    TRANSIENT,
    ChatFailure,
    ChatReply,
    ChatRequest,
    dollars,
    most_dollars,
    request_digest,
)
from data.clients import Answered
from data.endpoint import Endpoint
from data.ledger import Ledger
from data.retry import CallError, backoff

__all__ = ["ChatFailure", "ChatReply", "ChatRequest", "EndpointPool", "raise_for_outage"]

Outcome = ChatReply | ChatFailure
OnReply = Callable[[int, Outcome], None]
Value = TypeVar("Value")


class EndpointPool:
    """Asks the endpoints of a configuration. A context manager; an embedded endpoint starts when first asked.

    `cache`: the file of replies. `budget_dollars` (0: none) counts what earlier processes spent in the same file.
    """

    def __init__(
        self, endpoints: dict[str, EndpointConfig], cache: Path, emit: Emit, budget_dollars: float = 0.0
    ) -> None:
        self._configs = endpoints
        self._ledger = Ledger(cache, emit)
        self._budget = Budget(budget_dollars, self._ledger.spent)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="endpoints", daemon=True)
        self._thread.start()
        self._endpoints = {name: Endpoint(name, config) for name, config in endpoints.items()}
        self._flying: dict[str, asyncio.Future[Outcome]] = {}

    def __enter__(self) -> "EndpointPool":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def spent(self) -> float:
        """Dollars of all replies so far, earlier processes' too."""
        return self._budget.spent

    def config(self, name: str) -> EndpointConfig:
        """The endpoint's section. Raises `ConfigError` if there is none of that name."""
        if name not in self._configs:
            raise ConfigError(f"no endpoint {name!r}; [endpoints] has {sorted(self._configs)}")
        return self._configs[name]

    def check(self) -> None:
        """See that every endpoint can be asked: first keys, addresses and files, then whether it answers.

        Raises `ConfigError` for what the operator must mend, `Retryable` naming the URL of one that does not answer.
        """
        for endpoint in self._endpoints.values():
            endpoint.check()
        for endpoint in self._endpoints.values():
            self._wait(endpoint.reach())

    def ask(self, requests: Sequence[ChatRequest], on_reply: OnReply | None = None) -> list[Outcome]:
        """A result for every request, in their order; `on_reply(index, result)` is called here as each comes in.

        Never raises for a request's own failure. Raises `ConfigError` for an endpoint that there is not and `OSError`
        when replies cannot be kept. If `on_reply` raises, what is under way is cancelled.
        """
        for request in requests:
            self.config(request.endpoint)
        arrived: queue.SimpleQueue[tuple[int, Outcome] | None] = queue.SimpleQueue()
        work = asyncio.run_coroutine_threadsafe(self._answer_all(requests, arrived), self._loop)
        work.add_done_callback(lambda _: arrived.put(None))
        results: dict[int, Outcome] = {}
        try:
            while (one := arrived.get()) is not None:
                results[one[0]] = one[1]
                if on_reply is not None:
                    on_reply(*one)
            work.result()
        except ExceptionGroup as group:
            raise group.exceptions[0] from None
        finally:
            work.cancel()
        return [results[index] for index in range(len(requests))]

    def close(self) -> None:
        """Stop what is under way, end the embedded endpoint, close the file."""
        if self._loop.is_closed():
            return
        self._wait(self._shut())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._ledger.close()

    def _wait(self, work: Coroutine[Any, Any, Value]) -> Value:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _shut(self) -> None:
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        for endpoint in self._endpoints.values():
            await endpoint.close()
        await asyncio.get_running_loop().shutdown_default_executor()

    async def _answer_all(self, requests: Sequence[ChatRequest], arrived: queue.SimpleQueue) -> None:
        waiting: dict[str, deque[int]] = defaultdict(deque)
        for index, request in enumerate(requests):
            waiting[request.endpoint].append(index)

        async def work_off(indices: deque[int]) -> None:
            while indices:
                index = indices.popleft()
                arrived.put((index, await self._answer(requests[index])))

        async with asyncio.TaskGroup() as group:
            for name, indices in waiting.items():
                self._endpoints[name].gate.reset()
                for _ in range(min(self._endpoints[name].concurrency, len(indices))):
                    group.create_task(work_off(indices))

    async def _answer(self, request: ChatRequest) -> Outcome:
        """From the file, from a twin under way, or by asking."""
        digest = request_digest(request, self._configs[request.endpoint])
        while True:
            if (known := self._ledger.reply(digest)) is not None:
                await self._ledger.record(self._event(request, digest, known))
                return known
            if digest not in self._flying:
                break
            outcome = await asyncio.shield(self._flying[digest])
            if isinstance(outcome, ChatFailure):
                return outcome
        flying = self._flying[digest] = asyncio.get_running_loop().create_future()
        outcome: Outcome = ChatFailure("outage", "cancelled", 0)
        try:
            outcome = await self._ask(request, digest)
            return outcome
        finally:
            del self._flying[digest]
            flying.set_result(outcome)

    async def _ask(self, request: ChatRequest, digest: str) -> Outcome:
        """Ask until there is a reply, or no point in asking again."""
        config, endpoint = self._configs[request.endpoint], self._endpoints[request.endpoint]
        for attempt in range(1, config.attempts + 1):
            turn = await endpoint.gate.admit()
            if turn is None:
                return endpoint.given_up(attempt - 1)
            reserved = most_dollars(config, request)
            cost, error = 0.0, None
            began = time.monotonic()
            try:
                if not await self._budget.reserve(reserved):
                    endpoint.gate.abandoned(turn)
                    return self._no_money(attempt - 1)
                try:
                    began = time.monotonic()
                    said = await endpoint.complete(request)
                    endpoint.gate.answered(turn)
                    cost = dollars(config, said.tokens_in, said.tokens_out)
                    return await self._keep(request, digest, said, time.monotonic() - began, attempt, cost)
                finally:
                    await asyncio.shield(self._budget.settle(reserved, reserved if cost is None else cost))
            except CallError as caught:
                error = caught
            except asyncio.CancelledError:
                endpoint.gate.abandoned(turn)
                raise
            endpoint.tell_gate(turn, error, attempt)
            latency = time.monotonic() - began
            await self._ledger.record(self._event(request, digest, error, attempt=attempt, latency_s=latency))
            if not error.worth_another:
                return ChatFailure(error.reason, f"endpoint {request.endpoint!r}: {error.message}", attempt)
            if attempt < config.attempts and error.reason != "rate_limited" and not endpoint.gate.open:
                await asyncio.sleep(backoff(attempt))  # else the gate makes it wait
        return ChatFailure(error.reason, f"endpoint {request.endpoint!r}: {error.message}", config.attempts)

    async def _keep(
        self, request: ChatRequest, digest: str, said: Answered, latency_s: float, attempt: int, cost: float | None
    ) -> ChatReply:
        reply = ChatReply(said.text, said.finish, said.tokens_in, said.tokens_out, latency_s, False, digest)
        event = self._event(request, digest, reply, attempt=attempt, latency_s=latency_s, dollars=cost)
        await self._ledger.record(event, reply, cost)
        return reply

    def _event(
        self,
        request: ChatRequest,
        digest: str,
        outcome: ChatReply | CallError,
        attempt: int = 0,
        latency_s: float = 0.0,
        dollars: float | None = 0.0,
    ) -> dict[str, Any]:
        """The ledger row of an attempt; attempt 0 is a remembered reply, which costs nothing."""
        row: dict[str, Any] = {
            "endpoint": request.endpoint,
            "model": self._configs[request.endpoint].model,
            "purpose": request.purpose,
            "tag": request.tag,
            "digest": digest,
            "attempt": attempt,
            "cached": isinstance(outcome, ChatReply) and outcome.cached,
            "latency_s": latency_s,
            "dollars": dollars,
        }
        if isinstance(outcome, CallError):
            return {**row, "status": outcome.status, "error": outcome.message, "dollars": 0.0}
        said = hashlib.sha256(outcome.text.encode("utf-8", "replace")).hexdigest()
        counts = {"tokens_in": outcome.tokens_in, "tokens_out": outcome.tokens_out}
        return {**row, **counts, "status": "ok", "finish": outcome.finish, "reply": said}

    def _no_money(self, attempts: int) -> ChatFailure:
        limit = self._budget.limit
        return ChatFailure("budget", f"of the budget of ${limit:g}, ${self.spent:.4f} are spent", attempts)


def raise_for_outage(outcomes: Sequence[Outcome]) -> None:
    """Stop at what is wrong with an endpoint and not with single requests.

    Raises `ConfigError` if one refuses its key, model or address, and `Retryable` if one has stopped answering, or if
    every request of several failed for passing reasons.
    """
    failures = [one for one in outcomes if isinstance(one, ChatFailure)]
    for failure in failures:
        if failure.reason == "misconfigured":
            raise ConfigError(failure.message)
    for failure in failures:
        if failure.reason == "outage":
            raise Retryable(failure.message)
    if failures and len(failures) == len(outcomes) and all(failure.reason in TRANSIENT for failure in failures):
        raise Retryable(f"no request was answered; the last failure: {failures[-1].message}")
