import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nautile.evals.scoring.intervals import paired, wilson, wilson_mean


@pytest.fixture(scope="module")
def binomtest():
    """Imported here, for it takes a second of processor time, also in workers that only collect."""
    from scipy.stats import binomtest

    return binomtest


@given(correct=st.integers(0, 300), n=st.integers(1, 300))
def test_wilson_is_scipys(binomtest, correct, n):
    correct = min(correct, n)
    theirs = binomtest(correct, n).proportion_ci(0.95, method="wilson")
    assert wilson(correct, n, z=1.959963984540054) == pytest.approx((theirs.low, theirs.high), abs=1e-12)
    low, high = wilson(correct, n)
    assert 0 <= low <= correct / n <= high <= 1


def test_wilson_of_nothing_is_everything_and_of_nonsense_an_error():
    assert wilson(0, 0) == (0.0, 1.0)
    with pytest.raises(ValueError, match="5 of 3"):
        wilson(5, 3)


@given(st.lists(st.booleans(), min_size=1, max_size=300))
def test_the_interval_of_a_mean_of_one_group_is_wilsons(group):
    assert wilson_mean([group]) == pytest.approx(wilson(sum(group), len(group)))


def test_the_interval_of_a_mean_is_about_that_of_the_normal_approximation():
    easy, hard = [True] * 600 + [False] * 400, [True] * 300 + [False] * 700
    for weights in ([0.5, 0.5], [0.2, 0.8]):
        mean = 0.6 * weights[0] + 0.3 * weights[1]
        half = 1.96 * math.sqrt((0.24 * weights[0] ** 2 + 0.21 * weights[1] ** 2) / 1000)
        assert wilson_mean([easy, hard], weights) == pytest.approx((mean - half, mean + half), abs=0.001)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 40)), min_size=1, max_size=5))
def test_a_mean_lies_in_its_interval_which_always_has_a_width(counts):
    groups = [[1.0] * min(right, n) + [0.0] * (n - min(right, n)) for right, n in counts]
    mean = sum(sum(group) / len(group) for group in groups) / len(groups)
    low, high = wilson_mean(groups)
    assert 0 <= low <= mean + 1e-12
    assert mean - 1e-12 <= high <= 1
    assert high - low > 0.01


def test_all_right_and_all_wrong_are_not_certain():
    """The interval of 0 and of 100 % is Wilson's, whatever is averaged."""
    assert wilson_mean([[1.0] * 43])[0] == pytest.approx(0.918, abs=0.001)
    assert wilson_mean([[0.0] * 2, [0.0] * 2]) == pytest.approx((0.0, wilson(0, 2)[1] / math.sqrt(2)))
    with pytest.raises(ValueError, match="at least one"):
        wilson_mean([[True], []])


@given(pairs=st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=60))
def test_paired_is_mcnemars_exact_test(binomtest, pairs):
    a, b = zip(*pairs, strict=True)
    result = paired(a, b)
    discordant = result.only_a + result.only_b
    expected = binomtest(result.only_b, discordant).pvalue if discordant else 1.0
    assert result.p == pytest.approx(expected)
    assert result.lead == pytest.approx(np.mean(b) - np.mean(a))
    assert result.low <= result.lead <= result.high
    assert result.both + result.only_a + result.only_b + result.neither == result.n == len(pairs)


@pytest.mark.slow
def test_paired_holds_for_many_questions_and_refuses_unequal_ones(binomtest):
    a = [True] * 3000 + [False] * 3000
    b = [False] * 3000 + [True] * 2700 + [False] * 300
    assert paired(a, b).p == pytest.approx(binomtest(2700, 5700).pvalue, rel=1e-6)
    with pytest.raises(ValueError, match="2 and 1"):
        paired([True, False], [True])


def test_a_test_of_twenty_thousand_discordant_questions_is_exact_and_takes_no_binomial_for_each(monkeypatch, binomtest):
    computed, comb = [], math.comb
    monkeypatch.setattr(math, "comb", lambda n, k: computed.append(k) or comb(n, k))
    lost, won = 9_900, 10_100
    test = paired([1] * lost + [0] * won, [0] * lost + [1] * won)
    assert len(computed) < 2
    assert test.p == pytest.approx(binomtest(lost, lost + won).pvalue, rel=1e-9)
