"""What a run, step, execution, cost, score and metric is: each view over a store of toy rows.

Run `r` is started twice. Its step `pretrain` is interrupted in the first start and completed in the second, and is then
reused by run `s`. Other writers have added rows of a wrong shape.
"""

from datetime import UTC, datetime, timedelta

import pytest

from nautile.store.artifacts import Store
from nautile.store.catalog import Catalog
from nautile.store.events import EventWriter
from nautile.store.views import LAST_ATTEMPTS, SPENT, VIEWS, run_seconds
from tests.support.samples.foreign_events import OF_ANOTHER_FORM, PLAN, event_of, write_events
from tests.support.samples.stage_store import published

BEGUN = datetime(2026, 11, 22, 12, tzinfo=UTC)
LABELS = ("pretrain", "evaluate:pretrain", "align", "evaluate:align", "reason")


def execution_of(label):
    return f"e-{label.replace(':', '-')}"


def at(minutes):
    return (BEGUN + timedelta(minutes=minutes)).isoformat()


def events(store, execution, kind, *rows, stage=""):
    emit = EventWriter(store.root / "events" / f"{kind}-{execution}.jsonl", execution, stage=stage)
    for row in rows:
        emit(kind, **row)
    emit.close()


def plan(store, number, run, minutes, **fields):
    steps = [{"label": label, "after": []} for label in LABELS]
    row = {"id": f"{run}{number}", "run": run, "config": "toy", "name": f"{run} {number}", "steps": steps}
    row |= {"settings": {"seed": 0}, "started": at(minutes), "state": "running"}
    events(store, f"{run}{number}", "plan", row | fields)


def attempt(store, run, label, state, minutes, seconds, execution=None, **fields):
    row = {"id": f"{run}-{label}-{minutes}", "run": run, "config": "toy", "label": label, "attempt": 1, "state": state}
    row |= {"stage": label.partition(":")[0], "key": f"k-{label}", "execution": execution or execution_of(label)}
    row |= {"started": at(minutes), "ended": at(minutes + seconds / 60), "seconds": seconds}
    row["reused"] = state == "reused"
    events(store, row["id"], "run", row | fields)


CHIPS = {"chips": 8, "dollars_per_chip_hour": 2.0}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    store = Store(tmp_path_factory.mktemp("views"))
    store.prepare()
    return store


@pytest.fixture(scope="module")
def query(store):
    plan(store, 1, "r", 0, state="interrupted", ended=at(3))
    attempt(store, "r", "pretrain", "interrupted", 1, 60.0, peak_bytes=9)
    plan(store, 2, "r", 100, state="failed", ended=at(120), error="no chips")
    attempt(store, "r", "pretrain", "done", 101, 120.0, peak_bytes=5)
    attempt(store, "r", "pretrain", "reused", 104, 0.0)  # by the same run, after a retry
    for minutes, label, share in ((105, "evaluate:pretrain", 0.25), (107, "evaluate:align", 0.5)):
        attempt(store, "r", label, "done", minutes, 1.0)
        facts = {"samples": 8, "left_out": 0}
        published(store, "evaluation", label, facts=facts, execution=execution_of(label), stage="evaluate", label=label)
        metrics = [("accuracy", share), ("accuracy_lenient", 1.0)]
        rows = [{"name": f"evaluate/held_out/{name}", "step": 0, "value": value} for name, value in metrics]
        rows.append({"name": "evaluate/tokens_per_second", "step": 0, "value": 90.0})  # which is no score
        events(store, execution_of(label), "metric", *rows, stage="evaluate")
    attempt(store, "r", "align", "failed", 110, 30.0, execution="e-align-1")
    attempt(store, "r", "align", "failed", 111, 40.0, execution="e-align-2")
    for execution in ("e-align-1", "e-align-2"):
        calls = [{"dollars": 0.5, "cached": False}, {"cached": True, "unknown_dollars": 0.25}]
        events(store, execution, "call", *calls, stage="align")
    plan(store, 1, "s", 200, state="done", ended=at(201))
    attempt(store, "s", "pretrain", "reused", 200, 0.0)
    attempt(store, "t", "label", "done", 300, 7.0)  # a single use of a model
    events(store, "e-pretrain", "metric", {"name": "loss", "step": 4, "value": 2.5}, stage="pretrain")
    chips = [{"name": f"system/{name}", "step": 0, "value": value} for name, value in CHIPS.items()]
    events(store, "e-pretrain", "metric", *chips, stage="pretrain")
    events(store, "e-align-2", "metric", chips[0], stage="align")  # whose price is not known
    events(store, "e-pretrain", "sample", {"set": "train", "index": 0, "text": "a"}, stage="pretrain")
    wrong = [event_of("plan", **PLAN | part) for part in OF_ANOTHER_FORM]
    wrong += [event_of("metric", name="loss", step="x", value=1.0), event_of("call", dollars=-1.0), event_of("what")]
    wrong += [event_of("sample", set="train", index=[]), event_of("run", run="r", label="align", seconds=[1])]
    write_events(store, *({**row, "id": f"wrong-{number}"} for number, row in enumerate(wrong)))
    catalog = Catalog(store)
    catalog.ingest()
    assert catalog.left_out() == {"events/other.jsonl": len(wrong)}
    return lambda sql, *values: catalog.query(sql, values)


def test_a_run_is_all_its_starts_and_its_time_is_wall_time(query):
    runs = {row["run"]: row for row in query("FROM runs")}
    assert set(runs) == {"r", "s", "t"}
    run = runs["r"]
    assert (run["name"], run["state"], run["error"], run["planned"]) == ("r 2", "failed", "no chips", 5)
    assert (run["seconds"], runs["s"]["seconds"]) == (120 * 60.0, 60.0)
    assert (run["stages"], run["finished"], run["failed"], run["first_unfinished"]) == (4, 3, 1, "align")
    assert {name: row["pipeline"] for name, row in runs.items()} == {"r": True, "s": True, "t": False}
    assert run_seconds(run, live=False) == 7200.0
    assert run_seconds(run, live=True) == pytest.approx((datetime.now(UTC) - BEGUN).total_seconds(), abs=60)


def test_a_step_has_the_time_and_cost_of_all_that_its_run_did_for_it(query):
    steps = {(row["run"], row["label"]): row for row in query("FROM steps")}
    trained, reused = steps["r", "pretrain"], steps["s", "pretrain"]
    assert (trained["state"], trained["attempts"], trained["seconds"], trained["peak_bytes"]) == ("done", 2, 180.0, 9)
    assert (reused["state"], reused["reused"], reused["attempts"]) == ("reused", True, 0)
    align = steps["r", "align"]
    assert (align["calls"], align["cached"], align["dollars"], align["unknown_dollars"]) == (4, 2, 1.0, 0.5)
    assert trained["calls"] is None
    assert (trained["chip_hours"], trained["chip_dollars"]) == (pytest.approx(180 * 8 / 3600), pytest.approx(0.8))
    assert (reused["chip_hours"], reused["chip_dollars"]) == (None, None), "the work of another run"
    assert (align["chip_hours"], align["chip_dollars"]) == (pytest.approx(40 * 8 / 3600), None)
    assert steps["r", "evaluate:align"]["chip_hours"] is None, "on a CPU"


def test_an_execution_belongs_to_the_run_that_completed_it_and_its_reuses_are_no_work(query):
    (row,) = query("FROM executions WHERE execution = 'e-pretrain'")
    assert (row["run"], row["label"], row["made"], row["attempts"], row["seconds"]) == ("r", "pretrain", True, 2, 180.0)
    names = ("seconds", "dollars", "chip_dollars")
    spent = {row["execution"]: [row[name] for name in names] for row in query(SPENT, ["e-pretrain", "e-align-1"])}
    assert spent == {"e-pretrain": [180.0, None, pytest.approx(0.8)], "e-align-1": [30.0, 0.5, None]}
    (last,) = query(LAST_ATTEMPTS, ["k-pretrain"])
    assert (last["state"], last["seconds"]) == ("done", 120.0)


def test_metrics_samples_and_calls_have_their_run_and_step(query):
    for sql in ("FROM metrics WHERE name = 'loss'", "FROM samples"):
        assert [(row["run"], row["label"]) for row in query(sql)] == [("r", "pretrain")]
    assert [row["label"] for row in query("FROM calls")] == ["align"] * 4


def test_a_gain_is_over_the_stage_before_on_as_many_samples(query, store):
    sql = "SELECT after, value, over, gain FROM scores WHERE run = 'r' AND figure = 'accuracy' ORDER BY started"
    rows = [tuple(row.values()) for row in query(sql)]
    assert rows == [("pretrain", 0.25, None, None), ("align", 0.5, "pretrain", 0.25)]
    facts, label = {"samples": 9, "left_out": 0}, "evaluate:align"
    fields = {"execution": execution_of(label), "stage": "evaluate", "label": label, "supersede": True}
    published(store, "evaluation", label, facts=facts, **fields)
    Catalog(store).ingest()
    assert [tuple(row.values())[3] for row in query(sql)] == [None, None]


def test_each_view_has_one_row_for_its_key(query):
    for view in VIEWS:
        assert query(f"SELECT {', '.join(view.key)} FROM {view.name} GROUP BY ALL HAVING count(*) > 1") == [], view.name
        assert query(f"FROM {view.name} LIMIT 1"), view.name
