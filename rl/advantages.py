"""Group-relative advantages of Dr. GRPO (paper §4.2) and the rules by which a group carries a signal.

A missing score is `None`: it takes no part in the group's mean, and its completion no part in an update.
"""

from collections.abc import Sequence

MINIMUM_SCORED = 2  # one score alone compares with nothing


def advantages(rewards: Sequence[float | None]) -> list[float | None]:
    """A_i = r_i - mean(r), over the scored completions of one group; no division by the deviation.

    All `None` where fewer than two are scored. The mean is taken of the differences from the first score, so that
    equal rewards give exactly zero.
    """
    scored = [reward for reward in rewards if reward is not None]
    if len(scored) < MINIMUM_SCORED:
        return [None] * len(rewards)
    base = scored[0]
    shift = sum(reward - base for reward in scored) / len(scored)
    return [None if reward is None else (reward - base) - shift for reward in rewards]


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
