"""How fast one endpoint is asked: at the limits that are configured, that it states, or that its refusals show.

Requests are spread evenly and not sent in bursts, for a limit a minute is often kept as so many a second. Where the
server states no limit, the rate is cut to what got through when it refuses, and then crept up again until the next
refusal: 0.5 % a second at first, faster the longer nothing is refused. On a server that lets 50 a second through this
holds 97 % of it with 1 % of refusals, and with stated limits 98 % with none (bench/endpoints.py).
"""

import math
import re
import time
from collections import deque
from collections.abc import Callable, Mapping

WINDOW_S = 2.0  # over which it is reckoned what gets through
HEADROOM = 0.98  # of a stated limit: our clock and the server's are not the same
CUT = 0.98  # of what got through, after a refusal
GROWTH = 0.005  # a second, times 1 + t / 10 s
REST_S = 5.0  # before the first growth after a cut
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
        self._next = max(self._next, now - SLACK_S) + amount / self.rate

    def give_back(self, amount: float) -> None:
        """Less was used than taken (or, negative, more)."""
        self._next -= amount / self.rate

    def hold(self, until: float) -> None:
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
        self._sent: deque[float] = deque()
        self._refused: deque[float] = deque()
        self._cut_at = self._grown_at = -math.inf

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
        while self._sent[0] < now - WINDOW_S:
            self._sent.popleft()
        return now

    def answered(self, reserved: int, used: int | None) -> None:
        """It was answered, and used so many of the tokens."""
        self.window += 1
        if used is not None:
            self.tokens.give_back(reserved - used)

    def refused(self, sent_at: float) -> None:
        """It was refused for the rate (429)."""
        now = self._clock()
        self.refused_count += 1
        self._refused.append(sent_at)
        if sent_at <= self._cut_at:
            return  # sent before the last cut: it says nothing of the rate since
        began = max(now - WINDOW_S, self._cut_at)
        for times in (self._sent, self._refused):
            while times and times[0] < began:
                times.popleft()
        elapsed = max(0.5, now - max(began, self._sent[0] if self._sent else began))
        through = (len(self._sent) - len(self._refused)) / elapsed
        self.requests.found = max(SLOWEST, CUT * min(self.requests.rate, through))
        self._cut_at = now
        self._grown_at = now + REST_S

    def told(self, headers: Mapping[str, str]) -> None:
        """Learn from the headers of any response."""
        for spread, names in ((self.requests, _REQUESTS), (self.tokens, _TOKENS)):
            for limit_name, remaining_name, reset_name in names:
                limit = _number(headers.get(limit_name))
                if not limit:
                    continue
                remaining, reset = _number(headers.get(remaining_name)), seconds(headers.get(reset_name))
                spread.told = HEADROOM * _stated(limit, remaining, reset)
                if remaining == 0:
                    spread.hold(self._clock() + min(1.0, 1.0 if reset is None else reset))
                if spread is self.requests:
                    self.window = math.inf
                break

    def _grow(self, now: float) -> None:
        if now <= self._grown_at or self.requests.found == math.inf:
            return
        quiet = now - self._cut_at
        self.requests.found *= math.exp(GROWTH * (1 + quiet / 10) * min(1.0, now - self._grown_at))
        self._grown_at = now
        if self.requests.found > 100 * min(self.requests.configured, self.requests.told, 1e6):
            self.requests.found = math.inf


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
