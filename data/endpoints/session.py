"""Requests that are answered while more of them are still being made: results come in any order, one after another.

    with pool.session() as session:
        session.submit(enumerate(requests))
        while session.open_count:
            key, result = session.next_result()
            session.submit([...])       # what follows from it

As many requests of each endpoint are in flight as it allows, and an endpoint that is slow holds up no other.
"""

import asyncio
import queue
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping
from concurrent.futures import CancelledError, Future
from types import TracebackType
from typing import Any, cast

from data.endpoints.batch.queue import BatchQueue
from data.endpoints.chat_types import ChatFailure, ChatReply, ChatRequest
from data.endpoints.endpoint import Endpoint

AskResult = ChatReply | ChatFailure
STILL_RUNNING_S = 1.0  # between looks whether the pool was closed while a session waits for its last replies


class AskSession:
    """A context manager, to be used by one thread. `open_count`: requests without a result so far.

    At its start, endpoints that were given up get a new chance, and batch jobs are resumed. An error in the block sends
    nothing more and awaits the requests in flight, which are paid for; batch jobs are left to the next session.
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
        # The loop's thread puts the results, the caller's takes them.
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
        closed = isinstance(error, CancelledError)  # the pool, by another thread
        at_once = closed or (error is not None and not isinstance(error, Exception))  # Ctrl-C
        if closed or self._loop.is_closed():
            return
        ending = asyncio.run_coroutine_threadsafe(self._end(cancel=at_once), self._loop)
        while not at_once:
            try:
                return ending.result(STILL_RUNNING_S)
            except TimeoutError:
                if not self._loop.is_running():
                    return

    def submit(self, requests: Iterable[tuple[Hashable, ChatRequest]], *, more_follow: bool | None = None) -> None:
        """Send requests, each with a key to know its result by. `more_follow`: whether others are about to be submitted
        (None: as before), for which an endpoint in batch mode waits before it makes a job that is not full.

        Raises `ConfigError` for a request to an endpoint that does not exist.
        """
        items = list(requests)
        for _, request in items:
            self._check(request)
        self.open_count += len(items)
        self._loop.call_soon_threadsafe(self._enqueue, items, more_follow)

    def expect(self, key: Hashable, future: "Future[Any]") -> None:
        """Let the result of a future, which is worked on elsewhere, come out of `next_result` as those of requests."""
        self.open_count += 1

        def put(done: "Future[Any]") -> None:
            error = CancelledError() if done.cancelled() else done.exception()
            self._results.put((key, done.result() if error is None else cast(Exception, error)))

        future.add_done_callback(put)

    def next_result(self) -> tuple[Hashable, Any]:
        """The next result, with its key. Raises the error that ended a request: `OSError` on a full disk."""
        assert self.open_count, "nothing was submitted"
        key, result = self._results.get()
        self.open_count -= 1
        if isinstance(result, Exception):
            raise result
        return key, result

    @property
    def has_result(self) -> bool:
        """Whether `next_result` would return at once."""
        return not self._results.empty()

    def _begin(self) -> None:
        for endpoint in self._endpoints.values():
            endpoint.circuit_breaker.reset()
        for batch_queue in self._batch_queues.values():
            batch_queue.resume()

    def _enqueue(self, items: list[tuple[Hashable, ChatRequest]], more_follow: bool | None) -> None:
        for batch_queue in self._batch_queues.values():
            batch_queue.more_follow = batch_queue.more_follow if more_follow is None else more_follow
        for key, request in items:
            self._waiting[request.endpoint].append((key, request))
        for name in {request.endpoint for _, request in items}:
            batch_queue = self._batch_queues.get(name)
            most = batch_queue.capacity if batch_queue else self._endpoints[name].concurrency
            for _ in range(min(most - len(self._workers[name]), len(self._waiting[name]))):
                task = self._loop.create_task(self._work(name))
                self._workers[name].add(task)
                task.add_done_callback(self._report_cancellation)

    def _report_cancellation(self, task: "asyncio.Task[None]") -> None:
        if task.cancelled():  # the pool was closed, perhaps before the task began
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
                self._results.put((key, result))
        finally:
            # At once, not in a callback: what is enqueued from now on needs another worker.
            self._workers[name] -= {cast("asyncio.Task[None]", asyncio.current_task())}

    async def _end(self, *, cancel: bool) -> None:
        """Send nothing more; await what is in flight, or cancel it."""
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
