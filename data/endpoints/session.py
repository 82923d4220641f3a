"""Sessions of an endpoint pool: submit requests at any time, and take their results one by one in any order.

    with pool.session() as session:
        session.submit(enumerate(requests))
        while session.open_count:
            key, result = session.next_result()
            session.submit([...])       # requests that depend on it

Each endpoint has as many requests in flight as it allows, and a slow endpoint does not delay the others.
"""

import asyncio
import queue
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping
from concurrent.futures import CancelledError, Future
from functools import partial
from types import TracebackType
from typing import Any, cast

from nautile.data.endpoints.batch.queue import BatchQueue
from nautile.data.endpoints.chat_types import ChatFailure, ChatReply, ChatRequest
from nautile.data.endpoints.endpoint import Endpoint

AskResult = ChatReply | ChatFailure
WAITING_S = 2.0  # how often a caller that waits for a result may say so
STILL_RUNNING_S = 1.0  # how often a session that waits for its last replies checks whether the pool was closed


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
        """Answer the waiting requests of an endpoint, one at a time."""
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
