"""A small model that is tuned on the shares of groups moves toward these groups, as `nautile tune` would train it."""

import numpy as np
import pytest

from nautile.configs.base import OptimizerConfig
from nautile.data.table import Table
from nautile.data.tokenizer import tokenizer_for
from nautile.model.weights.files import load_weights, save_weights
from nautile.uses.labelled.config import LabelledDataConfig, TuneConfig
from nautile.uses.labelled.prompts import beginning_ids, context_ids, reply_ids
from nautile.uses.labelled.rows import _opinion_rows
from nautile.uses.simulate.comparison import compare
from nautile.uses.simulate.config import SimulateConfig
from nautile.uses.simulate.people import Person
from nautile.uses.simulate.prompts import OpinionScorer, training_rows
from nautile.uses.simulate.reading import Respondents, parse_survey
from nautile.uses.tune.fine_tune import TuningRow, fine_tune
from tests.evals.running.conftest import checkpoint  # noqa: F401 - a fixture

SURVEY = {"name": "parks", "title": "Parks", "persona": "{side}", "questions": [
    {"name": "more", "text": "More?", "options": ["no", "yes"]},
]}  # fmt: skip


@pytest.mark.heavy
def test_a_tuned_model_moves_toward_the_humans_of_the_groups_that_it_learnt(checkpoint, tmp_path):  # noqa: F811
    survey = parse_survey(SURVEY, "t")
    config = SimulateConfig(by=("side",), draws=20, rows_at_once=4, answer="text")
    # Four in five of the left say no, four in five of the right yes; every second of each is held out.
    people = [Person(str(i), {"side": ("left", "right")[i % 2]}) for i in range(80)]
    answers = np.array([[(i % 2) ^ (i // 4 % 5 == 0)] for i in range(80)])
    respondents = Respondents(
        people, answers, np.arange(80)[np.arange(80) // 2 % 2 == 0], np.arange(80)[np.arange(80) // 2 % 2 == 1]
    )
    rows, left_out = training_rows(survey, config, respondents)
    assert (len(rows), left_out) == (40, 0)

    params, model, tokenizer_config = load_weights(checkpoint)
    tokenizer = tokenizer_for(tokenizer_config)
    table = Table(list(rows[0]), rows, "", {})
    learnt = [
        TuningRow(
            beginning_ids(tokenizer, "") + context_ids(tokenizer, row.text, model.context),
            [reply_ids(tokenizer, option) for option in row.options],
            row.shares,
        )
        for row in _opinion_rows(LabelledDataConfig(reader="jsonl", path="rows"), table, "rows", 0)
    ]
    optimizer = OptimizerConfig(learning_rate=2e-2, final_learning_rate=2e-2, weight_decay=0.0)
    data = LabelledDataConfig(reader="jsonl", path="rows.jsonl")
    settings = TuneConfig(data=data, form="opinions", method="full", optimizer=optimizer, epochs=12, batch_rows=8)
    tuned, losses = fine_tune(params, model, learnt, settings, 0, tmp_path / "states", {"test": 1})
    assert losses[-1] < losses[0]
    save_weights(tmp_path / "tuned", tuned, model, tokenizer_config)

    asked = respondents.held_out
    judged = [people[i] for i in asked]

    def scores(folder):
        opinions = OpinionScorer(folder, survey, config).opinions(judged)
        means = [np.stack([opinion.mean(axis=0) for (opinion,) in opinions])]
        return compare(survey, config, judged, means, respondents, asked)["scores"]["model"]

    before, after = scores(checkpoint), scores(tmp_path / "tuned")
    assert after["group_similarity"]["value"] > before["group_similarity"]["value"] + 0.03
    assert abs(before["slope"]["value"]) < 0.1
    assert after["slope"]["value"] > 0.5
