"""common/retry.py on a clock of its own: which errors are tried again, how often, and after what pauses."""

import asyncio
import email.utils
import itertools
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nautile.common.retry import Backoff, retry, retry_after, retry_async


class Outage(Exception):
    """An error worth another attempt; `after` is what the server asked for."""

    after: float | None = None


def failing(times, error=Outage):
    """A call that fails `times` times, then returns the number of its call."""
    calls = itertools.count(1)

    def call():
        number = next(calls)
        if number <= times:
            raise error(f"failure {number}")
        return number

    return call


def is_outage(error):
    return isinstance(error, Outage)


def test_a_call_is_tried_until_it_succeeds_with_growing_pauses():
    pauses = []
    backoff = Backoff(attempts=5, first_s=1.0, longest_s=3.0, jitter=0.0)
    assert retry(failing(4), backoff, should_retry=is_outage, sleep=pauses.append) == 5
    assert pauses == [1.0, 2.0, 3.0, 3.0]


def test_the_last_error_is_raised_as_it_is():
    pauses = []
    with pytest.raises(Outage, match="failure 3"):
        retry(failing(9), Backoff(attempts=3), should_retry=is_outage, sleep=pauses.append)
    assert len(pauses) == 2


def test_an_error_that_should_not_be_retried_is_raised_at_once():
    with pytest.raises(KeyError):
        retry(failing(1, KeyError), Backoff(attempts=3), should_retry=is_outage, sleep=pytest.fail)


def test_retry_after_replaces_the_pause_up_to_its_limit():
    pauses, answers = [], iter([7.0, 1e6, None])
    backoff = Backoff(attempts=4, first_s=1.0, jitter=0.0, longest_retry_after_s=60.0)
    retry(failing(3), backoff, should_retry=is_outage, retry_after_s=lambda error: next(answers), sleep=pauses.append)
    assert pauses == [7.0, 60.0, 4.0]


def test_retries_end_when_their_time_is_up():
    backoff = Backoff(give_up_s=0.05, first_s=0.02, jitter=0.0, factor=1.0)
    calls = []

    def call():
        calls.append(time.monotonic())
        raise Outage

    with pytest.raises(Outage):
        retry(call, backoff, should_retry=is_outage)
    assert len(calls) >= 2
    assert calls[-1] - calls[0] > 0.05


def test_a_pause_can_be_interrupted():
    def stop(seconds):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        retry(failing(1), Backoff(attempts=3), should_retry=is_outage, sleep=stop)


def test_before_pause_is_called_with_error_attempt_and_pause():
    calls = []
    retry(
        failing(2),
        Backoff(attempts=3, first_s=1.0, jitter=0.0),
        should_retry=is_outage,
        before_pause=lambda error, attempt, pause_s: calls.append((str(error), attempt, pause_s)),
        sleep=lambda seconds: None,
    )
    assert calls == [("failure 1", 1, 1.0), ("failure 2", 2, 2.0)]


def test_a_coroutine_is_retried_in_the_same_way():
    call, pauses = failing(2), []

    async def ask():
        return call()

    async def sleep(seconds):
        pauses.append(seconds)

    backoff = Backoff(attempts=3, first_s=1.0, jitter=0.0)
    assert asyncio.run(retry_async(ask, backoff, should_retry=is_outage, sleep=sleep)) == 3
    assert pauses == [1.0, 2.0]


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"retry-after": "3"}, 3.0),
        ({"retry-after": "0.5"}, 0.5),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "Mon, 01 Jan 2026 99999999999999999999:00"}, None),
        ({"retry-after": "3", "retry-after-ms": "250"}, 0.25),
        ({"retry-after": "3", "retry-after-ms": "soon"}, 3.0),
        ({"retry-after": "-3"}, None),
        ({"retry-after": email.utils.formatdate(0)}, 0.0),
        ({"retry-after": email.utils.formatdate(10_030), "date": email.utils.formatdate(10_000, usegmt=True)}, 30.0),
        ({"retry-after": "Sun Nov  6 08:49:37 1994", "date": "Sun, 06 Nov 1994 08:49:00 GMT"}, 37.0),
        ({"retry-after": email.utils.formatdate(0), "date": "today"}, 0.0),
    ],
)
def test_retry_after_headers(headers, seconds):
    assert retry_after(headers) == seconds


@given(st.text())
def test_an_unreadable_retry_after_is_none(text):
    seconds = retry_after({"retry-after": text})
    assert seconds is None or seconds >= 0


def test_a_retry_after_date_in_the_future():
    assert 50 < retry_after({"retry-after": email.utils.formatdate(time.time() + 60, usegmt=True)}) <= 61


@given(st.integers(1, 60))
def test_a_pause_doubles_to_a_bound_and_half_of_it_is_random(attempt):
    backoff = Backoff(first_s=0.5, longest_s=20.0)
    longest = min(20.0, 0.5 * 2 ** (attempt - 1))
    assert longest / 2 <= backoff.pause_s(attempt) <= longest
