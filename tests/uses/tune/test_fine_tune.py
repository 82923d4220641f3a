"""Fine-tuning: what is learnt, that a run continues exactly, adapters, and the divergence from shares of people."""

from itertools import pairwise

import jax
import numpy as np
import pytest

from nautile.common.errors import ConfigError
from nautile.configs.base import OptimizerConfig
from nautile.model.decoding.scoring import continuation_logprobs
from nautile.uses.labelled.config import TuneConfig
from nautile.uses.tune import fine_tune as fine_tuning
from nautile.uses.tune.fine_tune import (
    TuningRow,
    batch_of,
    fine_tune,
    mean_loss,
    merge_adapters,
    new_adapters,
)

REPLIES = [TuningRow([3, 10 + i % 2, 5], [[20 + i % 2, 9]]) for i in range(12)]
OPTIMIZER = OptimizerConfig(learning_rate=1e-2, final_learning_rate=1e-2, weight_decay=0.0)


def settings(**changes):
    defaults = {
        "data": "rows.csv",
        "form": "chat",
        "method": "full",
        "optimizer": OPTIMIZER,
        "epochs": 4,
        "batch_rows": 4,
    }
    return TuneConfig.model_validate({**defaults, **changes})


def leaves(params):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(params)]


@pytest.fixture(autouse=True)
def _saves_often(monkeypatch):
    monkeypatch.setattr(fine_tuning, "SAVE_EVERY", 5)


class Killed(Exception):
    pass


@pytest.mark.heavy
def test_replies_are_learnt_and_a_killed_run_continues_as_if_it_had_not_been(config, params, tmp_path):
    whole, losses = fine_tune(params, config, REPLIES, settings(), 0, tmp_path / "whole", {"run": 1})
    assert losses[-1] < 0.3 < losses[0]
    assert mean_loss(whole, config, REPLIES, "reply", 4) < 0.3

    def emit(event, **fields):
        if event == "progress" and fields["done"] == 8:
            raise Killed

    with pytest.raises(Killed):
        fine_tune(params, config, REPLIES, settings(), 0, tmp_path / "parts", {"run": 1}, emit)
    seen = []
    resumed, again = fine_tune(
        params, config, REPLIES, settings(), 0, tmp_path / "parts", {"run": 1},
        lambda event, **fields: seen.append(fields["step"]) if event == "metric" else None,
    )  # fmt: skip
    assert seen[0] == 6  # after the saved fifth step
    assert again == pytest.approx(losses)
    for a, b in zip(leaves(whole), leaves(resumed), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    with pytest.raises(ConfigError, match="made by another run"):
        fine_tune(params, config, REPLIES, settings(), 0, tmp_path / "parts", {"run": 2})


@pytest.mark.slow
def test_adapters_begin_as_nothing_and_leave_the_rest_alone(config, params, tmp_path):
    for a, b in zip(leaves(merge_adapters(params, new_adapters(params, 2, 0), 4.0)), leaves(params), strict=True):
        np.testing.assert_array_equal(a, b)
    tuned, losses = fine_tune(params, config, REPLIES, settings(method="lora", rank=2), 0, tmp_path, {"run": 1})
    assert losses[-1] < losses[0] / 2
    np.testing.assert_array_equal(tuned["embedding"], params["embedding"])
    moved = tuned["blocks"]["sca_0"]["in_proj"] - params["blocks"]["sca_0"]["in_proj"]
    assert np.linalg.matrix_rank(np.asarray(moved[0]), tol=1e-4) <= 2
    assert np.abs(moved).max() > 0


QUESTIONS = [
    TuningRow([3, 10, 5], [[20, 9], [21, 9], [22, 23, 9]], [0.6, 0.4, 0.0]),
    TuningRow([3, 11, 5], [[20, 9], [21, 9]], [0.1, 0.9]),
]


@pytest.mark.slow
def test_shares_of_people_are_learnt_by_the_divergence_from_them(config, params, tmp_path):
    sequences = [([*row.prompt, *c], len(row.prompt)) for row in QUESTIONS for c in row.continuations]
    sums = np.split(continuation_logprobs(params, config, sequences, 2), [3])
    expected = []
    for row, scores in zip(QUESTIONS, sums, strict=True):
        logs = scores - np.log(np.exp(scores).sum())
        expected.append(sum(s * (np.log(s) - q) for s, q in zip(row.shares, logs, strict=True) if s))
    assert mean_loss(params, config, QUESTIONS, "options", 2) == pytest.approx(np.mean(expected), abs=1e-4)
    tuned, losses = fine_tune(
        params, config, QUESTIONS, settings(form="opinions", epochs=25, batch_rows=2), 0, tmp_path, {"run": 1}
    )
    assert mean_loss(tuned, config, QUESTIONS, "options", 2) < 0.05 < losses[0]


def test_a_batch_weighs_the_continuations_alone():
    batch = batch_of(QUESTIONS[:1], (2, 3, 6))
    assert batch["tokens"][2].tolist() == [3, 10, 5, 22, 23, 9]
    assert batch["targets"][2].tolist() == [10, 5, 22, 23, 9, 0]
    assert batch["weights"][2].tolist() == [0, 0, 1, 1, 1, 0]
    assert batch["real"].tolist() == [[True] * 3, [False] * 3]
    weighted = batch_of([QUESTIONS[0]._replace(weight=2.5)], (1, 3, 6))
    assert weighted["weights"][2].tolist() == [0, 0, 2.5, 2.5, 2.5, 0]


@pytest.mark.slow
def test_what_stands_in_a_prompt_is_no_part_of_the_loss(config, params):
    """The same reply after the same last tokens, weighed alone: its likelihood, and not that of the prompt."""
    for row in (REPLIES[0], TuningRow([3, 7, 11, 10, 5], [[20, 9]])):
        [expected] = continuation_logprobs(params, config, [([*row.prompt, *row.continuations[0]], len(row.prompt))], 1)
        assert mean_loss(params, config, [row], "reply", 1) == pytest.approx(-expected / 2, abs=1e-4)


def test_a_row_over_the_context_is_refused(config, params):
    with pytest.raises(ConfigError, match="1 of 2 rows are over the model's context of 64 tokens, the longest with 70"):
        mean_loss(params, config, [REPLIES[0], TuningRow([1] * 60, [[2] * 10])], "reply", 2)


@pytest.mark.slow
def test_events_are_on_disk_before_the_checkpoint_that_follows_them(config, params, tmp_path, monkeypatch):
    order = []

    class Recorder:
        def __call__(self, kind, **fields):
            order.append(kind)

        def sync(self):
            order.append("sync")

    monkeypatch.setattr("nautile.uses.tune.fine_tune.TrainCheckpoints.save", lambda *_: order.append("save"))
    fine_tune(params, config, REPLIES, settings(), 0, tmp_path, {}, Recorder())
    assert order.count("save") == 2
    assert [before for before, after in pairwise(order) if after == "save"] == ["sync", "sync"]
