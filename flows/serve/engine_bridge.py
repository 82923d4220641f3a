"""Bridge between the decoding engine's thread and the server's event loop.

Requests go to the engine's queue. The engine delivers its events once per step, and the bridge routes them to the HTTP
requests.
"""

import asyncio

from nautile.common.errors import ConfigError
from nautile.flows.serve.protocol import ApiError
from nautile.model.decoding.engine import Engine
from nautile.model.decoding.slots import DecodeRequest, EngineEvent, EngineStopped, Handle, QueueFull


class EngineBridge:
    """Submits the samples of HTTP requests to the engine, and routes its events back to them."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._receivers: dict[Handle, tuple[RequestEvents, int]] = {}

    def start(self) -> None:
        """Start the engine, whose events are delivered to the running event loop."""
        loop = asyncio.get_running_loop()
        self._engine.start(lambda events: loop.call_soon_threadsafe(self._dispatch, events))

    def check_samples(self, count: int) -> None:
        """Raise `ApiError` 400 for more samples than can wait; 429 would tell the client to try the same again.

        Call it before the samples are built: a body of a few MiB can ask for a hundred million of them.
        """
        if count > self._engine.queue:
            message = f"n: {count} samples exceed the queue of {self._engine.queue}: send several requests"
            raise ApiError(400, message, "n")

    def submit(self, requests: list[DecodeRequest]) -> "RequestEvents":
        """Queue all samples of an HTTP request.

        Raises `ApiError`: 429 if the queue is full, 503 if the engine has stopped, 400 for invalid or too many samples.
        """
        self.check_samples(len(requests))
        try:
            handles = self._engine.submit(requests)
        except QueueFull as error:
            headers = {"Retry-After": str(error.retry_after)}
            raise ApiError(429, str(error), code="queue_full", headers=headers) from None
        except EngineStopped as error:
            raise ApiError(503, str(error), code="unavailable") from None
        except ConfigError as error:
            raise ApiError(400, str(error)) from None
        events = RequestEvents(self, handles)
        # The engine may have answered already, but its events arrive through this event loop, which is busy here until
        # the receivers are known.
        self._receivers |= {handle: (events, index) for index, handle in enumerate(handles)}
        return events

    def cancel(self, handles: list[Handle]) -> None:
        """Cancel these samples and ignore their remaining events. Finished samples are allowed."""
        # Forgotten first: events that are on their way then find no receiver.
        unfinished = [handle for handle in handles if self._receivers.pop(handle, None)]
        if unfinished:
            self._engine.cancel(unfinished)

    def _dispatch(self, events: list[tuple[Handle, EngineEvent]]) -> None:
        for handle, event in events:
            if handle in self._receivers:
                receiver, index = self._receivers[handle]
                receiver.queue.put_nowait((index, event))


class RequestEvents:
    """Queue of (index, event): the engine's events for the samples of one HTTP request."""

    def __init__(self, bridge: EngineBridge, handles: list[Handle]) -> None:
        self._bridge, self._handles = bridge, handles
        self.queue: asyncio.Queue[tuple[int, EngineEvent]] = asyncio.Queue()

    def close(self) -> None:
        """Cancel all samples that are not finished."""
        self._bridge.cancel(self._handles)

    def cancel(self, index: int) -> None:
        """Cancel one sample."""
        self._bridge.cancel([self._handles[index]])
