"""The rate limiter of one endpoint: by configured limits, by limits stated in headers, or inferred from refusals.

Requests are spaced evenly, not sent in bursts, because a limit per minute is often enforced per second. If the server
states no limit, the rate is unlimited until a fifth of the requests of two seconds is refused (429), or one is refused
with a pause of half a second or more; single refusals may have other reasons, and are only retried. The rate is then
set below the accepted rate, and rises by additive increase with multiplicative decrease, as in TCP (RFC 5681).
"""

import math
import re
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import cache

from nautile.configs.vendors import VENDORS, LimitHeaders

HEADROOM = 0.98  # of a stated limit: our clock and the server's differ
SAMPLE, SAMPLE_S = 16, 2.0  # the accepted rate is measured over this many requests or this time, whichever is more
HISTORY = 1024  # latest requests kept for the measurement
LEAST_SAMPLE_S = 0.25  # a shorter sample does not show the accepted rate
CROWDED = 0.2  # share of a sample that is refused when the rate is clearly too high
LONG_PAUSE_S = 0.5  # a pause this long means that the rate is too high
BELOW_ACCEPTED = 0.96  # of the accepted rate, where a sample shows it
DECREASE, FAR_DECREASE = 0.9, 0.75  # of the rate, at a long pause; the second where the limit is far below the rate
FAR_S = 10.0  # a refusal so soon after a cut means that the cut was too small
INCREASE = 0.01  # of the rate after the last cut, each second; less where a refusal costs a pause
DOUBLING_S = 1.0  # time in which the rate doubles during the search for the limit
FIRST_IN_FLIGHT = 16  # requests in flight before the first answer; each answer allows one more
SLACK_S = 0.05  # a delay up to this is made up for by sending the next request earlier
SLOWEST = 0.05  # requests a second
DAY_LIKE_S = 61.0  # a limit that takes longer to reset is not per minute, but per day or the like

_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|d|h|m|s)")
_UNITS = {"d": 86_400.0, "h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}


@cache
def _limit_headers() -> tuple[list[LimitHeaders], list[LimitHeaders]]:
    """The headers of the limits of requests and of tokens, of all vendors: a gateway passes on those of others."""
    vendors = list(VENDORS.values())
    return [names for v in vendors for names in v.request_limits], [names for v in vendors for names in v.token_limits]


class EvenSpacing:
    """Spaces requests (or tokens) evenly, at the lowest of the `configured`, `stated` and `inferred` rate a second."""

    def __init__(self, per_minute: int | None) -> None:
        self.configured = per_minute / 60 if per_minute else math.inf
        self.stated = self.inferred = math.inf
        self._next = -math.inf  # time from which the next one may be sent

    @property
    def rate(self) -> float:
        return min(self.configured, self.stated, self.inferred)

    def delay(self, now: float) -> float:
        """Seconds until the next one may be sent."""
        return max(0.0, self._next - now)

    def take(self, amount: float, now: float) -> None:
        """Account for `amount` being sent now."""
        earliest = now if self._next == -math.inf else now - SLACK_S
        self._next = max(self._next, earliest) + amount / self.rate

    def give_back(self, amount: float) -> None:
        """Correct an earlier `take`: `amount` less was used (more, if negative)."""
        self._next -= amount / self.rate


class RateLimiter:
    """Limits the rate of requests and tokens to one endpoint. `clock` in seconds; to be used from one event loop.

    The inference of an unstated limit has two phases. While `_searching`, the rate doubles every `_doubling_s` until a
    refusal shows the limit. After that it rises linearly from the rate of the last cut, `_cut_to`.
    """

    def __init__(
        self,
        requests_per_minute: int | None = None,
        tokens_per_minute: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.requests, self.tokens = EvenSpacing(requests_per_minute), EvenSpacing(tokens_per_minute)
        _limit_headers()  # a vendor that cannot be read is refused here, and not at the first answer
        self.sent_count = self.refused_count = 0
        self.max_in_flight = math.inf if requests_per_minute else FIRST_IN_FLIGHT
        self._clock = clock
        self._sent: deque[float] = deque(maxlen=HISTORY)  # times when the latest requests were sent
        self._refused: deque[float] = deque(maxlen=HISTORY)  # the same for refused requests
        self._searching = True
        self._doubling_s = DOUBLING_S
        self._paused_until, self._paused_s = -math.inf, 0.0
        self._cut_to, self._cut_at, self._grown_at = math.inf, -math.inf, math.inf
        self._pause_s = 0.0  # that the server asked for at the last refusal

    @property
    def stated_per_minute(self) -> float | None:
        """The requests a minute that the server's headers allow; None if they have not said."""
        return None if self.requests.stated == math.inf else 60 * self.requests.stated / HEADROOM

    @property
    def pause_s(self) -> float:
        """Seconds that are left of a pause that the server asked for. May be read in any thread."""
        return max(0.0, self._paused_until - self._clock())

    def delay(self) -> float:
        """Seconds until the next request may be sent."""
        now = self._active_time()
        self._grow(now)
        pause = max(0.0, self._paused_until - self._clock())
        return pause + max(self.requests.delay(now), self.tokens.delay(now))

    def on_sent(self, tokens: int) -> float:
        """Record that a request of up to `tokens` tokens is sent now. Returns the time, for `on_rate_limit`."""
        now = self._active_time()
        self.sent_count += 1
        self.requests.take(1, now)
        self.tokens.take(tokens, now)
        self._sent.append(now)
        return now

    def on_unsent(self, tokens: int) -> None:
        """Take back the last `on_sent`: the request was not sent after all."""
        self.sent_count -= 1
        self.requests.give_back(1)
        self.tokens.give_back(tokens)
        self._sent.pop()  # perhaps another one's time, a moment later

    def on_reply(self, reserved: int, tokens: int | None) -> None:
        """Record an answer. `reserved`: the tokens of `on_sent`; `tokens`: those that it used, None if not stated."""
        self.max_in_flight += 1
        if tokens is not None:
            self.tokens.give_back(reserved - tokens)

    def on_rate_limit(self, sent_at: float, pause_s: float = 0.0) -> None:
        """Record a refusal for the rate (429) of a request sent at `sent_at`; nothing is sent for `pause_s`."""
        now = self._active_time()
        self.refused_count += 1
        self._refused.append(sent_at)
        clock = self._clock()
        # Extend the pause, and add the extension to the time that `_active_time` leaves out.
        paused_until = max(self._paused_until, clock + pause_s)
        self._paused_s += paused_until - max(self._paused_until, clock)
        self._paused_until = paused_until
        if sent_at <= self._cut_at:
            return  # sent before the last cut, so it says nothing about the current rate
        self._pause_s = pause_s
        sent, refused, elapsed = self._sample(sent_at)
        long_pause = pause_s >= LONG_PAUSE_S
        crowded = sent >= SAMPLE and not long_pause and refused >= CROWDED * sent
        if crowded and elapsed >= LEAST_SAMPLE_S:
            # Clearly too fast, and the sample is long enough to show the accepted rate. Never cut below a quarter.
            rate = min(self.requests.rate, sent / elapsed)
            self._cut(max(rate / 4, BELOW_ACCEPTED * (sent - refused) / elapsed))
        elif long_pause and self.requests.rate < math.inf:
            # The server says that we are too fast. The sample is useless, because the server recovers while we pause.
            far = self._searching or now - self._cut_at < FAR_S
            self._cut(self.requests.rate * (FAR_DECREASE if far else DECREASE))
        elif self._searching and (crowded or long_pause):
            # A short burst shows that the rate was too high, but not which rate would be accepted: halve it, go on.
            rate = self.requests.rate
            if rate == math.inf:
                rate = max(1, sent) / max(elapsed, LEAST_SAMPLE_S)
            self._doubling_s *= 2
            self._cut(rate / 2, searching=True)

    def on_headers(self, headers: Mapping[str, str]) -> None:
        for spacing, names in zip((self.requests, self.tokens), _limit_headers(), strict=True):
            for limit_name, remaining_name, reset_name in names:
                limit = _number(headers.get(limit_name))
                if not limit:
                    continue
                remaining, reset = _number(headers.get(remaining_name)), parse_duration(headers.get(reset_name))
                if spacing.stated == math.inf:
                    # The limit is known now, so discard the inferred rate.
                    spacing.inferred = math.inf
                    self._cut_at = self._active_time()
                    self._grown_at = math.inf
                # A limit per minute is a rate. Of a longer one (per day), what remains may be used within a minute;
                # near its end the rate falls to what the limit regains.
                if reset is None or reset < DAY_LIKE_S or remaining is None:
                    per_second = max(1.0, limit) / 60
                else:
                    per_second = max(remaining / 60, (limit - remaining) / reset, SLOWEST)
                spacing.stated = HEADROOM * per_second
                if spacing is self.requests:
                    self.max_in_flight = math.inf
                break

    def _grow(self, now: float) -> None:
        if now <= self._grown_at:
            return
        if self._searching:
            self.requests.inferred *= 2 ** ((now - self._grown_at) / self._doubling_s)
        else:
            gain = INCREASE * self._cut_to / (1 + self._pause_s)
            self.requests.inferred += gain * (now - self._grown_at)
        self._grown_at = now

    def _cut(self, rate: float, searching: bool = False) -> None:
        """Set the rate, which rises from there."""
        self._searching = searching
        self.requests.inferred = self._cut_to = max(SLOWEST, rate)
        self._cut_at = self._grown_at = self._active_time()

    def _active_time(self) -> float:
        """The clock, stopped during pauses that the server asked for: they must not count as time without refusals."""
        return max(self._clock(), self._paused_until) - self._paused_s

    def _sample(self, until: float) -> tuple[int, int, float]:
        """(sent, refused, seconds) of the latest requests up to `until` and since the last cut."""
        times = [sent for sent in self._sent if self._cut_at < sent <= until]
        if not times:
            return 0, 0, 0.0
        # From the 16th last request on, or from two seconds ago, whichever is earlier.
        start = max(times[0], min(until - SAMPLE_S, times[max(0, len(times) - SAMPLE)]))
        refused = sum(start <= sent <= until for sent in self._refused)
        return sum(sent >= start for sent in times), refused, until - start


def parse_duration(text: str | None) -> float | None:
    """Parse a duration as vendors write it ("6m0s", "12ms", "59.5") to seconds; None if absent or unreadable."""
    if text is None:
        return None
    if (number := _number(text)) is not None:
        return number
    parts = _DURATION.findall(text)
    return sum(float(amount) * _UNITS[unit] for amount, unit in parts) if parts else None


def _number(text: str | None) -> float | None:
    try:
        value = float(text) if text is not None else None
    except ValueError:
        return None
    return value if value is not None and math.isfinite(value) and value >= 0 else None
