"""The surveys page over a store with simulated surveys in it, whose texts try to be markup."""

import json

import numpy as np
import pandas as pd

from nautile.uses.simulate.comparison import compare
from nautile.uses.simulate.config import SimulateConfig
from nautile.uses.simulate.page import distribution
from nautile.uses.simulate.people import Person
from nautile.uses.simulate.reading import parse_survey
from nautile.uses.simulate.tables import NOT_FOR, NOTHING_TO_COMPARE, score_rows
from tests.support.pages.parts import literals, shown_page, tables

HOSTILE = "<script>alert(1)</script> ![x](http://example.invalid/x.png)"


def summary(humans: bool):
    question = {"name": "more", "text": f"More {HOSTILE}?", "options": ["no", HOSTILE], "ordered": True}
    if humans:
        question |= {"humans": [0.4, 0.6], "respondents": 50, "groups": {"side": {"left": [0.2, 0.8]}}}
    survey = parse_survey({"name": "p", "title": HOSTILE, "persona": "{side}", "questions": [question]}, "t")
    people = [Person(str(i), {"side": ("left", HOSTILE)[i % 2]}) for i in range(20)]
    draw = np.random.default_rng(0)
    config = SimulateConfig(personas="people.csv", by=("side",), draws=50)
    result = compare(survey, config, people, [draw.dirichlet([2, 2], 20)], None)
    return result | {"title": HOSTILE, "model": HOSTILE, "personas": 20, "personas_source": HOSTILE, "left_out": 1}


def shown(store, monkeypatch):
    page = shown_page(store, "surveys", monkeypatch, of_a_run=False)
    assert any(NOT_FOR[0] in element.value for element in page.warning)
    assert not any("<script>" in element.value for element in (*page.markdown, *page.caption, *page.subheader))
    return page


def publish(store, content):
    folder = store.staging("a" * 64)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "summary.json").write_text(json.dumps(content))
    step = {"stage": "simulate", "version": 1, "config": {}, "inputs": {}, "facts": {}}
    store.publish("opinions", "a" * 64, folder, **step, supersede=True)


def test_scores_stand_beside_the_baselines(store, monkeypatch):
    publish(store, summary(humans=True))
    page = shown(store, monkeypatch)
    [[_, *rows]] = tables(page)
    assert len(rows) == 5  # no regression and no forest without single respondents
    assert literals(page) == [f"More {HOSTILE}?"]
    assert not page.info
    assert [option for option in page.multiselect[0].options if option.startswith("majority")]


def test_without_humans_the_page_says_so(store, monkeypatch):
    publish(store, summary(humans=False))
    page = shown(store, monkeypatch)
    assert [element.value for element in page.info] == [NOTHING_TO_COMPARE]
    assert not tables(page)


def test_a_chart_has_an_interval_where_there_is_one():
    content = summary(humans=True)
    question = content["questions"][0]
    everybody, _, left = question["cells"]
    assert left["group"] == "left"
    chart = distribution(question, everybody, ["model", "humans", "uniform"])
    points = chart.table.to_dict("records")
    intervals = [(point["arm"], not pd.isna(point["low"])) for point in points]
    assert intervals == [("the model", True)] * 2 + [("humans", True)] * 2 + [("uniform", False)] * 2
    columns, rows = score_rows(content)
    assert [row[columns.index("1 − JSD")] for row in rows if row[0].startswith("the overall")] == ["–"]


def test_an_arm_has_its_colour_in_the_chart_of_every_group():
    question = summary(humans=True)["questions"][0]
    arms = ["model", "humans", "uniform"]
    colors = [distribution(question, cell, arms).spec["layer"][0]["encoding"]["color"] for cell in question["cells"]]
    assert {tuple(color["scale"]["domain"]) for color in colors} == {("the model", "humans", "uniform")}
    assert ["the model", "uniform"] in [color["legend"]["values"] for color in colors]  # a group without humans


def test_a_survey_that_was_simulated_again_is_shown_with_its_new_figures(store, monkeypatch):
    """The folder of an artifact is named by its key, so that of the new one has the old path."""
    before = summary(humans=True)
    publish(store, before)
    assert any("20 personas" in element.value for element in shown(store, monkeypatch).text)
    publish(store, before | {"personas": 77})
    assert any("77 personas" in element.value for element in shown(store, monkeypatch).text)
