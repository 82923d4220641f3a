"""What alignment asks of the judge for problems with an answer key, with options, and without either."""

from dataclasses import replace

from nautile.configs.training import JudgeConfig
from nautile.rl.calibration import calibrate
from nautile.rl.judge import JudgeScore
from nautile.tasks.reinforce import JudgeScorer
from tests.rl.conftest import group

CONFIG = JudgeConfig(endpoint="judge")


class Marks:
    """A judge that gives every answer the same marks and keeps what it was asked."""

    def __init__(self):
        self.asked = []

    def score(self, items):
        self.asked += items
        return [JudgeScore(3, 3, 3, 60) for _ in items]


def problem_of(scored, **changes):
    scored.problem = replace(scored.problem, **changes)
    return scored


def test_a_prompt_without_an_answer_is_judged_without_one_and_not_counted_as_wrong():
    judge = Marks()
    groups = [
        problem_of(group([None, None]), answer=""),
        group([None, None]),
        problem_of(group([None, None]), answer="B", options=("2", "3")),
    ]
    JudgeScorer(judge, CONFIG, 48).score(groups)
    assert [item.reference for item in judge.asked[::2]] == [None, "2", "B"]
    rewards = {rollout.reward for scored in groups for rollout in scored.rollouts}
    assert rewards == {0.5 * 3 / 5 + 0.5 * 0.6}
    assert [scored.rollouts[0].parts.get("correct") for scored in groups] == [None, 1.0, 0.0]
    assert groups[0].row(0)["expected"] is None


def test_a_judge_is_not_calibrated_on_problems_without_answers():
    figures = calibrate(Marks(), [], hostile=40)
    assert (figures["items"], figures["agreement"], figures["hostile"], figures["answers"]) == (0, None, None, [])
