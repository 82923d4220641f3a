"""Describe a failed attempt for whoever must act: what failed, why, what to do, the command, the last lines of the log.

The terminal, the page in Prefect and the file in the store all use this wording. Messages and logs are text from
outside: they stand in fences, where nothing of them is markup.
"""

import re
from pathlib import Path

from common.errors import ConfigError, Retryable
from common.text import fenced, visible
from tasks.engine.errors import StageCrash

RESUME_HEADING = "What was finished is kept. Continue with:"


def failure_page(
    label: str, attempt: int, error: Exception, *, log: Path, log_tail: str, resume: str, page: str, ids: dict[str, str]
) -> str:
    """Markdown about one failed attempt. `resume`: a shell command; `page`: the run in the dashboard; both may be
    empty."""
    parts = [f"## {label} failed" + (f" (attempt {attempt})" if attempt > 1 else "")]
    parts += [fenced(visible(reason(error))), f"**What to do.** {advice(error)}"]
    if resume:
        parts += [f"**{RESUME_HEADING}**", fenced(resume)]
    if log_tail.strip():
        parts += [f"**The last lines of its log**, `{log}`", fenced(visible(log_tail))]
    if page:
        parts.append(f"[The run in the dashboard]({page})")
    return "\n\n".join([*parts, "  \n".join(f"{name} `{value}`" for name, value in ids.items())]) + "\n"


def reason(error: BaseException) -> str:
    """Why, without the log's path and lines."""
    if isinstance(error, StageCrash):
        return error.reason
    return str(error) or type(error).__name__


def advice(error: BaseException | None) -> str:
    """What to do before the stage is run again, by the kind of error."""
    if isinstance(error, ConfigError):
        return "Fix the setting or file named above; retrying will not help."
    if isinstance(error, Retryable):
        return (
            "Check that the service named above is reachable. It is waited for as long as operation.STAGE.outage_hours "
            "says."
        )
    if isinstance(error, StageCrash) and error.was_killed:
        return (
            "The system ended the process, most likely because memory ran out: lower the stage's batch or "
            "launch.workers, stop other programs on this machine, or give it more memory."
        )
    return "This is a fault of the code or the machine, not of the configuration: the log shows where."


def slug(label: str) -> str:
    """A label as part of a file name or a Prefect key: `evaluate:align` becomes `evaluate-align`."""
    return re.sub(r"[^a-z0-9]+", "-", label.lower()).strip("-")
