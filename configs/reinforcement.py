"""The sections of the three reinforcement stages (paper §4) and the parts that they share."""

from typing import Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from configs.parts import OptimizerConfig, Share, TaskConfig
from configs.section import Section


class ProblemsConfig(Section):
    """A set of problems with checkable answers, or prompts for the judge."""

    source: Literal["reasoning", "gsm8k", "jsonl"] = "reasoning"
    tasks: tuple[TaskConfig, ...] = ()  # source "reasoning"
    count: PositiveInt = 1024
    revision: str = ""  # source "gsm8k": a commit of it on the Hub
    path: str = ""  # source "jsonl": a file of {question, answer} and perhaps {task, rationale}


class RolloutConfig(Section):
    """How completions are drawn. A step asks `prompts` questions, `group` completions each (paper §4.2: four)."""

    prompts: PositiveInt
    group: PositiveInt = 4
    max_tokens: PositiveInt
    prompt_length: PositiveInt = 64
    temperature: PositiveFloat = 1.0
    top_k: NonNegativeInt = 0
    top_p: Share = 1.0
    thinking_budget: PositiveInt | None = None  # tokens of thought, after which its end is put in

    @model_validator(mode="after")
    def _a_group_compares(self) -> "RolloutConfig":
        if self.group < 2:
            raise ValueError("rollout.group must be at least 2: an advantage compares completions of one prompt")
        return self


class PolicyConfig(Section):
    """The learner's settings, shared by the reinforcement stages."""

    steps: PositiveInt
    optimizer: OptimizerConfig
    kl: NonNegativeFloat = 0.0
    clip_ratio: PositiveFloat = 0.2
    inner_epochs: PositiveInt = 1
    micro_rows: PositiveInt = 8
    refill: NonNegativeInt = 3  # draws of further groups, at most, to replace groups that carry no signal
    save_every: PositiveInt = 10
    guard_every: PositiveInt | None = None  # evaluate the guard set every so many steps
    guard_problems: PositiveInt = 128
    guard_action: Literal["stop", "roll_back"] = "stop"  # when a reading falls under the interval of the best one
    guard_returns: PositiveInt = 2  # times to go back to the best policy before stopping after all
    train: tuple[str, ...] = ()  # names of parameters or blocks ("blocks.7", "blocks.attention"); empty: all of them
    fsdp: PositiveInt = 1  # devices that parameters are split over; the rest of the mesh splits rows alone


class JudgeConfig(Section):
    """The judge's rubric and the paper's weights (§4.2)."""

    endpoint: str
    rubric: str = "nautile-judge-1"
    reason_weight: Share = 0.30
    answer_weight: Share = 0.55
    follow_weight: Share = 0.15
    overlong_penalty: NonNegativeFloat = 0.5
    mastered_mean: float = 90.0
    mastered_minimum: float = 85.0
    max_tokens: PositiveInt = 64
    calibration_items: NonNegativeInt = 32  # answers of known quality that the judge is measured on, in four kinds


class AlignConfig(Section):
    """Stage 1, Dr. GRPO with an LLM judge (paper §4.2)."""

    rollout: RolloutConfig
    policy: PolicyConfig
    judge: JudgeConfig
    problems: ProblemsConfig


class ReasonConfig(Section):
    """Stage 2, gradient-balanced GRPO (paper §4.3)."""

    rollout: RolloutConfig
    policy: PolicyConfig
    problems: ProblemsConfig
    balance: Literal["equalise", "cap", "off"] = "equalise"
    balance_epsilon: PositiveFloat = 1e-8


class SelfDistillConfig(Section):
    """Stage 3, scored self-distillation (paper §4.4)."""

    rollout: RolloutConfig
    problems: ProblemsConfig
    rounds: PositiveInt = 1
    epochs: PositiveInt = 1
    batch_rows: PositiveInt = 16
    optimizer: OptimizerConfig
    fsdp: PositiveInt = 1
