"""When to ask an endpoint again, and when to stop: backoff, pauses it asks for, a breaker, its pace."""

import asyncio
import email.utils
import random
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from data.endpoints.chat_types import CallError, FailureReason
from data.endpoints.rate_limit import RateLimiter

FIRST_BACKOFF_S = 0.5
LONGEST_BACKOFF_S = 20.0
LONGEST_PAUSE_S = 120.0  # a Retry-After beyond this is not waited for in one go
OUTAGE_S = 15.0  # a breaker open for so long gives the endpoint up
PROBE_S = 3.0  # the longest gap between two probes


def reason_of(status: int) -> FailureReason:
    """What an HTTP status that is no success means for the next attempt."""
    if status == 429:
        return "rate_limited"
    if status >= 500 or status in (408, 409, 425):
        return "server_error"
    return "misconfigured" if status in (401, 403, 404) else "refused"


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds to wait by `Retry-After` (seconds or a date) or `retry-after-ms`; None if absent or unreadable."""
    try:
        if "retry-after-ms" in headers:
            return max(0.0, float(headers["retry-after-ms"]) / 1000)
        text = headers.get("retry-after")
        if text is None:
            return None
        if text.strip().replace(".", "", 1).isdigit():
            return float(text)
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
    except (ValueError, TypeError):
        return None


def backoff(attempt: int) -> float:
    """Seconds to wait after the `attempt`-th attempt: doubling from half a second, half of it drawn at random."""
    longest = min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2 ** (attempt - 1))
    return longest * random.uniform(0.5, 1.0)


@dataclass(frozen=True)
class Permit:
    """Leave to send one request, counted as under way until it is handed to one of the gate's four methods."""

    kind: Literal["usual", "probe"]
    sent_at: float
    tokens: int


@dataclass
class _Waiting:
    """One that waits for its turn, reckoned to use `tokens`; `elsewhere`: it can be asked of another endpoint."""

    turn: "asyncio.Future[Permit | Literal['elsewhere'] | None]"
    tokens: int
    elsewhere: bool


class CircuitBreaker:
    """Lets requests through to one endpoint: at its pace, not while it asked for a pause, and not while it is down.

    After `threshold` failures in a row with no answer between, the breaker opens: one request at a time probes, with
    growing gaps; all others wait, or go elsewhere. An answer of any kind closes it. After 15 s without one the gate is
    given up.
    """

    def __init__(self, pace: RateLimiter, threshold: int) -> None:
        self.pace = pace
        self._threshold = threshold
        self._queue: deque[_Waiting] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._probe_at = 0.0
        self._under_way, self._probing = 0, False
        self.reset()

    def reset(self) -> None:
        """Forget failures: the endpoint gets a new chance."""
        self.given_up: CallError | None = None
        self._failures, self._since, self._probes = 0, 0.0, 0

    async def admit(self, tokens: int = 0, *, elsewhere: bool = False) -> Permit | Literal["elsewhere"] | None:
        """Wait for a turn, to be handed to exactly one of `answered`, `refused`, `failed`, `abandoned`.

        None: given up. "elsewhere", only for those who can go there: the endpoint is down and somebody else probes.
        """
        one = _Waiting(asyncio.get_running_loop().create_future(), tokens, elsewhere)
        self._queue.append(one)
        self._move()
        try:
            return await one.turn
        except asyncio.CancelledError:
            if one.turn.done() and not one.turn.cancelled() and isinstance(turn := one.turn.result(), Permit):
                self.abandoned(turn)
            raise

    def answered(self, turn: Permit, used: int | None = None) -> None:
        """The endpoint answered, be it with an error about the request. `used`: its tokens, if it said."""
        self._failures = self._probes = 0
        self.pace.answered(turn.tokens, used)
        self._settle(turn)

    def refused(self, turn: Permit, pause_s: float) -> None:
        """The endpoint answers, but not so often: nobody asks it for so long."""
        self._failures = self._probes = 0
        self.pace.refused(turn.sent_at, min(pause_s, LONGEST_PAUSE_S))
        self._settle(turn)

    def failed(self, turn: Permit, error: CallError) -> None:
        """No answer, or a server error."""
        now = time.monotonic()
        self._failures += 1
        self._probes += turn.kind == "probe"
        if self._failures == 1:
            self._since = now
        if self.open:
            if self._failures == self._threshold or turn.kind == "probe":
                self._probe_at = now + min(PROBE_S, backoff(self._probes + 1))
            if now - self._since > OUTAGE_S:
                self.given_up = error
        self._settle(turn)

    def abandoned(self, turn: Permit) -> None:
        """The turn was not used."""
        self._settle(turn)

    def give_up(self, error: CallError) -> None:
        """No request can succeed: refuse all that come."""
        self.given_up = error
        self._move()

    @property
    def open(self) -> bool:
        """Whether the breaker is: requests wait for a probe to be answered."""
        return self._failures >= self._threshold

    def _settle(self, turn: Permit) -> None:
        self._under_way -= 1
        if turn.kind == "probe":
            self._probing = False
        self._move()

    def _move(self) -> None:
        """Let through whoever may go now, and come back when the next may."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._queue:
            head = self._queue[0]
            if head.turn.done():  # cancelled
                self._queue.popleft()
            elif self.given_up is not None:
                self._queue.popleft().turn.set_result(None)
            elif self.open:
                self._send_elsewhere()
                if self._probing or not self._queue or self._later(self._probe_at - time.monotonic()):
                    return
                self._probing = True
                self._pass("probe")
            else:
                if self._under_way >= self.pace.window or self._later(self.pace.delay()):
                    return
                self._pass("usual")

    def _pass(self, kind: Literal["usual", "probe"]) -> None:
        one = self._queue.popleft()
        self._under_way += 1
        one.turn.set_result(Permit(kind, self.pace.sent(one.tokens), one.tokens))

    def _send_elsewhere(self) -> None:
        """All who can go to another endpoint do, but for the one who will probe."""
        staying = deque(one for one in self._queue if not one.turn.done())
        self._queue = deque()
        for one in staying:
            if one.elsewhere and (self._probing or self._queue):
                one.turn.set_result("elsewhere")
            else:
                self._queue.append(one)

    def _later(self, wait: float) -> bool:
        """Whether there is to be a wait; then this comes back after it."""
        if wait > 0:
            self._timer = asyncio.get_running_loop().call_later(wait, self._move)
        return wait > 0
