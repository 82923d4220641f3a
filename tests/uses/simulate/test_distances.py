"""Distances against scipy's, and figures worked out by hand."""

import numpy as np
import pytest
from scipy.spatial.distance import jensenshannon
from scipy.stats import spearmanr, wasserstein_distance

from nautile.uses.simulate.comparison import (
    majority,
    predictions,
    rank_correlation,
    similarity,
    steerability,
    wasserstein,
)
from nautile.uses.simulate.people import Person
from nautile.uses.simulate.prompts import position_bias


@pytest.fixture
def pairs():
    draw = np.random.default_rng(0)
    p, q = draw.dirichlet([0.3] * 5, 40), draw.dirichlet([0.3] * 5, 40)
    p[0], q[0] = [1, 0, 0, 0, 0], [0, 0, 0, 0, 1]  # disjoint
    p[1] = q[1]
    p[2, 0], p[2] = 0.0, p[2] / p[2].sum()
    return p / p.sum(axis=1, keepdims=True), q


def test_similarity_is_one_minus_the_square_of_scipys_distance(pairs):
    p, q = pairs
    expected = [1 - jensenshannon(a, b, base=2) ** 2 for a, b in zip(p, q, strict=True)]
    np.testing.assert_allclose(similarity(p, q), expected, atol=1e-12)
    assert similarity(p, q)[:2].tolist() == [0.0, 1.0]


def test_wasserstein_is_scipys_on_the_scale(pairs):
    p, q = pairs
    for scale in ((0, 0.25, 0.5, 0.75, 1), (0, 1, 0.5, 0.1, 0.2)):
        expected = [wasserstein_distance(scale, scale, a, b) for a, b in zip(p, q, strict=True)]
        np.testing.assert_allclose(wasserstein(p, q, scale), expected, atol=1e-12)
    assert wasserstein(p, q, (0, 0.25, 0.5, 0.75, 1))[0] == 1


def test_rank_correlation_is_spearmans():
    a, b = [0.1, 0.5, 0.5, 0.9, 0.2], [0.2, 0.1, 0.7, 0.6, 0.3]
    assert rank_correlation(a, b) == pytest.approx(spearmanr(a, b).statistic)
    assert rank_correlation(a[:2], b[:2]) is None
    assert rank_correlation([0.5] * 5, b) is None


def test_steerability_by_hand():
    humans = np.array([0.2, -0.2, -0.1, 0.1])
    assert steerability(humans / 2, humans) == (pytest.approx(0.5), pytest.approx(1))
    assert steerability(-humans, humans) == (pytest.approx(-1), pytest.approx(-1))
    slope, cosine = steerability(np.array([0.1, -0.1, 0.2, -0.2]), humans)  # (0.04 - 0.04) / 0.1
    assert (slope, cosine) == (pytest.approx(0), pytest.approx(0))
    assert steerability(np.zeros(4), humans) == (0.0, None)
    assert steerability(humans, np.zeros(4)) == (None, None)


def test_a_preference_for_the_first_place_is_seen_and_averages_out():
    # Two people and both orders of two options: whatever stands first gets 0.7.
    by_order = np.array([[[0.7, 0.3], [0.3, 0.7]]] * 2)
    bias = position_bias(by_order, [(0, 1), (1, 0)])
    assert bias["by_place"] == pytest.approx([0.7, 0.3])
    assert bias["bias"] == pytest.approx(0.2)
    assert bias["spread"] == pytest.approx(0.2)
    assert bias["balanced"]
    # The same option in every order: no preference for places.
    steady = position_bias(np.array([[[0.7, 0.3], [0.7, 0.3]]]), [(0, 1), (1, 0)])
    assert steady["by_place"] == pytest.approx([0.5, 0.5])
    assert (steady["bias"], steady["spread"]) == (pytest.approx(0), pytest.approx(0))
    assert not position_bias(np.array([[[0.7, 0.3]]]), [(0, 1)])["balanced"]


def test_baselines_learn_what_the_fields_tell_and_nothing_of_the_held_out():
    people = [Person(str(i), {"side": "ab"[i % 2], "age": 20 + i % 50}) for i in range(200)]
    answers = np.array([i % 2 for i in range(200)])
    answers[:10] = -1
    judged = [Person("x", {"side": "a", "age": 30}), Person("y", {"side": "b", "age": 30}), Person("z", {"side": "c"})]
    results = predictions(people, answers, judged, ("side", "age"), 3, 0)
    assert set(results) == {"regression", "forest"}
    for probabilities in results.values():
        np.testing.assert_allclose(probabilities.sum(axis=1), 1)
        assert probabilities[0, 0] > 0.9
        assert probabilities[1, 1] > 0.9
        assert (probabilities[:, 2] == 0).all()  # nobody took it
    same = predictions(people, np.zeros(200, int), judged, ("side", "age"), 3, 0)
    assert same["forest"].tolist() == [[1, 0, 0]] * 3
    assert majority(np.array([0.2, 0.5, 0.3])).tolist() == [0, 1, 0]
