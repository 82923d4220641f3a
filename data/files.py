"""Parquet and JSON lines to records: whole files are refused by name, single bad rows are counted by reason.

Positions count every row, the rejected ones too, so that a position means the same row on every reading.
"""

import glob
import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import IO, Any, Literal

from configs.section import ConfigError
from data.records import Record, Rejected, SynthRecord, WebRecord, from_dict

Form = Literal["web", "synth"]
MAX_LINE = 32_000_000  # bytes; a longer line is passed over without being held
PARQUET_ROWS = 512


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

    Raises `ConfigError` for a file that is missing, empty or not text.
    """
    for path in paths:
        try:
            with _opened(path) as file:
                _check_text(path, file)
                for line in _lines(file):
                    if skip:
                        skip -= 1
                        continue
                    yield _from_line(line, form)
        except OSError as error:  # gzip's own errors are OSErrors too
            raise ConfigError(f"{path}: cannot be read ({error.strerror or error})") from None
        except EOFError:
            raise ConfigError(f"{path}: the compressed file ends too early; fetch it again") from None


def json_rows(path: Path) -> Iterator[Any]:
    """What each line of a JSON-lines file (`.gz` too) holds, or a `Rejected` for one that is not JSON.

    Raises `ConfigError` as `read_jsonl` does.
    """
    try:
        with _opened(path) as file:
            _check_text(path, file)
            yield from map(_parsed, _lines(file))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror or error})") from None
    except EOFError:
        raise ConfigError(f"{path}: the compressed file ends too early; fetch it again") from None


def read_parquet(path: Path | str, file: IO[bytes] | None, form: Form, skip: int = 0) -> Iterator[Record | Rejected]:
    """Rows of one Parquet file from the `skip`-th on; row groups before it are not read. `file`: already opened.

    Raises `ConfigError` for a file that is missing, no Parquet, or without the column of the text.
    """
    parquet = _open_parquet(path, file)
    wanted = [f.name for f in fields(WebRecord if form == "web" else SynthRecord)]
    columns = [name for name in wanted if name in parquet.schema_arrow.names]
    for needed in ("text",) if form == "web" else ("query", "synthetic_answer"):
        if needed not in columns:
            raise ConfigError(f"{path}: no column {needed!r}; there are {', '.join(parquet.schema_arrow.names)}")
    for group in range(parquet.num_row_groups):
        rows = parquet.metadata.row_group(group).num_rows
        if skip >= rows:
            skip -= rows
            continue
        for batch in _batches(path, parquet, group, columns, remote=file is not None):
            for index in range(min(skip, batch.num_rows), batch.num_rows):
                yield _from_arrow(batch, index, form)
            skip = max(0, skip - batch.num_rows)


def parquet_rows(path: Path) -> int:
    """Rows of a Parquet file by its footer."""
    return _open_parquet(path, None).metadata.num_rows


def _open_parquet(path: Path | str, file: IO[bytes] | None) -> Any:
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.ParquetFile(path if file is None else file)
    except OSError as error:
        if file is not None:
            raise
        raise ConfigError(f"{path}: cannot be read ({error.strerror or error})") from None
    except pyarrow.ArrowException as error:
        raise ConfigError(f"{path}: is not a Parquet file ({str(error).splitlines()[0]})") from None


def _batches(path: Path | str, parquet: Any, group: int, columns: list[str], remote: bool) -> Iterator[Any]:
    import pyarrow

    try:
        yield from parquet.iter_batches(PARQUET_ROWS, row_groups=[group], columns=columns)
    except (pyarrow.ArrowException, OSError) as error:  # a broken page header is an OSError
        if remote and not isinstance(error, pyarrow.ArrowException):
            raise
        raise ConfigError(f"{path}: row group {group} is damaged ({str(error).splitlines()[0]})") from None


def _from_arrow(batch: Any, index: int, form: Form) -> Record | Rejected:
    try:
        row = {name: batch.column(name)[index].as_py() for name in batch.schema.names}
    except UnicodeDecodeError:
        return Rejected("invalid_utf8")
    return from_dict(row, form)


def _opened(path: Path) -> IO[bytes]:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")


def _check_text(path: Path, file: IO[bytes]) -> None:
    head = file.read(8192)
    if not head.strip():
        raise ConfigError(f"{path}: is empty")
    if b"\x00" in head:
        raise ConfigError(f"{path}: is binary, not JSON lines; check the source's `reader`")
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
    row = _parsed(line)
    return row if isinstance(row, Rejected) else from_dict(row, form)


def _parsed(line: bytes | None) -> Any:
    if line is None:
        return Rejected("too_long")
    try:
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        return Rejected("invalid_utf8")
    except (ValueError, RecursionError):
        return Rejected("not_json")
