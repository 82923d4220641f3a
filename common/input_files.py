"""Open files and expand paths that come from outside: only regular files, and folders without loops.

A FIFO, a device, a socket and a link to nothing are refused by name before anything is read, so that no command waits
for a writer or reads /dev/zero to its end.
"""

import glob
import os
import stat
from collections.abc import Callable, Iterator
from io import BufferedReader
from pathlib import Path

from nautile.common.errors import ConfigError

MOST_PATHS = 1_000_000  # of files and folders below one configured path
_UNPACKED_FLOOR, _MOST_EXPANSION = 256 * 2**20, 1000  # bytes, and times the size of a file
_KINDS: dict[str, Callable[[int], bool]] = {
    "a folder": stat.S_ISDIR,
    "a link": stat.S_ISLNK,
    "a FIFO": stat.S_ISFIFO,
    "a socket": stat.S_ISSOCK,
    "a device": lambda mode: stat.S_ISCHR(mode) or stat.S_ISBLK(mode),
}


def open_regular(path: Path | str, *, follow_links: bool = True) -> BufferedReader:
    """Open a regular file for reading.

    Raises `ConfigError` that names any other kind of file, and with `follow_links=False` a link, wherever it leads;
    `OSError` for a file that cannot be opened.
    """
    check_regular(path, follow_links=follow_links)
    # Should the file be replaced after the check, neither a FIFO nor a link to one holds up the call.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow_links else os.O_NOFOLLOW)
    descriptor = os.open(path, flags)
    try:
        _check_mode(path, os.fstat(descriptor).st_mode)
    except ConfigError:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def check_regular(path: Path | str, *, follow_links: bool = True) -> None:
    """Raise `ConfigError`, as `open_regular` does, unless `path` is a regular file; `OSError` if there is none."""
    _check_mode(path, os.stat(path, follow_symlinks=follow_links).st_mode)


def _check_mode(path: Path | str, mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = next((name for name, matches in _KINDS.items() if matches(mode)), "of an unknown kind")
        help_text = "; put the file itself there" if kind == "a link" else ""
        raise ConfigError(f"{path}: is {kind}, not a regular file{help_text}")


def unpacked_limit(size: int) -> int:
    """The bytes that a packed file of `size` bytes may unpack to; text is packed to a hundredth at the very best.

    A reader refuses a file that goes on beyond, so that a few bytes cannot take any amount of memory or time.
    """
    return _UNPACKED_FLOOR + _MOST_EXPANSION * size


def matching_paths(pattern: str) -> list[str]:
    """The regular files that a path names, sorted: the file itself, all files below a folder, or those a glob matches.

    Links are followed, because caches of datasets consist of them. Raises `ConfigError` that names a folder that a
    link leads back to, a match that is no regular file, and a folder that a glob of files (`*.jsonl`) matches; and for
    over `MOST_PATHS` paths.
    """
    if os.path.isfile(pattern):  # first, because a file's name may contain brackets
        return [pattern]
    if os.path.isdir(pattern):
        return sorted(path for path in _below(pattern, hidden=True) if _is_data_file(path, names_files=False))
    parts = pattern.split(os.sep)
    if "**" in parts:  # `glob` walks into loops of links, so they are looked for first
        fixed = os.sep.join(parts[: parts.index("**")])
        for root in glob.glob(fixed or (os.sep if pattern.startswith(os.sep) else os.curdir)):
            for _ in _below(root, hidden=False) if os.path.isdir(root) else ():
                pass
    matches = set(glob.iglob(pattern, recursive=True))
    return sorted(path for path in matches if _is_data_file(path, names_files=bool(Path(pattern).suffix)))


def _is_data_file(path: str, *, names_files: bool) -> bool:
    """Whether a match is a file; False for a folder, unless the pattern is one of files. Raises `ConfigError`."""
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        what = "is a link to nothing" if os.path.islink(path) else f"cannot be read ({error.strerror})"
        raise ConfigError(f"{path}: {what}; mend or remove it") from None
    if stat.S_ISDIR(mode):
        if names_files:
            raise ConfigError(f"{path}: is a folder that the pattern of files matches; read its files with {path}/*")
        return False
    _check_mode(path, mode)
    return True


def _below(root: str, *, hidden: bool) -> Iterator[str]:
    """The paths of everything below a folder; `hidden`: also names that begin with a point.

    Raises `ConfigError` for a link that leads to a folder above it, and for over `MOST_PATHS` paths.
    """
    count = 0
    # Folders still to be read, each with the identities of those above it. A stack, because folders may be nested
    # deeper than calls.
    unread: list[tuple[str, frozenset[tuple[int, int]]]] = [(root, frozenset())]
    while unread:
        folder, above = unread.pop()
        try:
            status = os.stat(folder)
            with os.scandir(folder) as entries:
                visible = [entry for entry in entries if hidden or not entry.name.startswith(".")]
        except OSError as error:
            raise ConfigError(f"{folder}: cannot be read ({error.strerror})") from None
        identity = (status.st_dev, status.st_ino)
        if identity in above:
            raise ConfigError(
                f"{folder}: is the same folder as one above it, by a link, so its files have no end; remove the link"
            )
        count += len(visible)
        if count > MOST_PATHS:
            raise ConfigError(f"{root}: has over {MOST_PATHS:,} files and folders; name a folder with fewer")
        for entry in visible:
            yield entry.path
            if entry.is_dir():
                unread.append((entry.path, above | {identity}))
