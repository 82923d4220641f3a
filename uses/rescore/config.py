"""The section of `nautile rescore`: which rollouts, and by what they are scored again."""

from typing import Literal

from pydantic import NonNegativeFloat, PositiveInt

from nautile.configs.base import Operational, Section
from nautile.configs.training import JudgeConfig, RewardName


class RescoreConfig(Section):
    """A reward or a judge, one of the two; `group`, `max_tokens` and `advantage` as the rollouts were sampled."""

    reward: RewardName | None = None
    judge: JudgeConfig | None = None
    group: PositiveInt
    max_tokens: PositiveInt
    advantage: Literal["dr", "std"] = "dr"
    budget_dollars: Operational[NonNegativeFloat] = 0.0  # 0: no limit
