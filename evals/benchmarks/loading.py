"""Load a benchmark's records from a local file in the Hub's schema, or from the Hub at a pinned commit.

It also validates the names in lists of benchmarks, and yields the questions
that training text must not contain: all of a benchmark, even if only some are evaluated.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import httpx2  # the HTTP client under huggingface_hub

from nautile.common.errors import ConfigError, Retryable
from nautile.common.hub import OWN_DISK, TRANSIENT_STATUSES
from nautile.configs.evaluation import BenchmarkChoice
from nautile.data.records import Rejected
from nautile.data.screening.contamination import HeldOutQuestion
from nautile.data.sources.local_files import read_json_values
from nautile.data.table import read_table
from nautile.evals.benchmarks.catalogue import Benchmark, built, choose, items_of
from nautile.evals.benchmarks.items import BenchmarkItem
from nautile.evals.benchmarks.registry import BENCHMARKS, is_generated, parts_of

COMMIT = re.compile(r"[0-9a-f]{40}")


def check_benchmark(choice: BenchmarkChoice, field: str = "benchmarks") -> None:
    """Validate a benchmark of the list `field` without loading it, so that a mistake shows before hours of training.

    Raises `ConfigError` for an unknown name, or a revision that is not a full commit hash.
    """
    names = parts_of(choice.name)
    if not all(name in BENCHMARKS and BENCHMARKS[name].listed for name in names):
        known_names = ", ".join(sorted(name for name, entry in BENCHMARKS.items() if entry.listed))
        raise ConfigError(f"{field}: no benchmark {choice.name!r}; there are {known_names}")
    entries = [BENCHMARKS[name] for name in names]
    if is_generated(choice.name) and (choice.revision or choice.path):
        raise ConfigError(f"{field}: {choice.name!r} is generated, and takes neither `revision` nor `path`")
    if len(names) > 1 and (choice.path or any(entry.path for entry in entries)):
        raise ConfigError(f"{field}: give each part of {choice.name!r} its own `path`, by its own name")
    hubs = [entry for entry in entries if entry.hub and not choice.path]
    unpinned = [entry for entry in hubs if not COMMIT.fullmatch(choice.revision or entry.commit)]
    if choice.revision and not COMMIT.fullmatch(choice.revision):
        unpinned = hubs or entries
    if unpinned:
        default = f"; the default is {unpinned[0].commit}" if unpinned[0].commit else ""
        raise ConfigError(
            f"{field}: {choice.name!r} needs as `revision` a full commit hash of {unpinned[0].hub} (from its page's "
            f"history), so that the score can be reproduced{default}"
        )


def with_own_files(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows of a list of benchmarks (JSON data), with the `path` of each whose records are in a local file.

    So the file is in the key of a step by its content, as one that the configuration names.
    """
    entries = [BENCHMARKS.get(row["name"]) for row in rows]
    own = [entry.path if entry and not row["path"] else "" for row, entry in zip(rows, entries, strict=True)]
    return [{**row, "path": path} if path else dict(row) for row, path in zip(rows, own, strict=True)]


def items_for(
    choice: BenchmarkChoice, seed: int, bad_rows: dict[str, list[str]] | None = None
) -> dict[str, list[BenchmarkItem]]:
    """Load the items of each benchmark that `choice` names, by benchmark name (for a composite, its parts).

    The messages of invalid records, which are left out up to `choice.bad_rows_share`, are added to `bad_rows`. Raises
    `ConfigError` as `check_benchmark`, and for an unreadable file or too many invalid records; `Retryable` from the
    Hub.
    """
    check_benchmark(choice)
    items_by_name = {}
    for name in parts_of(choice.name):
        benchmark = BENCHMARKS[name]
        if benchmark.build:
            items_by_name[name] = built(benchmark, seed, choice.items)
            continue
        path = choice.path or benchmark.path
        records = read_file(benchmark, Path(path)) if path else read_hub(benchmark, choice.revision or benchmark.commit)
        bad: list[str] = []
        items = items_of(benchmark, records, seed, choice.bad_rows_share, bad)
        if bad and bad_rows is not None:
            bad_rows[name] = bad
        items_by_name[name] = choose(items, choice.items, seed)
    return items_by_name


def count_of(choice: BenchmarkChoice) -> int:
    """How many questions a benchmark asks, by the sizes of the catalogue; 0 for an unknown name."""
    sizes = [BENCHMARKS[name].size for name in parts_of(choice.name) if name in BENCHMARKS]
    generated = is_generated(choice.name)
    return sum(choice.items if choice.items and (generated or choice.items < size) else size for size in sizes)


def read_file(benchmark: Benchmark, path: Path) -> Iterator[Mapping[str, Any] | ConfigError]:
    """Yield the records of a JSONL, Parquet or CSV file in the Hub's schema, and the error of a bad line."""
    source = f"{benchmark.name}: {path}"
    if not path.is_file():
        raise ConfigError(
            f"{source}: no such file; `path` must be a JSONL, Parquet or CSV file of {benchmark.hub or 'its'} records"
        )
    try:
        if path.suffix.lower() in (".parquet", ".csv", ".tsv"):
            yield from read_table(path).rows
            return
        # JSONL: a bad line is yielded as an error, because a share of bad records may be allowed.
        for number, record in enumerate(read_json_values(path), 1):
            if isinstance(record, Rejected):
                yield ConfigError(f"{source}: line {number} is not JSON ({record.reason})")
            else:
                is_object = isinstance(record, dict)
                yield record if is_object else ConfigError(f"{source}: line {number} is not a JSON object")
    except ConfigError as error:
        raise ConfigError(f"{benchmark.name}: {error}") from None


def read_hub(benchmark: Benchmark, revision: str) -> Iterator[Mapping[str, Any]]:
    """Yield the records of the reported split at the Hub commit `revision` (40 hexadecimal digits)."""
    source = f"{benchmark.name}: {benchmark.hub} {benchmark.subset} {benchmark.split} at {revision[:12]}"
    gate = "; it is gated: accept its terms on the Hub and set HF_TOKEN" if benchmark.gated else ""
    try:
        split = _load_split(benchmark, revision)
    except Exception as error:
        if (clear := _clear_error(error, source, gate)) is None:
            raise
        raise clear from None
    # If the commit is unavailable, the client silently uses any other commit in its cache.
    # The path of a cached file contains the commit that it was built from.
    if not all(revision in Path(file["filename"]).parts for file in split.cache_files):
        raise ConfigError(
            f"{source}: this machine's cache has only another commit, and the Hub has no such commit or does not answer"
        )
    yield from split


def _load_split(benchmark: Benchmark, revision: str) -> Any:
    """The split as a `datasets.Dataset`."""
    import datasets

    load = partial(datasets.load_dataset, benchmark.hub, benchmark.subset, split=benchmark.split, revision=revision)
    if not benchmark.csv_texts:
        return load()
    # A CSV does not say which of its columns are texts: a column of numbers arrives as numbers, and the answer "None"
    # as no answer.
    try:
        return load(converters=dict.fromkeys(benchmark.csv_texts, str), na_filter=False)
    except (TypeError, ValueError) as error:
        if "converters" not in str(error):
            raise
        return load()  # another revision has files of another format, which says what is a text


def _clear_error(error: Exception, source: str, gate: str) -> Exception | None:
    """What `datasets` raised, as a `ConfigError` that the user must mend or a `Retryable`; None for any other error.

    An error of this machine's disk stays. `datasets` wraps whatever happens, so the causes tell a refusal from bad
    data.
    """
    import datasets
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, XetDownloadError

    causes = [error]
    while (cause := causes[-1].__cause__) is not None and isinstance(cause, Exception) and cause not in causes:
        causes.append(cause)
    unavailable = ConfigError(f"{source}: not available ({_line(error)}){gate}")
    # The Hub's answer decides, wherever in the chain it is: a gate, a missing file and a wrong token stay.
    for cause in causes:
        if isinstance(cause, HfHubHTTPError) and not isinstance(cause, LocalEntryNotFoundError):
            status = cause.response.status_code
            if status < 500 and status not in TRANSIENT_STATUSES:
                return ConfigError(f"{source}: not available ({_line(cause)}){gate}")
            return Retryable(f"{source}: the Hub did not answer ({_line(cause)})")
    if isinstance(error, datasets.exceptions.DatasetNotFoundError):
        return unavailable
    if own_disk := [cause for cause in causes if isinstance(cause, OSError) and cause.errno in OWN_DISK]:
        return own_disk[0]
    if isinstance(error, datasets.exceptions.DatasetBuildError | ValueError):
        cause = error.__cause__
        if isinstance(cause, OSError | httpx2.HTTPError):  # interrupted while the split was built
            return Retryable(f"{source}: the Hub did not answer ({_line(cause)})")
        return unavailable
    # Of hf_xet for a broken download, of `datasets` for a repository with a script.
    if type(error) is RuntimeError:
        if "scripts are no longer supported" in str(error):
            return ConfigError(f"{source}: not available ({_line(error)})")
        return Retryable(f"{source}: the Hub did not answer ({_line(error)})")
    # The Hub's own HTTP errors and what `datasets` translates are OSErrors; those of the HTTP client are not.
    if isinstance(error, OSError | httpx2.HTTPError | XetDownloadError):
        return Retryable(f"{source}: the Hub did not answer ({_line(error)})")
    return None


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def questions(
    choices: Sequence[BenchmarkChoice], seed: int, bad_rows: dict[str, list[str]] | None = None
) -> Iterator[HeldOutQuestion]:
    """Yield the questions of each benchmark; of a generated one only those that are evaluated.

    The text of a question is that of the benchmark, with its passage if it has one, but without options and prompt.

    The messages of records that are left out are added to `bad_rows`, by benchmark. Raises `ConfigError` before
    anything is loaded if a benchmark is unavailable, and as `evals.benchmarks.loading.items_for`.
    """
    for choice in choices:
        check_benchmark(choice)
    for choice in choices:
        complete = choice if is_generated(choice.name) else choice.model_copy(update={"items": None})
        for name, items in items_for(complete, seed, bad_rows).items():
            for item in items:
                yield HeldOutQuestion(name, item.id, item.question, whole=BENCHMARKS[name].similar)
