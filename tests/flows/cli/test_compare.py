"""`nautile compare`: two evaluations by folder, as text and as JSON, and what it refuses."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from nautile.common.errors import ConfigError
from nautile.evals.benchmarks.items import BenchmarkItem
from nautile.evals.running.runner import evaluate
from nautile.flows.cli.compare import comparison_view
from nautile.flows.sweep.comparisons import compare_evaluations
from tests.evals.conftest import Known
from tests.support.samples.stage_store import published

ITEMS = [BenchmarkItem("sums", n, str(n), f"{n} + 1?", "number", str(n + 1)) for n in range(12)]


def evaluation(folder, name, right):
    """The folder of an evaluation of a model that answers question n correctly if `right(n)`."""
    model = Known(ITEMS, lambda item: item.expected if right(item.index) else "0", name)
    evaluate(model, ITEMS, folder / "rows.jsonl")
    (folder / "scores.json").write_text(json.dumps({"model": name}))
    return str(folder)


@pytest.fixture
def sides(tmp_path):
    return evaluation(tmp_path / "a", "one", lambda n: n < 6), evaluation(tmp_path / "b", "two", lambda n: n > 2)


def render(comparison, shown):
    console = Console(width=160, file=io.StringIO())
    console.print(comparison_view(comparison, shown))
    return console.file.getvalue()


def test_two_folders_are_compared_and_shown(sides, store):
    comparison = compare_evaluations(store, *sides, "strict", "generate")
    assert comparison["benchmarks"]["sums"]["only_a"] == 3
    assert comparison["benchmarks"]["sums"]["only_b"] == 6
    assert (comparison["a"], comparison["b"]) == ("a (one)", "b (two)")
    assert json.loads(json.dumps(comparison))["common"] == 12
    text = render(comparison, 2)
    assert "9 samples changed: 3 lost, 6 gained" in text
    assert "lost: sums 0, expected 1" in text
    assert "B (wrong) 0" in text
    assert "7 more" in text


def test_a_side_that_was_not_screened_for_is_named_in_text_and_json(sides, store, tmp_path):
    path = tmp_path / "b" / "rows.jsonl"
    path.write_text(path.read_text().replace('"screened": null', '"screened": false'))
    comparison = compare_evaluations(store, *sides, "strict", "generate")
    note = "training text was not screened for it"
    assert comparison["benchmarks"]["sums"]["not_screened"] == {"b": note}
    assert f"sums (not screened for): {note} (B)." in render(comparison, 0)


def test_a_file_that_is_still_being_written_is_read_and_not_changed(sides, store, tmp_path):
    path = tmp_path / "b" / "rows.jsonl"
    torn = path.read_bytes()[:-20]
    path.write_bytes(torn)
    assert compare_evaluations(store, *sides, "strict", "generate")["common"] == 11
    assert path.read_bytes() == torn


@pytest.mark.parametrize(
    ("first", "options", "message"),
    [
        ("a", ("harsh", "generate"), "--verdict harsh: must be strict or lenient"),
        ("a", ("strict", "guess"), "--way guess: must be generate or likelihood"),
        ("a", ("strict", "likelihood"), r"has no likelihood\.jsonl"),
        ("empty", ("strict", "generate"), r"has no rows\.jsonl"),
    ],
)
def test_a_folder_without_an_evaluation_is_refused_by_name(sides, store, tmp_path, first, options, message):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=message):
        compare_evaluations(store, str(tmp_path / first), sides[1], *options)


def test_evaluations_of_the_store_have_their_ids_and_what_differs_around_them(sides, store):
    here = {"machine": "x86_64 A, 2 cores, Linux", "devices": "1 x cpu", "libraries": {"jax": "0.10.2", "numpy": "2.4"}}
    there = {**here, "machine": "x86_64 B, 2 cores, Linux", "libraries": {"jax": "0.10.3", "scipy": "1"}}
    ids, titles = [], []
    for folder, trained_in, evaluated_in in zip(sides, (here, there), (here, here), strict=True):
        files = {path.name: path.read_text() for path in Path(folder).iterdir()}
        checkpoint = published(store, "checkpoint", f"{folder} trained", facts={"environment": trained_in})
        fields = {"inputs": {"checkpoint": checkpoint.full_id}, "facts": {"environment": evaluated_in}}
        evaluated = published(store, "evaluation", folder, files, **fields)
        ids.append(evaluated.id)
        titles.append(f"toy, {evaluated.id} of {checkpoint.id}")
    comparison = compare_evaluations(store, *ids, "strict", "generate")
    (warning,) = comparison["warnings"]
    assert warning.startswith("trained in different environments")
    assert "machine: x86_64 A, 2 cores, Linux and x86_64 B, 2 cores, Linux; jax: 0.10.2 and 0.10.3" in warning
    assert f"warning: {warning[:60]}" in render(comparison, 0)
    assert compare_evaluations(store, ids[0], ids[0], "strict", "generate")["warnings"] == []
    # The heading has ids that `nautile show` takes.
    assert [comparison["a"], comparison["b"]] == titles
    assert all(store.get(word).id == word for title in titles for word in title.split() if "/" in word)
