"""The circuit breaker and queue of one endpoint: decides when each request may be sent."""

import asyncio
import time
from collections import deque
from dataclasses import dataclass
from typing import Literal

from common.retry import Backoff
from data.endpoints.chat_types import CallError, FailureReason
from data.endpoints.rate_limit import RateLimiter

BACKOFF = Backoff(first_s=0.5, longest_s=20.0, longest_retry_after_s=120.0)  # between the attempts of one request
OUTAGE_S = 15.0  # time without an answer after which an open breaker declares an outage
LONGEST_PROBE_GAP_S = 3.0


def reason_of(status: int) -> FailureReason:
    """Map an HTTP error status to a failure reason, which decides whether the request is sent again."""
    if status == 429:
        return "rate_limited"
    if status >= 500 or status in (408, 409, 425):
        return "server_error"
    # 402: the account has no money left, so every further request would be refused as well.
    return "misconfigured" if status in (401, 402, 403, 404) else "refused"


@dataclass(frozen=True)
class Permit:
    """Permission to send one request, which counts as in flight until the permit is returned to the breaker."""

    kind: Literal["usual", "probe"]
    sent_at: float
    tokens: int


@dataclass
class _Waiter:
    """A request that waits for a permit. `tokens`: its upper bound; `has_fallback`: another endpoint can take it."""

    permit: "asyncio.Future[Permit | Literal['use_fallback'] | None]"
    tokens: int
    has_fallback: bool


class CircuitBreaker:
    """Admits requests to one endpoint at the pace of its rate limiter, and stops them while the endpoint is down.

    After `threshold` consecutive failures the breaker opens: requests are sent one at a time as probes, at growing
    intervals, and all others wait or use their fallback. Any answer, even an error about the request, closes it. After
    15 s without an answer it declares an outage: every request fails until `reset`.
    """

    def __init__(self, rate_limiter: RateLimiter, threshold: int) -> None:
        self.rate_limiter = rate_limiter
        self._threshold = threshold
        self._queue: deque[_Waiter] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._probe_at = 0.0  # earliest time of the next probe
        self._in_flight, self._probing = 0, False
        self.reset()

    def reset(self) -> None:
        """Forget all failures: the endpoint gets a new chance."""
        self.outage: CallError | None = None  # the error that ended the last attempt to reach the endpoint
        self._failures, self._failing_since, self._failed_probes = 0, 0.0, 0

    @property
    def is_open(self) -> bool:
        """Whether the breaker is open: requests wait until a probe is answered."""
        return self._failures >= self._threshold

    async def acquire(self, tokens: int = 0, *, has_fallback: bool = False) -> Permit | Literal["use_fallback"] | None:
        """Wait for a permit, to be passed to exactly one of `on_reply`, `on_rate_limit`, `on_failure` and `release`.

        Returns None during an outage, and "use_fallback" (only with `has_fallback`) if the breaker is open and another
        request is the probe.
        """
        waiter = _Waiter(asyncio.get_running_loop().create_future(), tokens, has_fallback)
        self._queue.append(waiter)
        self._admit_waiters()
        try:
            return await waiter.permit
        except asyncio.CancelledError:
            # The permit may have been issued after the cancellation and before this coroutine ran again.
            if waiter.permit.done() and not waiter.permit.cancelled():
                permit = waiter.permit.result()
                if isinstance(permit, Permit):
                    self.release(permit)
            raise

    def on_reply(self, permit: Permit, tokens: int | None = None) -> None:
        """Record an answer, be it an error about the request. `tokens`: the number used, None if not stated."""
        self._failures = self._failed_probes = 0
        self.rate_limiter.on_reply(permit.tokens, tokens)
        self._end(permit)

    def on_rate_limit(self, permit: Permit, pause_s: float) -> None:
        """Record a refusal for the rate (429); nothing is sent for `pause_s`."""
        self._failures = self._failed_probes = 0
        # A refusal is an answer too: the endpoint is up, so the breaker is closed.
        self.rate_limiter.on_rate_limit(permit.sent_at, min(pause_s, BACKOFF.longest_retry_after_s))
        self._end(permit)

    def on_failure(self, permit: Permit, error: CallError) -> None:
        """Record that the endpoint did not answer, or answered with a server error."""
        now = time.monotonic()
        self._failures += 1
        self._failed_probes += permit.kind == "probe"
        if self._failures == 1:
            self._failing_since = now
        if self.is_open:
            # Requests that were in flight when the breaker opened fail too; they do not postpone the next probe.
            if self._failures == self._threshold or permit.kind == "probe":
                self._probe_at = now + min(LONGEST_PROBE_GAP_S, BACKOFF.pause_s(self._failed_probes + 1))
            if now - self._failing_since > OUTAGE_S:
                self.outage = error
        self._end(permit)

    def release(self, permit: Permit) -> None:
        """Return a permit that was not used."""
        self._end(permit)

    def fail_all(self, error: CallError) -> None:
        """Fail all waiting and future requests, because none can succeed (wrong key or model)."""
        self.outage = error
        self._admit_waiters()

    def _end(self, permit: Permit) -> None:
        self._in_flight -= 1
        if permit.kind == "probe":
            self._probing = False
        self._admit_waiters()

    def _admit_waiters(self) -> None:
        """Issue permits to the waiters that may send now, and set a timer for the next one."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._queue:
            head = self._queue[0]
            if head.permit.done():  # cancelled
                self._queue.popleft()
            elif self.outage is not None:
                self._queue.popleft().permit.set_result(None)
            # Open: whoever has a fallback goes there; the others wait while one request at a time is sent as a probe.
            elif self.is_open:
                self._send_to_fallbacks()
                if self._probing or not self._queue or self._wait(self._probe_at - time.monotonic()):
                    return
                self._probing = True
                self._give_permit("probe")
            else:
                if self._in_flight >= self.rate_limiter.max_in_flight or self._wait(self.rate_limiter.delay()):
                    return
                self._give_permit("usual")

    def _give_permit(self, kind: Literal["usual", "probe"]) -> None:
        waiter = self._queue.popleft()
        self._in_flight += 1
        waiter.permit.set_result(Permit(kind, self.rate_limiter.on_sent(waiter.tokens), waiter.tokens))

    def _send_to_fallbacks(self) -> None:
        """Send every waiter that has a fallback there, except the one that becomes the probe if there is none."""
        waiters = [waiter for waiter in self._queue if not waiter.permit.done()]
        self._queue = deque()
        for waiter in waiters:
            if waiter.has_fallback and (self._probing or self._queue):
                waiter.permit.set_result("use_fallback")
            else:
                self._queue.append(waiter)

    def _wait(self, delay_s: float) -> bool:
        """Whether to wait before the next permit; a timer then calls `_admit_waiters` again."""
        if delay_s > 0:
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._admit_waiters)
        return delay_s > 0
