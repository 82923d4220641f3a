"""The circuit breaker and queue of one endpoint: decides when each request may be sent."""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from nautile.common.retry import Backoff
from nautile.data.endpoints.chat_types import CallError, FailureReason
from nautile.data.endpoints.rate_limit import RateLimiter

BACKOFF = Backoff(first_s=0.5, longest_s=20.0, longest_retry_after_s=120.0)  # between the attempts of one request
OUTAGE_S = 15.0  # time without an answer after which an open breaker declares an outage
LONGEST_PROBE_GAP_S = 3.0
REFUSED_OUTAGES = (
    6  # times `OUTAGE_S` without an answer but refusals for the rate: a limit per minute has passed by then
)
# Of the client by their number, and yet about this moment: a timeout, a conflict, a busy or failed server behind the
# one that answers (421, 424), a connection that a gateway has closed (449, 460, 499), no capacity (498).
PASSING = frozenset({408, 409, 421, 423, 424, 425, 449, 460, 498, 499})


def reason_of(status: int) -> FailureReason:
    """Map an HTTP error status to a failure reason, which decides whether the request is sent again."""
    if status == 429:
        return "rate_limited"
    if status >= 500 or status in PASSING:
        return "server_error"
    # 402: the account has no money left, so every further request would be refused as well. 407: by a proxy.
    return "misconfigured" if status in (401, 402, 403, 404, 407) else "refused"


@dataclass(frozen=True)
class Permit:
    """Permission to send one request, which counts as in flight until the permit is returned to the breaker."""

    kind: Literal["usual", "probe"]
    sent_at: float
    tokens: int
    request: str = ""
    number: int = 0  # of the endpoint's permits


@dataclass
class _Waiter:
    """A request that waits for a permit. `tokens`: its upper bound; `has_fallback`: another endpoint can take it."""

    permit: "asyncio.Future[Permit | Literal['use_fallback'] | None]"
    tokens: int
    has_fallback: bool
    request: str


class CircuitBreaker:
    """Admits requests to one endpoint at the pace of its rate limiter, and stops them while the endpoint is down.

    After `threshold` consecutive failures the breaker opens: requests are sent one at a time as probes, at growing
    intervals, and all others wait or use their fallback. Any answer, even an error about the request, closes it. After
    15 s without an answer it declares an outage: every request fails until `reset`.

    A few requests that always fail must not pass for an outage. So a request that has failed is no probe while there is
    any other: `start_another` sends one that has not been sent yet, and returns None if there is none. Before an outage
    is declared, `confirm` (if it is set) sends a request of its own; it calls `fail_all` or `on_answer`.
    """

    def __init__(self, rate_limiter: RateLimiter, threshold: int) -> None:
        self.rate_limiter = rate_limiter
        self.start_another: Callable[[], asyncio.Task[None] | None] = lambda: None
        self.confirm: Callable[[CallError], None] | None = None
        # How many requests were sent, and the number of the last of them that was answered: by a reply, or by an error
        # about the request.
        self.sent = self.answered = 0
        self._threshold = threshold
        self._queue: deque[_Waiter] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._probe_at = 0.0  # earliest time of the next probe
        self._in_flight, self._probing = 0, False
        self.reset()

    def reset(self) -> None:
        """Forget all failures: the endpoint gets a new chance."""
        self.outage: CallError | None = None  # the error that ended the last attempt to reach the endpoint
        self._forget_failures()
        self._refusals, self._refused_since = 0, 0.0  # for the rate, since the last answer

    def _forget_failures(self) -> None:
        self._failures, self._failing_since, self._failed_probes = 0, 0.0, 0
        self._failed: set[str] = set()  # requests that have failed since the last answer
        self._last_error: CallError | None = None
        self._confirming = self._another_comes = False

    @property
    def is_open(self) -> bool:
        """Whether the breaker is open: requests wait until a probe is answered."""
        return self._failures >= self._threshold

    def refuses_for_long(self, attempts: int) -> bool:
        """Whether the last requests, `attempts` or more, were all refused for the rate, for over a minute."""
        return self._refusals >= attempts and time.monotonic() - self._refused_since > REFUSED_OUTAGES * OUTAGE_S

    def waits_for(self) -> str:
        """Why requests wait at this moment, for the operator; empty if none does. May be called in any thread."""
        if self.is_open and self._last_error is not None:
            return f"does not answer ({self._last_error.message})"
        if not self._refusals:
            return ""
        pause = self.rate_limiter.pause_s
        return "refuses requests for their rate (429)" + (f", the next one in {pause:.0f} s" if pause >= 1 else "")

    async def acquire(
        self, tokens: int = 0, *, has_fallback: bool = False, request: str = ""
    ) -> Permit | Literal["use_fallback"] | None:
        """Wait for a permit, to be passed to exactly one of `on_reply`, `on_rate_limit`, `on_failure` and `release`.

        Returns None during an outage, and "use_fallback" (only with `has_fallback`) if the breaker is open and another
        request is the probe. `request`: its digest, by which requests that have failed are known.
        """
        waiter = _Waiter(asyncio.get_running_loop().create_future(), tokens, has_fallback, request)
        if request not in self._failed:
            self._another_comes = False
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
        self.answered = max(self.answered, permit.number)
        self._forget_failures()
        self._refusals = 0
        self.rate_limiter.on_reply(permit.tokens, tokens)
        self._end(permit)

    def on_answer(self) -> None:
        """Record that the request of `confirm` was answered: what has failed so far has failed for its own reason."""
        self.sent += 1
        self.answered = self.sent
        self._forget_failures()
        self._admit_waiters()

    def on_rate_limit(self, permit: Permit, pause_s: float) -> None:
        """Record a refusal for the rate (429); nothing is sent for `pause_s`."""
        self._forget_failures()
        if not self._refusals:
            self._refused_since = time.monotonic()
        self._refusals += 1
        # A refusal is an answer too: the endpoint is up, so the breaker is closed.
        self.rate_limiter.on_rate_limit(permit.sent_at, min(pause_s, BACKOFF.longest_retry_after_s))
        self._end(permit)

    def on_failure(self, permit: Permit, error: CallError) -> None:
        """Record that the endpoint did not answer, or answered with a server error."""
        now = time.monotonic()
        self._failures += 1
        self._failed_probes += permit.kind == "probe"
        self._failed.add(permit.request)
        self._last_error = error
        if self._failures == 1:
            self._failing_since = now
        if self.is_open:
            # Requests that were in flight when the breaker opened fail too; they do not postpone the next probe.
            if self._failures == self._threshold or permit.kind == "probe":
                self._probe_at = now + min(LONGEST_PROBE_GAP_S, BACKOFF.pause_s(self._failed_probes + 1))
            if now - self._failing_since > OUTAGE_S:
                self._suspect_outage(error)
        self._end(permit)

    def _suspect_outage(self, error: CallError) -> None:
        # Nobody listens, so there is nothing to ask again.
        if self.confirm is None or error.reason == "connection":
            self.outage = error
        elif not self._confirming:
            self._confirming = True
            self.confirm(error)

    def no_other(self) -> None:
        """Record that the request that `start_another` announced needs no permit, and that there is no further one."""
        if self._another_comes:
            self._another_comes = False
            self._admit_waiters()

    def release(self, permit: Permit, *, sent: bool = False) -> None:
        """Return a permit whose request was not sent, or (`sent`) was cancelled on its way."""
        if not sent:
            self.rate_limiter.on_unsent(permit.tokens)
        self._end(permit)

    def fail_all(self, error: CallError) -> None:
        """Fail all waiting and future requests: the endpoint answers none, or none can succeed (wrong key or model)."""
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
                if not self._choose_probe():
                    return
                self._probing = True
                self._give_permit("probe")
            else:
                if self._in_flight >= self.rate_limiter.max_in_flight or self._wait(self.rate_limiter.delay()):
                    return
                self._give_permit("usual")

    def _choose_probe(self) -> bool:
        """Put the request that becomes the probe at the head of the queue; False while another one is on its way."""
        fresh = next((w for w in self._queue if w.request not in self._failed and not w.permit.done()), None)
        if fresh is not None:
            self._queue.remove(fresh)
            self._queue.appendleft(fresh)
            return True
        # All that wait have failed since the last answer.
        if not self._another_comes:
            self._another_comes = self.start_another() is not None
        return not self._another_comes

    def _give_permit(self, kind: Literal["usual", "probe"]) -> None:
        waiter = self._queue.popleft()
        self._in_flight += 1
        self.sent += 1
        sent_at = self.rate_limiter.on_sent(waiter.tokens)
        waiter.permit.set_result(Permit(kind, sent_at, waiter.tokens, waiter.request, self.sent))

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
