"""The files of prompt sets: how many rows each set has, and the rows from any number on.

The files of a Hub dataset are listed once, with their digests and rows, and the list is kept. Each is then fetched
whole and checked when its turn comes, and removed when it has been read: a resume fetches only the file that it is in.
"""

import shutil
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from configs.distill import PromptSetConfig
from data.sources.file_list import SourceFile, read_file_list, write_file_list
from data.sources.hub import COMMIT, count_hub_rows, describe, fetch_hub_file, is_parquet, list_hub_files
from data.sources.local_files import (
    count_jsonl_rows,
    matching_files,
    parquet_columns,
    read_json_values,
    read_parquet_values,
)
from data.sources.wikipedia import articles

READABLE = (".parquet", ".jsonl", ".jsonl.gz", ".ndjson", ".json")
FOOTERS_AT_ONCE = 8  # small requests
QUESTIONS_PER_ARTICLE = 3

PromptRow = tuple[str, Any, Collection[str]]  # its name in the set, its value as read, the columns that its file has


def check_prompt_set(source: PromptSetConfig) -> None:
    """Check a set's section without any request. Raises `ConfigError`."""
    if source.source == "jsonl":
        if not source.path:
            raise ConfigError(f"{source.label}: source 'jsonl' needs the `path` of a file, or a glob")
        matching_files(source.path)
    if source.source == "hub":
        if not source.path:
            raise ConfigError(f"{source.label}: `path` is not set; set it to the Hub dataset to read, as owner/name")
        if not COMMIT.fullmatch(source.revision):
            raise ConfigError(f"{source.label}: `revision` {source.revision!r} is no full commit hash of {source.path}")


def count_prompt_rows(source: PromptSetConfig, work: Path) -> int:
    """Rows of a set, the most prompts that it can give; for the Hub by its files' footers.

    Raises `ConfigError` for a set that cannot be read, `Retryable` if the Hub does not answer.
    """
    check_prompt_set(source)
    if source.source == "wikipedia":
        return QUESTIONS_PER_ARTICLE * len(articles(0))
    if source.source == "jsonl":
        return sum(count_jsonl_rows(path) for path in matching_files(source.path))
    return sum(file.rows or 0 for file in _hub_files(source, work))


def read_prompt_rows(source: PromptSetConfig, columns: Collection[str], work: Path, skip: int) -> Iterator[PromptRow]:
    """Rows of a set of files from number `skip` on; of Parquet only `columns`. Errors as `count_prompt_rows`."""
    if source.source == "jsonl":
        for path in matching_files(source.path):
            if skip and (rows := count_jsonl_rows(path)) <= skip:
                skip -= rows
                continue
            for number, row in enumerate(read_json_values(path, skip), skip):
                yield f"{path.name}/{number}", row, _columns_of(row)
            skip = 0
        return
    for file in _hub_files(source, work):
        assert file.rows is not None, "the list was written with the rows of each file"
        if skip >= file.first + file.rows:
            continue
        folder, begin = work / source.name, max(0, skip - file.first)
        path = fetch_hub_file(source, file, folder)
        try:
            if is_parquet(file.path):
                names = parquet_columns(path)
                for number, row in enumerate(read_parquet_values(path, columns, begin), file.first + begin):
                    yield str(number), row, names
            else:
                for number, row in enumerate(read_json_values(path, begin), file.first + begin):
                    yield str(number), row, _columns_of(row)
        except ConfigError as error:  # the operator knows the file by its dataset, not by where it was fetched to
            raise ConfigError(str(error).replace(str(path), describe(source, file.path))) from None
        shutil.rmtree(folder)


def _columns_of(row: Any) -> Collection[str]:
    return [str(name) for name in row] if isinstance(row, Mapping) else ()


def _hub_files(source: PromptSetConfig, work: Path) -> list[SourceFile]:
    """The files of a Hub set with `first` and `rows` of each, listed once."""
    path = work / f"{source.name}.files.jsonl"
    if not path.is_file():
        files = list_hub_files(source)
        if other := [file.path for file in files if not file.path.endswith(READABLE)]:
            raise ConfigError(
                f"{source.label}: reads Parquet and JSON lines, and {other[0]} of {source.path} is neither"
            )
        with ThreadPoolExecutor(FOOTERS_AT_ONCE) as threads:
            counts = list(threads.map(lambda file: count_hub_rows(source, file, work / f"counting-{file.item}"), files))
        first, listed = 0, []
        for file, rows in zip(files, counts, strict=True):
            listed.append(replace(file, first=first, rows=rows))
            first += rows
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file_list(path, listed)
    return read_file_list(path)
