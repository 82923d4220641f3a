"""Failures of a stage's process besides `ConfigError` and `Retryable`, and the policy of retrying them.

Exit codes: `common.processes.ExitCode`.
"""

import math
import signal
import time
from pathlib import Path

from common.errors import ConfigError, Retryable
from common.retry import Backoff

CRASHES = 2  # retries after crashes in a row
BACKOFF = Backoff(first_s=2.0, longest_s=600.0)  # the pauses between the tries of a stage
ITEM_BACKOFF = Backoff(attempts=5, first_s=2.0)  # of a work item: what lasts longer is for its stage to sit out


class StageCrash(RuntimeError):
    """A process ended by an exception, a signal or an unknown exit code. Worth a few more attempts.

    `reason` says how in one sentence; as text the exception adds the path of the log and its last lines.
    """

    def __init__(self, reason: str, *, log: Path | None = None, log_tail: str = "", signal_number: int = 0) -> None:
        super().__init__(reason)
        self.reason = reason
        self.log = log
        self.log_tail = log_tail
        self.signal_number = signal_number  # that ended the process; 0 if none did

    def __str__(self) -> str:
        return f"{self.reason}. The log is {self.log}; its last lines:\n{self.log_tail}" if self.log else self.reason

    @property
    def was_killed(self) -> bool:
        """True after SIGKILL, which on Linux mostly means that memory ran out."""
        return self.signal_number == signal.SIGKILL

    def prefixed(self, prefix: str) -> "StageCrash":
        """The same crash, its reason preceded by the part of the stage that it happened in."""
        return StageCrash(prefix + self.reason, log=self.log, log_tail=self.log_tail, signal_number=self.signal_number)


class StageCancelled(BaseException):
    """The stage was asked to stop. Not an `Exception`, so that no handler of failures tries it again."""


class NotWritable(ConfigError):
    """The store is full or read-only: this ends the whole stage, whichever work item met it."""


class RetryPolicy:
    """Whether a task run that failed is tried again, and after which pause.

    An outage (`Retryable`) is retried as `backoff` says, a crash `CRASHES` times; an error of any other kind never.
    Progress ends a row of failures: the next one is the first again.
    """

    def __init__(self, backoff: Backoff) -> None:
        self._backoff = backoff
        self._crashes = self._outages = 0  # in a row
        self._first_at = 0.0  # of this row, on the monotonic clock
        self._reached: dict[str, float] = {}  # what is counted -> how far the work came, in any attempt

    @property
    def failures(self) -> int:
        """The failures in a row."""
        return self._crashes + self._outages

    def progress(self, counted: str, done: float) -> None:
        """Take a report of the work: farther than any attempt came before is progress."""
        if done > self._reached.get(counted, 0.0):
            self._reached[counted] = done
            self._crashes = self._outages = 0

    def should_retry(self, error: object) -> bool:
        """Count this failure; True if there may be another try."""
        if not isinstance(error, (Retryable, StageCrash)):
            return False
        if not self.failures:
            self._first_at = time.monotonic()
        if isinstance(error, StageCrash):
            self._crashes += 1
            return self._crashes <= CRASHES
        self._outages += 1
        return self.left_s() > 0 and not self._backoff.is_last(self._outages, 0.0)

    def pause_s(self) -> float:
        """Seconds to wait before the next try. The last one begins when the patience with an outage ends."""
        return min(self._backoff.pause_s(self.failures), max(0.0, self.left_s()))

    def left_s(self) -> float:
        """Seconds until an outage is given up; infinite if only tries are counted."""
        if self._backoff.give_up_s is None:
            return math.inf
        return self._first_at + self._backoff.give_up_s - time.monotonic()
