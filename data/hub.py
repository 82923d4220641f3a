"""Datasets of the Hugging Face Hub, streamed file by file at a pinned revision.

The list of files comes from the dataset's own configuration (`subset`, `split`); each is read over range requests,
needed columns only, so nothing is kept on disk and a resume skips whole files and row groups by their footers.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from configs.schema import SourceConfig
from configs.section import ConfigError, Retryable
from data.files import read_parquet
from data.records import Record, Rejected

COMMIT = re.compile(r"[0-9a-f]{40}")


def read_hub(source: SourceConfig, skip: int = 0) -> Iterator[Record | Rejected]:
    """Rows of a Hub dataset from the `skip`-th on, over its files in the Hub's order.

    Raises `ConfigError` for a dataset, subset, split or revision that does not exist, or one that is closed to this
    user; `Retryable` for an outage or a broken connection.
    """
    from huggingface_hub import HfFileSystem
    from pyarrow.parquet import ParquetFile

    if not COMMIT.fullmatch(source.revision):
        raise ConfigError(f"source {source.name!r}: revision {source.revision!r} is not a full commit hash of the Hub")
    with _explained(source):
        files = _data_files(source)
    for name in files:
        with _explained(source), HfFileSystem().open(name, "rb") as file:
            rows = ParquetFile(file).metadata.num_rows if skip else 0
            if skip and skip >= rows:
                skip -= rows
                continue
            file.seek(0)
            yield from read_parquet(name, file, source.form, skip)
            skip = 0


def _data_files(source: SourceConfig) -> list[str]:
    import datasets

    builder = datasets.load_dataset_builder(source.path, name=source.subset or None, revision=source.revision)
    splits: dict[str, Any] = builder.config.data_files or {}
    if source.split not in splits:
        raise ConfigError(f"source {source.name!r}: {source.path} has no split {source.split!r}, only {list(splits)}")
    return [str(name) for name in splits[source.split]]


@contextmanager
def _explained(source: SourceConfig) -> Iterator[None]:
    """Turn the clients' errors into ours: what the operator must change, or what may pass by itself."""
    import httpx2  # the HTTP client under huggingface_hub
    from huggingface_hub import errors

    where = f"source {source.name!r}: {source.path} at {source.revision[:12]}"
    try:
        yield
    except ConfigError:
        raise
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.GatedRepoError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"{where}: not to be had ({reason}); check `path`, `revision` and HF_TOKEN") from None
    except (httpx2.HTTPError, errors.LocalEntryNotFoundError, ConnectionError, TimeoutError) as error:
        raise Retryable(f"{where}: the Hub did not answer ({type(error).__name__}: {error})") from None
    except (ValueError, FileNotFoundError) as error:  # what `datasets` raises for an unknown subset or dataset
        raise ConfigError(f"{where}: {error}") from None
    except OSError as error:  # pages that came incomplete
        raise Retryable(f"{where}: a file could not be read ({error})") from None
