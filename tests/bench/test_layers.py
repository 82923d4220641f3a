"""The study of the layers: the operator of arm P, and the rules by which its rows become tables."""

import numpy as np
import pytest

from bench.studies.layers import (
    CELLS,
    CONTRASTS,
    RATES,
    SEEDS,
    Arm,
    chosen,
    markdown,
    mix_by_projection,
    run_cell,
    verdict,
)
from nautile.model.layers.mixing.chunked import Operands
from nautile.model.layers.mixing.operator import mix
from tests.model.layers.mixing.cases import draw


def test_with_heads_of_one_number_the_projected_phase_is_that_of_the_layer():
    operands = Operands(*draw(batch=2, length=9, heads=3, head_dim=1, samples=2, queries=3)["operands"])
    for own, projected in zip(mix(operands)[:2], mix_by_projection(operands)[:2], strict=True):
        np.testing.assert_allclose(projected, own, atol=1e-5)


def row(arm, rate, seed, selection, accuracy, task="recall 8"):
    return {
        "task": task, "arm": arm.name, "rate": rate, "seed": seed, "selection": selection, "parameters": 1,
        "state_bytes": 1, "accuracy": {str(length): accuracy for length in (64, 128, 256, 512)},
    }  # fmt: skip


def test_a_rate_is_chosen_on_the_selection_rows_and_contrasts_are_over_seeds():
    rows = [row(Arm("LL"), rate, seed, rate, 10 * rate + 0.01 * seed) for rate in (0.02, 0.04) for seed in SEEDS]
    rows += [row(Arm("SS"), 0.02, seed, 0.5, 0.7 + 0.02 * seed) for seed in SEEDS]
    assert chosen(rows, "recall 8", "LL") == pytest.approx({1: 0.41, 2: 0.42, 3: 0.43})
    text = markdown(rows)
    assert "recall 8: SS M=2 over LL | +0.320" in text
    assert "recall 16" not in text


@pytest.mark.parametrize(
    ("values", "said"),
    [((0.95, 0.96, 0.97), "can"), ((0.12, 0.13, 0.12), "cannot"), ((0.2, 0.5, 0.8), "in part")],
)
def test_what_an_arm_can_do_follows_from_the_interval(values, said):
    assert verdict(dict(enumerate(values)), 1 / 8) == said


def test_every_contrast_is_among_the_cells():
    assert {(task, arm) for task, *arms in CONTRASTS for arm in arms} <= set(CELLS)


@pytest.mark.heavy
def test_a_cell_trains_the_first_seed_at_every_rate_and_the_others_at_its_best():
    rows = run_cell("parity", Arm("LP"), steps=60)
    best = max(rows[: len(RATES)], key=lambda each: each["selection"])["rate"]
    expected = [(rate, SEEDS[0]) for rate in RATES] + [(best, seed) for seed in SEEDS[1:]]
    assert [(each["rate"], each["seed"]) for each in rows] == expected
    # It has learnt by then that there are two answers, of which one is right.
    assert all(each["accuracy"]["512"] > 0.4 for each in rows if each["rate"] == best)
