"""Read the files of prompt sets: count the rows of a set, and read them from any row on.

The files of a Hub dataset are listed once, with their digests and row counts, and the list is saved. Each file is
downloaded and checked when it is needed, and removed after reading; a resume downloads only the file it continues in.
"""

import shutil
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from nautile.common.errors import ConfigError
from nautile.configs.distill import PromptSetConfig
from nautile.data.records import Rejected
from nautile.data.sources.file_list import SourceFile, read_file_list, write_file_list
from nautile.data.sources.hub import (
    COMMIT,
    count_hub_rows,
    describe,
    fetch_hub_file,
    list_hub_files,
    named_in_errors,
)
from nautile.data.sources.local_files import (
    LINES,
    count_jsonl_rows,
    is_parquet,
    matching_files,
    parquet_columns,
    read_json_values,
    read_parquet_values,
    refuse_other_kind,
)
from nautile.data.sources.wikipedia import articles

READABLE = (".parquet", *LINES)
FOOTERS_AT_ONCE = 8  # small requests
QUESTIONS_PER_ARTICLE = 3

PromptRow = tuple[str, Any, Collection[str]]  # name of the row in the set, its parsed value, the columns of its file


def check_prompt_set(source: PromptSetConfig) -> None:
    """Validate a set's configuration without sending a request. Raises `ConfigError`."""
    if source.source == "jsonl":
        if not source.path:
            raise ConfigError(f"{source.label}: source 'jsonl' needs the `path` of a file, or a glob")
        matching_files(source.path)
    if source.source == "hub":
        if not source.path:
            raise ConfigError(f"{source.label}: `path` is not set; set it to the Hub dataset to read, as owner/name")
        if not COMMIT.fullmatch(source.revision):
            raise ConfigError(
                f"{source.label}: `revision` {source.revision!r} is not a full commit hash of {source.path}"
            )


def count_prompt_rows(source: PromptSetConfig, work: Path) -> int:
    """Count the rows of a set, an upper bound on its prompts; for the Hub from the files' footers.

    Raises `ConfigError` for a set that cannot be read, `Retryable` if the Hub does not answer.
    """
    check_prompt_set(source)
    if source.source == "wikipedia":
        return QUESTIONS_PER_ARTICLE * len(articles(0))
    if source.source == "jsonl":
        return sum(count_jsonl_rows(path) for path in matching_files(source.path))
    return sum(file.rows or 0 for file in _hub_files(source, work))


def read_prompt_rows(source: PromptSetConfig, columns: Collection[str], work: Path, skip: int) -> Iterator[PromptRow]:
    """Read rows of a set of files from row `skip` on; of Parquet only `columns`. Raises as `count_prompt_rows`."""
    if source.source == "jsonl":
        for path in matching_files(source.path):
            # A file that lies before `skip` as a whole is counted without being parsed.
            if skip and (rows := count_jsonl_rows(path)) <= skip:
                skip -= rows
                continue
            for number, row in enumerate(_readable(path, read_json_values(path, skip), skip), skip):
                yield f"{path.name}/{number}", row, _columns_of(row)
            skip = 0
        return
    for file in _hub_files(source, work):
        assert file.rows is not None, "the list was written with the rows of each file"
        if skip >= file.first + file.rows:
            continue
        folder, begin = work / source.name, max(0, skip - file.first)
        path = fetch_hub_file(source, file, folder)
        with named_in_errors(path, describe(source, file.path)):
            names = parquet_columns(path) if is_parquet(file.path) else None
            hub_rows = read_json_values(path, begin) if names is None else read_parquet_values(path, columns, begin)
            for number, row in enumerate(_readable(path, hub_rows, begin), file.first + begin):
                yield str(number), row, _columns_of(row) if names is None else names
        shutil.rmtree(folder)


def _readable(path: Path, rows: Iterator[Any], skip: int) -> Iterator[Any]:
    """The rows of a file from row `skip` on. Raises `ConfigError` at its end if none of all its rows can be read."""
    rejected, some_usable = Counter[str](), skip > 0
    for row in rows:
        if isinstance(row, Rejected):
            rejected[row.reason] += 1
        else:
            some_usable = True
        yield row
    if not some_usable:
        refuse_other_kind(path, rejected)


def _columns_of(row: Any) -> Collection[str]:
    return [str(name) for name in row] if isinstance(row, Mapping) else ()


def _hub_files(source: PromptSetConfig, work: Path) -> list[SourceFile]:
    """The files of a Hub set with `first` and `rows` of each; the list is made once and saved."""
    path = work / f"{source.name}.files.jsonl"
    if not path.is_file():
        files = list_hub_files(source)
        if unreadable := [file.path for file in files if not file.path.endswith(READABLE)]:
            raise ConfigError(
                f"{source.label}: reads Parquet and JSON lines, and {unreadable[0]} of {source.path} is neither"
            )
        with ThreadPoolExecutor(FOOTERS_AT_ONCE) as threads:
            counts = list(threads.map(lambda file: count_hub_rows(source, file, work / f"counting-{file.item}"), files))
        first, counted_files = 0, []
        for file, rows in zip(files, counts, strict=True):
            counted_files.append(replace(file, first=first, rows=rows))
            first += rows
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file_list(path, counted_files)
    return read_file_list(path)
