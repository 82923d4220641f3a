"""The names of all rewards of the stages that train on problems with answers: the shipped ones, and those of plug-ins.

A reward is a function of a problem and a completion, or a `rl.rewards.Reward`, which is imported when it is used.
"""

from typing import Any

from nautile.common.text import did_you_mean
from nautile.configs.plugins import Registry

REWARDS: Registry[Any] = Registry(
    "rewards",
    "collections.abc:Callable",
    {name: f"nautile.rl.rewards:{name}" for name in ("verifiable", "reasoning_gym")},
)
DEFAULT_REWARD = REWARDS.shipped[0]


def known_reward(name: str) -> str:
    """The name, if it is a reward's. Raises `ValueError` for any other."""
    if name not in REWARDS:
        raise ValueError(f"no reward {name!r}{did_you_mean(name, REWARDS)}; there are {', '.join(REWARDS)}")
    return name
