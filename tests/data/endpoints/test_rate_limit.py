"""The pace against servers that keep time by the same clock as it: no real second passes."""

import heapq
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.endpoints.rate_limit import HEADROOM, RateLimiter, seconds

LATENCY_S = 0.05


class Server:
    """Lets `rate` requests a second through, `burst` at once; may say so."""

    def __init__(self, rate, burst, states_it):
        self.rate, self.burst, self.states_it = rate, burst, states_it
        self.level, self.at, self.through, self.refused = burst, 0.0, 0, 0

    def take(self, now):
        self.level = min(self.burst, self.level + (now - self.at) * self.rate)
        self.at = now
        if self.level < 1:
            self.refused += 1
            return False
        self.level -= 1
        self.through += 1
        return True

    @property
    def headers(self):
        if not self.states_it:
            return {}
        reset = f"{1000 * (self.burst - self.level) / self.rate:.0f}ms"
        return {
            "x-ratelimit-limit-requests": str(int(60 * self.rate)),
            "x-ratelimit-remaining-requests": str(int(self.level)),
            "x-ratelimit-reset-requests": reset,
        }


def drive(server, pace, until, *, retry_after=0.0, clock):
    """Send as fast as the pace allows for `until` seconds of the server's time."""
    answers, under_way, paused = [], 0, 0.0
    while clock[0] < until:
        while answers and answers[0][0] <= clock[0]:
            _, _, sent_at, good, headers = heapq.heappop(answers)
            under_way -= 1
            pace.told(headers)
            if good:
                pace.answered(0, None)
            else:
                pace.refused(sent_at, retry_after)
                paused = max(paused, clock[0] + retry_after)
        wait = max(pace.delay(), paused - clock[0])
        if wait <= 0 and under_way < min(256, pace.window):
            good = server.take(clock[0])
            under_way += 1
            heapq.heappush(answers, (clock[0] + LATENCY_S, pace.sent_count, pace.sent(0), good, server.headers))
            continue
        times = [answers[0][0]] if answers else []
        if wait > 0:
            times.append(clock[0] + wait)
        clock[0] = max(min(times), clock[0] + 1e-6)


def run(rate, *, burst, states_it, seconds, retry_after=0.0, **limits):
    clock = [0.0]
    server, pace = Server(rate, burst, states_it), RateLimiter(**limits, clock=lambda: clock[0])
    drive(server, pace, seconds, retry_after=retry_after, clock=clock)
    return server, pace


@pytest.mark.parametrize("burst", [5, 50])
def test_a_stated_limit_is_held_without_a_refusal(burst):
    server, pace = run(50, burst=burst, states_it=True, seconds=120)
    assert server.through >= 0.97 * 50 * 120
    assert pace.refused_count <= 16, "at most the few that were sent before anything was known"


@pytest.mark.parametrize("retry_after", [0.0, 1.0])
@pytest.mark.parametrize("burst", [5, 50])
@pytest.mark.parametrize("rate", [2, 50, 400])
def test_a_limit_that_nobody_states_is_found(rate, burst, retry_after):
    server, pace = run(rate, burst=burst, states_it=False, seconds=200, retry_after=retry_after)
    assert server.through >= 0.8 * rate * 200
    assert pace.refused_count <= 0.06 * pace.sent_count + 150, "many only while the limit is looked for"


def test_a_limit_that_is_raised_is_found_again():
    clock = [0.0]
    server, pace = Server(20, 20, False), RateLimiter(clock=lambda: clock[0])
    drive(server, pace, 60, clock=clock)
    server.rate = 60
    drive(server, pace, 180, clock=clock)
    before = server.through
    drive(server, pace, 240, clock=clock)
    assert server.through - before >= 0.9 * 60 * 60


def test_a_configured_limit_is_kept_and_a_stated_one_below_it_too():
    clock = [0.0]
    pace = RateLimiter(600, clock=lambda: clock[0])
    for _ in range(20):
        clock[0] += pace.delay()
        pace.sent(0)
    assert clock[0] == pytest.approx(1.9, abs=0.06)
    pace.told({"x-ratelimit-limit-req-minute": "300", "x-ratelimit-remaining-req-minute": "299"})
    assert pace.requests.rate == pytest.approx(5 * HEADROOM)


@pytest.mark.parametrize(
    "name", ["x-ratelimit-limit-tokens", "x-ratelimit-limit-tokens-minute", "ratelimitbysize-limit"]
)
def test_tokens_are_paced_by_what_is_set_aside_and_then_by_what_was_used(name):
    clock = [0.0]
    pace = RateLimiter(clock=lambda: clock[0])
    pace.told({name: "60000"})
    pace.sent(2000)
    assert pace.delay() == pytest.approx(2000 / 1000 / HEADROOM, abs=0.06)
    pace.answered(2000, 500)
    assert pace.delay() == pytest.approx(500 / 1000 / HEADROOM, abs=0.06)


def test_a_limit_a_day_is_spread_over_what_is_left_of_it():
    pace = RateLimiter(clock=lambda: 0.0)
    headers = {"x-ratelimit-limit-requests": "10000", "x-ratelimit-reset-requests": "60m0s"}
    pace.told({**headers, "x-ratelimit-remaining-requests": "9600"})
    assert pace.requests.rate == pytest.approx(HEADROOM * 160)
    pace.told({**headers, "x-ratelimit-remaining-requests": "6"})
    assert pace.requests.rate == pytest.approx(HEADROOM * 9994 / 3600)


def test_durations_are_read_as_the_vendors_write_them():
    assert [seconds(text) for text in ("1s", "6m0s", "12ms", "59.5", "1h2m3.5s")] == [1, 360, 0.012, 59.5, 3723.5]
    assert seconds(None) is seconds("soon") is None


@given(
    st.dictionaries(
        st.sampled_from(["x-ratelimit-limit-requests", "x-ratelimit-remaining-requests", "x-ratelimit-reset-requests"]),
        st.text(),
    )
)
def test_headers_that_nobody_can_read_change_nothing_or_leave_a_rate(headers):
    pace = RateLimiter(clock=lambda: 0.0)
    pace.told(headers)
    assert pace.requests.rate > 0
    assert math.isfinite(pace.delay())
