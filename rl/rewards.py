"""Rewards of completions and what follows from them in a group: advantages (paper §4.2), signal, mastery.

A reward is a number or `None`. `None` means that there is no score, and is never taken for zero: it takes no part in
the group's mean, and its completion no part in an update.
"""

import math
from collections.abc import Sequence
from typing import Literal

from configs.training import JudgeConfig
from data.chat_template import ParsedReply
from data.sources.reasoning_gym import Problem
from evals.benchmarks.items import grade
from evals.benchmarks.stand_ins import problem_item
from rl.judge import JudgeScore

AdvantageForm = Literal["dr", "std"]

MINIMUM_SCORED = 2  # one score alone compares with nothing
ROUNDING = 1e-9  # a smaller deviation of rewards is that of equal ones, computed in another order


def verifiable(problem: Problem, reply: ParsedReply) -> float:
    """1.0 where the strict grader of the evaluation accepts the reply, else 0.0."""
    return float(grade(problem_item("rollout", problem.index, problem), reply).verdict.strict)


def judged(score: JudgeScore | None, config: JudgeConfig, truncated: bool) -> float | None:
    """r = 1/2 (0.30 reason + 0.55 answer + 0.15 follow)/5 + 1/2 overall/100, less the overlong penalty if cut off."""
    if score is None:
        return None
    criteria = (
        config.reason_weight * score.reason + config.answer_weight * score.answer + config.follow_weight * score.follow
    )
    return 0.5 * criteria / 5 + 0.5 * score.overall / 100 - (config.overlong_penalty if truncated else 0.0)


def advantages(rewards: Sequence[float | None], form: AdvantageForm = "dr") -> list[float | None]:
    """A_i = r_i - mean(r), over the scored completions of one group (Dr. GRPO, paper §4.2).

    `form` "std": divided by their deviation (that of the group itself: over n, not n - 1), as GRPO has it. All `None`
    where fewer than two are scored. The mean is taken of the differences from the first score, so that equal rewards
    give exactly zero; so do, with "std", rewards that differ by rounding alone.
    """
    scored = [reward for reward in rewards if reward is not None]
    if len(scored) < MINIMUM_SCORED:
        return [None] * len(rewards)
    base = scored[0]
    shift = sum(reward - base for reward in scored) / len(scored)
    centred = [None if reward is None else (reward - base) - shift for reward in rewards]
    if form == "dr":
        return centred
    deviation = math.sqrt(sum(value * value for value in centred if value is not None) / len(scored))
    return [None if value is None else value / deviation if deviation > ROUNDING else 0.0 for value in centred]


def carries_signal(group: Sequence[float | None]) -> bool:
    """Whether any completion of the group has a positive or negative advantage."""
    return any(advantage not in (None, 0.0) for advantage in group)


def is_mastered(overalls: Sequence[float | None], mean_above: float = 90.0, minimum_above: float = 85.0) -> bool:
    """The paper's skip rule: overall scores above 90 on average and every one above 85.

    A group with an unscored completion is not mastered: an unknown score may be a low one.
    """
    if not overalls or any(overall is None for overall in overalls):
        return False
    known = [overall for overall in overalls if overall is not None]
    return sum(known) / len(known) > mean_above and min(known) > minimum_above
