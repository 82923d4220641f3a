"""Failures of a stage's process besides `ConfigError` and `Retryable`, the retry policy, and the page about a failure.

Exit codes: `common.processes.ExitCode`. The terminal, the page in Prefect and the file in the store share the wording
of the page. Messages and logs may hold text from outside, so they stand in Markdown fences, where nothing is markup.
"""

import math
import os
import re
import signal
import time
from pathlib import Path
from urllib.parse import urlencode

from nautile.common.errors import ConfigError, Retryable
from nautile.common.retry import Backoff
from nautile.common.text import fenced, visible

CRASHES = 2  # retries after consecutive crashes
BACKOFF = Backoff(first_s=2.0, longest_s=600.0)  # pauses between the attempts of a stage
ITEM_BACKOFF = Backoff(attempts=5, first_s=2.0)  # of a work item; its stage waits out a longer outage
RESUME_HEADING = "Finished work is kept. Continue with:"
DASHBOARD_URL = "NAUTILE_DASHBOARD_URL"  # the environment variable; no links without it


LOG_LINES = "; its last lines:\n"  # in the text of a crash, before the end of the log


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
        return f"{self.reason}. The log is {self.log}{LOG_LINES}{self.log_tail}" if self.log else self.reason

    @property
    def was_killed(self) -> bool:
        """True after SIGKILL, which on Linux usually means that memory ran out."""
        return self.signal_number == signal.SIGKILL

    def prefixed(self, prefix: str) -> "StageCrash":
        return StageCrash(prefix + self.reason, log=self.log, log_tail=self.log_tail, signal_number=self.signal_number)


class StageCancelled(BaseException):
    """The stage was cancelled. Not an `Exception`, so that no failure handler retries it."""


class EndsStage(ConfigError):
    """Bad input that concerns every work item: it ends the whole stage, and no item is skipped for it."""


class NotWritable(EndsStage):
    """The store is full or read-only."""


class NotInstalled(EndsStage):
    """A host has not what the run was started with: a plug-in, or the module of the stage."""


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


def failure_page(
    label: str, attempt: int, error: Exception, *, log: Path, log_tail: str, resume: str, page: str, ids: dict[str, str]
) -> str:
    """The page about one failed attempt, as Markdown.

    `resume`: a shell command, or empty. `page`: address of the run in the dashboard, or empty. `ids`: those of the run,
    the key and so on, by name.
    """
    parts = [f"## {label} failed" + (f" (attempt {attempt})" if attempt > 1 else "")]
    # `visible` first: a fence keeps out markup, but not control characters of a terminal.
    parts += [fenced(visible(reason(error))), f"**What to do.** {advice(error)}"]
    if resume:
        parts += [f"**{RESUME_HEADING}**", fenced(resume)]
    if log_tail.strip():
        parts += [f"**The last lines of its log**, `{log}`", fenced(visible(log_tail))]
    if page:
        parts.append(f"[The run in the dashboard]({page})")
    return "\n\n".join([*parts, "  \n".join(f"{name} `{value}`" for name, value in ids.items())]) + "\n"


def reason(error: BaseException) -> str:
    """Why the attempt failed, without the path and lines of the log."""
    if isinstance(error, StageCrash):
        return error.reason
    return str(error) or type(error).__name__


def advice(error: BaseException | None) -> str:
    """What the user should do before running the stage again, by the kind of error."""
    if isinstance(error, ConfigError):
        return "Fix the setting or file named above: until then every retry fails in the same way."
    if isinstance(error, Retryable):
        return (
            "Check that the service named above is reachable. The stage retries for operation.STAGE.outage_hours, then "
            "fails."
        )
    if isinstance(error, StageCrash) and error.was_killed:
        return (
            "The system ended the process, most likely because memory ran out: lower the stage's batch or "
            "launch.workers, stop other programs on this machine, or give it more memory."
        )
    return "This is an error of the code or the machine, not of the configuration: the log shows where."


def slug(label: str) -> str:
    """A label as part of a file name or a Prefect key: `evaluate:align` becomes `evaluate-align`."""
    return re.sub(r"[^a-z0-9]+", "-", label.lower()).strip("-")


def run_page(run: str) -> str:
    """Address of the dashboard's overview of a run; empty without a dashboard."""
    return _dashboard(run=run)


def artifact_page(run: str, artifact: str) -> str:
    """Address of the dashboard's page of an artifact; empty without a dashboard."""
    return _dashboard("lineage", run=run, artifact=artifact)


def _dashboard(page: str = "", **query: str) -> str:
    base = os.environ.get(DASHBOARD_URL, "").rstrip("/")
    return f"{base}/{page}?{urlencode(query)}" if base else ""
