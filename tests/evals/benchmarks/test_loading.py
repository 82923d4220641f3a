"""Which commit of a benchmark is read, and which failures of the client may pass; `test_catalogue` reads them all."""

import datasets
import pytest

from common.errors import ConfigError, Retryable
from configs.evaluation import BenchmarkChoice
from evals.benchmarks import loading
from evals.benchmarks.catalogue import BENCHMARKS

REVISION = "0123456789" * 4


def test_a_revision_is_read_in_place_of_the_pinned_one(hub_records, monkeypatch):
    revisions = []
    records = hub_records("gsm8k", 5)
    monkeypatch.setattr(loading, "read_hub", lambda benchmark, revision: revisions.append(revision) or records)
    for fields in ({}, {"revision": REVISION}):
        assert len(loading.items_for(BenchmarkChoice(name="gsm8k", **fields), 0)["gsm8k"]) == 5
    assert revisions == [BENCHMARKS["gsm8k"].pinned, REVISION]


def broken_download() -> Exception:
    error = datasets.exceptions.DatasetGenerationError("An error occurred while generating the dataset")
    error.__cause__ = ConnectionError("cut")
    return error


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (ConnectionError("cut"), Retryable, "the Hub did not answer"),
        (TimeoutError("slow"), Retryable, "the Hub did not answer"),
        (broken_download(), Retryable, "ConnectionError: cut"),
        (datasets.exceptions.DatasetGenerationError("bad bytes"), ConfigError, "not available"),
        (ValueError("no such subset"), ConfigError, "no such subset"),
    ],
)
def test_what_may_pass_is_told_from_what_must_be_mended(monkeypatch, error, kind, message):
    def load_dataset(*args, **kwargs):
        raise error

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(kind, match=f"gsm8k: openai/gsm8k main test at 0123.*{message}"):
        list(loading.read_hub(BENCHMARKS["gsm8k"], REVISION))
