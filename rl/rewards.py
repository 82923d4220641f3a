"""Rewards: verifiable ones from the shared graders, and the judge's by the paper's formula (§4.2).

A reward is a number or `None`; `None` means that there is no score, and is never taken for zero.
"""

from configs.training import JudgeConfig
from data.chat_template import ParsedReply
from data.sources.reasoning_gym import Problem
from evals.benchmarks.items import grade
from evals.benchmarks.stand_ins import problem_item
from rl.judge import JudgeScore


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
