"""The whole configuration as frozen pydantic models: one section per stage, and `RunConfig` that holds them.

A field that alters what a stage writes belongs to that stage's section, for the section is hashed into the key of
its artifacts. Where nothing is said a value is ours; `configs/nautile_370m.toml` gives the source of the paper's.
"""

from typing import Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from configs.base import OptimizerConfig, Section, Share, TaskConfig


class PhaseConfig(Section):
    """A stretch of pretraining: its token budget and the weights of the token sources it draws rows from."""

    name: str
    tokens: PositiveInt
    mixture: dict[str, PositiveFloat]


class PretrainConfig(Section):
    """Paper §3.1: phase 1 on web text, phase 2 on SYNTH with the distilled documents."""

    phases: tuple[PhaseConfig, ...]
    batch_rows: PositiveInt
    micro_rows: PositiveInt | None = None  # gradient accumulation when smaller than batch_rows
    optimizer: OptimizerConfig = OptimizerConfig()
    loss_chunk: PositiveInt = 128
    z_loss: NonNegativeFloat = 0.0
    fsdp: PositiveInt = 1
    save_every: PositiveInt = 1000
    keep: PositiveInt = 3
    log_every: PositiveInt = 10
    validate_every: PositiveInt = 1000
    validation_rows: PositiveInt = 64
    sample_every: PositiveInt = 5000
    skip_limit: NonNegativeInt = 5  # updates in a row that may be skipped for a loss or gradient that is not finite
    spike_factor: NonNegativeFloat = 10.0  # robust deviations above the median of late losses; 0: spikes are let be
    spike_steps: NonNegativeInt = 3  # losses in a row that may be above that
    rollbacks: NonNegativeInt = 3  # times to go back to a checkpoint, past the trouble, before giving up


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
