"""Benchmarks read from the Hub through the real client, against a repository on loopback."""

import errno
import json
import os
import subprocess
import sys

import datasets
import httpx2
import pyarrow
import pyarrow.parquet
import pytest
from huggingface_hub.errors import HfHubHTTPError, XetDownloadError

from nautile.common.errors import ConfigError, Retryable
from nautile.evals.benchmarks.catalogue import items_of
from nautile.evals.benchmarks.loading import read_hub
from nautile.evals.benchmarks.registry import BENCHMARKS
from tests.support.servers.fake_hub import FakeHub

REVISION = "0123456789" * 4
README = """---
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train.parquet}
  - {split: test, path: main/test.parquet}
---
"""

# The client reads HF_ENDPOINT when it is imported, so the reading has a process of its own.
CHILD = """
import json, sys
from nautile.configs.evaluation import BenchmarkChoice
from nautile.common.errors import ConfigError, Retryable
from nautile.evals.benchmarks.loading import items_for
told = []
for fields in json.loads(sys.argv[1]):
    try:
        told.append([[item.prompt, item.expected] for item in items_for(BenchmarkChoice(**fields), 0)["gsm8k"]])
    except (ConfigError, Retryable, KeyError) as error:
        told.append(f"{type(error).__name__}: {error}")
print(json.dumps(told))
"""


def read(url, home, *choices):
    environment = {**os.environ, "HF_ENDPOINT": url, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1"}
    command = [sys.executable, "-c", CHILD, json.dumps(choices)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_the_reported_split_of_the_pinned_commit_and_clear_refusals(hub_records, tmp_path):
    folder = tmp_path / "repository"
    (folder / "main").mkdir(parents=True)
    (folder / "README.md").write_text(README)
    rows = {"train": hub_records("gsm8k", 30)[20:], "test": hub_records("gsm8k", 20)}
    for split, row in rows.items():
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(row), folder / "main" / f"{split}.parquet")
    pinned = {"name": "gsm8k", "revision": REVISION}
    with FakeHub(folder, "openai/gsm8k", REVISION) as hub:
        choices = (pinned, {**pinned, "revision": "f" * 40}, {"name": "gpqa_diamond", "revision": REVISION})
        whole, unpinned, gated = read(hub.url, tmp_path / "home", *choices)
    assert whole == [[item.prompt, item.expected] for item in items_of(BENCHMARKS["gsm8k"], rows["test"], 0)]
    assert unpinned.startswith(
        "ConfigError: gsm8k: openai/gsm8k main test at ffffffffffff: this machine's cache has only another commit"
    )
    assert gated.startswith("ConfigError: gpqa_diamond: Idavidrein/gpqa")
    assert gated.endswith("accept its terms on the Hub and set HF_TOKEN")


def answered(status: int) -> Exception:
    """The clients' error for an answer of the Hub."""
    response = httpx2.Response(status, request=httpx2.Request("GET", "http://hub/datasets/openai/gsm8k"))
    return HfHubHTTPError(f"{status} of the Hub", response=response)


def not_found(cause: Exception) -> Exception:
    """The error of a file system of fsspec."""
    error = FileNotFoundError("datasets/openai/gsm8k/main")
    error.__cause__ = cause
    return error


def broken_download(cause: Exception) -> Exception:
    error = datasets.exceptions.DatasetGenerationError("An error occurred while generating the dataset")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (ConnectionError("cut"), Retryable, "the Hub did not answer"),
        (TimeoutError("slow"), Retryable, "the Hub did not answer"),
        (broken_download(ConnectionError("cut")), Retryable, "ConnectionError: cut"),
        (broken_download(httpx2.ReadError("cut")), Retryable, "ReadError: cut"),
        (httpx2.ConnectTimeout("slow"), Retryable, "the Hub did not answer .ConnectTimeout: slow"),
        (XetDownloadError("no shard"), Retryable, "XetDownloadError: no shard"),
        (RuntimeError("Data processing error: CAS service error"), Retryable, "CAS service error"),
        (RuntimeError("Dataset scripts are no longer supported, but found a.py"), ConfigError, "but found a.py"),
        (datasets.exceptions.DatasetGenerationError("bad bytes"), ConfigError, "not available"),
        (ValueError("no such subset"), ConfigError, "no such subset"),
        *((answered(status), ConfigError, f"not available .HfHubHTTPError: {status}") for status in (401, 403, 404)),
        *((answered(status), Retryable, f"did not answer .HfHubHTTPError: {status}") for status in (429, 500, 503)),
        (broken_download(answered(403)), ConfigError, "not available .HfHubHTTPError: 403"),
        (broken_download(answered(429)), Retryable, "did not answer .HfHubHTTPError: 429"),
        (not_found(answered(404)), ConfigError, "not available .HfHubHTTPError: 404"),
    ],
)
def test_what_may_pass_is_told_from_what_must_be_mended(monkeypatch, error, kind, message):
    def load_dataset(*args, **kwargs):
        raise error

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(kind, match=f"gsm8k: openai/gsm8k main test at 0123.*{message}"):
        list(read_hub(BENCHMARKS["gsm8k"], REVISION))


@pytest.mark.parametrize("wrap", [lambda error: error, broken_download])
def test_an_error_of_this_machines_disk_is_no_answer_of_the_hub(monkeypatch, wrap):
    def load_dataset(*args, **kwargs):
        raise wrap(OSError(errno.ENOSPC, "No space left on device"))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(OSError, match="No space left on device"):
        list(read_hub(BENCHMARKS["gsm8k"], REVISION))
