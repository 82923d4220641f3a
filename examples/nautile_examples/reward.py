"""A reward: 1 for a right answer, less a little for each token. `reward = "brief"` in `[reason]`."""

from nautile.data.sources.reasoning_gym import Problem
from nautile.rl.rewards import SampledReply, verifiable

PRICE = 0.001  # of a token


def brief(problem: Problem, reply: SampledReply) -> float | None:
    """None, an exception and what is no finite number are no reward: the completion is left out, and counted."""
    right = verifiable(problem, reply)  # the strict grader; None if it could not grade the answer
    return None if right is None else right - PRICE * reply.length
