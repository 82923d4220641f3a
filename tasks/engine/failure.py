"""Describe a failed attempt: what failed, why, what to do, the command to continue, the last lines of the log.

The terminal, the page in Prefect and the file in the store share this wording. Messages and logs may hold text from
outside, so they stand in Markdown fences, where nothing of them is markup.
"""

import re
from pathlib import Path

from nautile.common.errors import ConfigError, Retryable
from nautile.common.text import fenced, visible
from nautile.tasks.engine.errors import StageCrash

RESUME_HEADING = "Finished work is kept. Continue with:"


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
