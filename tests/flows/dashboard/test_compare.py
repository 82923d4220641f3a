"""The page that compares: two runs beside each other, and the table of a sweep."""

from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

from nautile.common.metrics import metric
from nautile.flows.sweep.arms import read_sweep
from nautile.store.catalog import Catalog
from tests.support.pages.parts import tables
from tests.support.stages.toy_stages import TOY

pytestmark = pytest.mark.slow


def _draw(run: str) -> None:
    from nautile.flows.dashboard import compare, shared

    compare.page(shared.chosen_run(run))


@pytest.fixture
def page(two_runs, monkeypatch):
    Catalog(two_runs).ingest()
    monkeypatch.setenv("NAUTILE_STORE", str(two_runs.root))
    return AppTest.from_function(_draw, kwargs={"run": "b0b0b0b0-1111"}, default_timeout=240)


def test_two_runs_stand_beside_each_other(page):
    shown = page.run()
    assert not shown.exception
    assert not [element.value for element in shown.error]
    texts = [element.value for element in shown.text]
    assert "steps 30 -> 3" in texts
    assert any("B is better by" in text for text in texts)
    settings, scores, last, steps = tables(shown)
    assert any("says nothing about another seed" in element.value for element in shown.caption)
    assert settings[1] == ["reason.policy.steps", "30", "3"]
    assert scores[1][-1] == "the same evaluation"
    assert steps[-1][0] == "in all"
    [metrics] = shown.multiselect
    assert last[0][1:] == [metric(name).title for name in metrics.value]  # of each curve below
    assert any("Reward" in element.value for element in shown.markdown)  # its curves
    assert shown.query_params["with"] == "toy"


def test_several_runs_are_rows_of_one_table_and_groups_have_mean_and_spread(page):
    page.query_params["view"] = "Several runs"
    page.query_params["compared"] = "toy"
    shown = page.run()
    assert not shown.exception
    assert not [element.value for element in shown.error]
    runs, *_ = tables(shown)
    assert runs[0][0] == "run"
    assert any(head.startswith("after ") for head in runs[0])
    assert runs[0][-1] == "steps"
    assert [row[-1] for row in runs[1:]] == ["3", "30"]
    assert shown.query_params["compared"] in ("toy", ["toy"])
    shown = shown.selectbox(key="group").set_value("reason.policy.steps").run()
    assert not shown.exception
    groups, *_ = tables(shown)
    assert groups[0] == ["group", "seeds", "mean", "95 % over seeds", "spread", "over the first group, points [95 %]"]
    assert groups[1][0] == "reason.policy.steps 3"
    assert groups[1][4] == "one seed"


def test_a_sweep_has_its_table_and_intervals(page, two_runs, tmp_path, toy_stages):
    file = Path(tmp_path / "try.toml")
    file.write_text(f'config = "{TOY}"\n[grid]\n"report.samples" = [4, 5]\n', encoding="utf-8")
    read_sweep(file, two_runs).save(two_runs)
    page.query_params["view"] = "A sweep"
    shown = page.run()
    shown.segmented_control(key="view").set_value("A sweep")
    shown = shown.run()
    assert not shown.exception
    assert not [element.value for element in shown.error]
    [scores] = tables(shown)
    [runs] = (element.value for element in shown.dataframe)
    assert [row[0] for row in scores[1:]] == ["samples=4", "samples=5"]
    assert scores[0][3] == "% [95 % over problems]"
    assert scores[2][4:] == ["the same evaluation", "", ""]  # a test of it with itself would say nothing
    assert runs["state"].tolist() == ["done", "not made"]
    assert any("McNemar" in element.value for element in shown.caption)
