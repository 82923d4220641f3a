"""An object store behind any fsspec URL: list, put, get and delete by name, retried when the connection fails.

All requests go through here, and the many errors of the backends become two: `ConfigError` for what the operator must
change (no such bucket, no permission, no credentials) and `StoreUnreachable` for the rest. The libraries take
credentials from the environment; nothing here reads, holds or shows them.
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
from common.files import not_writable, parse_json, read_json, write_json
from common.retry import Backoff, retry

logger = logging.getLogger(__name__)

BACKOFF = Backoff(attempts=4, first_s=0.6, longest_s=3.0)
PARALLEL_REQUESTS = 8
BLOCK = 8 * 2**20  # bytes
# Seconds to wait for a silent server. botocore does not retry: s3fs does, five times, and so do we.
_OPTIONS = {"config_kwargs": {"connect_timeout": 10, "read_timeout": 60, "retries": {"max_attempts": 0}}}
_PACKAGES = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}
_NOT_RETRIED = (PermissionError, FileNotFoundError, NotImplementedError, ImportError)

T = TypeVar("T")


class StoreUnreachable(Retryable):
    """The remote did not answer after all attempts."""


@dataclass(frozen=True)
class RemoteObject:
    """An object: its size in bytes, and when it was written (seconds since 1970; None if the server does not tell)."""

    bytes: int
    written: float | None


class Remote:
    """The objects under `url`. Names are relative to it. The connection is made by the first request."""

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

    def names(self, folder: str) -> dict[str, RemoteObject]:
        """Every object under `folder`, by its name relative to it. Empty where there is none."""

        def find(filesystem: Any, base: str) -> dict[str, RemoteObject]:
            prefix = f"{base}/{folder}/"
            listing = filesystem.find(prefix, detail=True)
            entries = listing.values() if isinstance(listing, dict) else []  # fsspec returns [] for an empty folder
            return {
                entry["name"].removeprefix("/").removeprefix(prefix.removeprefix("/")): RemoteObject(
                    int(entry["size"]), _written(entry)
                )
                for entry in entries
                if entry["type"] == "file"
            }

        return self._request(find, f"listing {folder}")

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

        return self._request(get, f"reading {name}")

    def read_json(self, name: str, limit: int) -> Any | None:
        """The JSON in a small object, None if there is none or it is not JSON; raises as `read`."""
        return parse_json(self.read(name, limit) or b"null")

    def write(self, name: str, data: bytes) -> None:
        """Put a small object, whole or not at all."""
        self._request(lambda filesystem, base: filesystem.pipe_file(f"{base}/{name}", data), f"writing {name}")

    def create(self, name: str, data: bytes) -> bool:
        """Put a small object unless there is one; False if there is. Of several at once one succeeds where the server
        knows that condition, as S3 does; elsewhere two may that ask in the same moment."""

        def put(filesystem: Any, base: str) -> bool:
            path = f"{base}/{name}"
            try:
                filesystem.pipe_file(path, data, mode="create")
            except FileExistsError:
                return False
            except (TypeError, NotImplementedError):  # this file system of fsspec has no such mode
                if filesystem.exists(path):
                    return False
                filesystem.pipe_file(path, data)
            return True

        return self._request(put, f"creating {name}")

    def put(self, source: Path, name: str) -> None:
        """Put a file, whole or not at all. Raises `Retryable` if `source` has been moved away meanwhile."""

        def send(filesystem: Any, base: str) -> None:
            if not source.is_file():
                raise Retryable(f"{source} was moved by another run while it was sent to {self.url}")
            filesystem.put_file(str(source), f"{base}/{name}")

        self._request(send, f"writing {name}")

    def get(self, name: str, target: Path) -> bool:
        """Download an object into the file `target`; False if there is no such object."""

        def receive(filesystem: Any, base: str) -> bool:
            try:
                filesystem.get_file(f"{base}/{name}", str(target))
            except FileNotFoundError:
                return False
            return True

        return self._request(receive, f"reading {name}", local=target)

    def digest(self, name: str) -> str:
        """sha256 of an object, streamed: nothing is kept on disk."""

        def stream(filesystem: Any, base: str) -> str:
            digest = hashlib.sha256()
            with filesystem.open(f"{base}/{name}", "rb", block_size=BLOCK) as file:
                while block := file.read(BLOCK):
                    digest.update(block)
            return digest.hexdigest()

        return self._request(stream, f"reading {name}")

    def delete(self, names: Iterable[str]) -> None:
        """Remove objects. One that does not exist is no error."""
        doomed = list(names)

        def remove(filesystem: Any, base: str) -> None:
            paths = [f"{base}/{name}" for name in doomed]
            try:
                filesystem.rm(paths)
            except FileNotFoundError:  # one of them is gone already: the others one by one
                for path in paths:
                    if filesystem.exists(path):
                        filesystem.rm_file(path)

        if doomed:
            self._request(remove, "deleting")

    def delete_folder(self, folder: str) -> None:
        """Remove every object under `folder`."""
        self.delete(f"{folder}/{name}" for name in self.names(folder))

    def map(self, function: Callable[[Any], T], items: Iterable[Any]) -> list[T]:
        """`function` of each item, in parallel; results in order, the first error raised."""
        with ThreadPoolExecutor(max_workers=PARALLEL_REQUESTS) as pool:
            return list(pool.map(function, items))

    def _request(self, request: Callable[[Any, str], T], doing: str, local: Path | None = None) -> T:
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
        if isinstance(error, _NOT_RETRIED) or "Credentials" in type(error).__name__:
            return ConfigError(
                f"the store {self.url} refuses ({doing}; {text}): check the bucket, and the credentials and endpoint "
                "in the environment"
            )
        return StoreUnreachable(f"the store {self.url} cannot be reached ({doing}; {text})")


def _written(entry: dict[str, Any]) -> float | None:
    """When a listed object was written. Every backend of fsspec has its own name for it."""
    names = ("LastModified", "mtime", "last_modified", "updated")
    written = next((entry[name] for name in names if entry.get(name)), None)
    if isinstance(written, str):
        written = datetime.fromisoformat(written)
    return written.timestamp() if isinstance(written, datetime) else None


RECORD = "remote.json"  # in the local folder: the URL that it mirrors
# Schemes that take no writes, end with the process, or are no object store: no other machine could read them.
_NO_STORE = {"memory", "http", "https", "data", "zip", "tar", "github", "git", "blockcache", "filecache", "simplecache"}


def resolve_location(root: str) -> tuple[Path, str | None]:
    """The folder of a store given as a path or URL, and the URL it mirrors, if any. Raises `ConfigError` for a URL that
    cannot hold a store. A URL's local folder is `$NAUTILE_STORE_CACHE`, else one in the user's cache folder."""
    parts = urlsplit(root)
    if "://" not in root or parts.scheme == "file":
        if parts.scheme == "file" and parts.netloc not in ("", "localhost"):
            raise ConfigError(f"NAUTILE_STORE {root!r}: a file:// URL names a path on this machine (file:///path)")
        path = Path(unquote(parts.path) if parts.scheme == "file" else root).expanduser().absolute()
        return path, _recorded_url(path)
    url = _checked_url(root.rstrip("/"))
    cache = os.environ.get("NAUTILE_STORE_CACHE")
    if not cache:
        readable = re.sub(r"[^A-Za-z0-9]+", "-", url).strip("-")[:60]
        name = f"{readable}-{hashlib.sha256(url.encode()).hexdigest()[:8]}"
        cache = os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "nautile", name)
    path = Path(cache).expanduser().absolute()
    if (other := _recorded_url(path)) not in (None, url):
        raise ConfigError(f"NAUTILE_STORE_CACHE {path} is the cache of {other}: name another folder for {url}")
    return path, url


def record_remote(root: Path, url: str) -> None:
    """Note in the local folder which remote it mirrors, so that the folder alone opens the same store."""
    if _recorded_url(root) != url:
        write_json(root / RECORD, {"url": url})


def _recorded_url(root: Path) -> str | None:
    record = read_json(root / RECORD, limit=2**16)
    return _checked_url(str(record.get("url"))) if isinstance(record, dict) else None


def _checked_url(url: str) -> str:
    """`url` itself. Raises `ConfigError` if it holds a secret or cannot hold a store."""
    parts = urlsplit(url)
    if parts.password or parts.query or parts.fragment:
        raise ConfigError(
            f"NAUTILE_STORE names {parts.scheme}://…: a URL with a password or a query in it would be written to disk. "
            "Credentials come from the environment (AWS_ACCESS_KEY_ID and the like, GOOGLE_APPLICATION_CREDENTIALS)"
        )
    if "::" in url or parts.scheme in _NO_STORE or parts.scheme not in fsspec.available_protocols():
        raise ConfigError(
            f"NAUTILE_STORE {url!r}: {parts.scheme}:// cannot hold the store; a local folder, or s3://, gs://, abfs:// "
            "or another object store that fsspec writes to can"
        )
    if not parts.netloc:
        raise ConfigError(f"NAUTILE_STORE {url!r}: the bucket is missing ({parts.scheme}://bucket/prefix)")
    return url
