"""The pages over a catalog of 600 runs: what is old is found, and has all that a new run has."""

import json

import duckdb
import pytest

from nautile.evals.scoring.scores import score
from nautile.flows.dashboard import queries
from nautile.flows.dashboard.shared import chosen_run, live_runs
from nautile.store.artifacts import Store
from nautile.store.catalog import Catalog
from nautile.store.events import EventWriter
from tests.support.pages.parts import page_of, shown_page
from tests.support.samples.stage_store import published

pytestmark = pytest.mark.slow

RUNS = 600
OLD = "r0000"  # the oldest
# Rows as their events would leave them: a plan, two attempts, an evaluation and its score a run, a minute apart.
_RUN = "printf('r%04d', i) AS run, 'toy' AS config"
_TIME = "TIMESTAMP '2026-01-01' + INTERVAL 1 MINUTE * i"
ROWS = (
    f"""INSERT INTO plans BY NAME SELECT run AS id, run, config, printf('try-%d', i) AS name, 'done' AS state,
    '[{{"label": "pretrain", "stage": "pretrain", "key": "k", "after": []}},
    {{"label": "evaluate:pretrain", "stage": "evaluate", "key": "l", "after": ["pretrain"]}}]' AS steps,
    '{{}}' AS settings, format('[{{{{"field":"reason.policy.steps","before":24,"after":{{}}}}}}]', i) AS changes,
    {_TIME} AS started, {_TIME} AS ended, {_TIME} AS time FROM (SELECT i, {_RUN} FROM range({RUNS}) t(i))""",
    f"""INSERT INTO attempts BY NAME SELECT run || label AS id, run, config, label, split_part(label, ':', 1) AS stage,
    repeat('a', 64) AS key, run || label AS execution, 'done' AS state, false AS reused, {_TIME} AS started,
    {_TIME} AS ended, 1.0 AS seconds, '{{}}' AS outputs, {_TIME} AS time
    FROM (SELECT i, {_RUN} FROM range({RUNS}) t(i)), (VALUES ('pretrain'), ('evaluate:pretrain')) l(label)""",
    f"""INSERT INTO artifacts BY NAME SELECT 'evaluation/' || run AS id, 'evaluation' AS kind, run AS key,
    0 AS superseded, run || 'evaluate:pretrain' AS execution, 'evaluate' AS stage, run, {_TIME} AS created,
    1 AS bytes, 1 AS file_count, '{{}}' AS facts, '{{}}' AS config
    FROM (SELECT i, {_RUN} FROM range(1, {RUNS}) t(i))""",
    f"""INSERT INTO recorded.metrics BY NAME SELECT run AS id, run || 'evaluate:pretrain' AS execution, 0 AS step,
    'evaluate/held_out/accuracy' AS name, i / {RUNS} AS value, {_TIME} AS time
    FROM (SELECT i, {_RUN} FROM range(1, {RUNS}) t(i))""",
)


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """The store. The evaluation of the oldest run has files, as on the disk of a machine that has made it."""
    store = Store(tmp_path_factory.mktemp("many"))
    store.prepare()
    asked = score("held_out", []) | {"accuracy": 0.25, "accuracy_lenient": 0.25, "interval": [0.1, 0.4], "n": 40}
    scores = {"model": "m", "composites": {}, "average": None, "benchmarks": {"held_out": asked}}
    files = {"scores.json": json.dumps(scores)}
    made = published(store, "evaluation", "old", files, run=OLD, label="evaluate:pretrain")
    emit = EventWriter(store.events / "old.jsonl", made.execution, stage="evaluate")
    emit("metric", name="evaluate/held_out/accuracy", step=0, value=0.25)
    emit.close()
    catalog = Catalog(store)
    catalog.ingest()
    with duckdb.connect(str(store.catalog_path)) as connection:
        for statement in ROWS:
            connection.execute(statement)
        connection.execute(
            "UPDATE attempts SET key = ?, execution = ?, outputs = ? WHERE run = ? AND stage = 'evaluate'",
            [made.key, made.execution, json.dumps({"evaluation": made.id}), OLD],
        )
        connection.execute("UPDATE artifacts SET created = TIMESTAMP '2026-01-01' WHERE id = ?", [made.id])
    return store


def runs_of(shown):
    return next(table.value for table in shown.dataframe if "show" in table.value)


def test_the_oldest_of_600_runs_has_its_state_steps_and_evaluation(many, monkeypatch):
    shown = shown_page(many, "overview", monkeypatch, run=OLD)
    assert shown.selectbox(key="run").value == OLD
    assert "25.0 %" in [figure.value for figure in shown.metric]
    steps = next(table.value for table in shown.dataframe if "step" in table.value)
    assert list(steps["step"]) == ["pretrain", "evaluate:pretrain"]
    assert chosen_run(OLD).state.state == "done"
    shown = shown_page(many, "evaluations", monkeypatch, run=OLD)
    assert "This run has no evaluation yet; those of the store are below." not in [e.value for e in shown.caption]
    assert any(box.label == "Evaluation" for box in shown.selectbox)


def test_a_search_and_an_order_look_at_all_runs_and_pages_reach_each(many, monkeypatch):
    shown = shown_page(many, "overview", monkeypatch)
    assert f"{RUNS} runs, page 1 of {RUNS // queries.LISTED}" in [element.value for element in shown.caption]
    assert len(runs_of(shown)) == queries.LISTED
    shown = shown.text_input(key="find").set_value("steps 24 -> 7 R0007").run()
    assert list(runs_of(shown)["show"]) == ["/?run=r0007"]
    shown = shown.text_input(key="find").set_value("").run()
    shown = shown.selectbox(key="order-runs").set_value("oldest first").run()
    assert list(runs_of(shown)["show"][:2]) == ["/?run=r0000", "/?run=r0001"]
    shown = shown.button(key="later-runs").click().run()
    assert runs_of(shown)["show"][0] == f"/?run=r{queries.LISTED:04}"
    shown = shown.selectbox(key="order-runs").set_value("lowest score").run()
    # The score of the run before is of the run that began before, not of the one that is listed before.
    assert runs_of(shown)[["score", "difference"]].iloc[1].tolist() == pytest.approx([100 * 2 / RUNS, 100 / RUNS])


def test_the_pickers_search_the_runs_and_artifacts_that_they_do_not_list(many, monkeypatch):
    page = page_of(many, "compare", monkeypatch, run=OLD)
    shown = page.run()
    assert not shown.exception
    shown = shown.text_input(key="find-with").set_value("try-5").run()
    offered = shown.selectbox(key="other").options
    assert all("try-5" in title for title in offered)
    assert "111 fit, the newest 50 are listed" in [element.value for element in shown.caption]
    shown = shown_page(many, "lineage", monkeypatch)
    shown = shown.text_input(key="find-artifact-").set_value("r0009").run()
    assert shown.selectbox(key="artifact-").options == ["evaluation/r0009"]
    shown = shown_page(many, "storage", monkeypatch, search="r0010")
    [table] = (table.value for table in shown.dataframe)
    assert list(table["id"]) == ["evaluation/r0010"]


def test_a_run_is_live_however_many_have_begun_since(many, monkeypatch, tmp_path):
    with duckdb.connect(str(many.catalog_path)) as connection:
        connection.execute("UPDATE plans SET state = 'running', ended = NULL WHERE run = 'r0003'")
    monkeypatch.setenv("NAUTILE_STORE", str(many.root))
    with many.run_lock("r0003").for_life():
        assert live_runs() == ["r0003"]
