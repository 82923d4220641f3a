"""Local files by a glob, and JSON lines to records.

Whole files are refused by name, single bad rows are counted by reason. Positions count every row, the rejected ones
too, so that a position means the same row on every reading.
"""

import glob
import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from configs.section import ConfigError
from data.records import Form, Record, Rejected, from_dict

MAX_LINE = 32_000_000  # bytes; a longer line is passed over without being held


def matching(pattern: str) -> list[Path]:
    """The files a glob names, sorted. Raises `ConfigError` if there are none."""
    paths = [Path(name) for name in sorted(glob.glob(pattern, recursive=True))]
    if len(paths) == 1 and paths[0].is_dir():
        raise ConfigError(f"{pattern} is a folder; give a glob of its files, such as {pattern.rstrip('/')}/*.parquet")
    files = [path for path in paths if path.is_file()]
    if not files:
        raise ConfigError(f"no file matches {pattern!r}; check the source's `path`")
    return files


def read_jsonl(paths: Sequence[Path], form: Form, skip: int = 0) -> Iterator[Record | Rejected]:
    """Rows of JSON-lines files (`.gz` too) from the `skip`-th on; blank lines do not count.

    Raises `ConfigError` for a file that is missing, empty, not text, or one JSON array.
    """
    for path in paths:
        with _text_lines(path) as lines:
            for line in lines:
                if skip:
                    skip -= 1
                    continue
                yield _from_line(line, form)


def jsonl_rows(path: Path) -> int:
    """Rows of a JSON-lines file, by reading it. Raises `ConfigError` as `read_jsonl` does."""
    with _text_lines(path) as lines:
        return sum(1 for _ in lines)


@contextmanager
def _text_lines(path: Path) -> Iterator[Iterator[bytes | None]]:
    try:
        with _opened(path) as file:
            _check_text(path, file)
            yield _lines(file)
    except zlib.error as error:
        raise ConfigError(f"{path}: the compressed file is damaged ({error}); fetch it again") from None
    except EOFError:
        raise ConfigError(f"{path}: the compressed file ends too early; fetch it again") from None
    except OSError as error:  # gzip's own errors are OSErrors too
        raise ConfigError(f"{path}: cannot be read ({error.strerror or error})") from None


def _opened(path: Path) -> IO[bytes]:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")


def _check_text(path: Path, file: IO[bytes]) -> None:
    head = file.read(8192)
    if not head.strip():
        raise ConfigError(f"{path}: is empty")
    if b"\x00" in head:
        raise ConfigError(f"{path}: is binary, not JSON lines; check the source's `reader`")
    if path.suffix == ".json" and head.lstrip().startswith(b"["):
        raise ConfigError(f"{path}: is one JSON array, which cannot be read bit by bit; write it as JSON lines")
    file.seek(0)


def _lines(file: IO[bytes]) -> Iterator[bytes | None]:
    """Lines without the blank ones; None for a line over `MAX_LINE`."""
    while line := file.readline(MAX_LINE):
        if len(line) < MAX_LINE or line.endswith(b"\n"):
            if line.strip():
                yield line
            continue
        while (rest := file.readline(MAX_LINE)) and not rest.endswith(b"\n"):
            pass
        yield None


def _from_line(line: bytes | None, form: Form) -> Record | Rejected:
    if line is None:
        return Rejected("too_long")
    try:
        return from_dict(json.loads(line.decode("utf-8")), form)
    except UnicodeDecodeError:
        return Rejected("invalid_utf8")
    except (ValueError, RecursionError):
        return Rejected("not_json")
