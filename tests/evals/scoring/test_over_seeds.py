"""Comparisons over seeds: identical arms are seldom called different, and the smallest effect printed is found."""

import math

import numpy as np
import pytest

from nautile.evals.scoring.intervals import LEVEL, holm, paired
from nautile.evals.scoring.over_seeds import lead, lead_of_votes, summary, summary_of_shares

PROBLEMS = 1000


def named(values):
    return dict(enumerate(values))


def simulated(rng, arms, seeds, spread, effect=0.0):
    """Votes [arm, seed, problem] of arms with equal recipes; the last one has a lead of `effect`.

    A problem is as hard for each run; a run is better or worse than its recipe by `spread`.
    """
    ability = rng.normal(0, spread, (arms, seeds, 1))
    ability[-1] += effect
    hardness = rng.uniform(0.2, 0.8, PROBLEMS)
    return (rng.random((arms, seeds, PROBLEMS)) < hardness + ability).astype(float)


def share_called_different(spread, seeds, arms, repetitions, by_votes=True):
    """Share of reports on identical arms that call at least one of `arms` different from the first."""
    rng = np.random.default_rng([round(100 * spread), seeds, arms])
    called = 0
    for _ in range(repetitions):
        first, *others = simulated(rng, arms + 1, seeds, spread)
        if by_votes:
            p_values = [lead_of_votes([first], [other], tests=arms).p for other in others]
        else:
            accuracy = [named(votes.mean(axis=1)) for votes in (first, *others)]
            p_values = [lead(accuracy[0], other, arms, PROBLEMS).p for other in accuracy[1:]]
        called += min(holm(named(p_values)).values()) < LEVEL
    return called / repetitions


@pytest.mark.slow
@pytest.mark.parametrize("spread", [0.0, 0.08])
@pytest.mark.parametrize(("seeds", "arms"), [(2, 1), (2, 4), (5, 4), (12, 1), (12, 4)])
def test_identical_arms_are_called_different_in_at_most_8_percent_of_reports(spread, seeds, arms):
    repetitions = 300 if arms * seeds < 20 else 150
    assert share_called_different(spread, seeds, arms, repetitions) <= 0.08
    assert share_called_different(spread, seeds, arms, repetitions, by_votes=False) <= 0.08


@pytest.mark.parametrize("seeds", [2, 3, 5])
def test_few_changed_answers_do_not_look_certain_where_seeds_agree_by_chance(seeds):
    """Runs that differ in one problem or none: differences of all seeds are often equal, so that t is infinite."""
    rng = np.random.default_rng(seeds)
    called = []
    for _ in range(400):
        votes = rng.poisson(0.7, (2, seeds)) / PROBLEMS
        called.append(lead(named(votes[0]), named(votes[1]), 1, PROBLEMS).p < LEVEL)
    assert np.mean(called) <= 0.08


def test_a_lead_is_students_t_of_the_paired_differences():
    stats = pytest.importorskip("scipy.stats")
    a, b = [0.31, 0.42, 0.28, 0.37, 0.45], [0.36, 0.44, 0.35, 0.36, 0.52]
    result, expected = lead(named(a), named(b)), stats.ttest_rel(b, a)
    interval = expected.confidence_interval()
    assert (result.p, result.low, result.high) == pytest.approx((expected.pvalue, interval.low, interval.high))
    assert result.lead == pytest.approx(np.mean(b) - np.mean(a))
    assert result.deviation == pytest.approx(np.std(np.subtract(b, a), ddof=1))
    assert (result.over, result.seeds) == ("seeds", (0, 1, 2, 3, 4))


def test_a_summary_has_the_t_interval_of_the_mean():
    stats = pytest.importorskip("scipy.stats")
    values = [0.31, 0.42, 0.28, 0.37, 0.45]
    result = summary(named(values))
    expected = stats.t.interval(0.95, 4, np.mean(values), stats.sem(values))
    assert (result.low, result.high) == pytest.approx(expected)
    assert result.deviation == pytest.approx(np.std(values, ddof=1))
    single = summary({7: 0.5})
    assert (single.mean, single.low, single.high, single.deviation, single.seeds) == (0.5, None, None, None, (7,))
    for value in (0.5, 0.1, 0.7, 0.0):  # the mean of three times 0.1 is not 0.1
        for seeds in (2, 3, 6):
            same = summary(named([value] * seeds))
            assert (same.low, same.high, same.deviation) == (None, None, 0.0)  # no spread: no interval of width zero
    with pytest.raises(ValueError, match="at least one seed"):
        summary({})


def test_intervals_of_shares_end_at_the_limits_of_shares():
    """Of two seeds Student's t is wide: 55 % would be [-8.5, 118.5]."""
    wide, single = summary_of_shares({1: 0.5, 2: 0.6}), summary_of_shares({1: 0.5})
    assert (wide.low, wide.high, wide.mean, single.low) == (0.0, 1.0, 0.55, None)
    inside = summary_of_shares({1: 0.5, 2: 0.501})
    assert inside == summary({1: 0.5, 2: 0.501})
    gain = lead({1: 0.1, 2: 0.2}, {1: 0.4, 2: 0.7}, problems=100)
    assert -1 < gain.low < 0 < gain.high == 1.0


@pytest.mark.parametrize(("seeds", "tests"), [(3, 1), (5, 4), (12, 1), (12, 8)])
def test_the_smallest_effect_is_found_in_four_of_five_cases(seeds, tests):
    deviation = 0.03
    unit = np.array([*np.linspace(-1, 1, seeds)])
    spread = named(unit / unit.std(ddof=1) * deviation)  # differences with exactly this deviation
    effect = lead(named([0.0] * seeds), spread, tests).detectable
    drawn = np.random.default_rng(seeds).normal(effect, deviation, (20_000, seeds))
    t = drawn.mean(axis=1) / (drawn.std(axis=1, ddof=1) / math.sqrt(seeds))
    critical = pytest.importorskip("scipy.stats").t.isf(LEVEL / tests / 2, seeds - 1)
    assert np.mean(np.abs(t) > critical) == pytest.approx(0.8, abs=0.015)
    significant = [lead(named([0.0] * seeds), named(row), tests).p < LEVEL / tests for row in drawn[:500]]
    assert np.mean(significant) == pytest.approx(0.8, abs=0.06)


def test_a_true_difference_is_found_with_enough_seeds():
    rng = np.random.default_rng(0)
    significant = {}
    for seeds in (2, 12):
        pairs = [simulated(rng, 2, seeds, 0.02, effect=0.05) for _ in range(60)]
        significant[seeds] = np.mean([lead_of_votes([a], [b]).p < LEVEL for a, b in pairs])
    assert significant[12] > 0.95
    assert significant[2] < 0.4


def test_equal_arms_have_p_one_and_equal_differences_no_p_of_zero():
    nothing = lead({1: 0.5, 2: 0.25}, {1: 0.5, 2: 0.25})
    assert (nothing.lead, nothing.p, nothing.low) == (0.0, 1.0, None)
    nothing = lead({1: 0.5, 2: 0.25}, {1: 0.5, 2: 0.25}, problems=40)
    assert nothing.p == 1.0
    assert nothing.low < 0 < nothing.high
    equal = lead({1: 0.3, 2: 0.4, 3: 0.2}, {1: 0.4, 2: 0.5, 3: 0.3})
    assert (equal.p, equal.low, equal.detectable) == (0.25, None, None)  # three signs that agree
    equal = lead({1: 0.3, 2: 0.4}, {1: 0.35, 2: 0.45}, problems=1000)
    assert 0.05 < equal.p < 1
    assert equal.low < 0 < equal.high
    votes = np.array([[1.0] * 10 + [0.0] * 30] * 2), np.array([[1.0] * 30 + [0.0] * 10] * 2)
    assert 0 < lead_of_votes([votes[0]], [votes[1]]).p < 1
    same = lead_of_votes([votes[0]], [votes[0]])
    assert same.p == 1.0
    assert same.low < 0 < same.high


def test_only_common_seeds_are_paired():
    result = lead({1: 0.3, 2: 0.5, 3: 0.9}, {2: 0.6, 1: 0.5, 4: 0.1})
    assert result.lead == pytest.approx(0.15)
    assert result.seeds == (1, 2)
    single = lead({1: 0.3, 2: 0.5}, {2: 0.6})
    assert (single.lead, single.p, single.low, single.detectable) == (pytest.approx(0.1), None, None, None)
    with pytest.raises(ValueError, match="both arms"):
        lead({1: 0.3}, {2: 0.3})


def test_one_seed_is_tested_over_problems():
    a, b = np.array([[1.0] * 20 + [0.0] * 20]), np.array([[1.0] * 34 + [0.0] * 6])
    expected = paired(a[0].tolist(), b[0].tolist())
    result = lead_of_votes([a], [b], seeds=[7])
    assert (result.lead, result.low, result.high, result.p) == (expected.lead, expected.low, expected.high, expected.p)
    assert (result.over, result.seeds, result.detectable) == ("problems", (7,), None)


def test_a_mean_of_benchmarks_weighs_their_leads_and_their_noise():
    rng = np.random.default_rng(0)
    a, b = simulated(rng, 2, 4, 0.03, effect=0.1)
    c = rng.integers(0, 2, (4, 50)).astype(float)
    mean = lead_of_votes([a, c], [b, c], (0.5, 0.5))
    alone = lead_of_votes([a], [b])
    assert mean.lead == pytest.approx(alone.lead / 2)
    assert mean.deviation == pytest.approx(alone.deviation / 2)
    single = lead_of_votes([a[:1], c[:1]], [b[:1], c[:1]], (0.5, 0.5))
    assert single.over == "problems"
    assert single.lead == pytest.approx((b[0] - a[0]).mean() / 2)


def test_questions_and_seeds_that_one_arm_lacks_are_left_out():
    nan = math.nan
    a = np.array([[1.0, 0.0, nan, 1.0], [1.0, 0.0, 1.0, nan], [nan, nan, nan, 1.0]])
    b = np.array([[1.0, 1.0, 1.0, 0.0], [1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, nan]])
    result = lead_of_votes([a], [b], seeds=["x", "y", "z"])
    assert result.seeds == ("x", "y")
    assert result.lead == pytest.approx((0 + 1 / 3) / 2)
    with pytest.raises(ValueError, match="each benchmark"):
        lead_of_votes([a[2:]], [b[2:]])


def test_holms_p_values_are_those_of_the_step_down_test():
    corrected = holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.9})
    assert corrected == pytest.approx({"a": 0.04, "b": 0.09, "c": 0.09, "d": 0.9})
    assert holm({}) == {}
