"""How fast one endpoint is asked: at the limits that are configured, that it states, or that its refusals show.

Requests are spread evenly and not sent in bursts, for a limit a minute is often kept as so many a second. Where the
server states no limit, nothing is done until a quarter of what was sent in two seconds is refused, or one is refused
with a pause of half a second and more: a few refusals may have other reasons, and are only asked again. Then the rate
goes to 4 % below what got through, and rises again on a cubic curve: it stays long near the limit, passes it after half
a minute, and goes far beyond only if it may. A refusal on the way cuts it again, unless as many came when it was low.
"""

import math
import re
import time
from collections import deque
from collections.abc import Callable, Mapping

HEADROOM = 0.98  # of a stated limit: our clock and the server's are not the same
SAMPLE, SAMPLE_S = 16, 2.0  # what got through is reckoned over so many requests, and over so long if there are more
KEPT = 1024  # of the latest requests, for that
LEAST_S = 0.25  # the shortest sample that says how much gets through
CROWDED = 0.25  # the share of a sample that is refused when we are clearly too fast
NOISE = 0.02  # a share that is refused even below the limit: then single refusals mean nothing
TOLD_OFF_S, TOLD_OFF = 0.5, 0.75  # a pause of that length means that we were too fast, and how far to go down
CUT = 0.04  # below what got through
BACK_S = 30.0  # until the rate is again what it was
DOUBLING_S = 1.0  # while the limit is looked for
FIRST_WINDOW = 16  # under way together before anything is known; one more for every answer
SLACK_S = 0.05  # a turn that was taken late is caught up with within this
SLOWEST = 0.05  # requests a second
DAY_LIKE_S = 61.0  # a limit that takes longer to reset is not one a minute

# limit, remaining, reset: OpenAI's, Mistral's, and Mistral's older ones
_REQUESTS = (
    ("x-ratelimit-limit-requests", "x-ratelimit-remaining-requests", "x-ratelimit-reset-requests"),
    ("x-ratelimit-limit-req-minute", "x-ratelimit-remaining-req-minute", "x-ratelimit-reset-req-minute"),
)
_TOKENS = (
    ("x-ratelimit-limit-tokens", "x-ratelimit-remaining-tokens", "x-ratelimit-reset-tokens"),
    ("x-ratelimit-limit-tokens-minute", "x-ratelimit-remaining-tokens-minute", "x-ratelimit-reset-tokens-minute"),
    ("ratelimitbysize-limit", "ratelimitbysize-remaining", "ratelimitbysize-reset"),
)
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|h|m|s)")
_UNITS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}


class EvenSpacing:
    """Even spacing of something that is used up at `configured`, `told` and `found` a second, whichever is least."""

    def __init__(self, per_minute: int | None) -> None:
        self.configured = per_minute / 60 if per_minute else math.inf
        self.told = self.found = math.inf
        self._next = -math.inf

    @property
    def rate(self) -> float:
        return min(self.configured, self.told, self.found)

    def delay(self, now: float) -> float:
        """Seconds until the next may go."""
        return max(0.0, self._next - now)

    def take(self, amount: float, now: float) -> None:
        earliest = now if self._next == -math.inf else now - SLACK_S
        self._next = max(self._next, earliest) + amount / self.rate

    def give_back(self, amount: float) -> None:
        """Less was used than taken (or, negative, more)."""
        self._next -= amount / self.rate


class RateLimiter:
    """The rate at which one endpoint is asked. `clock` in seconds; to be used from one event loop."""

    def __init__(
        self,
        requests_per_minute: int | None = None,
        tokens_per_minute: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.requests, self.tokens = EvenSpacing(requests_per_minute), EvenSpacing(tokens_per_minute)
        self.sent_count = self.refused_count = 0
        self.window = math.inf if requests_per_minute else FIRST_WINDOW
        self._clock = clock
        self._sent: deque[float] = deque(maxlen=KEPT)
        self._refused: deque[float] = deque(maxlen=KEPT)
        self._looking = True  # for the limit; after that `_ceiling` is what got through at the last refusal
        self._ceiling = math.inf
        self._sent_since = self._refused_since = 0
        self._doubling_s = DOUBLING_S
        self._paused_until, self._paused_s = -math.inf, 0.0
        self._cut_at, self._rise_from, self._grown_at = -math.inf, math.inf, math.inf

    def delay(self) -> float:
        """Seconds until a request may be sent."""
        now = self._active()
        self._grow(now)
        pause = max(0.0, self._paused_until - self._clock())
        return pause + max(self.requests.delay(now), self.tokens.delay(now))

    def sent(self, tokens: int) -> float:
        """A request goes out that may use so many tokens. Returns when, for `refused`."""
        now = self._active()
        self.sent_count += 1
        self._sent_since += 1
        self.requests.take(1, now)
        self.tokens.take(tokens, now)
        self._sent.append(now)
        return now

    def answered(self, reserved: int, used: int | None) -> None:
        """It was answered, and used so many of the tokens."""
        self.window += 1
        if used is not None:
            self.tokens.give_back(reserved - used)

    def refused(self, sent_at: float, pause_s: float = 0.0) -> None:
        """It was refused for the rate (429), and nobody will ask for so long."""
        now = self._active()
        self.refused_count += 1
        self._refused.append(sent_at)
        self._pause(pause_s)
        if sent_at <= self._cut_at:
            return  # sent before the last cut: it says nothing of the rate since
        self._refused_since += 1
        sent, refused, elapsed = self._sample(sent_at)
        crowded = sent >= SAMPLE and pause_s < TOLD_OFF_S and refused >= CROWDED * sent
        if crowded and elapsed >= LEAST_S:
            rate = min(self.requests.rate, sent / elapsed)
            self._cut(min(rate, max(rate / 4, (1 + CUT / 2) * (sent - refused) / elapsed)))
        elif pause_s >= TOLD_OFF_S and self.requests.rate < math.inf:
            # It says so itself; and as it recovers while we pause, what got through shows nothing.
            soon = self._looking or now - self._rise_from < BACK_S / 3
            self._cut(self.requests.rate * (TOLD_OFF if soon else 1.0))
        elif self._looking and (crowded or pause_s >= TOLD_OFF_S):
            # So short a burst shows that it was too fast, and not what would not be.
            rate = self.requests.rate if self.requests.rate < math.inf else max(1, sent) / max(elapsed, LEAST_S)
            self.requests.found = max(SLOWEST, rate / 2)
            self._doubling_s *= 2
            self._rest()
        elif (
            not self._looking and now - self._rise_from > BACK_S / 3 and self._refused_since < NOISE * self._sent_since
        ):
            self._cut(self.requests.rate)

    def _cut(self, ceiling: float) -> None:
        """Go on from a little below what is taken for the limit."""
        self._looking = False
        self.requests.found = max(SLOWEST, (1 - CUT) * ceiling)
        self._ceiling = max(ceiling, self.requests.found)
        self._rest()

    def _rest(self) -> None:
        self._cut_at = self._grown_at = self._rise_from = self._active()
        self._sent_since = self._refused_since = 0

    def _active(self) -> float:
        """The clock, without the pauses that the server asked for: nothing can be learnt in them."""
        return max(self._clock(), self._paused_until) - self._paused_s

    def _pause(self, seconds: float) -> None:
        now = self._clock()
        until = max(self._paused_until, now + seconds)
        self._paused_s += until - max(self._paused_until, now)
        self._paused_until = until

    def _sample(self, until: float) -> tuple[int, int, float]:
        """Of the latest requests until then and since the last cut: how many, how many were refused, in what time."""
        times = [sent for sent in self._sent if self._cut_at < sent <= until]
        if not times:
            return 0, 0, 0.0
        began = max(times[0], min(until - SAMPLE_S, times[max(0, len(times) - SAMPLE)]))
        refused = sum(began <= sent <= until for sent in self._refused)
        return sum(sent >= began for sent in times), refused, until - began

    def told(self, headers: Mapping[str, str]) -> None:
        """Learn from the headers of any response."""
        for spread, names in ((self.requests, _REQUESTS), (self.tokens, _TOKENS)):
            for limit_name, remaining_name, reset_name in names:
                limit = _number(headers.get(limit_name))
                if not limit:
                    continue
                remaining, reset = _number(headers.get(remaining_name)), seconds(headers.get(reset_name))
                if spread.told == math.inf:
                    spread.found = math.inf  # whatever was refused before: now we know
                    self._cut_at = self._active()
                    self._grown_at = math.inf
                spread.told = HEADROOM * _stated(limit, remaining, reset)
                if spread is self.requests:
                    self.window = math.inf
                break

    def _grow(self, now: float) -> None:
        if now <= self._grown_at:
            return
        if self._looking:
            self.requests.found *= 2 ** ((now - self._grown_at) / self._doubling_s)
        else:
            risen = (now - self._rise_from) / BACK_S - 1
            self.requests.found = self._ceiling * (1 + CUT * risen**3)
        self._grown_at = now


def _stated(limit: float, remaining: float | None, reset: float | None) -> float:
    """Requests or tokens a second by the headers. A limit a day may be used up as fast as one likes, to its end."""
    if reset is None or reset < DAY_LIKE_S or remaining is None:
        return limit / 60
    return max(remaining / 60, (limit - remaining) / reset, SLOWEST)


def seconds(text: str | None) -> float | None:
    """A duration as the vendors write it ("6m0s", "12ms", "59.5"); None if absent or unreadable."""
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
