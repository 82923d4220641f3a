"""Connections whose client does not get its request finished: closed after a while, so that they are not collected.

uvicorn closes an idle connection only after a response. One that never sends a request, or sends its head or body a
byte at a time, would stay for ever, with a file descriptor and a buffer each.
"""

import asyncio
import resource
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

REQUEST_S = 60.0  # from the connection, or the response before, to the end of a request; 4 MiB take that at 70 kB/s
CONNECTIONS = 16_384  # file descriptors that a server asks for


class ImpatientProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 (whose head of a request is 64 KiB at most) with a time limit on each request's arrival.

    A request that has arrived may be worked on, and its response read, for as long as it takes.
    """

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Start the time of the first request."""
        super().connection_made(transport)
        self._start_time()

    def on_response_complete(self) -> None:
        """Start the time of the next request."""
        super().on_response_complete()
        self._start_time()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the time."""
        if self._deadline is not None:
            self._deadline.cancel()
        super().connection_lost(exc)

    def _start_time(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self.loop.call_later(REQUEST_S, self._close_unless_arrived)

    def _close_unless_arrived(self) -> None:
        # A cycle is a request whose head is there; `more_body`: the end of its body is not.
        if self.cycle is None or self.cycle.response_complete or self.cycle.more_body:
            self.transport.abort()


def raise_descriptor_limit() -> None:
    """Let this process hold as many connections as the system allows, up to `CONNECTIONS`: many shells allow 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = CONNECTIONS if hard == resource.RLIM_INFINITY else min(CONNECTIONS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
