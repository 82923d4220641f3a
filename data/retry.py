"""When to ask an endpoint again, and when to stop: backoff, pauses it asks for, a breaker, a request rate."""

import asyncio
import email.utils
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from data.calls import TRANSIENT, FailureReason

FIRST_BACKOFF_S = 0.5
LONGEST_BACKOFF_S = 20.0
LONGEST_PAUSE_S = 120.0  # a Retry-After beyond this is not waited for in one go
OUTAGE_S = 15.0  # a breaker open for so long gives the endpoint up
PROBE_S = 3.0  # the longest gap between two probes

Turn = Literal["usual", "probe"]


@dataclass
class CallError(Exception):
    """One attempt that brought no reply. `status`: the HTTP status, or the reason where there was none."""

    reason: FailureReason
    message: str
    status: str = ""
    retry_after: float | None = None

    def __post_init__(self) -> None:
        self.status = self.status or self.reason

    @property
    def worth_another(self) -> bool:
        return self.reason in TRANSIENT


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


class Gate:
    """Lets requests through to one endpoint: at its rate, not while it asked for a pause, and not while it is down.

    After `threshold` failures in a row with no answer between, the breaker opens: one request at a time probes, with
    growing gaps; all others wait. An answer of any kind closes it. After 15 s without one the gate is given up.
    """

    def __init__(self, requests_per_minute: int | None, threshold: int) -> None:
        self._interval = 60 / requests_per_minute if requests_per_minute else 0.0
        self._threshold = threshold
        self._next = self._paused_until = 0.0
        self.reset()

    def reset(self) -> None:
        """Forget failures: the endpoint gets a new chance."""
        self.given_up: CallError | None = None
        self._failures, self._since, self._probes, self._probing = 0, 0.0, 0, False
        self._changed = asyncio.Event()

    async def admit(self) -> Turn | None:
        """Wait for a turn, to be handed to exactly one of `answered`, `failed`, `abandoned`. None: given up."""
        while self.given_up is None:
            if self.open:
                if self._probing:
                    await self._changed.wait()
                    continue
                self._probing = True
                try:
                    await asyncio.sleep(min(PROBE_S, backoff(self._probes + 1)))
                except asyncio.CancelledError:
                    self.abandoned("probe")
                    raise
                return "probe"
            now = time.monotonic()
            turn = max(now, self._next, self._paused_until)
            self._next = turn + self._interval
            if turn > now:
                await asyncio.sleep(turn - now)
                if self.open or self._paused_until > time.monotonic():
                    continue
            return "usual"
        return None

    def answered(self, turn: Turn) -> None:
        """The endpoint answered, be it with an error about the request."""
        self._failures = self._probes = 0
        self._settle(turn)

    def failed(self, turn: Turn, error: CallError) -> None:
        """No answer, or a server error."""
        self._failures += 1
        self._probes += turn == "probe"
        if self._failures == 1:
            self._since = time.monotonic()
        if self.open and time.monotonic() - self._since > OUTAGE_S:
            self.given_up = error
        self._settle(turn)

    def abandoned(self, turn: Turn) -> None:
        """The turn was not used."""
        self._settle(turn)

    def pause(self, seconds: float) -> None:
        """The endpoint asked for a pause: nobody asks it before that."""
        self._paused_until = max(self._paused_until, time.monotonic() + min(seconds, LONGEST_PAUSE_S))

    def give_up(self, error: CallError) -> None:
        """No request can succeed: refuse all that come."""
        self.given_up = error
        self._changed.set()

    @property
    def open(self) -> bool:
        """Whether the breaker is: requests wait for a probe to be answered."""
        return self._failures >= self._threshold

    def _settle(self, turn: Turn) -> None:
        if turn == "probe":
            self._probing = False
        self._changed.set()
        self._changed = asyncio.Event()
