"""Retry calls that may fail temporarily, with exponential backoff, jitter and support for `Retry-After`.

The caller decides which errors are retried and what to do before a pause, such as logging. The last error is raised
unchanged. `retry` blocks its thread, `retry_async` awaits. Both take the `sleep` function to use, so that a pause can
be interrupted and tests need not wait.
"""

import random
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import UTC
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Backoff:
    """Number of attempts, counted from 1, and pauses between them.

    Without `Retry-After` the pause after attempt n is `first_s * factor ** (n - 1)`, at most `longest_s`, times a
    random number between `1 - jitter` and 1, so that clients that failed together do not all retry at the same time.
    """

    attempts: int | None = None  # None: limited by `give_up_s` only
    give_up_s: float | None = None  # an attempt that fails later than this after the first began is the last
    first_s: float = 0.5
    longest_s: float = 20.0
    factor: float = 2.0
    jitter: float = 0.5
    longest_retry_after_s: float = 120.0  # upper limit of a server's `Retry-After`

    def pause_s(self, attempt: int, retry_after_s: float | None = None) -> float:
        """Seconds to wait after attempt number `attempt` has failed; a server's `Retry-After` replaces the backoff."""
        if retry_after_s is not None:
            return min(self.longest_retry_after_s, max(0.0, retry_after_s))
        # Bound the exponent: without a limit of attempts 2.0 ** 1100 would overflow.
        pause = min(self.longest_s, self.first_s * self.factor ** min(attempt - 1, 60))
        return pause * random.uniform(1.0 - self.jitter, 1.0)

    def is_last(self, attempt: int, elapsed_s: float) -> bool:
        """Whether attempt number `attempt`, which failed `elapsed_s` seconds after the first one began, is the last."""
        if self.attempts is not None and attempt >= self.attempts:
            return True
        return self.give_up_s is not None and elapsed_s > self.give_up_s


def retry(
    call: Callable[[], T],
    backoff: Backoff,
    *,
    should_retry: Callable[[Exception], bool],
    retry_after_s: Callable[[Exception], float | None] = lambda error: None,
    before_pause: Callable[[Exception, int, float], object] = lambda error, attempt, pause_s: None,
    sleep: Callable[[float], object] = time.sleep,
) -> T:
    """Return the result of `call`, retrying after errors; raises the last error, or one that should not be retried.

    `before_pause(error, attempt, pause_s)` is called before each pause; an exception from it or from `sleep` ends the
    retries.
    """
    start_time = time.monotonic()
    attempt = 1
    while True:
        try:
            return call()
        except Exception as error:
            if not should_retry(error) or backoff.is_last(attempt, time.monotonic() - start_time):
                raise
            pause_s = backoff.pause_s(attempt, retry_after_s(error))
            before_pause(error, attempt, pause_s)
        # After the `except`, so that an interruption of the pause is not reported as caused by the error.
        sleep(pause_s)
        attempt += 1


async def retry_async(
    call: Callable[[], Awaitable[T]],
    backoff: Backoff,
    *,
    should_retry: Callable[[Exception], bool],
    retry_after_s: Callable[[Exception], float | None] = lambda error: None,
    before_pause: Callable[[Exception, int, float], object] = lambda error, attempt, pause_s: None,
    sleep: Callable[[float], Awaitable[object]] | None = None,
) -> T:
    """`retry` for a coroutine function. `sleep`: None for `asyncio.sleep`."""
    import asyncio  # not above: most processes, as those of the command line, wait for nothing this way

    sleep = sleep or asyncio.sleep
    start_time = time.monotonic()
    attempt = 1
    while True:
        try:
            return await call()
        except Exception as error:
            if not should_retry(error) or backoff.is_last(attempt, time.monotonic() - start_time):
                raise
            pause_s = backoff.pause_s(attempt, retry_after_s(error))
            before_pause(error, attempt, pause_s)
        await sleep(pause_s)
        attempt += 1


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Parse `Retry-After` (seconds or a date) or `retry-after-ms` as seconds; None if absent or invalid.

    A date is compared with the server's own, because its clock may differ from ours.
    """
    milliseconds, text = headers.get("retry-after-ms", "").strip(), headers.get("retry-after", "").strip()
    # The standard knows whole seconds and dates; some servers send fractions of seconds.
    if _is_number(milliseconds):
        return float(milliseconds) / 1000
    if _is_number(text):
        return float(text)
    until, now = _seconds_of(text), _seconds_of(headers.get("date", ""))
    return None if until is None else max(0.0, until - (time.time() if now is None else now))


def _is_number(text: str) -> bool:
    return text.isascii() and text.replace(".", "", 1).isdigit()


def _seconds_of(date: str) -> float | None:
    """The seconds of the epoch of a date in a header, which is in UTC if it does not say; None if it is none."""
    from email.utils import parsedate_to_datetime  # which imports a fifth of the email package

    try:
        moment = parsedate_to_datetime(date)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except (ValueError, TypeError, OverflowError):  # a date may have numbers of any size
        return None
