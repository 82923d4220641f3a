"""Faults of a Prefect server, each in one line with what helps: its database, its address, its version, its errors.

This module imports no Prefect, which may be what has failed.
"""

import os
import re
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

import httpx

from nautile.common.commands import shell_command
from nautile.common.processes import is_loopback
from nautile.common.text import visible
from nautile.flows.operate.prefect_calls import call, wants_login

TIMEOUT_S = 10.0
LONGEST = 200  # characters of an error in a message
DATABASE = ("PREFECT_SERVER_DATABASE_", "PREFECT_API_DATABASE_")  # prefixes of settings that include a password
_ERROR = re.compile(r"[\w.]+(Error|Exception): ")  # the last line of a traceback
# What SQLite and Alembic say about a database that cannot be used as it is.
_DAMAGED = re.compile(
    r"malformed|not a database|file is encrypted|disk I/O error|no such (table|column)", re.IGNORECASE
)
_NOT_WRITABLE = re.compile(r"readonly database|read-only|unable to open database file|Permission denied", re.IGNORECASE)
_NEWER = re.compile(r"Can't locate revision", re.IGNORECASE)
_FULL = re.compile(r"database or disk is full|No space left", re.IGNORECASE)
# What Pydantic says about a setting of Prefect: its class, its name without those of the sections above, the reason.
_REFUSED = re.compile(
    r"validation errors? for (?P<section>\w*Settings)\n(?P<field>\S+)\n +(?P<reason>.*?)"
    r"( \[type=\w+(, input_value=(?P<value>.*), input_type=\w+)?\])?$",
    re.MULTILINE,
)
_UNREADABLE = re.compile(r'error parsing value for field "(?P<field>\w+)" from source "(?P<section>\w+)"')


def api_fault(url: str) -> str | None:
    """Why the API at `url` cannot be used; None if it is that of a Prefect server of our version.

    A server that answers nothing, or not as Prefect does, and one whose login or version is another.
    """
    # Two questions, because `/health` answers without a login, and the second shows whether ours is accepted.
    try:
        health = call("GET", url, "/health", timeout=TIMEOUT_S)
        version = call("GET", url, "/admin/version", timeout=TIMEOUT_S)
    except httpx.HTTPStatusError as error:  # 503 for longer than a locked database explains
        return _answers(url, error.response.status_code)
    except (httpx.HTTPError, httpx.InvalidURL, ValueError):
        return f"{url} does not answer; start that server, or unset the variable"
    with_key = "PREFECT_API_KEY" in os.environ  # a key is for Prefect Cloud, which has no version
    if version.status_code == httpx.codes.UNAUTHORIZED and not with_key:
        return wants_login(url)
    for response in (health, version):
        if response.is_server_error:
            return _answers(url, response.status_code)
    if with_key and health.is_success:
        return None
    theirs = _text_of(version)
    if not health.is_success or theirs is None:
        return (
            f"{url} is not the API of a Prefect server, whose address ends in /api; correct it, or unset the variable"
        )
    ours = metadata.version("prefect")
    if theirs.split(".")[0] != ours.split(".")[0]:
        return (
            f"the server at {url} is Prefect {visible(theirs, 40)}, and this is Prefect {ours}: start it with "
            f"`{shell_command('nautile', 'server')}` of this version, or unset the variable"
        )
    return None


def database_fault(lines: Sequence[str]) -> str:
    """What helps if the server's own database is the fault, from the last lines of its log; "" if it is not."""
    text = "\n".join(lines)
    where = "its database" if database_is_elsewhere() else f"its database {database_path()}"
    away = "move the file away, and Prefect's history of runs begins anew; the store has its own"
    if _DAMAGED.search(text):
        return f"{where} is damaged: {away}"
    if _NEWER.search(text):
        return f"{where} was written by a newer Prefect: use that version, or {away}"
    if _FULL.search(text):
        return f"the disk of {where.removeprefix('its database ')} is full: free some space"
    if _NOT_WRITABLE.search(text):
        return f"{where} cannot be written: fix its permissions, or set PREFECT_HOME to another folder"
    return ""


def database_is_elsewhere() -> bool:
    """Whether the environment names another database than the SQLite file in PREFECT_HOME."""
    return any(name.startswith(DATABASE) for name in os.environ)


def setting_fault(text: str, environment: Mapping[str, str] = os.environ) -> str:
    """What is wrong with a setting of Prefect's, by its variable, from an error or a log; "" if nothing is.

    Prefect reads its settings at import, and its error has the name of a field without that of the variable.
    """
    if not (match := _REFUSED.search(text) or _UNREADABLE.search(text)):
        return ""
    groups = match.groupdict()
    field = groups["field"].rsplit(".", 1)[-1].upper()
    names = [name for name in environment if name.upper().startswith("PREFECT_") and name.upper().endswith(f"_{field}")]
    # Several settings may end alike; Pydantic says what the value was. A value may be a secret, and is not repeated.
    names = [name for name in names if repr(environment[name]) == groups.get("value")] or names
    where = " or ".join(sorted(names)) or f"the setting {groups['field']!r} of Prefect ({groups['section']})"
    reason = visible(groups.get("reason") or "its value cannot be read, and should be JSON", LONGEST)
    return f"{where}: {reason}; {'correct it, or unset it' if names else 'correct it in the profile of Prefect'}"


def database_path() -> Path:
    """The SQLite file of the embedded server."""
    return Path(os.environ.get("PREFECT_HOME") or "~/.prefect").expanduser() / "prefect.db"


def last_error(lines: Sequence[str]) -> str:
    """The last error in a log: not its last line, because Uvicorn writes "Application startup failed" after it."""
    newest_first = [line.strip() for line in reversed(lines) if line.strip()]
    return next(filter(_ERROR.match, newest_first), next(iter(newest_first), "its log is empty"))


def described(error: BaseException) -> str | None:
    """The message about an exception of Prefect's client, with what helps; None for any other exception."""
    for cause in _chain(error):
        if isinstance(cause, httpx.HTTPError) and (url := _server_of(cause)):
            reason = visible(" ".join(str(cause).split()) or type(cause).__name__, LONGEST)
            own = database_path()
            more = f" If it is a run's own server, its log is {own.with_name('server.log')} and its database {own}."
            return (
                f"Prefect's server at {url} failed on a request ({reason}). Finished work is kept, and the same "
                f"command continues it: restart the server, or unset PREFECT_API_URL."
            ) + ("" if database_is_elsewhere() else more)
    return None


def _answers(url: str, status: int) -> str:
    return f"{url} answers with status {status}: the log of that server says why; restart it, or unset the variable"


def _text_of(response: httpx.Response) -> str | None:
    """The JSON text that a response consists of; None for anything else."""
    try:
        value = response.json() if response.is_success else None
    except ValueError:
        return None
    return value if isinstance(value, str) and re.match(r"\d+\.", value) else None


def _chain(error: BaseException) -> Sequence[BaseException]:
    """The error and its causes."""
    causes: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in causes:
        causes.append(cause)
        cause = cause.__cause__ or cause.__context__
    return causes


def _server_of(error: httpx.HTTPError) -> str | None:
    """The address of the API that a request was sent to; None if it was not Prefect's."""
    try:
        url = error.request.url
    except RuntimeError:  # no request is known
        return None
    # A run's own server is on this machine, and its address is unset again as the run ends.
    api = os.environ.get("PREFECT_API_URL", "").rstrip("/") or f"{url.scheme}://{url.netloc.decode()}/api"
    return (
        api if str(url).startswith(f"{api}/") and (is_loopback(url.host) or "PREFECT_API_URL" in os.environ) else None
    )
