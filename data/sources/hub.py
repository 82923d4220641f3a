"""Datasets of the Hugging Face Hub at a pinned commit: list the files, download each as a whole, check its digest.

Files are downloaded, not read by HTTP ranges: a file of FineWeb-Edu has some 700 row groups, so ranges would cost
hundreds of requests, and a truncated or altered answer could not be detected by a digest. A file is on disk only while
its work item runs. `hf_hub_download` resumes a broken transfer, obeys the pause of a 429 and checks the size; this
module also compares the digest that the Hub lists. Any other temporary error (a 5xx, an outage) is `Retryable`, and
the fan-out tries the work item again. Nothing is taken from the clients' caches, which may hold another commit.

`datasets` (1 s of processor time) and `huggingface_hub` (0.5 s) are imported inside functions, because every command
that plans a run imports this module.
"""

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import pyarrow
from pyarrow.parquet import ParquetFile, write_table

from nautile.common.errors import ConfigError, Retryable
from nautile.common.files import write_atomically
from nautile.common.hub import clear_errors
from nautile.common.retry import Backoff, retry, retry_after
from nautile.common.text import first_line
from nautile.data.sources.local_files import count_jsonl_rows, is_parquet

log = logging.getLogger(__name__)

# The environment variable of a rehearsal (flows/rehearsal.py): of a Parquet file only so many rows are fetched.
FIRST_ROWS = "NAUTILE_FIRST_ROWS"
DOWNLOADS = 3  # attempts at a file that arrives with another digest
PATHS_PER_REQUEST = 500


@dataclass(frozen=True)
class SourceFile:
    """One file of a source, or a range of the records of an offline package.

    bytes, digest: as listed by the Hub ("sha256:…", or "git:…" for a small file); a local file has only its size.
    first, rows: the first row to read and the number of rows; `rows` None: all that follow.
    """

    number: int
    path: str
    bytes: int | None = None
    digest: str = ""
    first: int = 0
    rows: int | None = None

    @property
    def item(self) -> str:
        return f"{self.number:05d}"


def write_file_list(path: Path, files: Sequence[SourceFile]) -> None:
    write_atomically(path, "".join(json.dumps(asdict(file), sort_keys=True) + "\n" for file in files).encode())


def read_file_list(path: Path) -> list[SourceFile]:
    return [SourceFile(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


COMMIT = re.compile(r"[0-9a-f]{40}")
# A failed listing fails the whole stage, so it is retried at length. The Hub's rate limit covers five minutes.
LISTING_BACKOFF = Backoff(attempts=5, first_s=1.0, longest_s=300.0, longest_retry_after_s=300.0)

T = TypeVar("T")


class HubSplit(Protocol):
    """A split of a dataset at a commit: the configuration fields that sources and prompt sets have in common."""

    path: str
    subset: str
    split: str
    revision: str

    @property
    def label(self) -> str:
        """The configuration section it comes from, for messages."""


class _DamagedFile(ConfigError):
    """A download that is not valid Parquet; it is retried, because the answer may have been truncated."""


def list_hub_files(source: HubSplit) -> list[SourceFile]:
    """List the data files of the source's subset and split, in the Hub's order, with sizes and digests.

    Raises `ConfigError` for a dataset, subset, split or revision that does not exist or that this user may not read;
    `Retryable` for an outage.
    """
    if not COMMIT.fullmatch(source.revision):
        raise ConfigError(f"{source.label}: revision {source.revision!r} is not a full commit hash of the Hub")
    names = _retried(source, "", lambda: _data_files(source))
    entries = {entry.path: entry for entry in _retried(source, "", lambda: list(_paths_info(source, names)))}
    if missing_names := [name for name in names if name not in entries]:
        raise ConfigError(
            f"{describe(source)}: the dataset's configuration names {missing_names[0]}, which is not in the repository"
        )
    files = []
    for number, name in enumerate(names):
        entry = entries[name]
        digest = f"sha256:{entry.lfs.sha256}" if entry.lfs else f"git:{entry.blob_id}"
        files.append(SourceFile(number, name, entry.size, digest))
    return files


@dataclass(frozen=True)
class SplitFacts:
    """What a few small requests tell of a split. `rows` and `columns`: None unless its first file is Parquet.

    `rows` of several files are estimated from the first one's by their bytes.
    """

    files: int
    rows: int | None = None
    columns: tuple[str, ...] | None = None


def check_hub_split(source: HubSplit) -> SplitFacts:
    """Check by a few small requests that a dataset's pinned files exist, and that this user may read the first.

    Raises as `list_hub_files`, also for a gated dataset, whose files everybody may list.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    files = list_hub_files(source)
    for file in files[:1]:
        url = hf_hub_url(source.path, file.path, repo_type="dataset", revision=source.revision)
        _retried(source, file.path, partial(get_hf_file_metadata, url))  # a HEAD request
        if file.path.endswith(".parquet"):  # not the CSV of a benchmark
            rows, columns = _read_parquet(source, file, lambda p: (p.metadata.num_rows, tuple(p.schema_arrow.names)))
            share = (file.bytes or 0) / sum(other.bytes or 0 for other in files)
            return SplitFacts(len(files), rows if len(files) == 1 else round(rows / share), columns)
    return SplitFacts(len(files))


def count_hub_rows(source: HubSplit, file: SourceFile, folder: Path) -> int:
    """Count the rows of one file of the Hub: from the Parquet footer, or by downloading a JSON-lines file.

    `folder`: a folder for this call alone, removed at the end. Raises as `list_hub_files`.
    """
    if not is_parquet(file.path):
        try:
            return count_jsonl_rows(fetch_hub_file(source, file, folder))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    return _read_parquet(source, file, lambda parquet: parquet.metadata.num_rows)


def _read_parquet(source: HubSplit, file: SourceFile, read: Callable[[ParquetFile], T]) -> T:
    """What `read` takes from a Parquet file of the Hub, which is read by ranges."""
    from huggingface_hub import HfFileSystem

    def attempt() -> T:
        name = f"datasets/{source.path}@{source.revision}/{file.path}"
        try:
            with HfFileSystem().open(name, "rb", block_size=1 << 16) as remote_file:
                # Page by page: a column of SYNTH is one chunk of some hundred MB.
                return read(ParquetFile(remote_file, buffer_size=1 << 16, pre_buffer=False))
        except pyarrow.ArrowException as error:
            message = f"{describe(source, file.path)}: is not a Parquet file ({first_line(error)})"
            raise _DamagedFile(message) from None

    return _retried(source, file.path, attempt)


def fetch_hub_file(source: HubSplit, file: SourceFile, folder: Path) -> Path:
    """Download a file into `folder`, resuming a partial download, and check its digest; returns its path.

    Raises `ConfigError` for a file that does not exist or arrives damaged every time, `Retryable` for an outage.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils import disable_progress_bars

    if (rows := os.environ.get(FIRST_ROWS)) and is_parquet(file.path):
        return _fetch_first_rows(source, file, folder, int(rows))
    disable_progress_bars()
    where, difference = describe(source, file.path), ""
    for _ in range(DOWNLOADS):
        with clear_errors(where):
            downloaded = hf_hub_download(
                source.path,
                file.path,
                repo_type="dataset",
                revision=source.revision,
                local_dir=folder,
                cache_dir=folder / ".no-cache",  # an empty folder, so that nothing is copied from the user's cache
            )
        path = Path(downloaded)
        difference = _difference(path, file)
        if not difference:
            return path
        log.warning("%s: %s; downloading it again", where, difference)
        shutil.rmtree(folder)
    raise ConfigError(f"{where}: {difference}, {DOWNLOADS} times")


def _fetch_first_rows(source: HubSplit, file: SourceFile, folder: Path, rows: int) -> Path:
    """Write the first rows of a Parquet file into `folder`; no digest can be checked of a part."""
    path = folder / file.path
    path.parent.mkdir(parents=True, exist_ok=True)

    def write(parquet: ParquetFile) -> None:
        head = next(parquet.iter_batches(rows), None)
        write_table(pyarrow.Table.from_batches([head] if head else [], parquet.schema_arrow), path)

    _read_parquet(source, file, write)
    return path


def _data_files(source: HubSplit) -> list[str]:
    """Paths in the repository of the files that the dataset's configuration lists for the subset and split."""
    import datasets

    builder = datasets.load_dataset_builder(source.path, name=source.subset or None, revision=source.revision)
    splits: dict[str, Any] = builder.config.data_files or {}
    if source.split not in splits:
        raise ConfigError(f"{source.label}: {source.path} has no split {source.split!r}, only {list(splits)}")
    pinned = f"hf://datasets/{source.path}@{source.revision}/"
    names = [str(name) for name in splits[source.split]]
    if unpinned := [name for name in names if not name.startswith(pinned)]:
        # When the Hub does not answer, `datasets` silently uses whatever commit is in its cache.
        raise Retryable(
            f"{describe(source)}: the Hub did not answer, and {unpinned[0]} in the cache is of another commit"
        )
    return [name.removeprefix(pinned) for name in names]


def _paths_info(source: HubSplit, names: Sequence[str]) -> Iterator[Any]:
    """The Hub's metadata of each file: path, size, `blob_id`, and `lfs` for a large file."""
    from huggingface_hub import HfApi

    for start in range(0, len(names), PATHS_PER_REQUEST):
        chunk = list(names[start : start + PATHS_PER_REQUEST])
        yield from HfApi().get_paths_info(source.path, chunk, repo_type="dataset", revision=source.revision)


def _difference(path: Path, file: SourceFile) -> str:
    """How a downloaded file differs from its listed size and digest, as a message; empty if it does not."""
    size = path.stat().st_size
    if size != file.bytes:
        return f"came with {size} bytes instead of {file.bytes}"
    kind, _, expected = file.digest.partition(":")
    # A git blob's digest covers a header and the content.
    digest = hashlib.sha256() if kind == "sha256" else hashlib.sha1(b"blob %d\x00" % size, usedforsecurity=False)
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return "" if digest.hexdigest() == expected else f"came with another {kind} digest than the Hub lists"


def _retried(source: HubSplit, path: str, call: Callable[[], T]) -> T:
    """Call `call`, which sends a few small requests, and retry while the Hub fails or asks to wait."""
    where = describe(source, path)

    def attempt() -> T:
        with clear_errors(where):
            return call()

    return retry(
        attempt,
        LISTING_BACKOFF,
        should_retry=lambda error: isinstance(error, Retryable | _DamagedFile),
        retry_after_s=lambda error: retry_after(getattr(getattr(error.__cause__, "response", None), "headers", {})),
        before_pause=lambda error, n, pause_s: log.warning("%s; attempt %d, again in %.1f s", error, n, pause_s),
    )


@contextmanager
def named_in_errors(path: Path, name: str) -> Iterator[None]:
    """Name the dataset, and not the temporary `path` of its file, in the message of a `ConfigError`."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(str(error).replace(str(path), name)) from None


def describe(source: HubSplit, path: str = "") -> str:
    return f"{source.label}: {source.path} at {source.revision[:12]}" + (f", {path}" if path else "")
