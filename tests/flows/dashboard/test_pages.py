"""The dashboard over a store where the toy chain ran: queries thinned and paged in SQL, and every page drawn."""

import socket

import pytest
from streamlit.testing.v1 import AppTest

from common.errors import ConfigError
from common.processes import free_port
from flows.dashboard import queries
from flows.dashboard.artifacts.lineage import graph
from flows.dashboard.command import arguments
from flows.dashboard.evaluation.evaluations import history
from flows.dashboard.pages import PAGES
from flows.dashboard.shared import STATE_MARKS, escaped, split_thinking
from store.artifacts import Store
from store.catalog import Catalog
from store.events import EventWriter
from store.manifest import now
from store.schema import LINEAGE_WITH_CALLS
from tasks.engine.attempt_log import write_attempt_row
from tasks.engine.staging import LATE_S, write_retry_note
from tests.support.stage_store import key_of

HOSTILE = "<script>alert(1)</script> ![x](http://example.invalid/x.png)"


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A catalog with one execution of 20,000 points, a peak among them, and 60 rollouts."""
    store = Store(tmp_path_factory.mktemp("measured"))
    store.prepare()
    emit = EventWriter(store.root / "events" / "one.jsonl", "e1", stage="reason")
    for step in range(20_000):
        emit("metric", name="reward", step=step, value=100.0 if step == 12_345 else 1.0)
    for index in range(60):
        text = f"{HOSTILE} number {index}<|think_end|>\n{index}"
        emit("sample", set="rollouts", index=index, step=index // 10, reward=index / 60, question="?", text=text)
    emit.close()
    catalog = Catalog(store)
    catalog.ingest()
    return catalog


def test_evaluations_of_one_minute_are_spaced_evenly_in_order():
    times = ["2026-12-31T23:59:10", "2027-01-01T00:00:40", "2026-12-31T23:59:50"]
    point = {"evaluation": "e", "after": "align", "accuracy": 0.5, "low": 0.4, "high": 0.6, "chance": None, "n": 9}
    chart = history([point | {"made": made} for made in times]).to_dict()
    assert chart["layer"][0]["encoding"]["x"]["sort"] == ["Dec 31 23:59:10", "Dec 31 23:59:50", "Jan 01 00:00:40"]


def test_a_long_curve_is_thinned_and_keeps_its_extremes(measured):
    rows = measured.query(queries.CURVES, [["e1"], ["reward"], 100])
    assert 90 <= len(rows) <= 101
    assert sum(row["points"] for row in rows) == 20_000
    assert max(row["high"] for row in rows) == 100.0
    assert [row["step"] for row in rows] == sorted(row["step"] for row in rows)


def test_a_short_curve_is_shown_as_measured(made):
    store, _ = made
    catalog = Catalog(store)
    catalog.ingest()
    run = catalog.query(queries.RUNS)[0]["run"]
    executions = [row["execution"] for row in catalog.query(queries.STAGES, [run])]
    names = [row["name"] for row in catalog.query(queries.METRIC_NAMES, [executions])]
    rows = catalog.query(queries.CURVES, [executions, names, queries.POINTS])
    counted = catalog.query("SELECT count(*) AS n FROM metrics WHERE isfinite(value)")[0]["n"]
    assert sum(row["points"] for row in rows) == counted
    assert all(row["low"] <= row["value"] <= row["high"] for row in rows)


def test_texts_are_searched_sorted_and_paged(measured):
    def texts(search="", order="as they came", page=0):
        sql = queries.texts(queries.SAMPLES, order)
        return measured.query(sql, [["e1"], "rollouts", search, search, queries.PAGE, page * queries.PAGE])

    rows = texts(order="highest reward")
    assert rows[0]["total"] == 60
    assert len(rows) == queries.PAGE
    assert [row["index"] for row in rows[:2]] == [59, 58]
    assert [row["index"] for row in texts(page=2)] == list(range(20, 30))
    assert [row["total"] for row in texts("NUMBER 7<")] == [1]
    assert texts("' OR 1=1 --") == []


def test_a_run_is_listed_stage_by_stage(made):
    store, outputs = made
    catalog = Catalog(store)
    catalog.ingest()
    run = catalog.query(queries.RUNS)[0]
    stages = catalog.query(queries.STAGES, [run["run"]])
    assert {row["label"] for row in stages} == set(outputs)
    assert run["stages"] == len(outputs)
    assert all(row["state"] in ("done", "reused") for row in stages)


def test_a_lineage_is_drawn_as_a_graph(made):
    store, outputs = made
    catalog = Catalog(store)
    catalog.ingest()
    dot = graph(catalog.query(LINEAGE_WITH_CALLS, [outputs["report"]["report"]]))
    assert dot.startswith("digraph {")
    assert f'"{outputs["pretrain"]["checkpoint"]}"' in dot
    assert dot.count("->") >= len(outputs) - 1


@pytest.mark.parametrize(
    ("text", "parts"),
    [("a<|think_end|>\nb", ("a", "b")), ("a", (None, "a")), ("<|think_end|>", ("", "")), ("", (None, ""))],
)
def test_thinking_is_split_from_the_answer(text, parts):
    assert split_thinking(text) == parts


def _draw(page: str) -> None:
    """Draw one page as app.py does. Runs inside Streamlit."""
    from flows.dashboard import shared
    from flows.dashboard.pages import PAGES

    PAGES[page].draw(shared.chosen_run(shared.choose_run(shared.run_titles())))


@pytest.mark.parametrize("page", PAGES)
def test_every_page_is_drawn(made, page, monkeypatch):
    store, _ = made
    Catalog(store).ingest()
    monkeypatch.setenv("NAUTILE_STORE", str(store.root))
    shown = AppTest.from_function(_draw, kwargs={"page": page}, default_timeout=240).run()
    assert not shown.exception
    assert shown.title


def test_an_outage_that_is_waited_for_is_shown_with_its_end_and_not_as_a_failure(store, monkeypatch):
    key, moment = key_of("distilled"), now()
    row = {"id": "1", "run": "r1", "stage": "distill", "label": "distill", "key": key, "execution": "e", "attempt": 1}
    write_attempt_row(store, row | {"state": "failed", "started": moment, "ended": moment, "error": "no answer"})
    Catalog(store).ingest()
    monkeypatch.setenv("NAUTILE_STORE", str(store.root))
    note = "trying again at 12:00:00, until 2026-11-23 12:00 (operation.distill.outage_hours), after: no *answer*"
    for pause_s, texts, failures in ((5.0, [note], []), (-2 * LATE_S, [], ["distill failed"])):
        write_retry_note(store.staging(key), note, pause_s)
        shown = AppTest.from_function(_draw, kwargs={"page": "overview"}, default_timeout=240).run()
        assert not shown.exception
        assert [element.value for element in shown.warning] == [f"distill waits: {escaped(text)}" for text in texts]
        assert [element.value for element in shown.subheader if "failed" in element.value] == failures
        assert list(shown.dataframe[0].value["state"]) == [STATE_MARKS["waiting" if texts else "failed"]]


@pytest.mark.parametrize("page", PAGES)
def test_an_empty_store_shows_captions(tmp_path, page, monkeypatch):
    monkeypatch.setenv("NAUTILE_STORE", str(tmp_path / "none"))
    shown = AppTest.from_function(_draw, kwargs={"page": page}, default_timeout=240).run()
    assert not shown.exception
    assert shown.caption


def test_the_records_of_a_published_file_are_shown(made, monkeypatch):
    store, _ = made
    Catalog(store).ingest()
    monkeypatch.setenv("NAUTILE_STORE", str(store.root))
    shown = AppTest.from_function(_draw, kwargs={"page": "distillation"}, default_timeout=240).run()
    (choice,) = (box for box in shown.selectbox if box.label == "Set")
    shown = choice.select(next(option for option in choice.options if option.startswith("file "))).run()
    assert not shown.exception
    assert not shown.error
    assert any(caption.value == "answer" for caption in shown.caption)


def test_a_used_port_is_refused_with_the_option_to_change():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}.*--port"):
            arguments("127.0.0.1", port)


def test_it_listens_on_loopback_and_sends_no_telemetry():
    command = arguments("127.0.0.1", free_port())
    assert command[command.index("--server.address") + 1] == "127.0.0.1"
    assert command[command.index("--browser.gatherUsageStats") + 1] == "false"
