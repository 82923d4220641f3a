"""`nautile compare RUN RUN`: settings that differ, paired scores, the ends of curves, time and cost by step."""

import json

import pytest
from pydantic import TypeAdapter

from nautile.evals.running.rows import read_rows
from nautile.evals.running.runner import evaluate
from nautile.evals.scoring.comparison import whose_gain
from nautile.flows.cli.document import OUTPUTS
from nautile.flows.sweep import comparisons
from nautile.flows.sweep.comparisons import runs_named
from nautile.store.artifacts import Store
from nautile.store.catalog import Catalog
from nautile.store.manifest import now
from nautile.tasks.engine.attempt_log import write_row
from tests.evals.conftest import Known
from tests.support.samples.evaluations import ITEMS
from tests.support.samples.stage_store import published
from tests.support.stages.two_runs import RUN


@pytest.fixture
def compare(two_runs, command_line, monkeypatch):
    monkeypatch.setenv("NAUTILE_STORE", str(two_runs.root))
    monkeypatch.setenv("COLUMNS", "80")
    return lambda *arguments: command_line("compare", *arguments)


def test_two_runs_by_the_first_digits_of_their_ids(compare):
    code, out, err = compare("to", "b0b0", "--json")
    assert (code, err) == (0, "")
    comparison = json.loads(out)
    TypeAdapter(OUTPUTS["compare RUN RUN"]).validate_json(out, strict=True)
    assert comparison["settings"] == [{"field": "reason.policy.steps", "before": 30, "after": 3}]
    shared, own = comparison["scores"]
    assert {row["stage"]: row["why"] for row in comparison["not_compared"]} == dict.fromkeys(
        ("align", "self_distill"), "run B has not begun this evaluation"
    )
    assert (shared["stage"], shared["same"], shared["gain"]) == ("pretrain", True, "the same evaluation")
    assert (own["stage"], own["b"], own["same"]) == ("reason", 1.0, False)
    assert own["gain"].startswith("B is better by ")
    (reward,) = comparison["curves"]
    assert reward["b"] == {"last": 0.7, "step": 3, "best": 0.9, "best_step": 2}
    assert reward["a"]["best"] == 0.5
    steps = {row["label"]: row for row in comparison["steps"]}
    assert steps["pretrain"]["same"]
    assert steps["pretrain"]["b"]["seconds"] == 1.5  # what it took whoever made it
    assert (steps["reason"]["a"]["seconds"], steps["reason"]["b"]["seconds"]) == (1.5, 60.0)
    assert steps["distill"]["b"] is None
    assert steps["distill"]["a"]["dollars"] == pytest.approx(0.03)


def test_runs_that_were_asked_other_questions_are_compared_in_all_else(two_runs, monkeypatch):
    catalog = Catalog(two_runs)
    catalog.ingest()

    def other_questions(path):
        return [row | {"prompt_digest": f"{path} {row['index']}"} for row in read_rows(path)]

    monkeypatch.setattr(comparisons, "read_rows", other_questions)
    with catalog.reading() as read:
        comparison = comparisons.compare_runs(two_runs, read, "toy", RUN)
    whys = {row["stage"]: row["why"] for row in comparison["not_compared"]}
    assert "no question in common" in whys["reason"]
    assert [row["stage"] for row in comparison["scores"]] == ["pretrain"]
    assert len(comparison["steps"]) == 14
    monkeypatch.undo()
    with catalog.reading() as read:
        by_options = comparisons.compare_runs(two_runs, read, "toy", RUN, way="likelihood")
    assert by_options["scores"] == []


def test_runs_are_named_by_what_they_are_called(compare, two_runs):
    assert runs_named(two_runs, "the toy run", "the b0b run") == ("toy", RUN)
    assert runs_named(two_runs, "to", "the b0b run") == ("toy", RUN)
    for run in ("first", "second"):
        row = {"id": run, "run": run, "name": "again", "state": "done", "steps": [], "started": now()}
        write_row(two_runs, "plan", row)
    code, out, err = compare("again", "toy")
    assert (code, out) == (2, "")
    assert "'again' matches more than one run (second, first): give more digits of its id" in err


def test_it_is_shown_within_eighty_columns(compare):
    code, out, _ = compare("toy", "b0b0")
    assert code == 0
    assert "settings, A -> B: steps 30 -> 3" in out
    assert "after reason, Held-out problems: B is better by" in out
    assert "pretrain (the same)" in out
    assert max(map(len, out.splitlines())) <= 80


def test_stages_name_their_newest_evaluations(compare):
    code, out, _ = compare("pretrain", "evaluate:reason", "--changed", "0")
    assert code == 0
    assert "Held-out problems: B is better by" in out


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("toy", "reason"), "'toy' is a run and 'reason' is not: compare two runs, or two evaluations"),
        (("toy", "to"), "'toy' and 'to' are the same run"),
        (("nothing", "toy"), "'toy' is a run and 'nothing' is not"),
        (("toy", "b0b0", "--verdict", "harsh"), "--verdict harsh: must be strict or lenient"),
    ],
)
def test_what_is_no_pair_is_one_message(compare, names, message):
    code, out, err = compare(*names)
    assert (code, out) == (2, "")
    assert message in err


def test_without_a_store_no_name_is_a_run(tmp_path):
    assert runs_named(Store(tmp_path / "none"), "a", "b") is None


def test_whose_gain_it_is_in_words():
    test = {"lead": -0.05, "low": -0.09, "high": -0.01}
    assert whose_gain(test) == "A is better by 5.0 points [1.0, 9.0] over problems"
    assert whose_gain(test | {"high": 0.02}, "x", "y") == (
        "no difference shown: x is 5.0 points ahead, which may be chance"
    )
    assert whose_gain({"lead": 0.0, "low": -0.1, "high": 0.1}) == "both score the same, [-10.0, 10.0]"


def test_an_evaluation_that_a_forced_run_has_replaced_is_still_that_of_its_run(store):
    """Both runs have the key: by the key alone, the second would be compared with itself."""
    catalog = Catalog(store)
    for run, execution, right in (("first", "e1", 30), ("second", "e2", 10)):
        path = store.root / f"{run}.jsonl"
        evaluate(Known(ITEMS, lambda item, n=right: item.expected if item.index < n else "0"), ITEMS, path)
        files = {"rows.jsonl": path.read_text(encoding="utf-8")}
        made = published(store, "evaluation", "e", files, execution=execution, run=run, supersede=True)
        row = {"id": run, "run": run, "stage": "evaluate", "label": "evaluate:pretrain", "key": made.key, "attempt": 1}
        row |= {"execution": execution, "state": "done", "reused": False, "outputs": {"evaluation": made.id}}
        write_row(store, "run", row | {"started": now(), "ended": now(), "seconds": 1.0})
    catalog.ingest()
    with catalog.reading() as read:
        comparison = comparisons.compare_runs(store, read, "first", "second")
    scores = {row["benchmark"]: (row["a"], row["b"], row["same"]) for row in comparison["scores"]}
    assert scores["sums"] == (0.75, 0.25, False)
