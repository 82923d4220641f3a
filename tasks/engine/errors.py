"""How a stage's process can fail, apart from `ConfigError` and `Retryable`. Exit codes: `common.processes.ExitCode`."""

import signal
from pathlib import Path

from common.errors import ConfigError


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
