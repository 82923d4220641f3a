"""Parts that sections of several stages are made of: a share, a kind of problem, an optimizer."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat

from configs.section import Section

Share = Annotated[float, Field(ge=0.0, le=1.0)]


class TaskConfig(Section):
    """One generator of verifiable problems: its name in the registry, its share of a draw, its own parameters."""

    name: str
    weight: PositiveFloat = 1.0
    parameters: dict[str, int | float | str] = {}


class OptimizerConfig(Section):
    name: Literal["adamw", "muon"] = "adamw"
    learning_rate: PositiveFloat = 1e-3
    final_learning_rate: NonNegativeFloat = 1e-5
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    warmup_steps: NonNegativeInt = 0
    decay_share: Share = 0.2  # wsd only: the share of steps spent going down
    beta1: Share = 0.9
    beta2: Share = 0.99
    weight_decay: NonNegativeFloat = 0.01
    clip: PositiveFloat = 1.0
