"""Datasets of the Hugging Face Hub at a pinned commit: their files listed once, each fetched whole and checked.

A file is fetched with one request and a digest to check it by, not read over ranges: a file of FineWeb-Edu has some
700 row groups, so ranges would cost hundreds of requests, and nothing would tell a cut or altered answer from data. It
lies on disk only while its unit is worked on. The clients' caches are not trusted to hold the pinned commit.
"""

import errno
import hashlib
import logging
import random
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from common.errors import ConfigError, Retryable
from configs.ingest import SourceConfig
from data.endpoints.circuit_breaker import retry_after
from data.sources.file_list import SourceFile

log = logging.getLogger(__name__)

COMMIT = re.compile(r"[0-9a-f]{40}")
ATTEMPTS = 5
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 300.0  # the Hub counts requests over five minutes
PATHS_A_REQUEST = 500
PASSING = (408, 425, 429)  # and every 5xx: an answer that may be another one later

Result = TypeVar("Result")


class _Damaged(Exception):
    """A file came otherwise than the Hub lists it."""


def list_hub_files(source: SourceConfig) -> list[SourceFile]:
    """The data files of the source's subset and split, in the Hub's order, with sizes and digests: few requests.

    Raises `ConfigError` for a dataset, subset, split or revision that does not exist, or one that is closed to this
    user; `Retryable` for an outage.
    """
    if not COMMIT.fullmatch(source.revision):
        raise ConfigError(f"source {source.name!r}: revision {source.revision!r} is not a full commit hash of the Hub")
    names = _patiently(source, lambda: _data_files(source))
    known = {info.path: info for info in _patiently(source, lambda: list(_paths_info(source, names)))}
    if missing := [name for name in names if name not in known]:
        raise ConfigError(f"{_where(source)}: {missing[0]} is named by the dataset, but is not there")
    return [SourceFile(i, name, known[name].size, _digest(known[name])) for i, name in enumerate(names)]


def count_hub_rows(source: SourceConfig, file: SourceFile) -> int:
    """Rows of one Parquet file of the Hub by its footer: two small requests. Errors as `fetch_hub_file`."""
    import pyarrow
    from huggingface_hub import HfFileSystem
    from pyarrow.parquet import ParquetFile

    def read() -> int:
        name = f"datasets/{source.path}@{source.revision}/{file.path}"
        try:
            with HfFileSystem().open(name, "rb", block_size=1 << 16) as opened:
                return ParquetFile(opened).metadata.num_rows
        except pyarrow.ArrowException as error:
            raise _Damaged(f"is not a Parquet file ({str(error).splitlines()[0]})") from None

    return _patiently(source, read, file.path)


def fetch_hub_file(source: SourceConfig, file: SourceFile, folder: Path) -> Path:
    """The file, whole and as listed, under `folder`; what an earlier process left there of it is gone on with.

    Raises `ConfigError` for a file that is gone or stays damaged, `Retryable` for an outage.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils import disable_progress_bars

    def fetch() -> Path:
        disable_progress_bars()
        path = Path(
            hf_hub_download(
                source.path,
                file.path,
                repo_type="dataset",
                revision=source.revision,
                local_dir=folder,
                cache_dir=folder / ".no-cache",  # or it would copy from the user's cache, whatever lies there
            )
        )
        if fault := _differs(path, file):
            shutil.rmtree(folder)
            raise _Damaged(fault)
        return path

    return _patiently(source, fetch, file.path)


def _data_files(source: SourceConfig) -> list[str]:
    """Paths inside the repository of what the dataset's own configuration names for the subset and split."""
    import datasets

    builder = datasets.load_dataset_builder(source.path, name=source.subset or None, revision=source.revision)
    splits: dict[str, Any] = builder.config.data_files or {}
    if source.split not in splits:
        raise ConfigError(f"source {source.name!r}: {source.path} has no split {source.split!r}, only {list(splits)}")
    pinned = f"hf://datasets/{source.path}@{source.revision}/"
    names = [str(name) for name in splits[source.split]]
    if other := [name for name in names if not name.startswith(pinned)]:
        # Without the Hub, `datasets` falls back on whatever commit it has in its cache.
        raise Retryable(f"{_where(source)}: the Hub did not answer, and {other[0]} in the cache is of another commit")
    return [name.removeprefix(pinned) for name in names]


def _paths_info(source: SourceConfig, names: Sequence[str]) -> Iterator[Any]:
    from huggingface_hub import HfApi

    for start in range(0, len(names), PATHS_A_REQUEST):
        some = list(names[start : start + PATHS_A_REQUEST])
        yield from HfApi().get_paths_info(source.path, some, repo_type="dataset", revision=source.revision)


def _digest(info: Any) -> str:
    return f"sha256:{info.lfs.sha256}" if info.lfs else f"git:{info.blob_id}"


def _differs(path: Path, file: SourceFile) -> str | None:
    """What is wrong with a fetched file, by its listed size and digest (git's is of a header and the content)."""
    size = path.stat().st_size
    if size != file.bytes:
        return f"came with {size} bytes instead of {file.bytes}"
    kind, _, expected = file.digest.partition(":")
    digest = hashlib.sha256() if kind == "sha256" else hashlib.sha1(b"blob %d\x00" % size, usedforsecurity=False)
    with path.open("rb") as opened:
        while block := opened.read(1 << 20):
            digest.update(block)
    return None if digest.hexdigest() == expected else f"came with another {kind} digest than the Hub lists"


def _patiently(source: SourceConfig, ask: Callable[[], Result], file: str = "") -> Result:
    """`ask`, again after a pause where that may help; the clients' errors become ours."""
    where = f"{_where(source)}{f', {file}' if file else ''}"
    pause = FIRST_PAUSE_S
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return ask()
        except Exception as error:
            verdict = _verdict(error, where)
            if verdict is None:
                raise
            final = isinstance(verdict, ConfigError) and not isinstance(error, _Damaged)
            if final or attempt == ATTEMPTS:
                raise verdict from None
            told = retry_after(getattr(getattr(error, "response", None), "headers", {}))
            wait = min(LONGEST_PAUSE_S, max(told or 0.0, pause * random.uniform(0.5, 1.0)))
            log.warning("%s; attempt %d of %d, again in %.1f s", verdict, attempt, ATTEMPTS, wait)
            time.sleep(wait)
            pause *= 2
    raise AssertionError("the last attempt returns or raises")


def _verdict(error: Exception, where: str) -> ConfigError | Retryable | None:
    """What an error of the clients means: something to change, something that may pass, or (None) a fault of ours."""
    import httpx2  # the HTTP client under huggingface_hub
    from huggingface_hub import errors

    if isinstance(error, ConfigError | Retryable):
        return error
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if isinstance(error, _Damaged):
        return ConfigError(f"{where}: {reason}, {ATTEMPTS} times")
    if isinstance(error, errors.LocalEntryNotFoundError):
        cause = error.__cause__
        reason = f"{reason} ({cause})" if cause else reason
    elif isinstance(error, errors.HfHubHTTPError) and not _passing(error.response.status_code):
        return ConfigError(f"{where}: not to be had ({reason}); check `path`, `revision` and HF_TOKEN")
    if isinstance(error, httpx2.HTTPError | errors.LocalEntryNotFoundError | ConnectionError | TimeoutError):
        return Retryable(f"{where}: the Hub did not answer ({type(error).__name__}: {reason})")
    if isinstance(error, errors.XetDownloadError):
        return Retryable(f"{where}: could not be fetched ({reason})")
    if isinstance(error, ValueError | FileNotFoundError):  # what `datasets` raises for an unknown subset or dataset
        return ConfigError(f"{where}: {reason}")
    if isinstance(error, OSError):
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES):
            return None  # our own disk: no fault of the file, which must not be set aside for it
        return Retryable(f"{where}: could not be fetched whole ({reason})")
    # hf_xet tells of a broken transfer by a bare RuntimeError
    return Retryable(f"{where}: could not be fetched ({reason})") if type(error) is RuntimeError else None


def _passing(status: int) -> bool:
    return status in PASSING or status >= 500


def _where(source: SourceConfig) -> str:
    return f"source {source.name!r}: {source.path} at {source.revision[:12]}"
