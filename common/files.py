"""Writes that survive a crash, and the one place where a failing disk becomes a clear message.

A file is written beside its final name, fsynced, and renamed over it; a folder is fsynced after a rename in it, for a
rename is only as durable as its folder.
"""

import errno
import hashlib
import json
import logging
import os
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common.errors import ConfigError

logger = logging.getLogger(__name__)

LARGEST_JSON = 512 * 2**20
_NOT_WRITABLE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOTDIR, errno.EEXIST}


@contextmanager
def writing(root: Path) -> Iterator[None]:
    """Turn "no space", "read-only", "permission denied" inside the block into a `ConfigError` naming the store."""
    try:
        yield
    except OSError as error:
        if error.errno not in _NOT_WRITABLE:
            raise
        raise ConfigError(not_writable(root, error)) from error


def not_writable(root: Path, error: OSError) -> str:
    where = f" at {error.filename}" if error.filename else ""
    return (
        f"the store {root} cannot be written ({error.strerror}{where}): free some space or mend its permissions, "
        "or point NAUTILE_STORE at another folder"
    )


def is_full_or_read_only(error: OSError) -> bool:
    """True for the errors that mean "this place cannot be written", whichever call met them."""
    return error.errno in _NOT_WRITABLE


def write_json(path: Path, value: Any, *, durable: bool = True) -> None:
    """Replace `path` by `value` as indented JSON, atomically; `durable=False` skips the fsyncs (live progress)."""
    write_text(path, json.dumps(value, indent=1, sort_keys=True, allow_nan=False) + "\n", durable=durable)


def write_text(path: Path, text: str, *, durable: bool = True) -> None:
    """Replace `path` by `text` in UTF-8, atomically; `durable=False` skips the fsyncs."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        sync_folder(path.parent)


def read_json(path: Path, *, limit: int = LARGEST_JSON) -> Any | None:
    """The JSON in `path`; None if there is no such file, it is not JSON, is nested too deep or over `limit` bytes."""
    try:
        with path.open("rb") as file:
            data = file.read(limit + 1)
        if len(data) > limit:
            logger.warning("%s: over %d bytes of JSON are not read", path, limit)
            return None
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None
    return parsed(data)


def parsed(data: bytes) -> Any | None:
    """The JSON in `data`; None if it is none, or nests deeper than the parser goes."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def sync_folder(path: Path) -> None:
    """Make the renames and creations in folder `path` durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_of(path: Path, *, sync: bool = False) -> str:
    """sha256 of a file as hexadecimal digits; `sync` also fsyncs it."""
    with path.open("rb") as file:
        if sync:
            os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()


CONFIG_LIMIT = 4 * 2**20
INDEX_LIMIT = 256 * 2**20  # of some 800,000 shards


def read_bounded_text(path: Path, limit: int = CONFIG_LIMIT) -> str:
    """The whole of a plain file in UTF-8. Raises `ConfigError` if it is none, is over `limit` bytes, or unreadable."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise ConfigError(f"{path}: is not a plain file")
        with path.open("rb") as file:
            content = file.read(limit + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    if len(content) > limit:
        raise ConfigError(f"{path}: is over {limit:,} bytes, far more than such a file can hold")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 (byte {error.start})") from None


def read_bounded_json(path: Path, limit: int = CONFIG_LIMIT) -> Any:
    """The JSON in a plain file. Raises `ConfigError` as `read_bounded_text`, and if it is not JSON or nested too
    deep."""
    try:
        return json.loads(read_bounded_text(path, limit))
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}: cannot be read as JSON ({error})") from None
    except RecursionError:
        raise ConfigError(f"{path}: is nested too deep") from None


def write_atomically(path: Path, content: bytes) -> None:
    """Write a whole file or none: a neighbour file, flushed to disk, renamed over `path`. One writer a path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.tmp")
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
