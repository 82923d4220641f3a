"""Files: writes that survive a crash, bounded reads, digests, and the message for a disk that cannot be written.

A file is written under a temporary name, fsynced, and renamed to its own; then its folder is fsynced, because a rename
is only as durable as the folder it happened in. Temporary names are `.*.tmp`, which `Store.publish` removes.

Two kinds of readers: `read_json` for files of our own, where "missing or damaged" is an answer (None), and
`read_bounded_text` / `read_bounded_json` for files of the operator's, where it is an error that names the file.
"""

import errno
import glob
import hashlib
import itertools
import json
import logging
import os
import stat
import time
import uuid
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from common.errors import ConfigError

logger = logging.getLogger(__name__)

LARGEST_JSON = 512 * 2**20  # bytes
CONFIG_LIMIT = 4 * 2**20  # bytes
INDEX_LIMIT = 256 * 2**20  # bytes: the index of some 800,000 shards
SETTLED_S = 2.0  # a file that was altered later than this before it was read may be altered again with equal times
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
    """The message for a store under `root` that `error` kept from being written."""
    where = f" at {error.filename}" if error.filename else ""
    return (
        f"the store {root} cannot be written ({error.strerror}{where}): free some space or fix its permissions, "
        "or point NAUTILE_STORE at another folder"
    )


def is_full_or_read_only(error: OSError) -> bool:
    """True for the errors that mean "nothing can be written here": full, read-only, no permission."""
    return error.errno in _NOT_WRITABLE


@contextmanager
def atomic_path(path: Path, *, durable: bool = True) -> Iterator[Path]:
    """A temporary file name in the folder of `path`, to be written in the block by any means.

    When the block ends, the file is fsynced and renamed over `path`; when it raises, the file is removed and `path`
    stays as it was. Safe for several writers of one path. `durable=False` skips the fsyncs.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}.tmp")
    try:
        yield temporary
        if durable:
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        sync_folder(path.parent)


def write_atomically(
    path: Path, content: bytes | memoryview, *, durable: bool = True, create_folder: bool = True
) -> None:
    """Replace `path` by `content`, whole or not at all."""
    if create_folder:
        path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(path, durable=durable) as temporary:
        temporary.write_bytes(content)


def write_text(path: Path, text: str, *, durable: bool = True) -> None:
    """Replace `path` by `text` in UTF-8, whole or not at all. Its folder must exist: one that was removed stays so."""
    write_atomically(path, text.encode("utf-8"), durable=durable, create_folder=False)


def write_json(path: Path, value: Any, *, durable: bool = True) -> None:
    """Replace `path` by `value` as indented JSON with sorted keys, whole or not at all. Its folder must exist."""
    write_text(path, json.dumps(value, indent=1, sort_keys=True, allow_nan=False) + "\n", durable=durable)


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
    return parse_json(data)


def parse_json(data: bytes) -> Any | None:
    """The JSON in `data`; None if it is not JSON, or nests deeper than the parser goes."""
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


def file_size(path: Path) -> int | None:
    """Bytes of a file; None if it is missing or cannot be read."""
    try:
        return path.stat().st_size
    except OSError:
        return None


def sha256_of(path: Path, *, sync: bool = False) -> str:
    """sha256 of a file as hexadecimal digits; `sync` also fsyncs it."""
    with path.open("rb") as file:
        if sync:
            os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_bounded_text(path: Path, limit: int = CONFIG_LIMIT) -> str:
    """The text of a plain UTF-8 file. Raises `ConfigError` if it is no such file, over `limit` bytes, or unreadable."""
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


def read_bounded_json(path: Path) -> Any:
    """The JSON in a plain file. Raises `ConfigError` as `read_bounded_text` does, and for damaged JSON."""
    try:
        return json.loads(read_bounded_text(path))
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}: cannot be read as JSON ({error})") from None
    except RecursionError:
        raise ConfigError(f"{path}: is nested too deep") from None


class RemoteFiles(Protocol):
    """Opens files that may not be on this machine yet: fetched and verified when they are first read. At most `limit`
    bytes of them stay here; one that is open does."""

    limit: int

    def open(self, path: str | Path) -> int:
        """The descriptor of a file. Raises `ConfigError`, `Retryable`, `OSError`."""
        ...


class FileContent(NamedTuple):
    """A file as part of a key: its name relative to the folder that was given, its size, its digest."""

    name: str
    bytes: int
    sha256: str


def content_digests(paths: Iterable[str | Path], memory: Path | None = None) -> list[FileContent]:
    """Name, size and digest of every file that `paths` (files, folders, globs) name, in their order, each one's sorted.

    A name is relative: to the folder that was given, or of a glob to its part before the first wildcard, so that a
    corpus may be moved. `memory`: a JSON file (its folder must exist) with the digests by size, mtime, ctime and inode,
    so that a file is read once. Any write through the file system alters ctime, also one that restores size and mtime.
    What remains is a clock too coarse to tell two writes apart, so a file is remembered only if it was last altered
    over `SETTLED_S` before it was read; a file server whose clock lags more than that may hide such a change.

    Raises `ConfigError` for a path without files, and for a file that cannot be read or changes while it is.
    """
    named = [entry for path in paths for entry in _files_named(str(path))]
    remembered = read_json(memory) if memory else None
    if not isinstance(remembered, dict):
        remembered = {}
    stamps = {path: _stamp(path) for path in dict.fromkeys(path for _, path in named)}
    known = {path: remembered[path][-1] for path, stamp in stamps.items() if remembered.get(path, [])[:-1] == stamp}
    unread = [path for path in stamps if path not in known]
    began = time.time_ns()
    with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
        known |= zip(unread, pool.map(_unchanging_digest, unread, (stamps[path] for path in unread)), strict=True)
    settled = [path for path in unread if began - stamps[path][2] > SETTLED_S * 1e9]
    if memory and settled:
        kept = {path: entry for path, entry in remembered.items() if os.path.exists(path)}
        with suppress(OSError):  # it only saves time: planning a run also works where nothing can be written
            write_json(memory, kept | {path: [*stamps[path], known[path]] for path in settled})
    return [FileContent(name, stamps[path][0], known[path]) for name, path in named]


def _files_named(pattern: str) -> list[tuple[str, str]]:
    """(relative name, absolute path) of the files that a path or glob names, sorted."""
    if os.path.isfile(pattern):  # its name may well contain a bracket
        return [(os.path.basename(pattern), os.path.abspath(pattern))]
    if os.path.isdir(pattern):
        folder, matches = pattern, glob.iglob("**", root_dir=pattern, recursive=True, include_hidden=True)
    else:
        parts = Path(pattern).parts
        folder = str(Path(*itertools.takewhile(lambda part: not glob.has_magic(part), parts)))
        matches = (os.path.relpath(path, folder) for path in glob.iglob(pattern, recursive=True))
    paths = ((name, os.path.abspath(os.path.join(folder, name))) for name in sorted(set(matches)))
    files = [(Path(name).as_posix(), path) for name, path in paths if os.path.isfile(path)]
    if not files:
        raise ConfigError(f"no file matches {pattern!r}; check the path")
    return files


def _stamp(path: str) -> list[int]:
    """[size, mtime, ctime, inode]"""
    try:
        status = os.stat(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def _unchanging_digest(path: str, stamp: list[int]) -> str:
    try:
        digest = sha256_of(Path(path))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    if _stamp(path) != stamp:
        raise ConfigError(f"{path}: changed while it was read; try again when nothing writes to it")
    return digest
