import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nautile.common.errors import ConfigError
from nautile.configs.training import JudgeConfig
from nautile.rl.judge import JudgeScore
from nautile.rl.rewards import (
    MEASURED,
    ROUNDING,
    SuccessRate,
    advantages,
    carries_signal,
    is_mastered,
    judged,
    known,
)

REWARDS = st.lists(st.none() | st.floats(-2, 2), min_size=1, max_size=8)


@given(REWARDS)
def test_is_the_reward_less_the_mean_of_the_scored(rewards):
    given_ = advantages(rewards)
    scored = [r for r in rewards if r is not None]
    if len(scored) < 2:
        assert given_ == [None] * len(rewards)
        return
    for reward, advantage in zip(rewards, given_, strict=True):
        assert (advantage is None) == (reward is None)
        if reward is not None:
            assert advantage == pytest.approx(reward - np.mean(scored), abs=2 * ROUNDING)


@given(REWARDS)
def test_std_is_divided_by_the_deviation_of_the_scored(rewards):
    plain, scaled = advantages(rewards), advantages(rewards, "std")
    known = [r for r in rewards if r is not None]
    assert [a is None for a in scaled] == [a is None for a in plain]
    if len(known) < 2 or np.std(known) <= ROUNDING / 2:
        assert not carries_signal(scaled)
    elif np.std(known) > 2 * ROUNDING:  # between these two the rounding of the deviation itself decides
        expected = [(r - np.mean(known)) / np.std(known) for r in known]
        # A mean of such numbers is off by up to some 1e-15, which a small deviation divides.
        assert [a for a in scaled if a is not None] == pytest.approx(expected, rel=1e-6, abs=1e-15 / np.std(known))


@pytest.mark.parametrize("form", ["dr", "std"])
def test_rounding_makes_no_signal(form):
    """The same reward, computed in another order; "std" would make an advantage of plus or minus one of it."""
    assert 0.1 + 0.2 != 0.3
    assert not carries_signal(advantages([0.1 + 0.2, 0.3, 0.3], form))
    # One at the mean but for rounding counts to neither side.
    assert advantages([0.0, 0.1 + 0.2, 0.6, 0.3], form)[1:4:2] == [0.0, 0.0]


@given(REWARDS, st.sampled_from(["dr", "std"]))
def test_what_is_above_the_mean_sums_to_what_is_below(rewards, form):
    """The identity of docs/theory.md: the positive advantages of a group and the negative ones have the same sum."""
    known = [a for a in advantages(rewards, form) if a is not None]
    assert sum(a for a in known if a > 0) == pytest.approx(-sum(a for a in known if a < 0), abs=8 * ROUNDING)


@given(st.floats(-2, 2), st.integers(2, 8))
def test_equal_rewards_carry_no_signal_whatever_their_rounding(reward, size):
    assert not carries_signal(advantages([reward] * size))


def test_a_missing_score_is_not_a_zero():
    assert advantages([1.0, 1.0, None, 0.0]) == pytest.approx([1 / 3, 1 / 3, None, -2 / 3])
    assert not carries_signal(advantages([1.0, None, None, None]))


@pytest.mark.parametrize("form", ["dr", "std"])
@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_no_number_is_a_missing_one(reward, form):
    assert advantages([1.0, 1.0, reward, 0.0], form) == advantages([1.0, 1.0, None, 0.0], form)
    assert advantages([1.0, reward, reward], form) == [None, None, None]
    assert known(reward) is known(None) is None
    assert known(0.5) == 0.5


@pytest.mark.parametrize(
    ("overalls", "mastered"),
    [
        ([91, 91, 91, 91], True),
        ([90, 90, 90, 90], False),  # on average above 90, not at it
        ([86, 93, 93, 93], True),
        ([85, 95, 95, 95], False),  # every one above 85, not at it
        ([100, 100, 100, 84], False),
        ([100, 100, 100, None], False),  # what is not known is not mastered
        ([], False),
    ],
)
def test_mastered_at_its_edges(overalls, mastered):
    assert is_mastered(overalls) is mastered


@pytest.mark.parametrize(
    ("tokens", "penalty", "length", "truncated", "expected"),
    [
        (0, 0.5, 100, True, 0.5),  # flat: those that were cut alone
        (0, 0.5, 100, False, 0.0),
        (20, 1.0, 80, False, 0.0),
        (20, 1.0, 85, False, 0.25),
        (20, 1.0, 99, False, 0.95),
        (20, 1.0, 100, False, 1.0),
        (20, 1.0, 100, True, 1.0),
        (500, 1.0, 50, False, 0.5),  # a ramp of more than the limit is one of the limit
    ],
)
def test_the_overlong_penalty_is_a_ramp(tokens, penalty, length, truncated, expected):
    config = JudgeConfig(endpoint="judge", overlong_tokens=tokens, overlong_penalty=penalty)
    score = JudgeScore(reason=4, answer=5, follow=3, overall=90)
    marks = 0.5 * (0.30 * 4 + 0.55 * 5 + 0.15 * 3) / 5 + 0.5 * 0.9
    assert judged(score, config, length, 100, truncated) == pytest.approx(marks - expected)
    assert judged(None, config, length, 100, truncated) is None


def test_a_stage_that_solves_too_little_stops_once_with_what_it_measured_and_what_helps():
    rate = SuccessRate("reason", 0.1)
    rate.add(MEASURED - 1, [1.0] + [0.0] * 19, last=False)  # 5 %, of too few problems to say so
    said = r"^reason: 1 of its first 40 completions, of 64 problems, are right \(2.5%\)"
    with pytest.raises(ConfigError, match=said) as error:
        rate.add(1, [0.0] * 20 + [None] * 5, last=False)
    assert all(word in str(error.value) for word in ("[supervise]", "pretrain for longer", "easier reason.problems"))
    rate.add(8, [0.0] * 8, last=True)  # measured once


@pytest.mark.parametrize(
    ("least", "verdicts"), [(0.1, [1.0] + [0.0] * 9), (0.1, [None] * 8), (None, [0.0] * 8), (0.0, [0.0] * 8)]
)
def test_one_in_ten_goes_on_and_so_does_what_is_not_graded_or_not_asked(least, verdicts):
    SuccessRate("reason", least).add(8, verdicts, last=True)
