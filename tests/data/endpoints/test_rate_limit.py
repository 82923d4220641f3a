"""The rate limiter against servers that share its simulated clock: no real second passes."""

import heapq
import itertools
import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nautile.data.endpoints.rate_limit import HEADROOM, RateLimiter, parse_duration

LATENCY_S = 0.05


class Server:
    """Accepts `rate` requests a second, `burst` at once, and may state that in headers."""

    def __init__(self, rate, burst, states_limit):
        self.rate, self.burst, self.states_limit = rate, burst, states_limit
        self.level, self.at, self.accepted, self.refused = burst, 0.0, 0, 0

    def take(self, now):
        self.level = min(self.burst, self.level + (now - self.at) * self.rate)
        self.at = now
        if self.level < 1:
            self.refused += 1
            return False
        self.level -= 1
        self.accepted += 1
        return True

    @property
    def headers(self):
        if not self.states_limit:
            return {}
        reset = f"{1000 * (self.burst - self.level) / self.rate:.0f}ms"
        return {
            "x-ratelimit-limit-requests": str(int(60 * self.rate)),
            "x-ratelimit-remaining-requests": str(int(self.level)),
            "x-ratelimit-reset-requests": reset,
        }


def drive(server, limiter, until, *, retry_after=0.0, clock):
    """Send as fast as the limiter allows until the clock shows `until` seconds."""
    responses, in_flight, paused = [], 0, 0.0
    while clock[0] < until:
        while responses and responses[0][0] <= clock[0]:
            _, _, sent_at, good, headers = heapq.heappop(responses)
            in_flight -= 1
            limiter.on_headers(headers)
            if good:
                limiter.on_reply(0, None)
            else:
                limiter.on_rate_limit(sent_at, retry_after)
                paused = max(paused, clock[0] + retry_after)
        wait = max(limiter.delay(), paused - clock[0])
        if wait <= 0 and in_flight < min(256, limiter.max_in_flight):
            good = server.take(clock[0])
            in_flight += 1
            heapq.heappush(
                responses, (clock[0] + LATENCY_S, limiter.sent_count, limiter.on_sent(0), good, server.headers)
            )
            continue
        times = [responses[0][0]] if responses else []
        if wait > 0:
            times.append(clock[0] + wait)
        clock[0] = max(min(times), clock[0] + 1e-6)


def run(rate, *, burst, states_limit, seconds, retry_after=0.0, **limits):
    clock = [0.0]
    server, limiter = Server(rate, burst, states_limit), RateLimiter(**limits, clock=lambda: clock[0])
    drive(server, limiter, seconds, retry_after=retry_after, clock=clock)
    return server, limiter


@pytest.mark.parametrize("burst", [5, 50])
def test_a_stated_limit_is_used_without_a_refusal(burst):
    server, limiter = run(50, burst=burst, states_limit=True, seconds=120)
    assert server.accepted >= 0.97 * 50 * 120
    assert limiter.refused_count <= 16, "at most the few that were sent before anything was known"


@pytest.mark.slow
@pytest.mark.parametrize("retry_after", [0.0, 1.0])
@pytest.mark.parametrize("burst", [5, 50])
@pytest.mark.parametrize("rate", [2, 50, 400])
def test_an_unstated_limit_is_found(rate, burst, retry_after):
    server, limiter = run(rate, burst=burst, states_limit=False, seconds=200, retry_after=retry_after)
    assert server.accepted >= 0.8 * rate * 200
    assert limiter.refused_count <= 0.1 * limiter.sent_count + 160, "more only while the limit is searched for"


def test_a_limit_that_is_raised_is_found_again():
    clock = [0.0]
    server, limiter = Server(20, 20, False), RateLimiter(clock=lambda: clock[0])
    drive(server, limiter, 60, clock=clock)
    server.rate = 60
    drive(server, limiter, 270, clock=clock)
    before = server.accepted
    drive(server, limiter, 330, clock=clock)
    assert server.accepted - before >= 0.9 * 60 * 60


def test_refusals_for_other_reasons_leave_the_rate_alone():
    """Why the rate is not cut at each refusal: one in twenty would cost nearly all of it."""
    clock, arrivals = [0.0], itertools.count(1)
    server, limiter = Server(math.inf, 1, False), RateLimiter(clock=lambda: clock[0])
    server.take = lambda now: next(arrivals) % 20 != 0
    drive(server, limiter, 3, clock=clock)
    assert limiter.refused_count > 100
    assert limiter.requests.rate == math.inf


def test_the_lower_of_a_configured_and_a_stated_limit_is_kept():
    clock = [0.0]
    limiter = RateLimiter(600, clock=lambda: clock[0])
    for _ in range(20):
        clock[0] += limiter.delay()
        limiter.on_sent(0)
    assert clock[0] == pytest.approx(1.9, abs=0.06)
    limiter.on_headers({"x-ratelimit-limit-req-minute": "300", "x-ratelimit-remaining-req-minute": "299"})
    assert limiter.requests.rate == pytest.approx(5 * HEADROOM)


@pytest.mark.parametrize(
    "name", ["x-ratelimit-limit-tokens", "x-ratelimit-limit-tokens-minute", "ratelimitbysize-limit"]
)
def test_tokens_are_limited_by_what_is_reserved_and_then_by_what_was_used(name):
    clock = [0.0]
    limiter = RateLimiter(clock=lambda: clock[0])
    limiter.on_headers({name: "60000"})
    limiter.on_sent(2000)
    assert limiter.delay() == pytest.approx(2000 / 1000 / HEADROOM, abs=0.06)
    limiter.on_reply(2000, 500)
    assert limiter.delay() == pytest.approx(500 / 1000 / HEADROOM, abs=0.06)


def test_a_daily_limit_is_spread_over_what_is_left_of_the_day():
    limiter = RateLimiter(clock=lambda: 0.0)
    headers = {"x-ratelimit-limit-requests": "10000", "x-ratelimit-reset-requests": "60m0s"}
    limiter.on_headers({**headers, "x-ratelimit-remaining-requests": "9600"})
    assert limiter.requests.rate == pytest.approx(HEADROOM * 160)
    limiter.on_headers({**headers, "x-ratelimit-remaining-requests": "6"})
    assert limiter.requests.rate == pytest.approx(HEADROOM * 9994 / 3600)


def test_durations_are_parsed_as_the_vendors_write_them():
    assert [parse_duration(text) for text in ("1s", "6m0s", "12ms", "59.5", "1h2m3.5s", "1d2h")] == [
        1,
        360,
        0.012,
        59.5,
        3723.5,
        93_600,
    ]
    assert parse_duration(None) is parse_duration("soon") is None


@given(
    st.dictionaries(
        st.sampled_from(["x-ratelimit-limit-requests", "x-ratelimit-remaining-requests", "x-ratelimit-reset-requests"]),
        st.text(),
    )
)
@example({"x-ratelimit-limit-requests": "0.0001"})
def test_unreadable_headers_leave_a_usable_rate(headers):
    limiter = RateLimiter(clock=lambda: 0.0)
    limiter.on_headers(headers)
    assert limiter.requests.rate > 0.01, "no request waits for days"
    assert math.isfinite(limiter.delay())
