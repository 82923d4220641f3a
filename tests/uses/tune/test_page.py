"""The tuning page over a store with a tuning for labels in it, whose texts and labels try to be markup."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nautile.store.artifacts import Store
from nautile.uses.tune.page import confusion_chart, learning_curves
from tests.support.pages.parts import shown_page, tables

HOSTILE = "<script>alert(1)</script> ![x](http://example.invalid/x.png)"


def scores(arm, shots, value):
    part = {"value": value, "low": value - 0.1, "high": value + 0.1}
    return {
        "arm": arm, "shots": shots, "accuracy": part, "macro_f1": part, "ece": 0.1, "ece_uncalibrated": 0.2,
        "coverage": 0.8, "accuracy_covered": None, "rows": 4, "seeds": 2,
    }  # fmt: skip


REPORT = {
    "form": "label", "method": "head", "labels": ["good", HOSTILE], "notes": [HOSTILE],
    "rows": {"train": 8, "validation": 2, "test": 4},
    "data": {"duplicates": 1, "contradictory": 2, "contradictory_texts": 1, "leaked": {"test": 3}},
    "arms": [scores("head", 0, 0.75), scores("head", 8, 0.5), scores("majority", 0, 0.5), scores("majority", 8, 0.5)],
    "chosen": {"shots": 0, "seed": 0, "temperature": 1.0, "threshold": 0.5, "validation_loss": 0.6},
    "confusion": [[2, 0], [1, 1]], "leads": [],
    "reliability": [{"low": 0.4, "high": 0.6, "count": 4, "confidence": 0.5, "accuracy": 0.75}],
}  # fmt: skip


def test_curves_end_with_all_rows_and_a_confusion_is_shaded_by_the_right_label():
    encoding = learning_curves(REPORT).spec["layer"][0]["encoding"]
    assert encoding["x"]["sort"] == ["8", "all"]
    cells = confusion_chart(REPORT).table.to_dict("records")
    assert [(cell["rows"], cell["share"]) for cell in cells] == [(2, 1.0), (0, 0.0), (1, 0.5), (1, 0.5)]


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path / "store")
    store.prepare()
    folder = store.staging("a" * 64)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tuning.json").write_text(json.dumps(REPORT))
    rows = {"text": [HOSTILE, "b"], "label": ["good", "good"], "given": [HOSTILE, "good"], "probability": [0.9, 0.8]}
    pq.write_table(pa.table(rows), folder / "rows.parquet")
    store.publish("tuning", "a" * 64, folder, stage="tune", version=1, config={}, inputs={}, facts={})
    return store


def test_scores_and_wrong_rows_are_cells_and_never_markup(store, monkeypatch):
    shown = shown_page(store, "tuning", monkeypatch, of_a_run=False)
    [[columns, first, *_]] = tables(shown)
    [wrong] = (element.value for element in shown.dataframe)
    assert dict(zip(columns, first, strict=True))["Accuracy"] == "75.0 [65.0, 85.0]"
    assert list(wrong["text"]) == [HOSTILE]
    assert not any("<script>" in element.value for element in (*shown.markdown, *shown.caption))
