"""Retry a call that may fail for a moment: exponential backoff with jitter, and the pause that a server asks for.

The caller says which errors are worth another attempt and what to do before a pause (log it, say); the last error is
raised as it is. `retry` blocks its thread, `retry_async` awaits; both take the `sleep` to use, so that a pause can be
interrupted and a test need not wait.
"""

import asyncio
import email.utils
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Backoff:
    """How often to try, and how long to wait in between. Attempts are counted from 1.

    Without `Retry-After` the pause after attempt n is `first_s * factor ** (n - 1)`, at most `longest_s`, times a
    number drawn between `1 - jitter` and 1, so that clients that failed together do not come back together.
    """

    attempts: int | None = None  # None: no limit but `give_up_s`
    give_up_s: float | None = None  # no attempt is begun later than so many seconds after the first
    first_s: float = 0.5
    longest_s: float = 20.0
    factor: float = 2.0
    jitter: float = 0.5
    longest_retry_after_s: float = 120.0  # a server that asks for more is asked again after so long

    def pause_s(self, attempt: int, retry_after_s: float | None = None) -> float:
        """Seconds to wait after attempt number `attempt` failed; a server's `Retry-After` replaces our own pause."""
        if retry_after_s is not None:
            return min(self.longest_retry_after_s, max(0.0, retry_after_s))
        # The exponent is bounded: 2.0 ** 1100 would overflow where attempts have no limit.
        pause = min(self.longest_s, self.first_s * self.factor ** min(attempt - 1, 60))
        return pause * random.uniform(1.0 - self.jitter, 1.0)

    def is_last(self, attempt: int, elapsed_s: float) -> bool:
        """True if no attempt may follow number `attempt`, which failed `elapsed_s` seconds after the first began."""
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
    """The result of `call`. Raises its last error, or at once one that `should_retry` declines.

    `before_pause(error, attempt, pause_s)` is called before each pause; an exception out of it or `sleep` ends the
    retries.
    """
    began = time.monotonic()
    attempt = 1
    while True:
        try:
            return call()
        except Exception as error:
            if not should_retry(error) or backoff.is_last(attempt, time.monotonic() - began):
                raise
            pause_s = backoff.pause_s(attempt, retry_after_s(error))
            before_pause(error, attempt, pause_s)
        sleep(pause_s)
        attempt += 1


async def retry_async(
    call: Callable[[], Awaitable[T]],
    backoff: Backoff,
    *,
    should_retry: Callable[[Exception], bool],
    retry_after_s: Callable[[Exception], float | None] = lambda error: None,
    before_pause: Callable[[Exception, int, float], object] = lambda error, attempt, pause_s: None,
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
) -> T:
    """`retry` for a coroutine function."""
    began = time.monotonic()
    attempt = 1
    while True:
        try:
            return await call()
        except Exception as error:
            if not should_retry(error) or backoff.is_last(attempt, time.monotonic() - began):
                raise
            pause_s = backoff.pause_s(attempt, retry_after_s(error))
            before_pause(error, attempt, pause_s)
        await sleep(pause_s)
        attempt += 1


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
