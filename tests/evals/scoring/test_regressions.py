"""What counts as fallen, which earlier evaluation was the best, and that a missing score is never a zero."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nautile.evals.benchmarks.items import BenchmarkItem
from nautile.evals.running.runner import evaluate
from nautile.evals.scoring.comparison import best_of, compare, protocol_differences, regressed, scored_benchmarks
from tests.evals.conftest import Known

ITEMS = [
    BenchmarkItem(name, n, str(n), f"{name}: {n} + 1?", "number", str(n + 1))
    for name in ("held", "lost")
    for n in range(60)
]


def rows(path, right):
    model = Known(ITEMS, lambda item: item.expected if right(item) else "0")
    return evaluate(model, ITEMS, path)


def scores(**accuracies):
    return {"benchmarks": {name: {"accuracy": value} for name, value in accuracies.items()}}


@pytest.fixture
def result(tmp_path):
    before = rows(tmp_path / "a.jsonl", lambda item: item.index < 40)
    after = rows(tmp_path / "b.jsonl", lambda item: item.index < (25 if item.benchmark == "lost" else 41))
    return compare(before, after)


def test_only_what_falls_beyond_its_interval_is_named(result):
    named = regressed(result)
    assert [item["benchmark"] for item in named] == ["lost"]
    assert named[0]["lead"] == pytest.approx(-0.25)
    assert named[0]["high"] < 0
    assert [entry["benchmark"] for entry in regressed(result, "holm")] == ["lost"]


def test_a_margin_lets_small_falls_pass(result):
    high = regressed(result)[0]["high"]
    assert regressed(result, margin=-high - 0.001)
    assert not regressed(result, margin=-high + 0.001)


@pytest.mark.slow
@given(st.lists(st.floats(0, 1), min_size=1, max_size=30))
def test_holms_correction_never_names_more_than_the_plain_rule_and_no_fewer_than_bonferroni(p_values):
    by_name = {"title": "", "n": 9, "a": 0.5, "b": 0.3, "lead": -0.2, "low": -0.3, "high": -0.1}
    made = {"benchmarks": {f"b{place}": {**by_name, "p": p} for place, p in enumerate(p_values)}}
    corrected = {item["benchmark"] for item in regressed(made, "holm")}
    assert corrected <= {f"b{place}" for place, p in enumerate(p_values) if p < 0.05}
    assert corrected >= {f"b{place}" for place, p in enumerate(p_values) if p < 0.05 / len(p_values)}


def test_the_best_has_a_score_wherever_the_new_one_has():
    candidates = [scores(a=0.5, b=0.6), scores(a=0.9, b=None), scores(a=0.6, b=0.6), scores(a=0.6, b=0.6, c=0.0)]
    assert best_of(candidates, {"a", "b"}) == 3  # of equals the newest; c was not asked of the new one
    assert best_of(candidates, {"a"}) == 1
    assert best_of(candidates, {"d"}) is None
    assert best_of(candidates, set()) is None


def test_what_one_side_alone_was_scored_on_is_told():
    assert scored_benchmarks(scores(a=0.0, b=None)) == {"a"}
    assert protocol_differences(scores(a=0.5, b=0.1), scores(a=0.4, b=None, c=0.2)) == ["b", "c"]
