"""The dashboard over a store where the toy chain ran: queries thinned and paged in SQL, and every page drawn."""

import hashlib
import json
import re
import socket

import duckdb
import prefect
import pytest
from streamlit.testing.v1 import AppTest

from nautile.common.errors import ConfigError
from nautile.common.processes import free_port
from nautile.evals.tables.results import MISSING, ResultTable
from nautile.flows.dashboard import queries, samples
from nautile.flows.dashboard.artifacts import graph
from nautile.flows.dashboard.command import arguments
from nautile.flows.dashboard.curves import Display, Line, chart, last_values
from nautile.flows.dashboard.evaluations import history, measured_only
from nautile.flows.dashboard.pages import PAGES
from nautile.flows.dashboard.shared import prefect_link, split_thinking
from nautile.flows.run_state import CURVES, POINTS, RUNS, STEPS
from nautile.store.artifacts import Store
from nautile.store.catalog import Catalog, query_files
from nautile.store.events import EventWriter
from nautile.store.views import LINEAGE_WITH_CALLS
from nautile.tasks.reinforce import reason
from tests.support.pages.parts import cells, literals, shown_page
from tests.support.samples.recorded_runs import attempted, planned
from tests.support.samples.stage_store import published

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
        emit("sample", set="rollouts", index=index, step=index // 10 + 1, reward=index / 60, question="?", text=text)
    emit.close()
    catalog = Catalog(store)
    catalog.ingest()
    return catalog


def test_the_history_has_days_and_joins_the_stages_of_one_run_alone():
    point = {"evaluation": "e", "configuration": "c", "accuracy": 0.5, "low": 0.4, "high": 0.6, "chance": None, "n": 9}
    points = [
        point | {"made": f"2026-12-{day}T23:59:10", "run": day, "after": after}
        for day in ("30", "31")
        for after in ("pretrain", "align")
    ]
    line, *_ = history(points).spec["layer"]
    assert line["encoding"]["detail"]["field"] == "run"
    assert line["encoding"]["x"]["type"] == "temporal"
    assert "%d %b" in line["encoding"]["x"]["axis"]["format"]
    *_, dots = history([row | {"not_screened": "not at all"} for row in points]).spec["layer"]
    assert dots["encoding"]["tooltip"][-1]["field"] == "not_screened"


def test_a_table_leaves_out_what_was_not_measured_and_names_it():
    columns = ("Benchmark", "Ours", "Difference", "Paper", "What differs")
    rows = (("ARC", MISSING, MISSING, "1.0", ""), ("Held out (stand-in)", "2.0", MISSING, MISSING, "a program"))
    table = measured_only(ResultTable("Table 2", columns, rows, ("note",)))
    assert table.columns == ("Benchmark", "Ours", "What differs")
    assert table.rows == (("Held out (stand-in)", "2.0", "a program"),)
    assert table.notes == ("note", "Not measured: ARC.")


def curve_of(name, count, execution="e1"):
    values = [float(step % 2) for step in range(count)]
    fields = {"execution": execution, "name": name, "source": "", "points": 1}
    return [
        fields | {"step": step, "value": value, "low": value, "high": value, "at": 60.0 * step}
        for step, value in enumerate(values)
    ]


@pytest.mark.parametrize(
    ("name", "count", "smoothed"),
    [("loss", 50, True), ("loss", 49, False), ("learning_rate", 80, False), ("validation_loss", 80, False)],
)
def test_a_curve_is_smoothed_from_fifty_points_on_and_never_a_schedule(name, count, smoothed):
    drawn = chart(curve_of(name, count), {"e1": Line("this run", "r", "pretrain")}, Display(smoothing=0.6))
    assert any(drawn.table["smooth"] != drawn.table["value"]) == smoothed
    # The measured curve is drawn behind it, fainter, where it differs.
    faint = [layer for layer in drawn.spec["layer"] if layer["encoding"]["y"]["field"] == "value"]
    assert [layer["mark"]["opacity"] for layer in faint] == [0.25] * smoothed


def test_the_horizontal_axis_is_steps_tokens_or_time_and_a_point_links_to_its_step():
    lines = {"e1": Line("this run", "r1", "align")}

    def link(line):
        return f"rollouts?run={line.run}"

    for axis, last, title in (("step", 9, "step"), ("tokens", 900, "tokens"), ("time", 9, "minutes since")):
        drawn = chart(curve_of("reward", 10), lines, Display(axis=axis), link, {"e1": 100.0})
        assert drawn.table["x"].max() == last
        points = drawn.spec["layer"][-1]["encoding"]
        assert points["x"]["axis"]["title"].startswith(title)
        assert points["href"]["field"] == "link"
        assert drawn.table["link"].iloc[-1] == "rollouts?run=r1&step=9"


def test_the_table_above_charts_has_the_last_value_of_each_run_and_its_range():
    rows = curve_of("solve_rate", 10) + curve_of("loss", 3) + curve_of("loss", 2, "e2")
    rows.append(rows[0] | {"name": "reward", "source": "web", "value": 0.25, "low": 0.25, "high": 0.25})
    lines = {"e1": Line("this run", "r1", "align"), "e2": Line("<b>other</b>", "r2", "align")}
    html = str(last_values(rows, ["loss", "solve_rate", "reward", "kl"], lines))
    assert cells(html) == [
        ["last (lowest to highest)", "Loss", "Solve rate", "Reward"],  # and none without a point
        ["this run", "0 (0 to 1)", "100.0% (0.0% to 100.0%)", "by source (0.25 to 0.25)"],
        ["<b>other</b>", "1 (0 to 1)", "", ""],
    ]
    assert "<b>" not in html


def _choose(names: list[str]) -> None:
    from nautile.flows.dashboard import curves

    curves.choose_metrics(names, "metrics")


@pytest.mark.parametrize(
    ("names", "first"),
    [
        (["a", "bits_per_byte", "loss", "validation_loss"], ["loss", "validation_loss", "bits_per_byte"]),
        (["kl", "loss", "reward", "solve_rate", "guard_accuracy"], ["reward", "solve_rate", "guard_accuracy", "kl"]),
        (list("abcdef"), list("abcd")),
    ],
)
def test_a_page_draws_the_main_metrics_at_first(names, first):
    (metrics,) = AppTest.from_function(_choose, kwargs={"names": names}, default_timeout=240).run().multiselect
    assert metrics.value == first
    assert len(metrics.options) == len(names)


@pytest.mark.slow
def test_a_long_curve_is_thinned_and_keeps_its_extremes(measured):
    rows = measured.query(CURVES, [["e1"], ["reward"], 100])
    assert 90 <= len(rows) <= 101
    assert sum(row["points"] for row in rows) == 20_000
    assert max(row["high"] for row in rows) == 100.0
    assert [row["step"] for row in rows] == sorted(row["step"] for row in rows)


def test_a_short_curve_is_shown_as_measured(made):
    store, _ = made
    catalog = Catalog(store)
    catalog.ingest()
    run = catalog.query(RUNS, [queries.LISTED])[0]["run"]
    executions = [row["execution"] for row in catalog.query(STEPS, [run])]
    names = [row["name"] for row in catalog.query(queries.METRIC_NAMES, [executions])]
    rows = catalog.query(CURVES, [executions, names, POINTS])
    counted = catalog.query("SELECT count(*) AS n FROM metrics WHERE isfinite(value)")[0]["n"]
    assert sum(row["points"] for row in rows) == counted
    assert all(row["low"] <= row["value"] <= row["high"] for row in rows)


@pytest.mark.slow
def test_texts_are_searched_and_paged(measured):
    def texts(search="", page=0):
        sql = queries.texts(queries.SAMPLES)
        return measured.query(sql, [["e1"], "rollouts", search, search, queries.PAGE, page * queries.PAGE])

    rows = texts()
    assert rows[0]["total"] == 60
    assert len(rows) == queries.PAGE
    assert [row["index"] for row in texts(page=2)] == list(range(20, 30))
    assert [row["total"] for row in texts("NUMBER 7<")] == [1]
    assert texts("' OR 1=1 --") == []


@pytest.mark.parametrize(
    ("which", "expected"), [("right", [0]), ("wrong", [1]), ("not graded", [2]), ("any", [0, 1, 2])]
)
def test_a_reply_that_could_not_be_graded_is_neither_right_nor_wrong(which, expected):
    rows = ", ".join(f"({i}, '{json.dumps({'strict': strict})}'::JSON)" for i, strict in enumerate([True, False, None]))
    sql = queries.texts(f'SELECT * FROM (VALUES {rows}) AS rows("index", fields)', which=which)
    with duckdb.connect() as database:
        assert [row[0] for row in database.execute(sql, ["", "", 9, 0]).fetchall()] == expected


@pytest.mark.slow
def test_rollouts_come_in_groups_of_a_prompt_and_step_counted_as_the_charts_do(measured):
    def groups(step="", search="", order="newest step first", which="all groups", limits=(None,) * 4, answers=None):
        sql = queries.groups(queries.SAMPLES, order, which, answers=answers or "all answers")
        return measured.query(sql, [["e1"], "rollouts", *limits, "", step, step, search, search, 4, 0])

    rows = groups()
    assert [(row["step"], len(row["members"]), row["total"]) for row in rows] == [
        (step, 10, 6) for step in (6, 5, 4, 3)
    ]
    assert json.loads(rows[0]["members"][0])["reward"] == 59 / 60  # the best first
    assert [row["step"] for row in groups(order="lowest reward")] == [1, 2, 3, 4]
    assert [row["step"] for row in groups(step="2")] == [2]
    assert [(row["step"], len(row["members"])) for row in groups(search="NUMBER 7<")] == [(1, 10)]
    assert [row["total"] for row in groups(which="all wrong")] == [6] * 4
    assert groups(which="right and wrong") == []
    for order in queries.GROUP_ORDERS:
        for which in queries.GROUP_WHICH:
            groups(order=order, which=which)
    # The answers are filtered, the facts of a group stay those of all its answers.
    (row,) = groups(limits=(55 / 60, 57 / 60, None, None))
    assert (row["step"], len(row["members"]), sum(row["fitting"])) == (6, 10, 3)
    assert groups(limits=(None, None, 1, None)) == []  # without a length nothing is long enough
    assert [sum(row["fitting"]) for row in groups(answers="wrong")] == [1]  # the reward of 0 alone
    assert groups(answers="not graded") == groups(answers="cut off") == []


def test_one_prompt_is_followed_over_the_steps(measured):
    digest = hashlib.md5(b"?", usedforsecurity=False).hexdigest()
    rows = measured.query(queries.prompt_over_steps(queries.SAMPLES), [["e1"], "rollouts", digest])
    assert [(row["step"], row["answers"]) for row in rows] == [(step, 10) for step in range(1, 7)]
    assert rows[-1]["reward"] == pytest.approx(54.5 / 60)
    sql = queries.groups(queries.SAMPLES, "oldest step first")
    for other, found in ((digest, 6), (digest[::-1], 0)):
        values = [["e1"], "rollouts", None, None, None, None, other, "", "", "", "", 9, 0]
        assert len(measured.query(sql, values)) == found


@pytest.mark.slow
def test_a_click_on_a_step_opens_its_rollouts_from_events_and_from_the_file(measured, tmp_path):
    """Events count steps from 1, as the charts do, and the rows of the artifact's file from 0."""
    rows = [{"step": step, "question": "?", "text": f"of update {step + 1}", "reward": 0.5} for step in range(3)]
    path = tmp_path / "rollouts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    of_file = [*queries.lines_of(path)]
    for run_query, source, parameters, word in (
        (measured.query, queries.SAMPLES, [["e1"], "rollouts"], "number 10<"),
        (query_files, queries.FILE_LINES, of_file, "of update 2"),
    ):
        [group] = run_query(queries.groups(source), [*parameters, *queries.EVERY_ANSWER, "2", "2", "", "", 4, 0])
        assert group["step"] == 2
        assert word in json.loads(group["members"][-1])["text"]


def test_a_card_shows_text_literally_with_its_verdict_and_equal_answers_once():
    fields = {"question": HOSTILE, "text": f"{HOSTILE}<|think_end|>\n7\n<|im_end|>", "advantage": 0.5, "length": 9}
    right = json.dumps(fields | {"reward": 0.6, "parts": {"correct": 1.0, "overall": 60}})
    wrong = json.dumps(fields | {"text": "8", "reward": 0.1, "parts": {"correct": 0.0}, "truncated": True})
    row = {"round": None, "step": 3, "prompt": HOSTILE, "members": [right, right, wrong], "total": 1}
    row["fitting"] = [True, True, True]
    html = str(samples._rollout_group(row, "rollouts?prompt=1"))
    assert 'href="rollouts?prompt=1"' in html
    assert "<script>" not in html
    assert "&lt;script&gt;" in html
    assert html.count("<article") == 2
    assert "2 the same" in html
    for text in (
        "step 3",
        "2 of 3 right",
        "reward 0.60 of 1",
        "advantage +0.50",
        "overall 60 of 100",
        "✓ right",
        "✗ wrong",
    ):
        assert text in html
    assert html.count("cut off at the limit") == 1
    assert '<span class="token" title="special token">im_end</span>' in html
    html = str(samples._rollout_group(row | {"fitting": [False, False, True]}))
    assert html.count("<article") == 1
    assert "2 of 3 right" in html
    assert "1 of 3 answers fit the filter" in html


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


@pytest.mark.parametrize("page", PAGES)
def test_every_page_is_drawn(made, page, monkeypatch):
    assert shown_page(made[0], page, monkeypatch).title


@pytest.mark.parametrize("page", PAGES)
def test_an_empty_store_shows_captions(tmp_path, page, monkeypatch):
    shown = shown_page(Store(tmp_path / "none"), page, monkeypatch)
    assert shown.caption
    assert not [element.value for element in shown.caption if "this run" in element.value]  # there is none


@pytest.mark.slow
def test_a_reinforcement_shows_the_charts_of_the_questions_that_are_picked(made, monkeypatch):
    shown = shown_page(made[0], "reinforcement", monkeypatch)
    assert [heading.value for heading in shown.subheader] == ["Does it learn?"]
    few = len(shown.get("vega_lite_chart"))
    (questions,) = shown.pills
    shown = questions.set_value(questions.options).run()
    assert not shown.exception
    assert [heading.value for heading in shown.subheader] == questions.options
    assert set(questions.options) <= {curve.question for curve in reason.curves}
    assert 0 < few < len(shown.get("vega_lite_chart"))


@pytest.mark.slow
def test_rollouts_are_filtered_on_the_page_and_by_its_address(made, monkeypatch):
    shown = shown_page(made[0], "rollouts", monkeypatch, **{"reward-from": "0.9"})
    assert shown.number_input(key="reward-from").value == 0.9
    before = sum("article" in element.proto.body for element in shown.get("html"))
    shown = shown.number_input(key="reward-from").set_value(None).run()
    assert not shown.exception
    assert sum("article" in element.proto.body for element in shown.get("html")) >= before
    (link,) = re.findall(
        r'href="(rollouts[^"]*prompt=[0-9a-f]{32})"', "".join(e.proto.body for e in shown.get("html"))
    )[:1]
    shown = shown_page(made[0], "rollouts", monkeypatch, prompt=link.rpartition("=")[2])
    assert any(element.value.startswith("##### One prompt at") for element in shown.markdown)


@pytest.mark.slow
def test_a_long_file_says_which_rows_are_read_and_how_the_others_are_reached(store, monkeypatch):
    """Newest steps first is the order of the page: the first rows of the file alone would never show them."""
    planned(store, ["reason"], state="done")
    attempted(store, "reason", "done", execution="e-reason")
    rows = [{"step": step, "question": f"q{step}", "text": f"of step {step + 1}", "reward": 0.5} for step in range(9)]
    file = {"rollouts.jsonl": "".join(json.dumps(row) + "\n" for row in rows)}
    published(store, "rollouts", "reason", file, stage="reason", label="reason", execution="e-reason")
    monkeypatch.setattr(queries, "FILE_ROWS", 4)

    def steps_of(**address):
        shown = shown_page(store, "rollouts", monkeypatch, **address)
        steps = [step for text in literals(shown) for step in re.findall(r"of step (\d)", text)]
        return steps, [element.value for element in shown.caption if "in the file" in element.value]

    how = "A step, or one prompt over the steps, is read from all of it."
    assert steps_of() == (["9", "8", "7", "6"], [f"Rows 6 to 9 of 9 in the file. {how}"])
    assert steps_of(order="oldest step first") == (["1", "2", "3", "4"], [f"Rows 1 to 4 of 9 in the file. {how}"])
    assert steps_of(step="2") == (["2"], [])
    digest = hashlib.md5(b"q2", usedforsecurity=False).hexdigest()
    assert steps_of(prompt=digest) == (["3"], [])
    sql = queries.texts(queries.FILE_LINES)
    (path,) = store.root.glob("artifacts/rollouts/*/rollouts.jsonl")
    found = query_files(sql, [*queries.lines_of(path, search="OF STEP 8"), "", "", 9, 0])
    assert [json.loads(row["fields"])["step"] for row in found] == [7]


@pytest.mark.slow
def test_the_documents_of_a_distillation_at_work_are_its_first_ones(store, monkeypatch):
    """And no count of all: the charts count those."""
    planned(store, ["distill"])
    attempted(store, "distill", "running", execution="e-distill")
    emit = EventWriter(store.root / "events" / "e.jsonl", "e-distill", stage="distill")
    emit("sample", set="documents", index=0, query="?", answer="!", teacher="t")
    emit.close()
    (choice,) = (box for box in shown_page(store, "distillation", monkeypatch).selectbox if box.label == "Set")
    assert choice.options == ["documents (the first 1)"]


@pytest.mark.slow
def test_the_records_of_a_published_file_are_shown(made, monkeypatch):
    shown = shown_page(made[0], "distillation", monkeypatch)
    (choice,) = (box for box in shown.selectbox if box.label == "Set")
    shown = choice.select(next(option for option in choice.options if option.startswith("file "))).run()
    assert not shown.exception
    assert not shown.error
    assert any("because" in str(element.proto) for element in shown.get("html"))


def test_a_used_port_is_refused_with_the_option_to_change(command_line):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--host 127.0.0.1 --port {port}: cannot listen there"):
            arguments("127.0.0.1", port)
        code, _, err = command_line("dashboard", "--port", str(port))
    assert code == 2
    assert f"--port {port}: cannot listen there" in err
    assert "the dashboard is at" not in err


def test_it_listens_on_loopback_and_sends_no_telemetry():
    command = arguments("127.0.0.1", free_port())
    assert command[command.index("--server.address") + 1] == "127.0.0.1"
    assert command[command.index("--browser.gatherUsageStats") + 1] == "false"
    # Two themes and none that is forced: the browser's preference for light or dark pages chooses.
    assert {"--theme.light.textColor", "--theme.dark.textColor"} <= set(command)
    assert "--theme.base" not in command


@pytest.mark.parametrize("base", ["http://127.0.0.1:4200", "http://127.0.0.1:4200/", "http://127.0.0.1:4200/v2"])
def test_a_link_leads_to_a_page_of_prefects_newer_interface(monkeypatch, base):
    monkeypatch.setenv("PREFECT_UI_URL", base)
    link = prefect_link("r1")
    assert link == "http://127.0.0.1:4200/v2/runs/flow-run/r1"
    # Its pages of runs have this route in the installed version.
    assets = (prefect.__ui_v2_static_path__ / "assets").glob("*.js")
    assert any("`/runs/flow-run/$id`" in script.read_text(encoding="utf-8") for script in assets)
