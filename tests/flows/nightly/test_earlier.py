"""Which earlier evaluations a new one is compared with, and why others are skipped."""

import json

import pytest

from nautile.configs.operation import ScheduleConfig
from nautile.flows.nightly import evaluation as nightly
from nautile.flows.nightly.earlier import compare_with_earlier, earlier_table, find_earlier
from tests.support.samples.evaluations import ITEMS, checkpoint, evaluation


@pytest.fixture
def made(store, toy):
    """made(name, right, ...) -> the evaluation of a new checkpoint of that name."""

    def make(name, right=lambda item: item.index < 20, model="small", **more):
        return evaluation(store, toy, checkpoint(store, name, model=model), right, **more)

    return make


def ids(earlier):
    return {role: artifact.id for role, artifact in earlier.by_role.items()}


def test_the_last_and_the_best_are_found(store, made):
    best = made("good", lambda item: item.index < 39)
    last = made("worse")
    new = made("newest")
    made("later")
    earlier = find_earlier(store, new, ScheduleConfig())
    assert ids(earlier) == {"last": last.id, "best": best.id}
    assert ids(find_earlier(store, new, ScheduleConfig(against=("best",)))) == {"best": best.id}
    assert find_earlier(store, best, ScheduleConfig()).by_role == {}


def test_earlier_is_what_was_published_before_whatever_the_clocks_of_machines_say(store, made, monkeypatch):
    of_a_late_clock, new, of_an_early_clock = made("after"), made("newest"), made("before")
    order = [artifact.version_id for artifact in (of_an_early_clock, new, of_a_late_clock)]

    def by_publication(store, artifacts):
        return sorted(artifacts, key=lambda artifact: order.index(artifact.version_id))

    monkeypatch.setattr(type(store), "by_publication", by_publication)
    monkeypatch.setattr(type(store), "list", lambda store, kind: [new, of_a_late_clock, of_an_early_clock])
    assert ids(find_earlier(store, new, ScheduleConfig(against=("last",)))) == {"last": of_an_early_clock.id}


def test_only_comparable_evaluations_are_used(store, made):
    made("wide", model="wide")
    made("warm", protocol={"shots": 5})
    (made("rowless").path / "rows.jsonl").unlink()
    earlier = find_earlier(store, made("newest"), ScheduleConfig())
    assert earlier.by_role == {}
    assert earlier.skipped == {"of another model": 1, "by another protocol": 1, "without a row for each question": 1}


def test_sampled_answers_beside_the_greedy_ones_are_no_other_protocol(store, made):
    plain = made("plain", protocol={"shots": 0})
    sampled = made("sampled", protocol={"shots": 0, "samples": 8, "sample_temperature": 1.0})
    assert ids(find_earlier(store, sampled, ScheduleConfig(against=("last",)))) == {"last": plain.id}


def test_one_that_lacks_a_score_can_be_the_last_but_not_the_best(store, made):
    half = [item for item in ITEMS if item.benchmark == "sums"]
    best = made("whole")
    made("half", lambda item: True, items=half)
    new = made("newest", lambda item: item.benchmark == "sums")
    earlier = find_earlier(store, new, ScheduleConfig())
    assert earlier.by_role["best"].id == best.id
    comparisons, problems = compare_with_earlier(new, earlier, ScheduleConfig())
    assert not problems
    last = next(comparison for comparison in comparisons if comparison.roles == ("last",))
    assert last.unmatched == ["more"]
    assert last.regressions == []
    assert any("left out: 1 (more)" in note for note in earlier_table(last).notes)
    against_best = next(comparison for comparison in comparisons if comparison.roles == ("best",))
    assert [row["benchmark"] for row in against_best.regressions] == ["more"]


def test_one_that_is_both_is_compared_once(store, made):
    made("only")
    new = made("newest")
    (comparison,), _ = compare_with_earlier(new, find_earlier(store, new, ScheduleConfig()), ScheduleConfig())
    assert comparison.role == "last and best"
    assert comparison.regressions == []


def test_no_question_in_common_is_reported_and_fails_nothing(store, made):
    others = [type(item)(item.benchmark, item.index, item.id, f"other {item.prompt}", "number", "1") for item in ITEMS]
    old = made("old", items=others)
    new = made("newest")
    comparisons, problems = compare_with_earlier(new, find_earlier(store, new, ScheduleConfig()), ScheduleConfig())
    assert comparisons == []
    assert problems == [f"{old.id}: the two evaluations have no question in common: nothing to compare"]


def test_scores_of_another_form_are_skipped_and_stop_nothing(store, made):
    """A file without `benchmarks`, as of an earlier version, must not fail every night that follows."""
    path = made("old").path / "scores.json"
    scores = json.loads(path.read_text(encoding="utf-8"))
    del scores["benchmarks"]
    path.write_text(json.dumps(scores), encoding="utf-8")
    earlier = find_earlier(store, made("newest"), ScheduleConfig())
    assert (earlier.by_role, sum(earlier.skipped.values())) == ({}, 1)


@pytest.mark.slow
def test_a_checkpoint_that_another_machine_has_made_is_the_newest(machine, toy, monkeypatch):
    """A worker's container begins with an empty folder: what is at the remote is all that there is."""
    there, here = machine("there"), machine("here")
    there.prepare()
    there.push([made := checkpoint(there, "elsewhere")])
    chosen = []

    class Chosen(Exception):
        """The evaluation itself needs Prefect."""

    def choose(store, config, artifact, run_id):
        chosen.append(artifact.full_id)
        raise Chosen

    monkeypatch.setattr(nightly, "_evaluate", choose)
    with pytest.raises(Chosen):
        nightly._evaluate_and_compare(here, toy, "newest", "r1")
    assert chosen == [made.full_id]


@pytest.mark.slow
def test_a_comparison_is_known_to_the_machine_of_the_next_night(machine, toy):
    """Else each night in a new container raises the same regression again."""
    first, second = machine("first"), machine("second")
    before = evaluation(first, toy, checkpoint(first, "good"), lambda item: True)
    new = evaluation(first, toy, checkpoint(first, "bad"), lambda item: False)
    earlier = find_earlier(first, new, ScheduleConfig())
    first.push([before, new])
    key = nightly.comparison_key(new, earlier, toy)
    comparisons, _ = compare_with_earlier(new, earlier, ScheduleConfig())
    made = nightly._publish_comparison(first, key, toy, new, earlier, comparisons, [], [], "r1")
    second.refresh()
    known = nightly._find_comparison(second, key, new, earlier)
    assert known is not None
    assert known.execution == made.execution
