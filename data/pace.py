"""How fast one endpoint is asked: at the limits that are configured, that it states, or that its refusals show.

Requests are spread evenly and not sent in bursts, for a limit a minute is often kept as so many a second. Where the
server states no limit, its first refusals halve the rate, which then doubles again (within a second; two; four) until
enough is refused to see what gets through. From then on a refusal cuts the rate to 4 % below that, and it rises again
on a cubic curve: it stays long near the limit, passes it after half a minute, and goes far beyond only if it may.
"""

import math
import re
import time
from collections import deque
from collections.abc import Callable, Mapping

HEADROOM = 0.98  # of a stated limit: our clock and the server's are not the same
SAMPLE, SAMPLE_S = 16, 2.0  # what got through is reckoned over so many requests, and over so long if there are more
KEPT = 1024  # of the latest requests, for that
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


class Spread:
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

    def hold(self, until: float) -> None:
        """None before that, and none in a hurry after it."""
        self._next = max(self._next, until)


class Pace:
    """The rate at which one endpoint is asked. `clock` in seconds; to be used from one event loop."""

    def __init__(
        self,
        requests_per_minute: int | None = None,
        tokens_per_minute: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.requests, self.tokens = Spread(requests_per_minute), Spread(tokens_per_minute)
        self.sent_count = self.refused_count = 0
        self.window = math.inf if requests_per_minute else FIRST_WINDOW
        self._clock = clock
        self._sent: deque[float] = deque(maxlen=KEPT)
        self._refused: deque[float] = deque(maxlen=KEPT)
        self._looking = True  # for the limit; after that `_ceiling` is what got through at the last refusal
        self._ceiling, self._depth = math.inf, CUT
        self._doubling_s = DOUBLING_S
        self._cut_at, self._rise_from, self._grown_at = -math.inf, math.inf, math.inf

    def delay(self) -> float:
        """Seconds until a request may be sent."""
        now = self._clock()
        self._grow(now)
        return max(self.requests.delay(now), self.tokens.delay(now))

    def sent(self, tokens: int) -> float:
        """A request goes out that may use so many tokens. Returns when, for `refused`."""
        now = self._clock()
        self.sent_count += 1
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
        now = self._clock()
        self.refused_count += 1
        self._refused.append(sent_at)
        if sent_at <= self._cut_at:
            return  # sent before the last cut: it says nothing of the rate since
        tried, through = self._measured(sent_at)
        rate = self.requests.rate if self.requests.rate < math.inf else tried
        if through is not None:
            self._looking = False
            self._ceiling = min(rate, through * (1 + CUT / 2))
            self.requests.found = max(SLOWEST, rate / 4, (1 - CUT) * self._ceiling)
            self._ceiling = max(self._ceiling, self.requests.found)
            self._depth = max(CUT, 1 - self.requests.found / self._ceiling)
        elif self._looking:
            self.requests.found = max(SLOWEST, rate / 2)
            self._doubling_s *= 2
        else:
            self.requests.found = max(SLOWEST, (1 - CUT) * rate)
            self._ceiling, self._depth = rate, CUT
        self._cut_at, self._grown_at = now, now + pause_s
        self._rise_from = now + pause_s
        self.requests.hold(now + pause_s)

    def _measured(self, until: float) -> tuple[float, float | None]:
        """Requests a second that were tried before `until` and since the last cut, and that got through; the latter is
        None where they are too few to say."""
        times = [sent for sent in self._sent if self._cut_at < sent <= until]
        if not times:
            return math.inf, None
        began = max(times[0], min(until - SAMPLE_S, times[max(0, len(times) - SAMPLE)]))
        tried = sum(sent >= began for sent in times)
        elapsed = max(until - began, 0.25)
        refused = sum(began <= sent <= until for sent in self._refused)
        through = (tried - refused) / elapsed if tried >= SAMPLE and until - began >= 0.25 else None
        return tried / elapsed, through

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
                    self._cut_at = self._clock()
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
            self.requests.found = self._ceiling * (1 + self._depth * risen**3)
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
