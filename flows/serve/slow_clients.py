"""Time limit for the arrival of a request, against slow clients (slowloris), and the limit of file descriptors.

uvicorn closes an idle connection only after a response. A connection that never sends a request, or sends it byte by
byte, would stay open forever, with a file descriptor and a buffer.
"""

import asyncio
import resource
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

REQUEST_S = 60.0  # from the connection, or the last response, to the end of a request; 4 MiB take that at 70 kB/s
CONNECTIONS = 16_384  # file descriptors that the server needs at most


class ImpatientProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 protocol with a time limit for the arrival of each request.

    There is no limit for the processing of a request, or for the client to read the response. uvicorn limits the head
    of a request to 64 KiB.
    """

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Start the time limit of the first request."""
        super().connection_made(transport)
        self._start_timer()

    def on_response_complete(self) -> None:
        """Start the time limit of the next request."""
        super().on_response_complete()
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the time limit."""
        if self._deadline is not None:
            self._deadline.cancel()
        super().connection_lost(exc)

    def _start_timer(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self.loop.call_later(REQUEST_S, self._close_unless_arrived)

    def _close_unless_arrived(self) -> None:
        # `cycle` is a request whose head has arrived; `more_body` is True until the end of its body has arrived.
        if self.cycle is None or self.cycle.response_complete or self.cycle.more_body:
            self.transport.abort()


def raise_descriptor_limit() -> None:
    """Raise the limit of open files up to `CONNECTIONS`, as far as the system allows: many shells set it to 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = CONNECTIONS if hard == resource.RLIM_INFINITY else min(CONNECTIONS, hard)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
