"""The pool of chat endpoints, used by distillation, judges and evaluation: answers many requests concurrently.

It runs an asyncio event loop in its own thread; `ask` is an ordinary blocking call. A reply is on disk before it is
returned, and is never paid for twice, even after a kill -9. A request that fails gives a `ChatFailure`; the caller
decides whether to stop because a whole endpoint has failed (`raise_for_outage`).
"""

import asyncio
import logging
import queue
import threading
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, cast

from nautile.common.errors import ConfigError, Retryable
from nautile.common.events import Emit
from nautile.configs.endpoint import EndpointConfig
from nautile.data.endpoints.batch import BatchQueue, check_no_pending_jobs
from nautile.data.endpoints.budget import NO_USAGE, SpendingLimit, Usage
from nautile.data.endpoints.chat_types import (
    TRANSIENT,
    UNPAID,
    ChatFailure,
    ChatReply,
    ChatRequest,
    call_row,
    is_finished,
    limits_of,
    request_digest,
    with_limits,
)
from nautile.data.endpoints.endpoint import Endpoint, send_request
from nautile.data.endpoints.reply_cache import BATCHES, DiskState, ReplyCache
from nautile.data.endpoints.reply_source import ReplySource

AskResult = ChatReply | ChatFailure
WAITING_S = 2.0  # how often a caller that waits for a result may say so
STILL_RUNNING_S = 1.0  # how often a session that waits for its last replies checks whether the pool was closed

logger = logging.getLogger(__name__)

SMALLEST_WINDOW = 16_384  # requests: enough that an endpoint 20 times slower than the others does not delay them
WINDOW_PER_CONNECTION = 4  # requests for each of an endpoint's connections
FIRST_POLL_S, LONGEST_POLL_S = 0.05, 2.0  # pause between checks of a request that another process has sent


class AskSession:
    """A context manager for one thread. `open_count`: requests without a result so far.

    On entry, endpoints with an outage are tried again, and batch jobs are resumed. After an error in the block nothing
    more is sent, and the requests in flight, which are paid for, are awaited; batch jobs are left to the next session.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        check: Callable[[ChatRequest], object],
        answer: Callable[[ChatRequest], Awaitable[AskResult]],
        endpoints: Mapping[str, Endpoint],
        batch_queues: Mapping[str, BatchQueue],
    ) -> None:
        self._loop, self._check, self._answer = loop, check, answer
        self._endpoints, self._batch_queues = endpoints, batch_queues
        self.open_count = 0
        # Filled by the event loop's thread, emptied by the caller's.
        self._results: queue.SimpleQueue[tuple[Hashable, Any]] = queue.SimpleQueue()
        self._waiting: dict[str, deque[tuple[Hashable, ChatRequest]]] = defaultdict(deque)  # by endpoint
        self._workers: dict[str, set[asyncio.Task[None]]] = defaultdict(set)  # by endpoint
        self._stopped = False

    def __enter__(self) -> "AskSession":
        self._loop.call_soon_threadsafe(self._begin)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        pool_closed = isinstance(error, CancelledError)  # by another thread
        interrupted = pool_closed or (error is not None and not isinstance(error, Exception))  # Ctrl-C
        if pool_closed or self._loop.is_closed():
            return
        ending = asyncio.run_coroutine_threadsafe(self._end(cancel=interrupted), self._loop)
        # After Ctrl-C nothing is awaited; else wait, unless the pool is closed meanwhile.
        while not interrupted:
            try:
                return ending.result(STILL_RUNNING_S)
            except TimeoutError:
                if not self._loop.is_running():
                    return

    def submit(self, requests: Iterable[tuple[Hashable, ChatRequest]], *, more_follow: bool | None = None) -> None:
        """Send (key, request) pairs; the key identifies the result.

        `more_follow`: whether more requests will be submitted soon (None: unchanged); a batch endpoint then waits for
        them before it makes a job that is not full. Raises `ConfigError` for a request to an unknown endpoint.
        """
        items = list(requests)
        for _, request in items:
            self._check(request)
        self.open_count += len(items)
        self._loop.call_soon_threadsafe(self._enqueue, items, more_follow)

    def expect(self, key: Hashable, future: "Future[Any]") -> None:
        """Deliver the result of any other future through `next_result`, like the result of a request."""
        self.open_count += 1

        def put(finished: "Future[Any]") -> None:
            error = CancelledError() if finished.cancelled() else finished.exception()
            self._results.put((key, finished.result() if error is None else cast(Exception, error)))

        future.add_done_callback(put)

    def next_result(self, while_waiting: Callable[[], object] | None = None) -> tuple[Hashable, Any]:
        """Wait for the next result; returns (key, result). Raises the error that ended a request, as on a full disk.

        `while_waiting` is called every few seconds until there is one.
        """
        assert self.open_count, "nothing was submitted"
        while True:
            try:
                key, result = self._results.get(timeout=None if while_waiting is None else WAITING_S)
                break
            except queue.Empty:
                assert while_waiting is not None
                while_waiting()
        self.open_count -= 1
        if isinstance(result, Exception):
            raise result
        return key, result

    @property
    def has_result(self) -> bool:
        """Whether `next_result` would return without waiting."""
        return not self._results.empty()

    def _begin(self) -> None:
        for name, endpoint in self._endpoints.items():
            endpoint.circuit_breaker.reset()
            endpoint.circuit_breaker.start_another = partial(self._start_another, name)
            endpoint.cache.reset()
        for batch_queue in self._batch_queues.values():
            batch_queue.resume()

    def _enqueue(self, items: list[tuple[Hashable, ChatRequest]], more_follow: bool | None) -> None:
        """Queue requests, and start as many workers per endpoint as it may have requests in flight."""
        for batch_queue in self._batch_queues.values():
            batch_queue.more_follow = batch_queue.more_follow if more_follow is None else more_follow
        for key, request in items:
            self._waiting[request.endpoint].append((key, request))
        for name in {request.endpoint for _, request in items}:
            is_batch = name in self._batch_queues
            capacity = self._batch_queues[name].capacity if is_batch else self._endpoints[name].concurrency
            for _ in range(min(capacity - len(self._workers[name]), len(self._waiting[name]))):
                self._start_worker(name)

    def _start_worker(self, name: str) -> "asyncio.Task[None]":
        task = self._loop.create_task(self._work(name))
        self._workers[name].add(task)
        task.add_done_callback(self._report_cancellation)
        return task

    def _start_another(self, name: str) -> "asyncio.Task[None] | None":
        """Send one more of the waiting requests of an endpoint, beyond its concurrency; None if there is none.

        The others in progress have all failed, and may be at fault themselves.
        """
        if self._stopped or name in self._batch_queues or not self._waiting[name]:
            return None
        return self._start_worker(name)

    def _report_cancellation(self, task: "asyncio.Task[None]") -> None:
        # A callback and not a part of `_work`, because a task may be cancelled before it begins, if the pool is closed.
        if task.cancelled():
            self._results.put((None, CancelledError()))

    async def _work(self, name: str) -> None:
        try:
            while self._waiting[name] and not self._stopped:
                key, request = self._waiting[name].popleft()
                try:
                    result: AskResult | Exception = await self._answer(request)
                except Exception as error:
                    result = error
                    # At once, and not when the caller hears of it: what cannot be written must not be paid for.
                    self._stopped = True
                self._results.put((key, result))
                # Its place is taken by another worker (`_start_another`).
                if name not in self._batch_queues and len(self._workers[name]) > self._endpoints[name].concurrency:
                    break
        finally:
            # Here, not in a done callback, which runs later: requests enqueued from now on need a new worker.
            self._workers[name] -= {cast("asyncio.Task[None]", asyncio.current_task())}
            self._endpoints[name].circuit_breaker.no_other()

    async def _end(self, *, cancel: bool) -> None:
        """Stop sending; await the requests in flight, or cancel them. Waits for batch jobs are always cancelled."""
        self._stopped = True
        for name, workers in self._workers.items():
            batch_queue = self._batch_queues.get(name)
            if batch_queue is not None:
                batch_queue.more_follow = False
                batch_queue.drop_queued()
            if batch_queue is not None or cancel:
                for task in workers:
                    task.cancel()
        await asyncio.gather(*(task for workers in self._workers.values() for task in workers), return_exceptions=True)


OnReply = Callable[[int, AskResult], None]
Value = TypeVar("Value")


class EndpointPool:
    """The endpoints of a configuration. A context manager; own servers start with their first request.

    `replies`: where replies and batch jobs in progress are stored. `budget_dollars` and `budget_tokens` (0: no limit)
    cover all processes of the same execution; replies that another execution paid for cost nothing.
    """

    def __init__(
        self,
        endpoints: dict[str, EndpointConfig],
        replies: ReplySource | Path,
        emit: Emit,
        budget_dollars: float = 0.0,
        budget_tokens: int = 0,
    ) -> None:
        # Reply caches, one per model: what they contain decides how much of the budgets is left.
        source = replies if isinstance(replies, ReplySource) else ReplySource(replies)
        self._configs = endpoints
        disk = DiskState()
        self._caches = {
            model: ReplyCache(source, model, emit, disk) for model in dict.fromkeys(e.model for e in endpoints.values())
        }
        for name, config in endpoints.items():
            if config.mode != "batch":
                check_no_pending_jobs(self._cache(name).folder / BATCHES, name)
        caches = self._caches.values()
        spent = sum((cache.total for cache in caches), NO_USAGE)
        unknown = sum((usage for cache in caches for usage in cache.unknown.values()), NO_USAGE)
        self._emit = emit
        limit = Usage(budget_dollars, budget_tokens)
        self._limit = SpendingLimit(limit, spent, "the budget", self._warn_of_budget, unknown)
        # The event loop in its thread, and the endpoints that live in it.
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="endpoints", daemon=True)
        self._thread.start()
        self._endpoints: dict[str, Endpoint] = {}
        for name, config in endpoints.items():
            limit = Usage(config.budget_dollars, config.budget_tokens)
            spent, unknown = self._cache(name).spent[name], self._cache(name).unknown[name]
            if limit.dollars or budget_dollars:
                _warn_without_price(name, config)
            own = SpendingLimit(limit, spent, f"the budget of endpoint {name!r}", self._warn_of_budget, unknown)
            self._endpoints[name] = Endpoint(name, config, own, self._limit, self._cache(name))
            self._endpoints[name].has_answered = spent != NO_USAGE  # it answered an earlier process
        self._batch_queues = {
            name: BatchQueue(self._endpoints[name]) for name, config in endpoints.items() if config.mode == "batch"
        }
        # Requests in progress by digest: a second request with the same digest waits for the first.
        self._in_flight: dict[str, asyncio.Future[AskResult]] = {}
        self._wait_is_logged = False

    def __enter__(self) -> "EndpointPool":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def spent(self) -> float:
        """Dollars of all replies so far, including those of earlier processes of the execution."""
        return self._limit.spent.dollars

    @property
    def unknown(self) -> float:
        """Upper bound in dollars on the cost of attempts without a reply (cut off, late or unreadable)."""
        return self._limit.unknown.dollars

    def waits_for(self) -> str:
        """Why requests wait at this moment, for a progress line; empty if none does."""
        reasons = {name: endpoint.circuit_breaker.waits_for() for name, endpoint in self._endpoints.items()}
        return "; ".join(f"endpoint {name!r} {reason}" for name, reason in reasons.items() if reason)

    def window(self, names: Iterable[str]) -> int:
        """How many requests a session should have open to keep these endpoints busy.

        A live endpoint needs several per connection, a batch endpoint all jobs it may have in progress and the next.
        """
        sizes = [
            self._batch_queues[name].capacity
            if name in self._batch_queues
            else WINDOW_PER_CONNECTION * self.config(name).concurrency
            for name in names
        ]
        return max([SMALLEST_WINDOW, *sizes])

    def config(self, name: str) -> EndpointConfig:
        """The configuration of an endpoint. Raises `ConfigError` if there is none of that name."""
        if name not in self._configs:
            raise ConfigError(f"no endpoint {name!r}; [endpoints] has {sorted(self._configs)}")
        return self._configs[name]

    def check(self) -> None:
        """Check every endpoint: first keys, addresses and files, then whether it answers.

        Raises `ConfigError` for what the user must fix, `OwnServerError`, and `Retryable` naming the URL of an endpoint
        that does not answer, unless one of its fallbacks does.
        """
        for endpoint in self._endpoints.values():
            endpoint.check_config()
        unreachable: dict[str, Retryable] = {}
        for name, endpoint in self._endpoints.items():
            try:
                self._run_in_loop(endpoint.check_reachable())
            except Retryable as error:
                unreachable[name] = error
        for name, retryable in unreachable.items():
            if set(self._configs[name].fallback) <= unreachable.keys():
                raise retryable
            logger.warning("%s; continuing, because a fallback answers", retryable)

    def ask(self, requests: Sequence[ChatRequest], on_reply: OnReply | None = None) -> list[AskResult]:
        """Send requests and return their results in order; `on_reply(index, result)` is called as each arrives.

        The failure of a single request is a result, not an exception. Raises `ConfigError` for an unknown endpoint,
        `OSError` if replies cannot be written, and `OwnServerError`. If `on_reply` raises, nothing more is sent, and
        the requests in flight, which are paid for, are awaited; batch jobs are left to the next call.
        """
        results: dict[Hashable, AskResult] = {}
        with self.session() as session:
            session.submit(enumerate(requests))
            while session.open_count:
                index, result = session.next_result()
                results[index] = result
                if on_reply is not None:
                    on_reply(cast(int, index), result)
        return [results[index] for index in range(len(requests))]

    def session(self) -> AskSession:
        """Open a session, in which new requests may be submitted while others are in progress."""
        return AskSession(self._loop, self._candidates, self._answer, self._endpoints, self._batch_queues)

    def close(self) -> None:
        """Cancel the requests in flight, stop the own servers, close the files."""
        if self._loop.is_closed():
            return
        self._run_in_loop(self._shut_down())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        for cache in self._caches.values():
            cache.close()

    def _run_in_loop(self, work: Coroutine[Any, Any, Value]) -> Value:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _shut_down(self) -> None:
        """Cancel all other tasks of the event loop, then close the batch queues and the endpoints.

        Replies that have arrived are written first: they are paid for.
        """
        writers = [cache.writer for cache in self._caches.values() if cache.writer is not None]
        kept_tasks = {asyncio.current_task(), *writers}
        other_tasks = [task for task in asyncio.all_tasks() if task not in kept_tasks]
        for task in other_tasks:
            task.cancel()
        await asyncio.gather(*other_tasks, return_exceptions=True)
        await asyncio.gather(*writers, return_exceptions=True)
        for batch_queue in self._batch_queues.values():
            await batch_queue.close()
        for endpoint in self._endpoints.values():
            await endpoint.close()
        await asyncio.get_running_loop().shutdown_default_executor()

    def _candidates(self, request: ChatRequest) -> list[str]:
        """The endpoints that may answer a request: its own, then fallbacks. Raises `ConfigError` for an unknown one."""
        config = self.config(request.endpoint)
        names = [request.endpoint, *(config.fallback if request.purpose in config.fallback_for else ())]
        for name in names:
            self.config(name)
        return names

    async def _answer(self, request: ChatRequest) -> AskResult:
        """Answer a request from the cache of any candidate, else by the first candidate that answers now."""
        names = self._candidates(request)
        digests = {name: request_digest(request, self._configs[name]) for name in names}
        for name in names:
            if (cached := await self._cached(request, name, digests[name])) is not None:
                return cached
        first_failure: ChatFailure | None = None
        for name in names:
            result = await self._answer_at(name, request, digests[name], has_fallback=name != names[-1])
            if isinstance(result, ChatReply):
                return result
            first_failure = first_failure or result
            if result.reason not in UNPAID | TRANSIENT:
                return result  # the request or the configuration is at fault, so a fallback would not help
        assert first_failure is not None
        return first_failure

    def _warn_of_budget(self, limit: SpendingLimit) -> None:
        logger.warning("%s", limit)
        self._emit("metric", name="budget_spent_share", step=0, value=limit.spent_share)

    def _cache(self, name: str) -> ReplyCache:
        return self._caches[self._configs[name].model]

    async def _cached(self, request: ChatRequest, name: str, digest: str) -> ChatReply | None:
        """The cached reply, None if there is none; a hit is recorded in the ledger."""
        reply = self._cache(name).reply(digest) or self._finished_reply(request, name)
        if reply is not None:
            reply = replace(reply, endpoint=name)
            await self._cache(name).record(call_row(request, reply.digest, name, self._configs[name], reply))
        return reply

    def _finished_reply(self, request: ChatRequest, name: str) -> ChatReply | None:
        """A cached reply to the same request with another token limit, if it is finished."""
        cache, config = self._cache(name), self._configs[name]
        for limits in cache.limits - {"", limits_of(request, config)}:
            reply = cache.reply(request_digest(*with_limits(request, config, limits)))
            if reply is not None and is_finished(reply, request.max_tokens, limits):
                return reply
        return None

    async def _answer_at(self, name: str, request: ChatRequest, digest: str, *, has_fallback: bool) -> AskResult:
        """Answer a request from one endpoint, so that requests of the same digest are paid for once."""
        # Wait for requests of the same digest in this process.
        while True:
            if (cached := await self._cached(request, name, digest)) is not None:
                return cached
            if digest not in self._in_flight:
                break
            result = await asyncio.shield(self._in_flight[digest])
            if isinstance(result, ChatFailure):
                return result
            # The reply is in the cache now: the next iteration reads it, and records that it cost nothing.
        in_flight = self._in_flight[digest] = asyncio.get_running_loop().create_future()
        result = ChatFailure("outage", "cancelled", 0)  # what waiters get if this task is cancelled
        cache, batch_queue = self._cache(name), self._batch_queues.get(name)
        try:
            # Wait for a request of the same digest in another process, then look for its reply.
            pause = FIRST_POLL_S
            while not (cache.locks.acquire(digest) and await cache.claim(digest)):
                if pause == LONGEST_POLL_S and not self._wait_is_logged:
                    self._wait_is_logged = True
                    logger.warning("endpoint %r: waiting for replies that another process has asked for", name)
                await asyncio.sleep(pause)
                pause = min(LONGEST_POLL_S, 2 * pause)
                if cache.claims is not None:  # the claim of a host stays; what ends the wait is the reply
                    cache.refresh()
                    if cache.reply(digest) is not None:
                        break
            # Whoever held the lock has written its reply to a shard of its own, which is not indexed here yet.
            cache.refresh()
            if (cached := await self._cached(request, name, digest)) is not None:
                result = cached
            elif batch_queue is not None:
                result = await batch_queue.ask(digest, request)
            else:
                result = await send_request(self._endpoints[name], request, digest, has_fallback=has_fallback)
            return result
        finally:
            # A job keeps the locks of its requests until it has ended, even if the session that asked is over: no other
            # process may send them. The job may be of another endpoint for the same model, whose fallback this one is.
            if not any(queue.has_in_job(digest) for queue in self._batch_queues.values()):
                cache.locks.release(digest)
                if cache.claims is not None:
                    cache.claims.release(digest, answered=isinstance(result, ChatReply))
            del self._in_flight[digest]
            in_flight.set_result(result)


def _warn_without_price(name: str, config: EndpointConfig) -> None:
    """Say that a budget in dollars does not limit an endpoint that may cost something, but has no price."""
    if config.key_variable and not config.has_price:
        logger.warning(
            "endpoint %r has no price, so no budget in dollars limits it: set its dollars_per_million_in and _out, "
            "or a budget_tokens",
            name,
        )


def raise_for_outage(results: Sequence[AskResult], *, unpaid_allowed: bool = False) -> None:
    """Raise if the failures among `results` mean that a whole endpoint has failed, not single requests.

    Raises `ConfigError` if an endpoint refuses its key, model or address, or if the budget is spent, except with
    `unpaid_allowed` (the caller can use a part of the replies); `Retryable` if an endpoint has stopped answering, or if
    every request failed for temporary reasons. A request that fails while others are answered is no outage.
    """
    failures = [result for result in results if isinstance(result, ChatFailure)]
    for failure in failures:
        if failure.reason == "misconfigured":
            raise ConfigError(failure.message)
    for failure in failures:
        if failure.reason in UNPAID and not unpaid_allowed:
            raise ConfigError(f"{failure.message}; raise it and run again: what is paid for is kept")
    for failure in failures:
        if failure.reason == "outage":
            raise Retryable(failure.message)
    for failure in failures:
        if failure.unfinished and failure.own is False:
            raise Retryable(f"no request was answered; the last failure: {failure.message}")
    if failures and len(failures) == len(results) and all(f.unfinished and not f.own for f in failures):
        raise Retryable(f"no request was answered; the last failure: {failures[-1].message}")
