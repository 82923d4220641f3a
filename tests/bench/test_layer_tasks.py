"""The synthetic tasks of bench/studies/layers.py: each label follows from the tokens before it, by a program."""

import numpy as np
import pytest

from bench.studies.layer_tasks import TASKS, VOCABULARY, chance_of


@pytest.mark.parametrize("length", [64, 97])
@pytest.mark.parametrize("name", TASKS)
def test_a_program_solves_every_task(name, length):
    task = TASKS[name]
    tokens_BL, labels_BL = task.draw(np.random.default_rng(1), 16, length)
    assert tokens_BL.shape == labels_BL.shape == (16, length)
    assert tokens_BL.max() < VOCABULARY
    assert labels_BL.max() < VOCABULARY
    np.testing.assert_array_equal(np.where(labels_BL > 0, task.solve(tokens_BL), 0), labels_BL)


@pytest.mark.parametrize("name", TASKS)
def test_equal_seeds_draw_equal_sequences_and_others_differ(name):
    first, again, other = (TASKS[name].draw(np.random.default_rng(seed), 8, 64)[0] for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


@pytest.mark.parametrize("name", TASKS)
def test_the_most_frequent_label_does_no_better_than_chance(name):
    labels_BL = TASKS[name].draw(np.random.default_rng(3), 512, 64)[1]
    counts = np.bincount(labels_BL[labels_BL > 0])
    assert counts.max() / counts.sum() <= chance_of(TASKS[name], 64) + 0.02
