"""An object store behind any fsspec URL: list, put, get and delete by name, tried again when the connection fails.

The one place that talks to it, and where its hundred kinds of error become two: `ConfigError` for what the operator
must mend (no such bucket, no permission, no credentials) and `Retryable` for the rest. Credentials are found by the
libraries in the environment; nothing here reads, holds or shows them.
"""

import errno
import hashlib
import logging
import os
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

import fsspec

from common.errors import ConfigError, Retryable
from common.files import not_writable, read_json, write_json
from common.retry import Backoff, retry

logger = logging.getLogger(__name__)

BACKOFF = Backoff(attempts=4, first_s=0.6, longest_s=3.0)
TOGETHER = 8
CHUNK = 8 * 2**20
# How long a silent server is waited for. botocore's own tries are off: s3fs's five and ours would multiply them.
_OPTIONS = {"config_kwargs": {"connect_timeout": 10, "read_timeout": 60, "retries": {"max_attempts": 0}}}
_PACKAGES = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}
_MEND = (PermissionError, FileNotFoundError, NotImplementedError, ImportError)

T = TypeVar("T")


class StoreUnreachable(Retryable):
    """The remote did not answer, several times."""


@dataclass(frozen=True)
class Thing:
    """An object: its bytes, and when it was written (seconds since 1970; None where the store does not say)."""

    bytes: int
    written: float | None


class Remote:
    """The objects under `url`. Names are relative to it. Connects when it is first asked for something."""

    def __init__(self, url: str) -> None:
        self.url = url

    @cached_property
    def _filesystem(self) -> tuple[Any, str]:
        scheme = self.url.partition("://")[0]
        options = _OPTIONS if _PACKAGES.get(scheme) == "s3" else {}
        try:
            filesystem, base = fsspec.core.url_to_fs(self.url, use_listings_cache=False, **options)
        except ImportError as error:
            extra = _PACKAGES.get(scheme)
            how = f"`pip install 'nautile[{extra}]'`" if extra else f"install the package ({error})"
            raise ConfigError(f"the store {self.url} needs a package that is not installed: {how}") from None
        return filesystem, base.rstrip("/")

    def names(self, folder: str) -> dict[str, Thing]:
        """Every object under `folder`, by its name relative to it. Empty where there is none."""

        def find(filesystem: Any, base: str) -> dict[str, Thing]:
            prefix = f"{base}/{folder}/"
            found = filesystem.find(prefix, detail=True)
            things = found.values() if isinstance(found, dict) else []
            rows = {one["name"].removeprefix("/"): one for one in things if one["type"] == "file"}
            return {
                name.removeprefix(prefix.removeprefix("/")): Thing(int(one["size"]), _written(one))
                for name, one in rows.items()
            }

        return self._ask(find, f"listing {folder}")

    def read(self, name: str, limit: int) -> bytes | None:
        """The bytes of a small object, None if there is none. Raises `ConfigError` if it has more than `limit`."""

        def get(filesystem: Any, base: str) -> bytes | None:
            try:
                size = int(filesystem.info(f"{base}/{name}")["size"])
                if size > limit:
                    raise ConfigError(f"{self.url}/{name} has {size} bytes, over the {limit} that are read")
                return filesystem.cat_file(f"{base}/{name}") if size else b""
            except FileNotFoundError:
                return None

        return self._ask(get, f"reading {name}")

    def write(self, name: str, data: bytes) -> None:
        """Put a small object, whole or not at all."""
        self._ask(lambda filesystem, base: filesystem.pipe_file(f"{base}/{name}", data), f"writing {name}")

    def put(self, source: Path, name: str) -> None:
        """Put a file, whole or not at all. Raises `Retryable` if `source` has been moved away meanwhile."""

        def send(filesystem: Any, base: str) -> None:
            if not source.is_file():
                raise Retryable(f"{source} was moved by another run while it was sent to {self.url}")
            filesystem.put_file(str(source), f"{base}/{name}")

        self._ask(send, f"writing {name}")

    def get(self, name: str, target: Path) -> bool:
        """Write an object into the file `target`, by and by; False if there is no such object."""

        def receive(filesystem: Any, base: str) -> bool:
            try:
                filesystem.get_file(f"{base}/{name}", str(target))
            except FileNotFoundError:
                return False
            return True

        return self._ask(receive, f"reading {name}", local=target)

    def digest(self, name: str) -> str:
        """sha256 of an object, read in pieces and kept nowhere."""

        def stream(filesystem: Any, base: str) -> str:
            sum_ = hashlib.sha256()
            with filesystem.open(f"{base}/{name}", "rb", block_size=CHUNK) as file:
                while block := file.read(CHUNK):
                    sum_.update(block)
            return sum_.hexdigest()

        return self._ask(stream, f"reading {name}")

    def delete(self, names: Iterable[str]) -> None:
        """Remove objects; those that are gone already do not matter."""
        gone = list(names)
        if gone:
            self._ask(lambda filesystem, base: _remove(filesystem, [f"{base}/{name}" for name in gone]), "deleting")

    def together(self, function: Callable[[Any], T], items: Iterable[Any]) -> list[T]:
        """`function` of each item, several at a time, in order; the first error is raised."""
        with ThreadPoolExecutor(max_workers=TOGETHER) as pool:
            return list(pool.map(function, items))

    def _ask(self, request: Callable[[Any, str], T], doing: str, local: Path | None = None) -> T:
        """The result of `request(filesystem, base)`, which is tried again after an error of the connection."""

        def attempt() -> T:
            try:
                return request(*self._filesystem)
            except (ConfigError, Retryable):
                raise
            except Exception as error:
                raise self._translated(error, doing, local) from None

        return retry(
            attempt,
            BACKOFF,
            should_retry=lambda error: isinstance(error, StoreUnreachable),
            before_pause=lambda error, attempt, pause_s: logger.info("%s; again in %.1f s", error, pause_s),
        )

    def _translated(self, error: Exception, doing: str, local: Path | None) -> ConfigError | Retryable:
        """The error as the operator reads it: something to change, or an outage."""
        if local is not None and isinstance(error, OSError) and error.errno in _FULL:
            return ConfigError(not_writable(local.parent, error))
        lines = str(error).strip().splitlines()
        text = f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__
        if isinstance(error, _MEND) or "Credentials" in type(error).__name__:
            return ConfigError(
                f"the store {self.url} refuses ({doing}; {text}): check the bucket, and the credentials and endpoint "
                "in the environment"
            )
        return StoreUnreachable(f"the store {self.url} cannot be reached ({doing}; {text})")


def _written(row: dict[str, Any]) -> float | None:
    moment = next((row[name] for name in ("LastModified", "mtime", "last_modified", "updated") if row.get(name)), None)
    if isinstance(moment, str):
        moment = datetime.fromisoformat(moment)
    return moment.timestamp() if isinstance(moment, datetime) else None


def _remove(filesystem: Any, paths: list[str]) -> None:
    try:
        filesystem.rm(paths)
    except FileNotFoundError:
        for path in paths:
            if filesystem.exists(path):
                filesystem.rm_file(path)


RECORD = "remote.json"
# They take no writes, end with the process, or are no object store: nothing that another machine could read back.
_NO_STORE = {"memory", "http", "https", "data", "zip", "tar", "github", "git", "blockcache", "filecache", "simplecache"}


def place_of(root: str) -> tuple[Path, str | None]:
    """The folder that `root` means and the URL it mirrors, if any. Raises `ConfigError` for an impossible one."""
    parts = urlsplit(root)
    if "://" not in root or parts.scheme == "file":
        if parts.scheme == "file" and parts.netloc not in ("", "localhost"):
            raise ConfigError(f"NAUTILE_STORE {root!r}: a file:// URL names a path on this machine (file:///path)")
        path = Path(unquote(parts.path) if parts.scheme == "file" else root).expanduser().absolute()
        return path, _recorded(path)
    url = _checked(root.rstrip("/"))
    cache = os.environ.get("NAUTILE_STORE_CACHE")
    path = Path(cache).expanduser().absolute() if cache else _default_cache(url)
    if (other := _recorded(path)) not in (None, url):
        raise ConfigError(f"NAUTILE_STORE_CACHE {path} is the cache of {other}: name another folder for {url}")
    return path, url


def record(root: Path, url: str) -> None:
    """Remember in the cache folder which remote it belongs to."""
    if _recorded(root) != url:
        write_json(root / RECORD, {"url": url})


def _recorded(root: Path) -> str | None:
    found = read_json(root / RECORD, limit=2**16)
    return _checked(str(found.get("url"))) if isinstance(found, dict) else None


def _checked(url: str) -> str:
    parts = urlsplit(url)
    if parts.password or parts.query or parts.fragment:
        raise ConfigError(
            f"NAUTILE_STORE names {parts.scheme}://…: a URL with a password or a query in it would be written down. "
            "Credentials come from the environment (AWS_ACCESS_KEY_ID and its kin, GOOGLE_APPLICATION_CREDENTIALS)"
        )
    if "::" in url or parts.scheme in _NO_STORE or parts.scheme not in fsspec.available_protocols():
        raise ConfigError(
            f"NAUTILE_STORE {url!r}: {parts.scheme}:// cannot hold the store; a local folder, or s3://, gs://, abfs:// "
            "or another object store that fsspec writes to can"
        )
    if not parts.netloc:
        raise ConfigError(f"NAUTILE_STORE {url!r}: the bucket is missing ({parts.scheme}://bucket/prefix)")
    return url


def _default_cache(url: str) -> Path:
    base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser().absolute()
    readable = re.sub(r"[^A-Za-z0-9]+", "-", url).strip("-")[:60]
    return base / "nautile" / f"{readable}-{hashlib.sha256(url.encode()).hexdigest()[:8]}"
