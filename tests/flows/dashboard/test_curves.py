"""Several runs over one chart: their colours, the legend, groups with mean and spread, and the file of all points."""

import json

import pytest

from nautile.flows.dashboard import figures
from nautile.flows.dashboard.curves import Display, Line, chart, csv_of, grouped, settings_that_differ
from nautile.store.catalog import Catalog
from nautile.store.events import EventWriter
from tests.flows.dashboard.test_pages import curve_of
from tests.support.pages.parts import shown_page
from tests.support.samples.recorded_runs import attempted, planned

RUNS = [f"run-{index}" for index in range(8)]


def test_a_run_keeps_its_colour_whichever_runs_stand_beside_it():
    known: dict[str, int] = {}
    first = figures.colours_of(RUNS[:6], known)
    assert len(set(first.values())) == 6
    later = figures.colours_of([RUNS[7], *reversed(RUNS[1:6])], known)
    assert {run: later[run] for run in RUNS[1:6]} == {run: first[run] for run in RUNS[1:6]}
    assert later[RUNS[7]] not in set(first[run] for run in RUNS[1:6])
    assert figures.colours_of(RUNS[:6], {}) == first  # of another server too
    assert set(figures.colours_of([f"r{at}" for at in range(40)], {}).values()) == set(figures.PALETTE)


def test_a_click_in_the_legend_hides_a_run_and_the_plot_keeps_its_height():
    lines = {f"e{at}": Line("the same name", run, "align") for at, run in enumerate(RUNS)}
    rows = [row for execution in lines for row in curve_of("reward", 5, execution)]
    spec = chart(rows, lines).spec
    one = chart(curve_of("reward", 5, "e0"), lines).spec
    assert spec["height"] == one["height"]
    assert spec["autosize"]["type"] == "fit-x"  # the legend is not part of the height
    names = [f"the same name · {run}" for run in RUNS]
    (line,) = [layer for layer in spec["layer"] if "params" in layer]
    (shown,) = [param for param in line["params"] if param["name"] == "shown"]
    assert [value["who"] for value in shown["value"]] == names
    assert spec["transform"] == [{"filter": {"param": "shown"}}]
    # Else the run that is hidden would leave the legend, and the others would change their colours.
    scale = line["encoding"]["color"]["scale"]
    assert scale["domain"] == names
    assert scale["range"] == list(figures.colours_of(RUNS, {}).values())
    assert "transform" not in one


@pytest.mark.parametrize(("names", "columns"), [(("reward_answer", "kl"), 2), (("reward_answer", "reward_follow"), 1)])
def test_long_names_stand_below_each_other_in_a_legend(names, columns):
    """Beside each other the edge of a phone cuts the second."""
    rows = [row for name in names for row in curve_of(name, 5)]
    spec = chart(rows, {"e1": Line("this run", "r", "align")}).spec
    assert [layer["encoding"]["color"]["legend"]["columns"] for layer in spec["layer"]] == [columns] * 2


def test_axes_are_logarithmic_in_each_direction_where_all_values_allow_it():
    rows = [row | {"low": 1.0, "value": 1.0, "high": 2.0} for row in curve_of("loss", 5)]
    lines = {"e1": Line("this run", "r", "pretrain")}
    drawn = chart(rows, lines, Display(logarithmic=("vertical", "horizontal")))
    y, x = (drawn.spec["layer"][-1]["encoding"][axis]["scale"]["type"] for axis in "yx")
    assert (x, y) == ("log", "log")
    assert drawn.table["step"].tolist() == [1, 2, 3, 4]
    zero = chart(curve_of("loss", 5), lines, Display(logarithmic=("vertical",)))
    assert zero.spec["layer"][-1]["encoding"]["y"]["scale"]["type"] == "linear"


def test_runs_of_a_group_are_their_mean_with_its_spread_at_steps_that_all_have():
    lines = {"e1": Line("a", "r1", "align", "lr 1"), "e2": Line("b", "r2", "align", "lr 1")}
    lines["e3"] = Line("c", "r3", "align", "lr 2")
    rows = []
    for execution, values in (("e1", [1.0, 2.0, 9.0]), ("e2", [3.0, 2.0]), ("e3", [5.0])):
        for step, value in enumerate(values):
            row = {"execution": execution, "name": "reward", "source": "", "bucket": step, "step": step, "at": 0.0}
            rows.append(row | {"value": value, "low": value, "high": value, "points": 1})
    merged, names = grouped(rows, lines)
    found = [(row["execution"], row["step"], row["value"], row["points"]) for row in merged]
    assert found == [("lr 1", 0, 2.0, 2), ("lr 1", 1, 2.0, 2), ("lr 2", 0, 5.0, 1)]  # at step 2 one is missing
    assert (merged[0]["low"], merged[0]["high"]) == pytest.approx((2 - 2**0.5, 2 + 2**0.5))
    assert (merged[2]["low"], merged[2]["high"]) == (5.0, 5.0)
    assert {key: line.name for key, line in names.items()} == {"lr 1": "lr 1 (2 runs)", "lr 2": "lr 2 (1 run)"}


def test_settings_that_differ_are_offered_those_of_keys_first():
    settings = [{"name": "a", "operation": {"notify": "A"}, "seed": 1, "reason": {"policy": {"steps": 3}}}]
    settings.append({"name": "b", "operation": {"notify": "B"}, "seed": 1, "reason": {"policy": {"steps": 4}}})
    rows = [{"run": str(at), "settings": json.dumps(own)} for at, own in enumerate(settings)]
    assert settings_that_differ(rows) == ["reason.policy.steps", "operation.notify"]
    assert settings_that_differ([]) == settings_that_differ(rows[:1]) == []


def test_the_file_has_every_point_and_no_formula(store, monkeypatch):
    emit = EventWriter(store.root / "events" / "one.jsonl", "e1", stage="reason")
    for step in range(300):
        emit("metric", name="reward", step=step, value=step / 2, source="=HYPERLINK()")
    emit.close()
    Catalog(store).ingest()
    monkeypatch.setenv("NAUTILE_STORE", str(store.root))
    head, *lines = csv_of(["e1"], ["reward"]).decode().splitlines()
    assert head == "run,step_of_run,metric,source,step,value,time"
    assert len(lines) == 300
    assert lines[3].startswith(",,reward,'=HYPERLINK(),3,1.5,")


def test_a_run_that_the_address_hides_is_not_drawn(two_curves, monkeypatch):
    shown = shown_page(two_curves, "training", monkeypatch, run="r1", compared="r2", hidden="r2")
    (drawn,) = shown.get("vega_lite_chart")
    (line,) = [layer for layer in json.loads(drawn.proto.spec)["layer"] if "params" in layer]
    (picked,) = [param["value"] for param in line["params"] if param["name"] == "shown"]
    assert picked == [{"who": "this run"}]


def test_a_run_of_the_address_is_the_one_that_is_shown_or_the_page_says_so(store, monkeypatch):
    """By the beginning of its id, as in commands; another one in its place without a word would be read as it."""
    for run in ("aa11", "aa22", "bb33"):
        planned(store, ["pretrain"], run, state="done", name=run)
        attempted(store, "pretrain", "done", run, execution=f"e-{run}")

    def shown(**address):
        page = shown_page(store, "training", monkeypatch, **address)
        return page.selectbox(key="run").value, page.multiselect(key="compared").value, [w.value for w in page.warning]

    assert shown(run="aa1", compared="bb") == ("aa11", ["bb33"], [])
    _, compared, warnings = shown(run="cc", compared="aa")
    assert not compared
    said = {warning.partition(",")[0] for warning in warnings}
    assert said == {"This store has no run cc", "This store has several runs that begin with aa"}
