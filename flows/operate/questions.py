"""Runs that wait for an approval, and the approval itself: notes in the store, one per waiting run.

Separate from `flows.operate.approval`, which writes the notes, so that commands and pages that read them start fast:
this module imports no Prefect, and its HTTP client only when a run waits.
"""

import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit
from uuid import UUID

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator

from nautile.common.errors import ConfigError
from nautile.common.files import read_json
from nautile.common.processes import is_loopback
from nautile.common.text import one_line
from nautile.flows.operate.prefect_calls import ask_server, call
from nautile.store.artifacts import Store
from nautile.store.manifest import RUN, host, utc_time

logger = logging.getLogger(__name__)

LARGEST_NOTE = 2**20  # bytes


class WaitingNote(BaseModel):
    """A note. Further fields are kept."""

    model_config = ConfigDict(extra="allow", defer_build=True)

    run: Annotated[str, Field(pattern=rf"^{RUN.pattern}$")]
    label: Annotated[str, AfterValidator(one_line)]
    message: str
    since: str
    host: Annotated[str, AfterValidator(one_line)]
    pid: int | None = None  # None: a suspended run, which has no process
    api: str | None = None

    @field_validator("since")
    @classmethod
    def _since_is_a_time(cls, since: str) -> str:
        utc_time(since)
        return since

    @field_validator("api")
    @classmethod
    def _api_is_an_address(cls, api: str | None) -> str | None:
        _ = urlsplit(api or "").port  # raises for what is none
        return api


def waiting(store: Store) -> list[dict[str, Any]]:
    """The notes of the waiting runs, oldest first: run, label, message, since, api (the server's address).

    A run that waits in a process of this machine stops waiting when that process ends; a suspended run when its state
    on the server changes. The note of a run that has stopped waiting is removed.
    """
    notes = []
    for path in store.questions.glob("*.json"):
        if note := _read_note(path):
            if _still_waits(store, note):
                notes.append(note)
            else:  # nobody else removes it: a suspended run has no process, and that of a waiting one was killed
                with suppress(OSError):  # a store that this user may only read
                    path.unlink()
    return sorted(notes, key=lambda note: note["since"])


def _read_note(path: Path) -> dict[str, Any] | None:
    """A note; None if it is missing, or not of this version's form: all hosts of a store write notes there."""
    note = read_json(path, limit=LARGEST_NOTE)
    if note is None:
        return None
    try:
        return WaitingNote.model_validate(note).model_dump()
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        logger.warning("%s is not the note of a waiting run, and is left out (%s: %s)", path, where, first["msg"])
        return None


def approve(store: Store, run: str, api: str | None) -> dict[str, Any]:
    """Resume the waiting run whose id begins with `run`; returns its note. `api`: the server for a run without a note.

    Raises `ConfigError` if no such run waits, several match, or its server refuses.
    """
    # Every id begins with an empty name, such as that of a variable that is not set.
    matches = [note for note in waiting(store) if run and note["run"].startswith(run)]
    if len(matches) > 1:
        raise ConfigError(f"{len(matches)} waiting runs begin with {run!r}: give more digits")
    # A run of another store has no note here; with its full id, the server of PREFECT_API_URL can be asked.
    note: dict[str, Any] = matches[0] if matches else {"run": run, "api": api, "label": "", "message": ""}
    try:
        UUID(note["run"])
    except ValueError:
        raise ConfigError(f"no run {run!r} waits in {store.root}: `nautile approve` lists those that do") from None
    url = note["api"]
    if not url:
        raise ConfigError(f"run {run!r} is not one of {store.root}: PREFECT_API_URL must name its server")
    if not _is_known(url):
        raise ConfigError(f"run {note['run'][:8]} waits on the server {url}: set PREFECT_API_URL to it to answer there")
    ask_server(url, note["run"], "resume", {}, "was not resumed", timeout_s=30.0)
    return note


def _is_known(api: Any) -> bool:
    """Whether a note's server is on this machine, or the one of PREFECT_API_URL: others are not sent its login.

    A store may come from elsewhere, and a note in it name any server.
    """
    return isinstance(api, str) and (
        api == os.environ.get("PREFECT_API_URL") or is_loopback(urlsplit(api).hostname or "")
    )


def _still_waits(store: Store, note: dict[str, Any]) -> bool:
    """Whether the process of the note lives, or the server has its run as paused. True if this cannot be checked."""
    if note["pid"] is not None:
        # By the lock that the run holds for life, because another process may have got the id of one that was killed.
        return note["host"] != host() or store.run_lock(note["run"]).held_elsewhere()
    if not _is_known(note["api"]):
        return True
    import httpx

    try:
        response = call("GET", note["api"], f"/flow_runs/{note['run']}", timeout=5.0)
        return response.status_code != httpx.codes.NOT_FOUND and response.json()["state"]["type"] == "PAUSED"
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        return True  # its server does not answer, which does not end the wait
