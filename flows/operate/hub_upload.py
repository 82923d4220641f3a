"""Upload of a folder to a repository of the Hugging Face Hub: what differs from what is there, in one commit.

The files are compared by digest with the repository's own list, so the same bytes are never sent twice. A commit is
made after all large files are there; an upload that is cut off leaves the repository as it was, and the next one
sends only what the Hub does not have yet.

`huggingface_hub` (0.5 s) is imported inside functions, for every command that imports this module.
"""

import hashlib
import json
import logging
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import httpx2  # the HTTP client under huggingface_hub

from common.errors import ConfigError, Retryable
from common.files import sha256_of
from common.retry import Backoff, retry, retry_after
from common.text import first_line, visible
from data.sources.hub import TRANSIENT_STATUSES

T = TypeVar("T")
logger = logging.getLogger(__name__)

RepositoryKind = Literal["model", "dataset"]
BACKOFF = Backoff(attempts=4, first_s=1.0, longest_s=10.0)
LONGEST_REASON = 300  # characters of a server's message


@dataclass(frozen=True)
class PlannedFile:
    """A file of the folder, and how it stands to the repository's."""

    path: str
    bytes: int
    state: Literal["new", "changed", "same"]


@dataclass(frozen=True)
class UploadPlan:
    """What an upload would do. `head`: the commit that the folder was compared with, None where there is no repository.

    `others`: files of the repository that the folder does not have; they stay. `private`: as the repository is, or as
    it will be created.
    """

    repository: str
    kind: RepositoryKind
    folder: Path
    files: tuple[PlannedFile, ...]
    others: tuple[str, ...]
    head: str | None
    private: bool

    @property
    def to_send(self) -> tuple[PlannedFile, ...]:
        """The files that differ from the repository's."""
        return tuple(file for file in self.files if file.state != "same")


def check_repository(name: str) -> None:
    """Raise `ConfigError` unless `name` is OWNER/NAME as the Hub has it."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        reason = first_line(error)
    else:
        if re.fullmatch(r"[^/]+/[^/]+", name):
            return
        reason = "it has no owner"
    raise ConfigError(f"{visible(name, 100)!r} is not a repository of the Hub, OWNER/NAME: {visible(reason, 200)}")


def hub_token() -> str | None:
    """The token that the environment (HF_TOKEN) or `hf auth login` provides."""
    from huggingface_hub import get_token

    return get_token()


def planned_files(folder: Path, listed: dict[str, Any]) -> tuple[PlannedFile, ...]:
    """Every file under `folder` by path, compared with the repository's `RepoFile`s by path."""
    files = []
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        size = path.stat().st_size
        state: Literal["new", "changed", "same"] = "new"
        if theirs := listed.get(name):
            state = "same" if size == theirs.size and _digest(path, theirs) else "changed"
        files.append(PlannedFile(name, size, state))
    return tuple(files)


def _digest(path: Path, theirs: Any) -> bool:
    """Whether a file is the repository's: by sha256 if that is a large one, by git's digest otherwise."""
    if theirs.lfs:
        return sha256_of(path) == theirs.lfs.sha256
    digest = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
    with path.open("rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest() == theirs.blob_id


class HubUploader:
    """The Hub for one token. Methods raise `ConfigError` for what the operator must change, and `Retryable` where the
    Hub does not answer after several attempts; no message has the token."""

    def __init__(self, token: str, endpoint: str | None = None, sleep: Callable[[float], object] = time.sleep) -> None:
        from huggingface_hub import HfApi
        from huggingface_hub.utils import disable_progress_bars

        if not sys.stderr.isatty():
            disable_progress_bars()
        self._api, self._token, self._sleep = HfApi(endpoint=endpoint, token=token), token, sleep

    def user(self) -> str:
        """The name of the token's owner."""
        return str(self._call("who the token belongs to", self._api.whoami)["name"])

    def plan(self, folder: Path, repository: str, kind: RepositoryKind, private: bool) -> UploadPlan:
        """Compare `folder` with the repository. `private`: how the repository is created, if there is none."""
        from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
        from huggingface_hub.hf_api import RepoFile

        def compare() -> UploadPlan:
            try:
                info = self._api.repo_info(repository, repo_type=kind)
            except GatedRepoError:
                raise
            except RepositoryNotFoundError:
                return UploadPlan(repository, kind, folder, planned_files(folder, {}), (), None, private)
            entries = self._api.list_repo_tree(repository, recursive=True, revision=info.sha, repo_type=kind)
            listed = {entry.path: entry for entry in entries if isinstance(entry, RepoFile)}
            files = planned_files(folder, listed)
            others = tuple(sorted(set(listed) - {file.path for file in files} - {".gitattributes"}))
            return UploadPlan(repository, kind, folder, files, others, info.sha, bool(info.private))

        return self._call(f"{repository}: cannot be compared", compare)

    def upload(self, plan: UploadPlan, message: str) -> str:
        """Create the repository if need be, send what differs as one commit; its address."""
        from huggingface_hub import CommitOperationAdd

        where = f"{plan.repository}: nothing was published"
        if plan.head is None:
            create = {"repo_type": plan.kind, "private": plan.private, "exist_ok": True}
            self._call(where, lambda: self._api.create_repo(plan.repository, **create))

        def commit() -> str:
            additions = [CommitOperationAdd(file.path, str(plan.folder / file.path)) for file in plan.to_send]
            done = self._api.create_commit(
                plan.repository, additions, commit_message=message, repo_type=plan.kind, parent_commit=plan.head
            )
            return str(done.commit_url)

        return self._call(where, commit)

    def _call(self, where: str, call: Callable[[], T]) -> T:
        """The result of `call`, tried again while the Hub has an outage, with errors that the operator can act on."""

        def attempt() -> T:
            try:
                return call()
            except Exception as error:
                clear = self._clear(where, error)
                if clear is None:
                    raise
                raise clear from None  # the library's errors may hold the request with its headers

        return retry(
            attempt,
            BACKOFF,
            should_retry=lambda error: isinstance(error, Retryable),
            retry_after_s=lambda error: getattr(error, "retry_after_s", None),
            before_pause=lambda error, n, pause_s: logger.warning("%s; attempt %d, again in %.1f s", error, n, pause_s),
            sleep=self._sleep,
        )

    def _clear(self, where: str, error: Exception) -> Exception | None:
        """The error to raise instead of one of the library's; None for a fault of our own."""
        from huggingface_hub import errors

        # An upload of several files wraps the error of the file that failed.
        if type(error) is RuntimeError and isinstance(error.__cause__, Exception):
            error = error.__cause__
        text = getattr(error, "server_message", None) or first_line(error)
        reason = visible(" ".join(text.replace(self._token, "(the token)").split()), LONGEST_REASON)
        if isinstance(error, errors.OfflineModeIsEnabled):
            return ConfigError(f"{where}: HF_HUB_OFFLINE forbids any request to the Hub: unset it")
        if isinstance(error, errors.HfHubHTTPError):
            status = error.response.status_code
            if status >= 500 or status in TRANSIENT_STATUSES:
                outage = Retryable(
                    f"{where}: the Hub answered with {status} ({reason}); the same command goes on from here"
                )
                outage.retry_after_s = retry_after(error.response.headers)  # type: ignore[attr-defined]
                return outage
            helps = {
                401: "it refuses the token: set HF_TOKEN to a valid one with the right to write",
                403: "the token has no right to write there: set HF_TOKEN to one that may, or name your own repository",
                404: "it has no such repository, or the token may not see it",
                412: "someone else changed it meanwhile: run the command again to compare with what is there now",
            }
            return ConfigError(f"{where}: {helps.get(status, f'the Hub refused it with {status}')} ({reason})")
        if isinstance(error, httpx2.HTTPError | ConnectionError | TimeoutError) or type(error) is RuntimeError:
            # hf_xet raises a bare RuntimeError for all that fails on its way
            return Retryable(
                f"{where}: the Hub did not answer ({type(error).__name__}: {reason}); run the command again"
            )
        if isinstance(error, json.JSONDecodeError):  # the page of a proxy in front of the Hub
            return Retryable(f"{where}: the Hub's answer is no JSON ({reason}); run the command again")
        if isinstance(error, ValueError) and not isinstance(error, ConfigError):
            return ConfigError(f"{where}: {visible(str(error).replace(self._token, '(the token)'), LONGEST_REASON)}")
        return None
