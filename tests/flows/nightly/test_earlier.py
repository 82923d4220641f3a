"""Which earlier evaluations a new one is set beside, and what is said of the others."""

import pytest

from configs.operation import ScheduleConfig
from flows.nightly.earlier import earlier, stand, table_of
from store.artifacts import Store
from tests.support.standing import ITEMS, checkpoint, evaluation


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path / "store")
    store.prepare()
    return store


@pytest.fixture
def made(store, toy):
    """made(name, right, ...) -> the evaluation of a new checkpoint of that name."""

    def make(name, right=lambda item: item.index < 20, model="small", **more):
        return evaluation(store, toy, checkpoint(store, name, model=model), right, **more)

    return make


def ids(found):
    return {role: one.id for role, one in found.by_role.items()}


def test_the_last_and_the_best_are_found(store, made):
    best = made("good", lambda item: item.index < 39)
    last = made("worse")
    new = made("newest")
    made("later")
    found = earlier(store, new, ScheduleConfig())
    assert ids(found) == {"last": last.id, "best": best.id}
    assert ids(earlier(store, new, ScheduleConfig(against=("best",)))) == {"best": best.id}
    assert earlier(store, best, ScheduleConfig()).by_role == {}


def test_only_like_is_set_beside_like(store, made):
    made("wide", model="wide")
    made("warm", protocol={"shots": 5})
    (made("rowless").path / "rows.jsonl").unlink()
    found = earlier(store, made("newest"), ScheduleConfig())
    assert found.by_role == {}
    assert found.passed_over == {"of another model": 1, "asked in another way": 1, "without a row for each question": 1}


def test_one_that_lacks_a_score_can_be_the_last_but_not_the_best(store, made):
    half = [item for item in ITEMS if item.benchmark == "sums"]
    best = made("whole")
    made("half", lambda item: True, items=half)
    new = made("newest", lambda item: item.benchmark == "sums")
    found = earlier(store, new, ScheduleConfig())
    assert found.by_role["best"].id == best.id
    sides, refused = stand(new, found, ScheduleConfig())
    assert not refused
    last = next(side for side in sides if side.roles == ("last",))
    assert last.unmatched == ["more"]
    assert last.fallen == []
    assert any("left out: 1 (more)" in note for note in table_of(last).notes)
    against_best = next(side for side in sides if side.roles == ("best",))
    assert [one["benchmark"] for one in against_best.fallen] == ["more"]


def test_one_that_is_both_is_compared_once(store, made):
    made("only")
    new = made("newest")
    (side,), _ = stand(new, earlier(store, new, ScheduleConfig()), ScheduleConfig())
    assert side.role == "last and best"
    assert side.fallen == []


def test_one_with_no_question_in_common_is_told_and_fails_nothing(store, made):
    others = [type(item)(item.benchmark, item.index, item.id, f"other {item.prompt}", "number", "1") for item in ITEMS]
    old = made("old", items=others)
    new = made("newest")
    sides, refused = stand(new, earlier(store, new, ScheduleConfig()), ScheduleConfig())
    assert sides == []
    assert refused == [f"{old.id}: the two evaluations have no question in common: nothing to compare"]
