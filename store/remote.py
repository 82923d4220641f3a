"""Client of an object store at any fsspec URL: list, put, get and delete by name, with retries.

All requests go through here, and the many errors of the backends become two: `ConfigError` for what the operator must
change (no such bucket, no permission, no credentials) and `StoreUnreachable` for everything else. The libraries take
credentials from the environment; this module never reads, stores or logs them.
"""

import errno
import hashlib
import logging
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

from nautile.common.errors import ConfigError, Retryable
from nautile.common.extras import how_to_install
from nautile.common.files import not_writable, parse_json, read_json, write_json
from nautile.common.retry import Backoff, retry

logger = logging.getLogger(__name__)

BACKOFF = Backoff(attempts=8, give_up_s=60.0, first_s=0.6, longest_s=3.0)
ONCE = Backoff(attempts=1)
DOWN_S = 60.0  # for so long after all attempts at a request have failed, the others are sent once
SLOW_S = 5.0  # from then on an operator is told that a request is tried again
PARALLEL_REQUESTS = 8
BLOCK = 8 * 2**20  # bytes
# Timeouts in seconds. The retries of botocore and s3fs are off: all libraries' attempts multiply, and ours are enough.
_OPTIONS = {"config_kwargs": {"connect_timeout": 10, "read_timeout": 30, "retries": {"max_attempts": 0}}}
_PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs"}
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}
_NOT_RETRIED = (PermissionError, FileNotFoundError, NotImplementedError, ImportError)

T = TypeVar("T")


class StoreUnreachable(Retryable):
    """The remote did not answer after all attempts."""


class ObjectTooLarge(ConfigError):
    """An object has more bytes than are read of its kind."""


@dataclass(frozen=True)
class RemoteObject:
    """An object: its size in bytes, and when it was written (seconds since 1970; None if the server does not say)."""

    bytes: int
    written: float | None


class Remote:
    """The objects under `url`. Names are relative to it. The connection is made by the first request."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.is_conditional = True  # False once the backend has turned out to have no conditional creation
        self._down_since = -math.inf  # when all attempts at a request had failed, by the monotonic clock

    @cached_property
    def _filesystem(self) -> tuple[Any, str]:
        scheme = self.url.partition("://")[0]
        options = _OPTIONS if _PACKAGES.get(scheme) == "s3fs" else {}
        import fsspec  # not above: a store in a folder needs none of it

        try:
            # Without fsspec's cache of listings: other machines write to the same folders.
            filesystem, base = fsspec.core.url_to_fs(self.url, use_listings_cache=False, **options)
        except ImportError as error:
            package = _PACKAGES.get(scheme)
            how = how_to_install(package) if package else f"install the package ({error})"
            raise ConfigError(f"the store {self.url} needs a package that is not installed: {how}") from None
        if _PACKAGES.get(scheme) == "s3fs":
            filesystem.retries = 1
        return filesystem, base.rstrip("/")

    def names(self, folder: str) -> dict[str, RemoteObject]:
        """List all objects under `folder`, by their names relative to it."""

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
        """Read a small object; None if it does not exist. Raises `ObjectTooLarge` for more than `limit` bytes."""

        def get(filesystem: Any, base: str) -> bytes | None:
            try:
                # The size first: an object of another writer may be of any size, and this one is read into memory.
                size = int(filesystem.info(f"{base}/{name}")["size"])
                if size > limit:
                    raise ObjectTooLarge(f"{self.url}/{name} has {size} bytes, over the {limit} that are read")
                return filesystem.cat_file(f"{base}/{name}") if size else b""
            except FileNotFoundError:
                return None

        return self._request(get, f"reading {name}")

    def read_json(self, name: str, limit: int) -> Any | None:
        """Read a small JSON object; None if it does not exist or is not JSON. Raises the errors of `read`."""
        return parse_json(self.read(name, limit) or b"null")

    def write(self, name: str, data: bytes) -> None:
        """Write a small object atomically."""
        self._request(lambda filesystem, base: filesystem.pipe_file(f"{base}/{name}", data), f"writing {name}")

    def create(self, name: str, data: bytes) -> bool:
        """Create a small object; False if it exists.

        Of several concurrent requests exactly one succeeds if the server supports conditional writes, as S3 does; on
        other servers two simultaneous requests may both succeed.
        """

        def put(filesystem: Any, base: str) -> bool:
            path = f"{base}/{name}"
            try:
                filesystem.pipe_file(path, data, mode="create")
            except FileExistsError:
                return False
            except (TypeError, NotImplementedError):  # this file system of fsspec has no such mode
                self.is_conditional = False
                if filesystem.exists(path):
                    return False
                filesystem.pipe_file(path, data)
            return True

        return self._request(put, f"creating {name}")

    def put(self, source: Path, name: str) -> None:
        """Upload a file atomically. Raises `Retryable` if `source` has been moved away in the meantime."""

        def send(filesystem: Any, base: str) -> None:
            try:
                filesystem.put_file(str(source), f"{base}/{name}")
            except FileNotFoundError:  # either the source or the bucket
                if source.is_file():
                    raise
                raise Retryable(f"{source} was moved by another run while it was sent to {self.url}") from None

        self._request(send, f"writing {name}")

    def get(self, name: str, target: Path) -> bool:
        """Download an object to the file `target`; False if it does not exist.

        Raises `Retryable` if the folder of `target` has been moved away in the meantime.
        """

        def receive(filesystem: Any, base: str) -> bool:
            try:
                filesystem.get_file(f"{base}/{name}", str(target))
            except FileNotFoundError:  # either the object or the folder
                if target.parent.is_dir():
                    return False
                raise Retryable(f"{target.parent} was moved by another run while {name} was fetched") from None
            return True

        return self._request(receive, f"reading {name}", local=target)

    def digest(self, name: str) -> str:
        """The sha256 of an object, which is streamed and not stored."""

        def stream(filesystem: Any, base: str) -> str:
            digest = hashlib.sha256()
            with filesystem.open(f"{base}/{name}", "rb", block_size=BLOCK) as file:
                while block := file.read(BLOCK):
                    digest.update(block)
            return digest.hexdigest()

        return self._request(stream, f"reading {name}")

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects; one that does not exist is not an error.

        One request each: the answer to a request for many is "done" even if some of them were refused, and fsspec would
        take `*` and `[` in their names for patterns.
        """

        def remove(name: str) -> None:
            def request(filesystem: Any, base: str) -> None:
                with suppress(FileNotFoundError):
                    filesystem.rm_file(f"{base}/{name}")

            self._request(request, f"deleting {name}")

        self.map(remove, names)

    def delete_folder(self, folder: str) -> None:
        self.delete(f"{folder}/{name}" for name in self.names(folder))

    def server_time(self) -> float | None:
        """The time by the clock of the server, with which it stamps objects; None if it does not stamp them.

        In seconds since 1970. An object is written and listed.
        """
        self.write("clock/now", b"{}")
        written = self.names("clock").get("now")
        return written.written if written else None

    def map(self, function: Callable[[Any], T], items: Iterable[Any]) -> list[T]:
        """Apply `function` to the items in parallel; returns the results in order, raises the first error.

        After an error, and when the caller is interrupted, no further item is begun.
        """
        pending = list(enumerate(items))[::-1]
        results: dict[int, T] = {}
        errors: list[BaseException] = []

        def work() -> None:
            with suppress(IndexError):  # by `pop`, once nothing is pending
                while not errors:
                    index, item = pending.pop()
                    try:
                        results[index] = function(item)
                    except BaseException as error:
                        errors.append(error)

        count = len(pending)
        # Daemons, unlike the threads of an executor: a request that is never answered must not hold the process.
        threads = [threading.Thread(target=work, daemon=True) for _ in range(min(PARALLEL_REQUESTS, count))]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except BaseException:
            pending.clear()
            raise
        if errors:
            raise errors[0]
        return [results[index] for index in range(count)]

    def _request(self, request: Callable[[Any, str], T], action: str, local: Path | None = None) -> T:
        """Call `request(filesystem, base)` with retries after connection errors.

        `action` describes the request in messages. `local`: the file that it writes, if any.
        """

        def attempt() -> T:
            try:
                return request(*self._filesystem)
            except (ConfigError, Retryable):
                raise  # ours already, from inside the request
            except Exception as error:
                raise self._translate_error(error, action, local) from None

        began = time.monotonic()

        def report(error: Exception, attempt: int, pause_s: float) -> None:
            level = logging.INFO if time.monotonic() - began < SLOW_S else logging.WARNING
            logger.log(level, "%s; again in %.1f s", error, pause_s)

        try:
            result = retry(
                attempt,
                ONCE if began - self._down_since < DOWN_S else BACKOFF,
                should_retry=lambda error: isinstance(error, StoreUnreachable),
                before_pause=report,
            )
        except StoreUnreachable:
            self._down_since = time.monotonic()
            raise
        self._down_since = -math.inf
        return result

    def _translate_error(self, error: Exception, action: str, local: Path | None) -> ConfigError | Retryable:
        """Translate a backend's error: `ConfigError` for what the operator must change, else `StoreUnreachable`."""
        # The disk of this machine, not the remote: waiting will not help.
        if local is not None and isinstance(error, OSError) and error.errno in _FULL:
            return ConfigError(not_writable(local.parent, error))
        # Messages of backends may be pages of XML: one line of them goes to the log.
        lines = str(error).strip().splitlines()
        text = f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__
        if isinstance(error, _NOT_RETRIED) or "Credentials" in type(error).__name__:
            return ConfigError(
                f"the store {self.url} refuses ({action}; {text}): check the bucket, and the credentials and endpoint "
                "in the environment"
            )
        return StoreUnreachable(f"the store {self.url} cannot be reached ({action}; {text})")


def _written(entry: dict[str, Any]) -> float | None:
    """When a listed object was written, in seconds since 1970. Backends of fsspec have different names for it."""
    names = ("LastModified", "mtime", "last_modified", "updated")
    written = next((entry[name] for name in names if entry.get(name)), None)
    if isinstance(written, str):
        written = datetime.fromisoformat(written)
    return written.timestamp() if isinstance(written, datetime) else None


RECORD = "remote.json"  # in the local folder: the URL that it mirrors
# Schemes that are read-only, end with the process, or are not a store that other machines can read.
_NO_STORE = {"memory", "http", "https", "data", "zip", "tar", "github", "git", "blockcache", "filecache", "simplecache"}


def resolve_location(root: str) -> tuple[Path, str | None]:
    """The local folder of a store given as a path or URL, and the URL of its remote, if any.

    The local folder of a URL is `$NAUTILE_STORE_CACHE`, else one in the user's cache folder. Raises `ConfigError` for a
    URL that cannot be a store.
    """
    parts = urlsplit(root)
    if "://" not in root or parts.scheme == "file":
        if parts.scheme == "file" and parts.netloc not in ("", "localhost"):
            raise ConfigError(f"NAUTILE_STORE {root!r}: a file:// URL names a path on this machine (file:///path)")
        path = Path(unquote(parts.path) if parts.scheme == "file" else root).expanduser().absolute()
        return path, _recorded_url(path)
    url = _checked_url(root.rstrip("/"))
    cache = os.environ.get("NAUTILE_STORE_CACHE")
    if not cache:
        # Readable for the operator; the digest tells URLs apart that differ in other characters alone.
        readable = re.sub(r"[^A-Za-z0-9]+", "-", url).strip("-")[:60]
        name = f"{readable}-{hashlib.sha256(url.encode()).hexdigest()[:8]}"
        cache = os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "nautile", name)
    path = Path(cache).expanduser().absolute()
    # Two remotes in one folder would each get the artifacts of the other.
    if (other := _recorded_url(path)) not in (None, url):
        raise ConfigError(f"NAUTILE_STORE_CACHE {path} is the cache of {other}: name another folder for {url}")
    return path, url


def record_remote(root: Path, url: str) -> None:
    """Record the remote's URL in the local folder, so that opening the folder opens the same store."""
    if _recorded_url(root) != url:
        write_json(root / RECORD, {"url": url})


def _recorded_url(root: Path) -> str | None:
    record = read_json(root / RECORD, limit=2**16)
    return _checked_url(str(record.get("url"))) if isinstance(record, dict) else None


def _checked_url(url: str) -> str:
    """`url` if it is valid. Raises `ConfigError` if it contains a secret or cannot be a store."""
    parts = urlsplit(url)
    if parts.password or parts.query or parts.fragment:
        raise ConfigError(
            f"NAUTILE_STORE names {parts.scheme}://…: a URL with a password or a query in it would be written to disk. "
            "Credentials come from the environment (AWS_ACCESS_KEY_ID and the like, GOOGLE_APPLICATION_CREDENTIALS)"
        )
    import fsspec

    if "::" in url or parts.scheme in _NO_STORE or parts.scheme not in fsspec.available_protocols():
        raise ConfigError(
            f"NAUTILE_STORE {url!r}: {parts.scheme}:// cannot hold the store; a local folder, or s3://, gs://, abfs:// "
            "or another object store that fsspec writes to can"
        )
    if not parts.netloc:
        raise ConfigError(f"NAUTILE_STORE {url!r}: the bucket is missing ({parts.scheme}://bucket/prefix)")
    return url
