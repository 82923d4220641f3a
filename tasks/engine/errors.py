"""`@stage`: a function of a job becomes a step of the pipeline, reused by its content key or run in a child process.

    @stage("pretrain", version=1, outputs=("checkpoint",), accelerator=True)
    def pretrain(job: Job) -> None: ...

The decorated name is a `Stage`; it must stay a module-level name, for the child process finds it by import. This file
is imported by every child, so it loads neither Prefect nor DuckDB.
"""

from typing import TYPE_CHECKING

from common.errors import ConfigError

if TYPE_CHECKING:
    pass


class StageCrash(RuntimeError):
    """The stage's process ended without a verdict of its own (an exception, a signal). Worth one more try."""


class StageCancelled(BaseException):
    """The stage was asked to stop. Not an `Exception`: nothing may take it for a failure and try again."""


class NotWritable(ConfigError):
    """The store is full or read-only: bad for the whole stage, whichever unit met it."""
