"""Failures of a stage's process besides `ConfigError` and `Retryable`, and the retry policy.

Exit codes: `common.processes.ExitCode`.
"""

import math
import signal
import time
from pathlib import Path

from nautile.common.errors import ConfigError, Retryable
from nautile.common.retry import Backoff

CRASHES = 2  # retries after consecutive crashes
BACKOFF = Backoff(first_s=2.0, longest_s=600.0)  # pauses between the attempts of a stage
ITEM_BACKOFF = Backoff(attempts=5, first_s=2.0)  # of a work item; its stage waits out a longer outage


class StageCrash(RuntimeError):
    """A process ended by an exception, a signal or an unknown exit code. It is retried a few times.

    `reason` is one sentence; `str()` adds the path of the log and its last lines.
    """

    def __init__(self, reason: str, *, log: Path | None = None, log_tail: str = "", signal_number: int = 0) -> None:
        super().__init__(reason)
        self.reason = reason
        self.log = log
        self.log_tail = log_tail
        self.signal_number = signal_number  # the signal that ended the process; 0 if none did

    def __str__(self) -> str:
        return f"{self.reason}. The log is {self.log}; its last lines:\n{self.log_tail}" if self.log else self.reason

    @property
    def was_killed(self) -> bool:
        """True after SIGKILL, which on Linux usually means that memory ran out."""
        return self.signal_number == signal.SIGKILL

    def prefixed(self, prefix: str) -> "StageCrash":
        """A copy of the crash with `prefix` before its reason."""
        return StageCrash(prefix + self.reason, log=self.log, log_tail=self.log_tail, signal_number=self.signal_number)


class StageCancelled(BaseException):
    """The stage was cancelled. Not an `Exception`, so that no failure handler retries it."""


class NotWritable(ConfigError):
    """The store is full or read-only. It ends the whole stage, even if only one work item raised it."""


class RetryPolicy:
    """Decide whether a failed task run is retried, and after which pause.

    An outage (`Retryable`) is retried as `backoff` says, a crash `CRASHES` times, any other error never. Progress
    resets the counts, so the limits apply to consecutive failures only.
    """

    def __init__(self, backoff: Backoff) -> None:
        self._backoff = backoff
        self._crashes = self._outages = 0  # consecutive, since the last progress
        self._first_at = 0.0  # when the first of them happened, on the monotonic clock
        self._best_counts: dict[str, float] = {}  # counter -> the highest count of any attempt

    @property
    def failures(self) -> int:
        """The number of consecutive failures."""
        return self._crashes + self._outages

    def progress(self, counter: str, count: float) -> None:
        """Take a progress report. A count above that of all earlier attempts resets the failures."""
        if count > self._best_counts.get(counter, 0.0):
            self._best_counts[counter] = count
            self._crashes = self._outages = 0

    def should_retry(self, error: object) -> bool:
        """Count this failure; True if there may be another attempt."""
        if not isinstance(error, (Retryable, StageCrash)):
            return False
        if not self.failures:
            self._first_at = time.monotonic()
        if isinstance(error, StageCrash):
            self._crashes += 1
            return self._crashes <= CRASHES
        # The time counts for outages, their number only where the backoff limits it (work items).
        self._outages += 1
        return self.left_s() > 0 and not self._backoff.is_last(self._outages, 0.0)

    def pause_s(self) -> float:
        """Seconds to wait before the next attempt. The last one starts when the time allowed for an outage ends."""
        return min(self._backoff.pause_s(self.failures), max(0.0, self.left_s()))

    def left_s(self) -> float:
        """Seconds until retrying an outage stops; infinite if the backoff only limits the number of attempts."""
        if self._backoff.give_up_s is None:
            return math.inf
        return self._first_at + self._backoff.give_up_s - time.monotonic()
