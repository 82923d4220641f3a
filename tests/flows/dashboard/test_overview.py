"""The first page: what needs a person, the pipeline, the verdict, and the table of runs."""

from pathlib import Path

import pandas as pd
import pytest

from nautile.common.files import read_json, write_json
from nautile.flows import listings
from nautile.flows.dashboard import figures
from nautile.flows.dashboard.graph import columns_of, drawing, edges_of
from nautile.flows.dashboard.overview import (
    attention,
    budgets,
    difference,
    evaluation_folders,
    ladder_chart,
    ladder_of,
    table_of_runs,
    verdict,
)
from nautile.flows.dashboard.queries import LISTED
from nautile.flows.dashboard.shared import STATE_MARKS, chosen_run, query
from nautile.flows.run_state import StepState
from nautile.store.catalog import Catalog
from nautile.store.events import EventWriter
from nautile.store.manifest import now
from nautile.store.mirror import open_store
from nautile.tasks.engine.attempt_log import write_row
from nautile.tasks.engine.errors import StageCrash
from nautile.tasks.engine.progress import LATE_S, write_retry_note
from tests.support.pages.parts import literals, shown_page, tables
from tests.support.samples.recorded_runs import attempted, planned
from tests.support.samples.stage_store import key_of, published

HOSTILE = "<script>alert(1)</script> ![x](http://example.invalid/x.png)"


def evaluated(store, word, share, files=None, **fields):
    """Publish an evaluation, and record its accuracy on the held-out problems."""
    made = published(store, "evaluation", word, files, **fields)
    emit = EventWriter(store.root / "events" / f"{word}-{made.execution}.jsonl", made.execution, stage="evaluate")
    emit("metric", name="evaluate/held_out/accuracy", step=0, value=share)
    emit.close()
    return made


def listed_runs():
    """The first page of the table of runs."""
    return listings.listed_runs(open_store(), query, limit=LISTED)


def cards(shown):
    """The titles of what needs a person."""
    return [element.value for element in shown.markdown if element.value.startswith(("**✗", "**!", "**i"))]


def steps_of(shown):
    """Step -> its state in the table of steps."""
    table = next(table.value for table in shown.dataframe if "step" in table.value)
    return dict(zip(table["step"], table["state"], strict=True))


def test_an_outage_that_is_waited_for_is_shown_with_its_end_and_not_as_a_failure(store, monkeypatch):
    planned(store, ["distill", "pretrain"])
    attempted(store, "distill", "failed", error="no answer")
    note = "trying again at 12:00:00, until 2026-11-23 12:00 (operation.distill.outage_hours), after: no *answer*"
    with store.run_lock("r1").for_life():
        for pause_s, card, state in (
            (5.0, "**i distill waits**", "waiting"),
            (-2 * LATE_S, "**✗ distill failed**", "failed"),
        ):
            write_retry_note(store.staging(key_of("distill")), note, pause_s)
            shown = shown_page(store, "overview", monkeypatch)
            assert cards(shown) == [card]
            assert (note in literals(shown)) == (state == "waiting")
            assert steps_of(shown) == {"distill": STATE_MARKS[state], "pretrain": STATE_MARKS["coming"]}


def test_the_first_page_names_what_waits_for_an_answer_with_its_cost_and_command(store, monkeypatch):
    planned(store, ["ingest", "pretrain"])
    attempted(store, "ingest", "done")
    note = {"run": "r1", "label": "pretrain", "message": "Expected cost: <b>$5</b>", "since": now(), "host": "other"}
    store.questions.mkdir()
    write_json(store.questions / "r1.json", note | {"pid": 1, "api": None})
    shown = shown_page(store, "overview", monkeypatch)
    assert cards(shown) == ["**! pretrain waits for your answer**"]
    assert {"Expected cost: <b>$5</b>", "nautile approve r1"} <= set(literals(shown))
    assert steps_of(shown)["pretrain"] == STATE_MARKS["waiting"]
    assert shown.selectbox(key="run").options[0].startswith("… toy · ")


def test_a_failed_run_leads_with_its_reason_and_the_way_on_and_folds_the_log(store, monkeypatch):
    planned(store, ["pretrain", "align"], state="failed", ended=now())
    crash = str(StageCrash("its process ended with 1", log=Path("/s/log"), log_tail="Traceback:\n" + "frame\n" * 60))
    attempted(store, "pretrain", "failed", error=crash)
    shown = shown_page(store, "overview", monkeypatch)
    texts = [element.value for element in shown.markdown]
    verdicts = [text for text in texts if text.startswith("**No stage has been evaluated")]
    assert texts.index("**✗ pretrain failed**") < texts.index(verdicts[0])
    reason, command, log = literals(shown)[:3]
    assert reason.startswith("its process ended with 1. The log is /s/log")
    assert "frame" not in reason
    assert command == "nautile run toy"
    assert log.count("frame") == 60
    assert "The last lines of its log" in [box.label for box in shown.expander]


def test_a_run_that_was_refused_at_its_start_has_its_reason_and_no_command(store, monkeypatch):
    planned(store, [], state="failed", error="overrides: `seed`: is no number", resume="", ended=now())
    shown = shown_page(store, "overview", monkeypatch)
    assert cards(shown) == ["**✗ The run failed**"]
    assert literals(shown)[-1:] == ["overrides: `seed`: is no number"]
    assert "It has none: it ended before it had a plan." in [caption.value for caption in shown.caption]


def test_a_cancelled_run_has_its_way_on_and_a_budget_nearly_spent_is_named(store, monkeypatch):
    planned(store, ["distill", "pretrain"], state="cancelled", settings={"distill": {"budget_dollars": 1.0}})
    attempted(store, "distill", "cancelled")
    emit = EventWriter(store.root / "events" / "calls.jsonl", "e-distill", stage="distill")
    emit("call", endpoint="teacher", attempt=1, dollars=0.9, cached=False)
    emit("call", endpoint="teacher", attempt=1, dollars=0.0, cached=True)
    emit.close()
    shown = shown_page(store, "overview", monkeypatch)
    assert cards(shown) == ["**i distill cancelled**", "**! distill has used 90\\% of its budget**"]
    assert "nautile run toy" in literals(shown)
    assert ["distill", "2", "1", "$0.9000"] in tables(shown)[-1]  # as lineage and SQL count
    assert [metric.value for metric in shown.metric if metric.label == "paid for calls"] == ["$0.9000"]


def test_the_budget_of_evaluations_is_that_of_each_model(store, monkeypatch):
    labels = ["evaluate:small", "evaluate:large"]
    planned(store, labels, state="done", settings={"evaluate": {"budget_dollars": 1.0}})
    for label, cost in zip(labels, (0.6, 0.7), strict=True):
        attempted(store, label, "done")
        emit = EventWriter(store.root / "events" / f"calls-{cost}.jsonl", f"e-{label}", stage="evaluate")
        emit("call", endpoint="teacher", attempt=1, dollars=cost, cached=False)
        emit.close()
    shown = shown_page(store, "overview", monkeypatch)
    assert cards(shown) == []
    assert list(budgets(chosen_run("r1"))) == [("evaluate:small", 0.6, 1.0), ("evaluate:large", 0.7, 1.0)]


def test_the_table_of_runs_has_changes_scores_settings_and_notes(store, monkeypatch):
    """Scores of runs are compared after the same stage; a path that is no setting gives an empty column."""
    for run, accuracy, seconds in (("r1", {"pretrain": 0.25, "align": 0.5}, 0), ("r2", {"pretrain": 0.125}, 1)):
        for stage, share in accuracy.items():
            made = evaluated(store, f"{run}{stage}", share)
            made_by = {"execution": made.execution, "outputs": {"evaluation": made.id}}
            attempted(store, f"evaluate:{stage}", "done", run=run, **made_by)
        changes = [{"field": "reason.policy.steps", "before": 30, "after": 3}] if run == "r2" else []
        settings = {"seed": 7, "reason": {"policy": {"steps": 30}}}
        started = f"2026-11-22T12:00:0{seconds}+00:00"
        planned(
            store, ["evaluate:pretrain"], run=run, state="done", started=started, settings=settings, changes=changes
        )
    write_row(store, "note", {"id": "r1", "text": "kept <b>", "tags": ["low"]})
    attempted(store, "evaluate:pretrain", "reused", run="r3", reused=True, **made_by)
    planned(store, ["evaluate:pretrain"], run="r3", state="done", started="2026-11-22T12:00:02+00:00")
    Catalog(store).ingest()
    monkeypatch.setenv("NAUTILE_STORE", str(store.root))
    rows = {row["show"]: row for row in table_of_runs(listed_runs(), ["reason.policy.steps", "no.such"], "r1")}
    first, second = rows["/?run=r1"], rows["/?run=r2"]
    assert (rows["/?run=r3"]["score"], rows["/?run=r3"]["difference"]) == (12.5, None)  # the evaluation of r2
    assert (first["score"], first["after"], first["difference"]) == (50.0, "align", None)
    assert (second["score"], second["after"], second["difference"]) == (12.5, "pretrain", -12.5)
    assert (second["changed"], first["changed"]) == ("steps 30 -> 3", "")
    assert (first["reason.policy.steps"], first["no.such"]) == ("30", None)
    assert (first["notes"], first["tags"], second["notes"]) == ("kept <b>", ["low"], "")


def test_the_pipeline_is_drawn_with_signs_and_its_texts_are_escaped():
    steps = [StepState("ingest", "ingest", "done", elapsed_s=5.0), StepState(HOSTILE, "align", "coming", ("ingest",))]
    steps.append(StepState("report", "report", "coming", ("ingest", HOSTILE)))
    drawn = drawing(steps, "r1")
    assert "✓ done" in drawn
    assert "○ to come" in drawn
    assert "<script" not in drawn
    assert edges_of(steps) == [("ingest", HOSTILE), (HOSTILE, "report")]  # the third follows from these
    assert [[step.label for step in column] for column in columns_of(steps)] == [["ingest"], [HOSTILE], ["report"]]


def test_the_verdict_names_the_gain_only_where_it_is_beyond_chance():
    def climbed(low, high):
        test = {"lead": 0.1, "low": low, "high": high, "p": 0.01}
        score = {"n": 200, "accuracy": 0.5, "interval": [0.4, 0.6]}
        stages = [{"stage": "pretrain", "score": score, "test": None}, {"stage": "align", "score": score, "test": test}]
        return {"stages": stages, "total": None}

    assert verdict(climbed(0.05, 0.15)).startswith("Better than its start: 50.0 % of 200 problems")
    assert verdict(climbed(-0.05, 0.15)).startswith("No change from its start beyond chance")
    assert verdict(climbed(-0.15, -0.05)).startswith("Worse than its start")
    worse = verdict(climbed(0.05, 0.15), {"lead": -0.057, "low": -0.08, "high": -0.034})
    assert worse.startswith("Better than its start")
    assert worse.endswith(" It is worse than the run before: -5.7 [-8.0, -3.4] points.")
    assert verdict(climbed(0.05, 0.15), {"lead": 0.01, "low": -0.01, "high": 0.03}) == verdict(climbed(0.05, 0.15))
    assert verdict(None) == "No stage has been evaluated yet, so it is not known whether the model got better."
    assert verdict(None, score={"accuracy": 0.5, "after": "reason"}).startswith("50.0 % after reason. The files of")


def test_a_score_of_zero_is_a_score(store, monkeypatch):
    made = evaluated(store, "zero", 0.0)
    attempted(store, "evaluate:pretrain", "done", execution=made.execution, outputs={"evaluation": made.id})
    planned(store, ["evaluate:pretrain"], state="done")
    shown = shown_page(store, "overview", monkeypatch)
    runs = next(table.value for table in shown.dataframe if "show" in table.value)
    assert list(runs["score"]) == [0.0]
    assert not {"difference", "tags", "notes"} & set(runs.columns)


def test_the_budget_of_a_distillation_is_shown_while_it_runs(store, monkeypatch):
    planned(store, ["distill"], settings={"distill": {"budget_dollars": 2.5}})
    attempted(store, "distill", "running")
    with store.run_lock("r1").for_life():
        shown = shown_page(store, "distillation", monkeypatch)
    assert {metric.label: metric.value for metric in shown.metric}["budget"] == "$2.50"


@pytest.mark.slow
def test_a_run_keeps_its_score_when_a_forced_run_has_replaced_its_evaluation(store, monkeypatch):
    label = "evaluate:pretrain"
    for run, share in (("r1", 0.25), ("r2", 0.75)):
        execution = f"e-{run}"
        files = {"scores.json": f'{{"accuracy": {share}}}'}
        made = evaluated(store, label, share, files, execution=execution, supersede=True)
        attempted(store, label, "done", run=run, execution=execution, reused=False, outputs={"evaluation": made.id})
        planned(store, [label], run=run, state="done")
    Catalog(store).ingest()
    monkeypatch.setenv("NAUTILE_STORE", str(store.root))
    scores = {row["show"]: row["score"] for row in table_of_runs(listed_runs(), [], "r1")}
    assert scores == {"/?run=r1": 25.0, "/?run=r2": 75.0}
    shares = {}
    for run in ("r1", "r2"):
        (folder,) = evaluation_folders(chosen_run(run)).values()
        shares[run] = read_json(Path(folder) / "scores.json")["accuracy"]
    assert shares == {"r1": 0.25, "r2": 0.75}


def test_the_ladder_of_an_evaluation_that_was_made_again_is_the_new_one(store, monkeypatch):
    """The folder of an artifact is named by its key, so that of the new one has the old path."""
    monkeypatch.setattr(
        "nautile.flows.dashboard.overview.ladder", lambda scores, rows: {"scores": scores, "rows": rows}
    )
    monkeypatch.setattr(
        "nautile.flows.dashboard.overview.common_problems", lambda before, after: {"benchmarks": {"n": len(after)}}
    )
    shown = []
    for count in (1, 2):
        rows = "".join(f'{{"id": "{index}"}}\n' for index in range(count))
        files = {"scores.json": f'{{"count": {count}}}', "rows.jsonl": rows}
        folder = str(published(store, "evaluation", "again", files, supersede=True).path)
        shown.append((ladder_of({"pretrain": folder})["scores"], difference(folder, folder, "n")))
    assert shown == [({"pretrain": {"count": 1}}, 1), ({"pretrain": {"count": 2}}, 2)]


def test_the_figures_above_the_bars_are_legible_on_a_dark_page():
    """Streamlit colours axes and titles, and leaves the texts among the marks black."""
    stages = [{"stage": "pretrain", "title": "Held out", "paper": 28.0, "score": None}]
    texts = [layer["mark"] for layer in ladder_chart({"stages": stages}).spec["layer"] if "text" in layer["encoding"]]
    assert [mark["color"] for mark in texts] == [figures.shade("#262730", "#e6edf3")]


def test_a_stage_that_made_no_update_needs_a_person(store, monkeypatch):
    planned(store, ["reason"])
    attempted(store, "reason", "done", execution="e-reason")
    facts = {"updates": 0, "no_update": "all 8 groups had equal rewards"}
    published(store, "checkpoint", "reason", stage="reason", label="reason", facts=facts, execution="e-reason")
    Catalog(store).ingest()
    monkeypatch.setenv("NAUTILE_STORE", str(store.root))
    (concern,) = [item for item in attention(chosen_run("r1")) if item.level == "warning"]
    assert concern.title == "reason made no update"
    assert "all 8 groups had equal rewards" in concern.text


@pytest.mark.slow
def test_a_curve_that_does_what_it_should_not_needs_a_person_and_stands_beside_its_chart(store, monkeypatch):
    planned(store, ["pretrain"], state="done")
    attempted(store, "pretrain", "done")
    emit = EventWriter(store.root / "events" / "curve.jsonl", "e-pretrain", stage="pretrain")
    for step, loss in enumerate([6.0, 4.6, 8.4]):
        emit("metric", name="validation_loss", step=step, value=loss, source="web")
        emit("metric", name="validation_loss", step=step, value=6.0 - step, source="synth")
    emit.close()
    shown = shown_page(store, "overview", monkeypatch)
    assert cards(shown) == ["**! Curves of pretrain to look at**"]
    assert any("of web rose from 4.6 at step 1 to 8.4 at step 2" in text for text in literals(shown))
    shown = shown_page(store, "training", monkeypatch)
    assert ["of web rose" in element.value for element in shown.warning] == [True]


@pytest.mark.parametrize(("seconds", "form"), [(0, "%H:%M:%S"), (300, "%H:%M:%S"), (3600, "%d %b %H:%M")])
def test_the_labels_of_a_time_axis_do_not_repeat(seconds, form):
    times = pd.to_datetime(pd.Series([0.0, float(seconds)]), unit="s")
    assert figures.clock(times, 5)["format"] == form
