"""What a step draws: never more than it lacks, every group with a signal is used, and each group counts once."""

import math

import pytest

from nautile.data.sources.reasoning_gym import Problem
from nautile.rl.problems import ProblemOrder
from nautile.rl.reinforce import TOTALS, GroupDraw, without_update
from tests.rl.conftest import group

MIXED, EQUAL, HIGH, UNSCORED = [0.0, 1.0], [0.5, 0.5], [0.95, 0.9], [None, 0.5]


class Scripted:
    """Sampler and scorer: groups with the rewards given, in turn."""

    def __init__(self, rewards):
        self.rewards, self.asked, self.scored = iter(rewards), [], []

    def sample(self, params, problems, draw):
        self.asked.append([position for position, _ in problems])
        return [group([None, None], seed=position) for position, _ in problems]

    def score(self, groups):
        for each in groups:
            self.scored.append(each)
            for rollout, reward in zip(each.rollouts, next(self.rewards), strict=True):
                rollout.reward = reward

    def mastered(self, group):
        return min(rollout.reward or 0 for rollout in group.rollouts) > 0.85


def draw_of(rewards, refill=3):
    scripted = Scripted(rewards)
    problems = [Problem("sum", index, "1 + 1?", "2", "") for index in range(20)]
    return GroupDraw(problems, ProblemOrder(20, 0), scripted, scripted, refill), scripted


def test_a_refill_draws_what_is_missing_and_nothing_scored_is_thrown_away():
    draw, scripted = draw_of([MIXED, EQUAL, EQUAL, MIXED, EQUAL, MIXED, MIXED])
    live, every, metrics = draw.step({}, 4)
    assert scripted.asked == [[0, 1, 2, 3], [4, 5], [6]]
    assert (metrics["refilled"], metrics["missing_groups"], metrics["live_share"]) == (3, 0, 4 / 7)
    assert [each.position for each in live] == [0, 3, 5, 6]
    assert every == scripted.scored
    assert (draw.cursor, draw.draw) == (7, 3)
    assert draw.totals["groups"] == len(live) + draw.totals["no_signal"] == 7
    assert (draw.totals["refilled"], draw.totals["missing"]) == (3, 0)


def test_a_step_that_stays_short_is_counted():
    draw, scripted = draw_of([MIXED, EQUAL, EQUAL, EQUAL, EQUAL], refill=1)
    live, _, _ = draw.step({}, 3)
    assert ([each.position for each in live], scripted.asked) == ([0], [[0, 1, 2], [3, 4]])
    assert (draw.totals["refilled"], draw.totals["missing"]) == (2, 2)


def test_mastered_groups_have_a_share_of_their_own():
    draw, _ = draw_of([MIXED, EQUAL, HIGH, UNSCORED, EQUAL], refill=0)
    live, _, metrics = draw.step({}, 5)
    assert len(live) == 1
    assert metrics["mastered_share"] == 0.2, "it has advantages, and is left out all the same"
    assert metrics["zero_signal_share"] == 0.4
    assert metrics["dropped_share"] == 0.2
    assert {name: draw.totals[name] for name in ("mastered", "no_signal", "dropped", "unscored")} == {
        "mastered": 1, "no_signal": 2, "dropped": 1, "unscored": 1,
    }  # fmt: skip
    assert metrics["reward"] == pytest.approx((1 + 1 + 1.85 + 0.5 + 1) / 9)


def test_a_reward_that_is_no_number_is_counted_as_missing_and_spoils_no_mean():
    draw, _ = draw_of([[math.nan, 0.5], [math.inf, 0.0]], refill=0)
    live, every, metrics = draw.step({}, 2)
    assert live == []
    assert [rollout.reward for each in every for rollout in each.rollouts] == [None, 0.5, None, 0.0]
    assert (draw.totals["unscored"], draw.totals["dropped"]) == (2, 2)
    assert metrics["reward"] == 0.25


def test_lengths_by_sign_are_of_the_groups_that_are_trained_on():
    class OfLengths(Scripted):
        def sample(self, params, problems, draw):
            groups = super().sample(params, problems, draw)
            for each in groups:
                for rollout, length in zip(each.rollouts, (7, 3), strict=True):
                    rollout.ids = rollout.ids.repeat(9)[:length]
            return groups

    scripted = OfLengths([MIXED, HIGH])
    problems = [Problem("sum", index, "1 + 1?", "2", "") for index in range(20)]
    _, _, metrics = GroupDraw(problems, ProblemOrder(20, 0), scripted, scripted, 0).step({}, 2)
    assert (metrics["length_positive"], metrics["length_negative"]) == (3, 7), "0.95 of the mastered group is above too"


def test_a_group_whose_only_signal_was_cut_has_none_if_what_was_cut_is_left_out():
    class Cutting(Scripted):
        def sample(self, params, problems, draw):
            groups = super().sample(params, problems, draw)
            for each in groups:
                for rollout in each.rollouts:
                    rollout.truncated = True
            return groups

    scripted = Cutting([MIXED])
    problems = [Problem("sum", index, "1 + 1?", "2", "") for index in range(20)]
    draw = GroupDraw(problems, ProblemOrder(20, 0), scripted, scripted, 0, mask_truncated=True)
    live, (only,), metrics = draw.step({}, 1)
    assert (live, metrics["zero_signal_share"]) == ([], 1.0)
    assert [rollout.advantage for rollout in only.rollouts] == [-0.5, 0.5], "its reward counts in the mean all the same"


@pytest.mark.parametrize(
    ("rewards", "reason"),
    [
        ([EQUAL, EQUAL], "all 2 groups had equal rewards"),
        ([HIGH, HIGH], "all 2 groups were mastered"),
        ([[None, None], [None, None]], "no completion was scored"),
        ([UNSCORED, UNSCORED], "all 2 groups had fewer than two scored completions"),
        ([EQUAL, HIGH], "of 2 groups 1 had equal rewards, 1 were mastered"),
        ([MIXED, EQUAL], "no update was finite"),
    ],
)
def test_why_groups_led_to_no_update(rewards, reason):
    draw, _ = draw_of(rewards, refill=0)
    draw.step({}, len(rewards))
    assert draw.totals.keys() == set(TOTALS)
    assert without_update(draw.totals) == reason
