"""The classification page over a store with one in it, whose texts and labels try to be markup."""

import pytest

from nautile.store.artifacts import Store
from nautile.uses.classify.stage import EXAMPLES, WITHOUT_TEXT, classification_examples, classification_summary
from nautile.uses.labelled.scores import UNTUNED
from nautile.uses.labelled.texts import write_rows
from tests.support.pages.parts import shown_page, tables

HOSTILE = "<script>alert(1)</script> ![x](http://example.invalid/x.png)"
LABELS = ("good", HOSTILE)
SHARES = (0.97, 0.91, 0.55, 0.61, 1.0)  # the third and the fourth are below the threshold


def answer(number, share):
    abstained = share < 0.7
    likeliest = LABELS[number % 2]
    label = None if abstained else likeliest
    row = {"number": number, "label": label, "probability": share, "abstained": abstained, "likeliest": likeliest}
    return {**row, "cut": False, "reason": None}


ROWS = [*(answer(number, share) for number, share in enumerate(SHARES, 1)), {"number": 6, **WITHOUT_TEXT}]
TEXTS = [HOSTILE, "two", "three", HOSTILE, "five", None]


@pytest.fixture
def shown(tmp_path, monkeypatch):
    store = Store(tmp_path / "store")
    store.prepare()
    folder = store.staging("a" * 64)
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(folder / EXAMPLES, classification_examples(ROWS, TEXTS))
    facts = {**classification_summary(ROWS, LABELS), "labels": list(LABELS), "calibration": UNTUNED}
    store.publish(
        "labelled", "a" * 64, folder, stage="classify", version=2, config={}, inputs={}, facts=facts, execution="e"
    )
    return shown_page(store, "classification", monkeypatch, of_a_run=False)


def test_outcomes_are_counted_and_their_examples_are_cells_and_never_markup(shown):
    assert [metric.value for metric in shown.metric] == ["6", "3", "2", "1"]
    outcome = shown.selectbox(key="outcome")
    assert outcome.options[:2] == ["(abstained)", "(no text)"]
    assert len(outcome.options) == 4
    assert [row[-1] for row in tables(shown)[0][1:]] == [HOSTILE, "three"]  # the surest first
    outcome.select_index(2).run()
    [[columns, *rows]] = tables(shown)
    assert columns == ["row", "likeliest", "probability", "text"]
    assert [row[-1] for row in rows] == ["five", HOSTILE]  # those with the hostile label, which sorts first
    assert [row[2] for row in rows] == ["1", "0.97"]
    shown_texts = [element.value for element in (*shown.markdown, *shown.caption, *shown.header, *shown.subheader)]
    assert not any("<script>" in text for text in shown_texts)
    assert any("not calibrated" in text for text in shown_texts)


def test_examples_of_an_outcome_are_the_surest_and_the_least_sure():
    rows = [answer(2 * number, 0.7 + number / 2000) for number in range(1, 101)]
    examples = classification_examples(rows, ["x" * 2000] * 100)
    assert [row["number"] for row in examples] == [*range(200, 180, -2), *range(20, 0, -2)]
    assert {len(row["text"]) for row in examples} == {1000}
    summary = classification_summary(rows, LABELS)
    assert summary["confidence"] == {"labelled": [0] * 7 + [100, 0, 0], "abstained": [0] * 10}
    assert summary["cut"] == 0
    assert classification_summary([row | {"cut": row["number"] < 10} for row in rows], LABELS)["cut"] == 4
