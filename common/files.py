"""File utilities: crash-safe writes, size-limited reads, digests, and errors of a disk that cannot be written.

A file is written under a temporary name, fsynced and renamed; then its folder is fsynced, which makes the rename
durable. Temporary names are `.*.tmp`, which `Store.publish` removes.

There are two kinds of readers: `read_json` for our own files returns None if the file is missing or damaged;
`read_bounded_text`, `read_bounded_json` and `read_bounded_toml` for files of the operator raise an error that names it.
"""

import codecs
import errno
import glob
import hashlib
import itertools
import json
import logging
import os
import re
import time
import tomllib
import uuid
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from nautile.common.errors import ConfigError
from nautile.common.input_files import matching_paths, open_regular
from nautile.common.processes import machine_start

logger = logging.getLogger(__name__)

LARGEST_JSON = 512 * 2**20  # bytes
CONFIG_LIMIT = 4 * 2**20  # bytes
INDEX_LIMIT = 256 * 2**20  # bytes: the index of some 800,000 shards
MOST_PARTS = 100  # of a dotted key in TOML
# The parts of a dotted key but the last. Possessive, and only from the start of a word: the time is linear in the text.
_DOTTED = re.compile(r"""(?<![\w-])(?:(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+)++""", re.ASCII)
# A whole number of TOML, which has 64 bits, that Python reads although it cannot write it as decimal digits.
_LONG_NUMBER = re.compile(r"\b0[xob][0-9A-Fa-f_]{3500}")
SETTLED_S = 2.0  # a file changed less than this before it was read may change again with the same timestamps
NOT_WRITABLE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT}
_STORE_NOT_WRITABLE = NOT_WRITABLE | {errno.ENOTDIR, errno.EEXIST}  # also a file where a folder has to be


class NotToml(ConfigError):
    """A text that is not TOML."""


@contextmanager
def writing(root: Path) -> Iterator[None]:
    """Translate "no space", "read-only" and "permission denied" in the block into a `ConfigError` with the store."""
    try:
        yield
    except OSError as error:
        if error.errno not in _STORE_NOT_WRITABLE:
            raise
        raise ConfigError(not_writable(root, error)) from error


def not_writable(root: Path, error: OSError) -> str:
    """The message for a store at `root` that cannot be written because of `error`."""
    where = f" at {error.filename}" if error.filename else ""
    return (
        f"the store {root} cannot be written ({error.strerror}{where}): free some space or fix its permissions, "
        "or point NAUTILE_STORE at another folder"
    )


def is_full_or_read_only(error: OSError) -> bool:
    """Whether `error` means that nothing can be written: disk full, read-only, no permission."""
    return error.errno in _STORE_NOT_WRITABLE


@contextmanager
def atomic_path(path: Path, *, durable: bool = True) -> Iterator[Path]:
    """Yield a temporary path in the folder of `path`, which is renamed to `path` when the block ends.

    The file is fsynced first (`durable=False` skips that). If the block raises, the temporary file is removed and
    `path` stays as it was. Safe for several concurrent writers of a path.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}.tmp")
    # The mode of a new file here. Some libraries create theirs with a mode of their own, readable for the owner alone.
    temporary.touch()
    mode = temporary.stat().st_mode
    temporary.unlink()
    try:
        yield temporary
        temporary.chmod(mode)
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
    """Replace the file `path` by `content` atomically."""
    if create_folder:
        make_folder(path.parent, durable=durable)
    with atomic_path(path, durable=durable) as temporary:
        temporary.write_bytes(content)


def write_text(path: Path, text: str, *, durable: bool = True) -> None:
    """Replace `path` by `text` in UTF-8 atomically. Its folder must exist: a removed one is not created again."""
    write_atomically(path, text.encode("utf-8"), durable=durable, create_folder=False)


def write_json(path: Path, value: Any, *, durable: bool = True) -> None:
    """Replace `path` by `value` as indented JSON with sorted keys, atomically. Its folder must exist."""
    write_text(path, json.dumps(value, indent=1, sort_keys=True, allow_nan=False) + "\n", durable=durable)


def read_json(path: Path, *, limit: int = LARGEST_JSON) -> Any | None:
    """Read a JSON file; None if it is missing, no regular file, not JSON, nested too deep, or over `limit` bytes."""
    try:
        with open_regular(path) as file:
            data = file.read(limit + 1)
        if len(data) > limit:
            logger.warning("%s: over %d bytes of JSON are not read", path, limit)
            return None
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ConfigError as error:
        logger.warning("%s", error)
        return None
    return parse_json(data)


def parse_json(data: bytes) -> Any | None:
    """Parse JSON; None if `data` is not JSON or is nested too deep for the parser."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def refuse_constant(name: str) -> Any:
    """`parse_constant` of `json.loads`: refuse NaN and the infinities, which Python accepts and JSON does not have."""
    raise ValueError(f"{name} is not a JSON number")


def distinct_members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """`object_pairs_hook` of `json.loads`: refuse two members of one name, of which Python would take the last."""
    if len(members := dict(pairs)) < len(pairs):
        raise ValueError("an object has two members of the same name")
    return members


def make_folder(path: Path, *, durable: bool = True) -> None:
    """Create a folder and its parents, and fsync what names them: else a power cut could take them with their files."""
    missing = list(itertools.takewhile(lambda folder: not folder.is_dir(), (path, *path.parents)))
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing if durable else ():
        sync_folder(folder.parent)


def sync_folder(path: Path) -> None:
    """Fsync a folder, which makes renames and new files in it durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def folder_identity(folder: Path) -> str:
    """A text that identifies a folder of this machine until its next start; a copy, here or elsewhere, has another."""
    status = folder.stat()
    return f"{machine_start()} {status.st_dev} {status.st_ino}"


def append_durably(path: Path, content: bytes) -> None:
    """Append to a file and fsync it, with its folder if the file is new. A crash may leave a part of `content`."""
    is_new = not path.exists()
    with path.open("ab") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    if is_new:
        sync_folder(path.parent)


def file_size(path: Path) -> int | None:
    """The size of a file in bytes; None if it is missing or cannot be read."""
    try:
        return path.stat().st_size
    except OSError:
        return None


def sha256_of(path: Path, *, sync: bool = False, follow_links: bool = True) -> str:
    """The sha256 of a file as hexadecimal digits; `sync` also fsyncs the file. Raises as `open_regular`."""
    with open_regular(path, follow_links=follow_links) as file:
        if sync:
            os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_bounded_text(path: Path, limit: int = CONFIG_LIMIT) -> str:
    """Read a UTF-8 file, without a byte-order mark.

    Raises `ConfigError` if it is unreadable, not a regular file, or has over `limit` bytes.
    """
    try:
        with open_regular(path) as file:
            content = file.read(limit + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    if len(content) > limit:
        raise ConfigError(f"{path}: is over {limit:,} bytes, far more than such a file can hold")
    try:
        return content.removeprefix(codecs.BOM_UTF8).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 (byte {error.start})") from None


def read_bounded_json(path: Path) -> Any:
    """Read a JSON file. Raises the errors of `read_bounded_text`, and `ConfigError` for invalid JSON."""
    text = read_bounded_text(path)
    try:
        with _parser_limits(path):
            return json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}: cannot be read as JSON ({error})") from None


@contextmanager
def _parser_limits(where: object) -> Iterator[None]:
    """Translate what Python's parsers cannot read although it is valid into `ConfigError`; errors of syntax pass."""
    try:
        yield
    except (json.JSONDecodeError, tomllib.TOMLDecodeError):
        raise
    except ValueError:  # Python reads no decimal number of over 4,300 digits
        raise ConfigError(f"{where}: a number in it has too many digits") from None
    except RecursionError:
        raise ConfigError(f"{where}: is nested too deep") from None


def read_bounded_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file. Raises the errors of `read_bounded_text` and `parse_toml`."""
    return parse_toml(read_bounded_text(path), str(path))


def has_long_key(text: str) -> bool:
    """Whether a TOML text has a dotted key of over `MOST_PARTS` parts. It is only looked for, not parsed."""
    return any(match[0].count(".") >= MOST_PARTS for match in _DOTTED.finditer(text))


def parse_toml(text: str, where: str) -> dict[str, Any]:
    """Parse TOML. `where`: the file or option, for messages.

    Raises `NotToml`, and `ConfigError` for what is TOML but too deep, or has keys or numbers that are too long.
    """
    # Python's parser takes a time that is quadratic in the parts of a key, a minute for 50,000.
    if has_long_key(text):
        raise ConfigError(f"{where}: a key in it has over {MOST_PARTS} parts")
    if _LONG_NUMBER.search(text):
        raise ConfigError(f"{where}: a number in it has too many digits")
    try:
        with _parser_limits(where):
            return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise NotToml(f"{where}: is not TOML: {error}") from None


class RemoteFiles(Protocol):
    """Opens files that may only be at a remote: they are downloaded and verified when they are first read.

    At most `limit` bytes of files that are not open stay on this machine.
    """

    limit: int

    def open(self, path: str | Path) -> int:
        """Open a file for reading; returns its descriptor. Raises `ConfigError`, `Retryable`, `OSError`."""
        ...


class FileContent(NamedTuple):
    """A file as part of a key: its name relative to the configured folder, its size and its digest."""

    name: str
    bytes: int
    sha256: str


def content_digests(paths: Iterable[str | Path], memory: Path | None = None) -> list[FileContent]:
    """Name, size and digest of all files of `paths` (files, folders, globs), in their order, sorted within each.

    Names are relative to the given folder, or to the part of a glob before its first wildcard, so that a corpus can be
    moved without a new key. Raises `ConfigError` for a path without files, and for a file that cannot be read or
    changes while it is read.

    `memory`: a cache file of digests by size, mtime, ctime and inode, so that a file is read only once; its folder must
    exist. Every write through the file system changes ctime, even one that restores size and mtime. Only two writes
    within the resolution of the clock could have the same ctime, so a digest is cached only if the file last changed
    more than `SETTLED_S` before it was read. A file server whose clock lags more than that may hide such a change.
    """
    # Files whose stamp is that of the cache need not be read.
    entries = [entry for path in paths for entry in _matching_files(str(path))]
    cache = read_json(memory) if memory else None
    # Without what is damaged: each entry is a stamp and the digest.
    cache = {path: entry for path, entry in cache.items() if _is_remembered(entry)} if isinstance(cache, dict) else {}
    stamps = {path: _stamp(path) for path in dict.fromkeys(path for _, path in entries)}
    digests = {path: cache[path][-1] for path, stamp in stamps.items() if cache.get(path, [])[:-1] == stamp}
    unread = [path for path in stamps if path not in digests]
    # Taken before any is read: whatever changes later than this is not settled. Hashing releases the interpreter's
    # lock, so several threads read at a time.
    start_ns = time.time_ns()
    with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
        digests |= zip(unread, pool.map(_stable_digest, unread, (stamps[path] for path in unread)), strict=True)
    settled = [path for path in unread if start_ns - stamps[path][2] > SETTLED_S * 1e9]
    if memory and settled:
        # Without those that are gone: tests and notebooks name temporary files, and the cache would only grow.
        existing = {path: entry for path, entry in cache.items() if os.path.exists(path)}
        with suppress(OSError):  # the cache only saves time: a run can also be planned on a read-only disk
            write_json(memory, existing | {path: [*stamps[path], digests[path]] for path in settled})
    return [FileContent(name, stamps[path][0], digests[path]) for name, path in entries]


def _is_remembered(entry: Any) -> bool:
    return isinstance(entry, list) and len(entry) == 5 and isinstance(entry[-1], str)


def _matching_files(pattern: str) -> list[tuple[str, str]]:
    """(relative name, absolute path) of the files of a path or glob, sorted."""
    paths = matching_paths(pattern)
    if paths == [pattern]:
        return [(os.path.basename(pattern), os.path.abspath(pattern))]
    folder = pattern
    if not os.path.isdir(pattern):
        folder = str(Path(*itertools.takewhile(lambda part: not glob.has_magic(part), Path(pattern).parts)))
    files = [(Path(os.path.relpath(path, folder)).as_posix(), os.path.abspath(path)) for path in paths]
    if not files:
        raise ConfigError(f"no file matches {pattern!r}; check the path")
    return sorted(files)


def _stamp(path: str) -> list[int]:
    """[size, mtime, ctime, inode] of a file, by which a change is detected."""
    try:
        status = os.stat(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def _stable_digest(path: str, stamp: list[int]) -> str:
    """The digest of a file; raises `ConfigError` if it changes while it is read."""
    try:
        digest = sha256_of(Path(path))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    if _stamp(path) != stamp:
        raise ConfigError(f"{path}: changed while it was read; try again when no process writes to it")
    return digest
