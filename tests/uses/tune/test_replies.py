"""What replies are scored by: spans of entities, and the distance from people's shares of two simple answers."""

import json

import numpy as np
import pytest

from nautile.uses.labelled.rows import LabelledRow
from nautile.uses.tune.tuner import option_baselines, span_scores


def entities(*pairs):
    return json.dumps([{"text": text, "label": label} for text, label in pairs])


def test_spans_count_as_often_as_they_occur_and_what_is_no_json_is_counted():
    rows = [
        LabelledRow("a", entities(("Ada", "PER"), ("Ada", "PER"), ("Rome", "LOC")), "a", 1),
        LabelledRow("b", entities(("Bo", "PER")), "b", 2),
        LabelledRow("c", entities(), "c", 3),
    ]
    replies = [entities(("Ada", "PER"), ("Rome", "PER")), "none", None]
    assert span_scores(replies, rows) == {"f1": pytest.approx(2 * 1 / (2 + 4)), "invalid": 2, "rows": 3}
    assert span_scores([entities()], rows[2:])["f1"] is None
    assert span_scores(["{}", '""'], rows[:1] * 2)["invalid"] == 2, "JSON, and no list"


def test_uniform_and_mean_answers():
    def row(prompt, *shares, options=("yes", "no")):
        return LabelledRow(prompt, "", prompt, 1, options, shares)

    train = [row("a", 0.9, 0.1), row("b", 0.7, 0.3)]
    test = [row("c", 0.8, 0.2), row("d", 1.0, 0.0, options=("x", "y"))]
    measured = option_baselines(train, test)
    uniform = [np.log(2) + 0.8 * np.log(0.8) + 0.2 * np.log(0.2), np.log(2)]
    assert measured["uniform"] == pytest.approx(np.mean(uniform))
    assert measured["mean_human"] == pytest.approx(0, abs=1e-12)
    assert measured["covered"] == 1
    assert option_baselines([], test)["mean_human"] is None
