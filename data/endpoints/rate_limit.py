"""The rate at which one endpoint is asked: by configured limits, by limits it states in headers, or by its refusals.

Requests are spaced evenly and not sent in bursts, because a limit per minute is often enforced per second. Where the
server states no limit, the rate is unlimited until a quarter of the requests of two seconds is refused (429), or one is
refused with a pause of half a second or more; single refusals may have other reasons and are only sent again. Then the
rate is set 4 % below what was accepted, and rises again on a cubic curve, as in TCP CUBIC: it stays near the limit for
long, passes it after half a minute, and goes far beyond only if nothing is refused there. A refusal on the way cuts it
again, unless refusals were as frequent when the rate was low.
"""

import math
import re
import time
from collections import deque
from collections.abc import Callable, Mapping

HEADROOM = 0.98  # of a stated limit: our clock and the server's differ
SAMPLE, SAMPLE_S = 16, 2.0  # the accepted rate is measured over so many requests, or over so long if there are more
HISTORY = 1024  # latest requests that are kept for it
LEAST_SAMPLE_S = 0.25  # a shorter sample does not show the accepted rate
CROWDED = 0.25  # share of a sample that is refused when the rate is clearly too high
NOISE = 0.02  # share refused even below the limit: then single refusals mean nothing
LONG_PAUSE_S, LONG_PAUSE_CUT = 0.5, 0.75  # a pause so long means that the rate was too high, and how far to cut it
CUT = 0.04  # below the accepted rate
RECOVERY_S = 30.0  # until the rate has returned to where it was cut
DOUBLING_S = 1.0  # while the limit is searched for
FIRST_IN_FLIGHT = 16  # at once before anything is known; one more for every answer
SLACK_S = 0.05  # a request that was sent late is made up for within this
SLOWEST = 0.05  # requests a second
DAY_LIKE_S = 61.0  # a limit that takes longer to reset is not one per minute

# limit, remaining, reset: OpenAI's, Mistral's, and Mistral's older ones
_REQUEST_HEADERS = (
    ("x-ratelimit-limit-requests", "x-ratelimit-remaining-requests", "x-ratelimit-reset-requests"),
    ("x-ratelimit-limit-req-minute", "x-ratelimit-remaining-req-minute", "x-ratelimit-reset-req-minute"),
)
_TOKEN_HEADERS = (
    ("x-ratelimit-limit-tokens", "x-ratelimit-remaining-tokens", "x-ratelimit-reset-tokens"),
    ("x-ratelimit-limit-tokens-minute", "x-ratelimit-remaining-tokens-minute", "x-ratelimit-reset-tokens-minute"),
    ("ratelimitbysize-limit", "ratelimitbysize-remaining", "ratelimitbysize-reset"),
)
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|h|m|s)")
_UNITS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}


class EvenSpacing:
    """Spaces requests (or tokens) evenly, at the lowest of the `configured`, `stated` and `inferred` rate a second."""

    def __init__(self, per_minute: int | None) -> None:
        self.configured = per_minute / 60 if per_minute else math.inf
        self.stated = self.inferred = math.inf
        self._next = -math.inf  # when the next one may be sent

    @property
    def rate(self) -> float:
        return min(self.configured, self.stated, self.inferred)

    def delay(self, now: float) -> float:
        """Seconds until the next one may be sent."""
        return max(0.0, self._next - now)

    def take(self, amount: float, now: float) -> None:
        """Use `amount` of the rate."""
        earliest = now if self._next == -math.inf else now - SLACK_S
        self._next = max(self._next, earliest) + amount / self.rate

    def give_back(self, amount: float) -> None:
        """Less was used than taken (or, if negative, more)."""
        self._next -= amount / self.rate


class RateLimiter:
    """The rate at which one endpoint is asked. `clock` in seconds; to be used from one event loop.

    A search for an unstated limit has two phases. While `_searching`, the rate doubles every `_doubling_s` until a
    refusal shows the limit; after that, `_ceiling` is the rate that was accepted at the last refusal, and the rate
    moves on the cubic curve around it.
    """

    def __init__(
        self,
        requests_per_minute: int | None = None,
        tokens_per_minute: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.requests, self.tokens = EvenSpacing(requests_per_minute), EvenSpacing(tokens_per_minute)
        self.sent_count = self.refused_count = 0
        self.max_in_flight = math.inf if requests_per_minute else FIRST_IN_FLIGHT
        self._clock = clock
        self._sent: deque[float] = deque(maxlen=HISTORY)  # when the latest requests were sent
        self._refused: deque[float] = deque(maxlen=HISTORY)  # when those that were refused had been sent
        self._searching = True
        self._ceiling = math.inf
        self._doubling_s = DOUBLING_S
        self._sent_since_cut = self._refused_since_cut = 0
        self._paused_until, self._paused_s = -math.inf, 0.0
        self._cut_at, self._rise_from, self._grown_at = -math.inf, math.inf, math.inf

    def delay(self) -> float:
        """Seconds until a request may be sent."""
        now = self._active_time()
        self._grow(now)
        pause = max(0.0, self._paused_until - self._clock())
        return pause + max(self.requests.delay(now), self.tokens.delay(now))

    def on_sent(self, tokens: int) -> float:
        """A request is sent that may use so many tokens. Returns the time, for `on_rate_limit`."""
        now = self._active_time()
        self.sent_count += 1
        self._sent_since_cut += 1
        self.requests.take(1, now)
        self.tokens.take(tokens, now)
        self._sent.append(now)
        return now

    def on_reply(self, reserved: int, used: int | None) -> None:
        """A request was answered, and used so many of its reserved tokens (None: not stated)."""
        self.max_in_flight += 1
        if used is not None:
            self.tokens.give_back(reserved - used)

    def on_rate_limit(self, sent_at: float, pause_s: float = 0.0) -> None:
        """A request was refused for the rate (429), and nothing will be sent for `pause_s`."""
        now = self._active_time()
        self.refused_count += 1
        self._refused.append(sent_at)
        clock = self._clock()
        paused_until = max(self._paused_until, clock + pause_s)
        self._paused_s += paused_until - max(self._paused_until, clock)
        self._paused_until = paused_until
        if sent_at <= self._cut_at:
            return  # sent before the last cut: it shows nothing about the rate since then
        self._refused_since_cut += 1
        sent, refused, elapsed = self._sample(sent_at)
        long_pause = pause_s >= LONG_PAUSE_S
        crowded = sent >= SAMPLE and not long_pause and refused >= CROWDED * sent
        # How far into the rise after a cut the refusal came: early ones mean that the cut was too small.
        early = now - self._rise_from < RECOVERY_S / 3
        if crowded and elapsed >= LEAST_SAMPLE_S:
            # Clearly too fast, and the sample shows what was accepted. Never cut to less than a quarter at once.
            rate = min(self.requests.rate, sent / elapsed)
            self._cut(min(rate, max(rate / 4, (1 + CUT / 2) * (sent - refused) / elapsed)))
        elif long_pause and self.requests.rate < math.inf:
            # The server says that we are too fast. What was accepted shows nothing, since it recovers while we pause.
            self._cut(self.requests.rate * (LONG_PAUSE_CUT if self._searching or early else 1.0))
        elif self._searching and (crowded or long_pause):
            # A short burst shows that its rate was too high, but not which rate would be accepted: halve and go on.
            rate = self.requests.rate
            if rate == math.inf:
                rate = max(1, sent) / max(elapsed, LEAST_SAMPLE_S)
            self.requests.inferred = max(SLOWEST, rate / 2)
            self._doubling_s *= 2
            self._start_rise()
        elif not self._searching and not early and self._refused_since_cut < NOISE * self._sent_since_cut:
            # The first refusals near or above the old limit: the limit is here.
            self._cut(self.requests.rate)

    def on_headers(self, headers: Mapping[str, str]) -> None:
        """Take over the limits that the headers of a response state."""
        for spacing, names in ((self.requests, _REQUEST_HEADERS), (self.tokens, _TOKEN_HEADERS)):
            for limit_name, remaining_name, reset_name in names:
                limit = _number(headers.get(limit_name))
                if not limit:
                    continue
                remaining, reset = _number(headers.get(remaining_name)), parse_duration(headers.get(reset_name))
                if spacing.stated == math.inf:
                    # From now on the limit is known: whatever was inferred from refusals no longer counts.
                    spacing.inferred = math.inf
                    self._cut_at = self._active_time()
                    self._grown_at = math.inf
                spacing.stated = HEADROOM * _stated_rate(limit, remaining, reset)
                if spacing is self.requests:
                    self.max_in_flight = math.inf
                break

    def _grow(self, now: float) -> None:
        """Raise the inferred rate by the time since the last call."""
        if now <= self._grown_at:
            return
        if self._searching:
            self.requests.inferred *= 2 ** ((now - self._grown_at) / self._doubling_s)
        else:
            # -1 right after a cut (the rate is CUT below the ceiling), 0 at the ceiling, above 0 beyond it.
            risen = (now - self._rise_from) / RECOVERY_S - 1
            self.requests.inferred = self._ceiling * (1 + CUT * risen**3)
        self._grown_at = now

    def _cut(self, ceiling: float) -> None:
        """Continue a little below `ceiling`, which is taken for the limit."""
        self._searching = False
        self.requests.inferred = max(SLOWEST, (1 - CUT) * ceiling)
        self._ceiling = max(ceiling, self.requests.inferred)
        self._start_rise()

    def _start_rise(self) -> None:
        self._cut_at = self._grown_at = self._rise_from = self._active_time()
        self._sent_since_cut = self._refused_since_cut = 0

    def _active_time(self) -> float:
        """The clock without the pauses that the server asked for, in which nothing can be learnt."""
        return max(self._clock(), self._paused_until) - self._paused_s

    def _sample(self, until: float) -> tuple[int, int, float]:
        """The latest requests until then and since the last cut: how many, how many were refused, in what time."""
        times = [sent for sent in self._sent if self._cut_at < sent <= until]
        if not times:
            return 0, 0, 0.0
        began = max(times[0], min(until - SAMPLE_S, times[max(0, len(times) - SAMPLE)]))
        refused = sum(began <= sent <= until for sent in self._refused)
        return sum(sent >= began for sent in times), refused, until - began


def _stated_rate(limit: float, remaining: float | None, reset: float | None) -> float:
    """Requests or tokens a second by the headers. A daily limit may be used up as fast as one likes, to its end."""
    if reset is None or reset < DAY_LIKE_S or remaining is None:
        return limit / 60
    return max(remaining / 60, (limit - remaining) / reset, SLOWEST)


def parse_duration(text: str | None) -> float | None:
    """Seconds of a duration as the vendors write it ("6m0s", "12ms", "59.5"); None if absent or unreadable."""
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
