"""The Hugging Face Hub: its client's errors as ours, and files of a repository in its client's cache.

`huggingface_hub` takes 0.5 s to import, and is no requirement of the core: it is imported inside functions.
"""

import errno
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nautile.common.errors import ConfigError, Retryable
from nautile.common.text import first_line, visible

TRANSIENT_STATUSES = (408, 425, 429)  # and every 5xx
# Errors of this machine's disk, which another download would meet again.
OWN_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)
# OWNER/NAME, or OWNER/NAME@REVISION: a branch, a tag or a commit.
REPOSITORY = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[\w./-]+))?", re.ASCII)


@contextmanager
def clear_errors(where: str, check: str = "`path`, `revision` and HF_TOKEN") -> Iterator[None]:
    """Translate the clients' errors into `ConfigError` (the user must change something) or `Retryable` (temporary).

    `where`: the beginning of messages. `check`: what to look at where the Hub refuses. Errors of the local disk and
    programming errors are not translated, because no file may be skipped for them.
    """
    import httpx2  # the HTTP client under huggingface_hub
    from huggingface_hub import errors

    try:
        yield
    except (ConfigError, Retryable):
        raise
    except Exception as error:
        reason = first_line(error)
        if isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__:
            reason = f"{reason} ({error.__cause__})"
        elif isinstance(error, errors.HfHubHTTPError):
            status = error.response.status_code
            if status < 500 and status not in TRANSIENT_STATUSES:
                message = f"{where}: cannot be read ({reason}); check {check}"
                if isinstance(error, errors.GatedRepoError):
                    message = f"{where}: it is gated: accept its terms on the Hub and set HF_TOKEN"
                raise ConfigError(message) from error
        if isinstance(error, httpx2.HTTPError | errors.LocalEntryNotFoundError | ConnectionError | TimeoutError):
            raise Retryable(f"{where}: the Hub did not answer ({type(error).__name__}: {reason})") from error
        if isinstance(error, errors.XetDownloadError) or type(error) is RuntimeError:  # hf_xet raises RuntimeError
            raise Retryable(f"{where}: could not be fetched ({reason})") from error
        if "gated dataset" in reason:  # of `datasets`, which drops the Hub's own error
            message = f"{where}: {reason}; it is gated: accept its terms on the Hub and set HF_TOKEN"
            raise ConfigError(message) from error
        if isinstance(error, ValueError | FileNotFoundError):  # from `datasets`, for an unknown subset or dataset
            raise ConfigError(f"{where}: {reason} (check `path`, `subset` and `revision`)") from error
        if isinstance(error, OSError) and error.errno not in OWN_DISK:
            raise Retryable(f"{where}: could not be fetched whole ({reason})") from error
        raise


def fetch_model_files(repository: str, names: Sequence[str], elsewhere: str = "") -> Path:
    """The folder in the client's cache with those of `names` that a model's repository has; downloads what is missing.

    `repository`: OWNER/NAME, or OWNER/NAME@REVISION. What is in the cache is used where the Hub cannot be reached.
    Nothing in it is executed. `elsewhere`: for the message about a repository that does not exist, what else the name
    is not. Raises `ConfigError` and `Retryable` as `clear_errors`.
    """
    from huggingface_hub import constants, errors, snapshot_download
    from huggingface_hub.utils import tqdm

    class Silent(tqdm):
        def __init__(self, *arguments: Any, **settings: Any) -> None:
            super().__init__(*arguments, **{**settings, "disable": True})  # type: ignore[no-untyped-call]

    match = REPOSITORY.fullmatch(repository)
    if match is None:
        raise ConfigError(f"{visible(repository, 100)!r} is not a repository of the Hub, OWNER/NAME[@REVISION]")
    name, revision = match["name"], match["revision"]
    check = "its name, and set HF_TOKEN where it is private"
    if revision is not None:
        check = "the revision: a branch, a tag or a commit"
    with clear_errors(f"{repository} of the Hub", check):
        try:
            endpoint = os.environ.get("HF_ENDPOINT")
            folder = snapshot_download(
                name, revision=revision, allow_patterns=list(names), endpoint=endpoint,
                tqdm_class=None if sys.stderr.isatty() else Silent,  # it prints its bars into logs as well
            )  # fmt: skip
            return Path(folder)
        except errors.GatedRepoError:  # which is a kind of the next
            raise
        except errors.RepositoryNotFoundError:
            raise ConfigError(
                f"{visible(repository, 100)}: the Hub has no such repository, or it is private: check the name, or set "
                f"HF_TOKEN{elsewhere}"
            ) from None
        except errors.LocalEntryNotFoundError:
            if constants.is_offline_mode():
                raise ConfigError(
                    f"{repository} of the Hub: is not in the cache, and HF_HUB_OFFLINE forbids to fetch it: unset it"
                ) from None
            raise
