"""The pool of chat endpoints that distillation, judge and evaluation ask: many requests in, as many results out.

Inside it is asynchronous, in a thread of its own; outside it is a plain call. A reply is on disk before it is handed
out and is never asked for again, also after a kill -9. What one request suffers is its own `ChatFailure`; what the
whole endpoint suffers (`raise_for_outage`) is for the caller to stop at.
"""

import asyncio
import logging
import queue
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from common.errors import ConfigError, Retryable
from common.events import Emit
from configs.endpoint import EndpointConfig
from data.endpoints.batch.jobs import refuse_forgotten_jobs
from data.endpoints.batch.queue import BatchQueue, jobs_folder
from data.endpoints.budget import NO_USAGE, SpendingLimit, Usage
from data.endpoints.chat_types import TRANSIENT, ChatFailure, ChatReply, ChatRequest, call_row, request_digest
from data.endpoints.endpoint import Endpoint, ask_now
from data.endpoints.reply_cache import ReplyCache

__all__ = ["ChatFailure", "ChatReply", "ChatRequest", "EndpointPool", "raise_for_outage"]

logger = logging.getLogger(__name__)

AskResult = ChatReply | ChatFailure
OnReply = Callable[[int, AskResult], None]
Value = TypeVar("Value")


class EndpointPool:
    """Asks the endpoints of a configuration. A context manager; an embedded endpoint starts when first asked.

    `cache`: the file of replies; batch jobs under way are kept in a folder beside it. `budget_dollars` and
    `budget_tokens` (0: none) count what earlier processes spent in the same file.
    """

    def __init__(
        self,
        endpoints: dict[str, EndpointConfig],
        cache: Path,
        emit: Emit,
        budget_dollars: float = 0.0,
        budget_tokens: int = 0,
    ) -> None:
        refuse_forgotten_jobs(jobs_folder(cache), [name for name, one in endpoints.items() if one.mode == "batch"])
        self._configs = endpoints
        self._ledger = ReplyCache(cache, emit)
        self._budget = SpendingLimit(Usage(budget_dollars, budget_tokens), self._ledger.total, "the budget")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="endpoints", daemon=True)
        self._thread.start()
        self._endpoints = {name: self._endpoint(name, config) for name, config in endpoints.items()}
        self._desks = {
            name: BatchQueue(endpoint, jobs_folder(cache), self._ledger)
            for name, endpoint in self._endpoints.items()
            if endpoint.config.mode == "batch"
        }
        self._flying: dict[str, asyncio.Future[AskResult]] = {}

    def _endpoint(self, name: str, config: EndpointConfig) -> Endpoint:
        limit = Usage(config.budget_dollars, config.budget_tokens)
        own = SpendingLimit(limit, self._ledger.spent.get(name, NO_USAGE), f"the budget of endpoint {name!r}")
        return Endpoint(name, config, own, self._budget)

    def __enter__(self) -> "EndpointPool":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def spent(self) -> float:
        """Dollars of all replies so far, earlier processes' too."""
        return self._budget.spent.dollars

    @property
    def spent_tokens(self) -> int:
        """Tokens of prompts and replies so far, earlier processes' too."""
        return self._budget.spent.tokens

    def pace(self) -> dict[str, dict[str, float | int | None]]:
        """Of each endpoint that was asked: attempts sent by this process, how many of them were refused for the rate
        (429), and the requests a second that it is asked at (None: as many as there are)."""
        paces = {name: endpoint.pace for name, endpoint in self._endpoints.items() if endpoint.pace.sent_count}
        return {
            name: {
                "sent": pace.sent_count,
                "refused": pace.refused_count,
                "refused_share": pace.refused_count / pace.sent_count,
                "requests_per_s": pace.requests.rate if pace.requests.rate < float("inf") else None,
            }
            for name, pace in paces.items()
        }

    def preferred_requests(self, names: Iterable[str]) -> int:
        """How many requests to hand over at a time so that none of these endpoints waits for more: a few rounds of
        what is asked live, and all the jobs that a batch interface may have under way."""
        configs = [self.config(name) for name in names]
        wanted = [
            c.batch.requests_per_job * c.batch.jobs_at_once if c.mode == "batch" else 4 * c.concurrency for c in configs
        ]
        return max([1024, *wanted])

    def config(self, name: str) -> EndpointConfig:
        """The endpoint's section. Raises `ConfigError` if there is none of that name."""
        if name not in self._configs:
            raise ConfigError(f"no endpoint {name!r}; [endpoints] has {sorted(self._configs)}")
        return self._configs[name]

    def check(self) -> None:
        """See that every endpoint can be asked: first keys, addresses and files, then whether it answers.

        Raises `ConfigError` for what the operator must mend, `Retryable` naming the URL of one that does not answer
        and for which no other answers.
        """
        for endpoint in self._endpoints.values():
            endpoint.check()
        silent: dict[str, Retryable] = {}
        for name, endpoint in self._endpoints.items():
            try:
                self._wait(endpoint.reach())
            except Retryable as error:
                silent[name] = error
        for name, error in silent.items():
            if set(self._configs[name].fallback) <= silent.keys():
                raise error
            logger.warning("%s; it is not waited for, as there are others to ask in its place", error)

    def ask(self, requests: Sequence[ChatRequest], on_reply: OnReply | None = None) -> list[AskResult]:
        """A result for every request, in their order; `on_reply(index, result)` is called here as each comes in.

        Never raises for a request's own failure. Raises `ConfigError` for an endpoint that there is not and `OSError`
        when replies cannot be kept. If `on_reply` raises, what is under way is cancelled.
        """
        for request in requests:
            for name in self._order(request):
                self.config(name)
        arrived: queue.SimpleQueue[tuple[int, AskResult] | None] = queue.SimpleQueue()
        work = asyncio.run_coroutine_threadsafe(self._answer_all(requests, arrived), self._loop)
        work.add_done_callback(lambda _: arrived.put(None))
        results: dict[int, AskResult] = {}
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
        for one in (*self._desks.values(), *self._endpoints.values()):
            await one.close()
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
            for endpoint in self._endpoints.values():
                endpoint.gate.reset()
            for desk in self._desks.values():
                desk.resume()
            for name, indices in waiting.items():
                desk = self._desks.get(name)
                together = desk.capacity if desk else self._endpoints[name].concurrency
                for _ in range(min(together, len(indices))):
                    group.create_task(work_off(indices))

    def _order(self, request: ChatRequest) -> list[str]:
        """The endpoints that may answer a request, the one that was asked first."""
        config = self.config(request.endpoint)
        return [request.endpoint, *(config.fallback if request.purpose in config.fallback_for else ())]

    async def _answer(self, request: ChatRequest) -> AskResult:
        """From the file, whoever answered then; else by the first endpoint of the order that does."""
        names = self._order(request)
        digests = {name: request_digest(request, self._configs[name]) for name in names}
        for name in names:
            if (known := await self._remembered(request, name, digests[name])) is not None:
                return known
        first: ChatFailure | None = None
        for name in names:
            outcome = await self._answer_at(name, request, digests[name], elsewhere=name != names[-1])
            if isinstance(outcome, ChatReply):
                return outcome
            first = first or outcome
            if outcome.reason != "budget" and outcome.reason not in TRANSIENT:
                return outcome  # it is about the request, or for the operator to mend
        assert first is not None
        return first

    async def _remembered(self, request: ChatRequest, name: str, digest: str) -> ChatReply | None:
        known = self._ledger.reply(digest)
        if known is not None:
            known = replace(known, endpoint=name)
            await self._ledger.record(call_row(request, digest, name, self._configs[name], known))
        return known

    async def _answer_at(self, name: str, request: ChatRequest, digest: str, *, elsewhere: bool) -> AskResult:
        """By asking one endpoint, or from a twin under way there."""
        while True:
            if (known := await self._remembered(request, name, digest)) is not None:
                return known
            if digest not in self._flying:
                break
            outcome = await asyncio.shield(self._flying[digest])
            if isinstance(outcome, ChatFailure):
                return outcome
        flying = self._flying[digest] = asyncio.get_running_loop().create_future()
        outcome: AskResult = ChatFailure("outage", "cancelled", 0)
        try:
            if name in self._desks:
                outcome = await self._desks[name].ask(digest, request)
            else:
                endpoint = self._endpoints[name]
                outcome = await ask_now(endpoint, request, digest, self._ledger, elsewhere=elsewhere)
            return outcome
        finally:
            del self._flying[digest]
            flying.set_result(outcome)


def raise_for_outage(outcomes: Sequence[AskResult]) -> None:
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
