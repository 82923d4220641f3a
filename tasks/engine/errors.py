"""Failures of a stage's process besides `ConfigError` and `Retryable`, and the policy of retrying them.

Exit codes: `common.processes.ExitCode`.
"""

import signal
import time
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

from common.errors import ConfigError, Retryable

OUTAGES, CRASHES = 4, 2  # retries after a `Retryable` and after a `StageCrash`
PAUSES_S = (2.0, 10.0, 30.0, 60.0)  # before the first, second, … retry; the last one repeats
JITTER = 0.5  # up to this share is added to a pause, so that tasks which failed together do not return together


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


@dataclass
class _Failures:
    outages: int = 0
    crashes: int = 0
    last: float | None = None


class RetryPolicy:
    """Counts the failures in a row of each task run. An error of any other kind is never tried again."""

    def __init__(self, reset_after_s: float | None = None) -> None:
        """An attempt that lasted longer than `reset_after_s` made progress: the counts start from zero."""
        self._reset_after_s = reset_after_s
        self._failures: dict[UUID, _Failures] = {}

    def should_retry(self, task_run: UUID, error: object) -> bool:
        """Count this failure; True if the task run may be tried again."""
        if not isinstance(error, (Retryable, StageCrash)):
            return False
        failures = self._failures.setdefault(task_run, _Failures())
        now = time.monotonic()
        if self._reset_after_s is not None and failures.last is not None and now - failures.last > self._reset_after_s:
            failures.outages = failures.crashes = 0
        failures.last = now
        if isinstance(error, Retryable):
            failures.outages += 1
        else:
            failures.crashes += 1
        return failures.outages <= OUTAGES and failures.crashes <= CRASHES
