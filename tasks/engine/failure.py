"""A failed attempt told to whoever must act: what failed, why, the last lines of its log, what to do, the command.

The one wording of it, for the terminal, the page in Prefect and the file in the store. What a stage or its log said is
text from outside: it stands in fences, where nothing of it is markup.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from common.errors import ConfigError, Retryable
from common.text import fenced, visible

RESUME_HEADING = "What was finished is kept. Go on with:"
LOG_LINES = 15


@dataclass(frozen=True)
class Failure:
    """One attempt at one use of a stage that failed. `resume` is a shell command, empty if nobody told it."""

    label: str
    attempt: int
    run: str
    key: str
    execution: str
    host: str
    error: Exception
    log: Path
    tail: str
    resume: str = ""
    page: str = ""  # of the run, in the dashboard

    @property
    def file(self) -> str:
        """The name of its file in the store's logs/failures."""
        return f"{slug(self.label)}-{self.execution[:12]}-{self.attempt}.md"

    def markdown(self) -> str:
        parts = [f"## {self.label} failed" + (f" (attempt {self.attempt})" if self.attempt > 1 else "")]
        parts += [
            fenced(visible(reason(str(self.error) or type(self.error).__name__, self.label))),
            f"**What to do.** {advice(self.error)}",
        ]
        if self.resume:
            parts += [f"**{RESUME_HEADING}**", fenced(self.resume)]
        if self.tail.strip():
            parts += [f"**The last lines of its log**, `{self.log}`", fenced(visible(self.tail))]
        if self.page:
            parts.append(f"[The run in the dashboard]({self.page})")
        told = {"run": self.run, "key": self.key, "execution": self.execution, "host": self.host}
        return "\n\n".join([*parts, "  \n".join(f"{name} `{value}`" for name, value in told.items())]) + "\n"


def reason(error: str, label: str) -> str:
    """Why, without the stage's name before it and without the log after it."""
    return error.removeprefix(f"stage {label}: ").partition(". The log is ")[0].strip()


def advice(error: BaseException | None) -> str:
    """What to do about an error of its kind, before the stage is run again."""
    if isinstance(error, ConfigError):
        return "Mend what the message names: until then it fails in the same way."
    if isinstance(error, Retryable):
        return "It was tried again and did not pass by itself: see that what the message names can be had."
    if error is not None and "SIGKILL" in str(error):
        return (
            "The system ended the process, most likely for want of memory: lower the stage's batch, "
            "launch.workers or what else runs here, or give it more memory."
        )
    return "This is a fault of the code or the machine, not of the configuration: the log says where."


def slug(label: str) -> str:
    """A label as part of a file's name or a Prefect key: `evaluate:align` is `evaluate-align`."""
    return re.sub(r"[^a-z0-9]+", "-", label.lower()).strip("-")
