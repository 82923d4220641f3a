"""`nautile compare`: two evaluations by id or by folder, for people and as JSON, and what it refuses."""

import io
import json

import pytest
from rich.console import Console

from common.errors import ConfigError
from evals.benchmarks.items import BenchmarkItem
from evals.running.runner import evaluate
from flows.cli.compare import compared, view
from store.artifacts import Store
from tests.evals.conftest import Known

ITEMS = [BenchmarkItem("sums", n, str(n), f"{n} + 1?", "number", str(n + 1)) for n in range(12)]


def evaluation(folder, name, right):
    """A folder of an evaluation by a model that is right where `right(n)`."""
    model = Known(ITEMS, lambda item: item.expected if right(item.index) else "0", name)
    evaluate(model, ITEMS, folder / "rows.jsonl")
    (folder / "scores.json").write_text(json.dumps({"model": name}))
    return str(folder)


@pytest.fixture
def sides(tmp_path):
    return evaluation(tmp_path / "a", "one", lambda n: n < 6), evaluation(tmp_path / "b", "two", lambda n: n > 2)


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "store")


def drawn(found, shown):
    console = Console(width=160, file=io.StringIO())
    console.print(view(found, shown))
    return console.file.getvalue()


def test_folders_are_compared_and_shown(sides, store):
    found = compared(store, *sides, "strict", "generate")
    assert found["benchmarks"]["sums"]["only_a"] == 3
    assert found["benchmarks"]["sums"]["only_b"] == 6
    assert (found["a"], found["b"]) == ("a (one)", "b (two)")
    assert json.loads(json.dumps(found))["common"] == 12
    text = drawn(found, 2)
    assert "9 samples changed: 3 lost, 6 gained" in text
    assert "lost: sums 0, expected 1" in text
    assert "B (wrong) 0" in text
    assert "7 more" in text


def test_a_file_that_is_still_being_written_is_read_and_left_as_it_is(sides, store, tmp_path):
    path = tmp_path / "b" / "rows.jsonl"
    torn = path.read_bytes()[:-20]
    path.write_bytes(torn)
    assert compared(store, *sides, "strict", "generate")["common"] == 11
    assert path.read_bytes() == torn


@pytest.mark.parametrize(
    ("first", "options", "said"),
    [
        ("a", ("harsh", "generate"), "--verdict: 'harsh' is none; there are strict, lenient"),
        ("a", ("strict", "guess"), "--way: 'guess' is none; there are generate, likelihood"),
        ("a", ("strict", "likelihood"), r"no likelihood\.jsonl there"),
        ("empty", ("strict", "generate"), r"no rows\.jsonl there"),
    ],
)
def test_what_is_no_evaluation_is_refused_by_name(sides, store, tmp_path, first, options, said):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=said):
        compared(store, str(tmp_path / first), sides[1], *options)
