"""When a failed stage or work item is tried again: how often by kind of failure, and after what pause."""

import time
from dataclasses import dataclass
from uuid import UUID

from common.errors import Retryable
from tasks.engine.errors import StageCrash

OUTAGES, CRASHES = 4, 2  # retries after a `Retryable` and after a `StageCrash`
PAUSES_S = (2.0, 10.0, 30.0, 60.0)  # before the first, second, … retry; the last one repeats
JITTER = 0.5  # up to this share is added to a pause, so that tasks which failed together do not return together


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
