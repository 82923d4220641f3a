"""The sections of the training stages: pretraining (paper §3.1), and the three reinforcement stages (paper §4).

Between them may be supervised training on worked solutions, which the paper does not have.
"""

import json
import re
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from nautile.common.errors import ConfigError
from nautile.configs.base import Operational, OptimizerConfig, Section, Share, TaskConfig, Worker
from nautile.configs.distill import PromptSetConfig
from nautile.configs.rewards import DEFAULT_REWARD, known_reward
from nautile.configs.stages import TRAINED

SMALLEST_GUARD = 8  # problems: with fewer the guard's test never rejects (2 / 2**8 < 0.01)
MOST_GUARD = 400  # default upper limit of guard problems; GSM8K has 393
RewardName = Annotated[str, AfterValidator(known_reward)]
# Least share of right completions among the first that a stage samples, below which it stops before it is paid for in
# full: with so few, hardly a group has a right one to learn from. None or 0: go on.
LeastSuccess = Operational[Share | None]


class StartSection(Section):
    """The section of a step that may start from any checkpoint in the store instead of the previous step's.

    `start`: "checkpoint/ID", "newest", or "newest:LABEL", the newest of that label or stage; or the name of an earlier
    stage of the same run, such as "pretrain", which leaves out the stages between. It is resolved before anything runs
    (`flows.dag`); the checkpoint is an input of the step, and part of its key as such.
    """

    start: str | None = None

    @field_validator("start")
    @classmethod
    def _names_a_checkpoint(cls, start: str | None) -> str | None:
        forms = rf"checkpoint/[0-9a-f]{{1,64}}|newest(:\S+)?|{'|'.join(TRAINED)}"
        if start is not None and not re.fullmatch(forms, start):
            raise ValueError(
                f'{start!r} must be "checkpoint/ID", "newest", "newest:LABEL", as in "newest:align", or an earlier '
                'stage of this run, as "pretrain"'
            )
        return start


class PhaseConfig(Section):
    """A phase of pretraining."""

    name: str
    tokens: PositiveInt  # length of the phase in positions read; padding and prompts count, trained on or not
    mixture: dict[str, PositiveFloat]  # token source -> weight; rows are drawn in proportion


class PretrainConfig(StartSection):
    """Paper §3.1: phase 1 on web text, phase 2 on SYNTH with the distilled documents."""

    phases: tuple[PhaseConfig, ...]
    batch_rows: PositiveInt  # rows in an update, over all devices
    # Rows in a forward and backward pass, at least one per device; None: all of `batch_rows`.
    micro_rows: Operational[PositiveInt | None] = None
    optimizer: OptimizerConfig = OptimizerConfig()
    z_loss: NonNegativeFloat = 0.0  # weight of the squared log-partition, which keeps logits small
    fsdp: Operational[PositiveInt] = 1  # devices that parameters are split over; the rest of the mesh splits rows alone
    save_every: Operational[PositiveInt] = 1000  # steps between checkpoints to resume from
    keep: Operational[PositiveInt] = 3  # number of newest checkpoints to keep
    log_every: Operational[PositiveInt] = 10  # steps that a row of metrics averages over
    validate_every: Operational[PositiveInt] = 1000  # steps
    validation_rows: Operational[PositiveInt] = 64  # rows of each source in a validation
    sample_every: Operational[PositiveInt] = 5000  # steps between samples of text
    skip_limit: NonNegativeInt = 5  # updates in a row that may be skipped for a loss or gradient that is not finite
    spike_factor: NonNegativeFloat = 10.0  # a loss so many robust deviations above the recent median is a spike; 0: off
    spike_steps: NonNegativeInt = 3  # tolerated spikes in a row
    rollbacks: NonNegativeInt = 3  # times to roll back to a checkpoint and skip the rows after it, before giving up

    def rows_at_once(self, devices: int) -> int:
        """Rows in a micro-batch: `micro_rows` or the whole batch, but at least one per device if it has enough.

        Raises ConfigError unless a batch divides into micro-batches, and a micro-batch among the devices.
        """
        micro = max(self.micro_rows or self.batch_rows, min(devices, self.batch_rows))
        if self.batch_rows % micro:
            raise ConfigError(f"pretrain.batch_rows {self.batch_rows} is not a multiple of pretrain.micro_rows {micro}")
        if micro % devices:
            field = "micro_rows" if self.micro_rows else "batch_rows"
            raise ConfigError(
                f"pretrain.{field} {micro} does not divide among {devices} devices: make it a multiple of {devices}"
            )
        return micro


class ProblemSource(Section):
    """A source of problems: generators, a training set of the Hub (`rl.problems`), a file of your own, or prompts.

    The source "prompts" has no answers, and is for [align] alone, whose judge needs none.
    """

    source: Literal[
        "reasoning", "gsm8k", "math", "arc_easy", "arc_challenge", "commonsense_qa", "openbookqa", "jsonl", "prompts"
    ] = "reasoning"
    tasks: tuple[TaskConfig, ...] = ()  # source "reasoning": the generators
    revision: str = ""  # a training set: a commit of the Hub instead of the pinned one
    path: Worker[str] = ""  # source "jsonl": a file of {question, answer, ...}; docs/problems.md has its format
    prompt_set: PromptSetConfig | None = None  # source "prompts": as in `distill.prompt_sets`, without weight and count
    license: Operational[str] = ""  # of the problems, for the model cards

    @model_validator(mode="after")
    def _has_its_prompt_set(self) -> "ProblemSource":
        if (self.source == "prompts") != (self.prompt_set is not None):
            raise ValueError("source 'prompts' and `prompt_set` belong together: set both, or neither")
        return self


class WeightedSource(ProblemSource):
    """One of several sources; `weight` is its share of the problems, relative to the weights of the others."""

    weight: PositiveFloat = 1.0


class ProblemsConfig(ProblemSource):
    """Problems with verifiable answers, or prompts for the judge, from one source or from several by weight."""

    count: PositiveInt = 1024  # of all sources together
    sources: tuple[WeightedSource, ...] | None = None

    @field_validator("sources")
    @classmethod
    def _empty_is_none(cls, sources: tuple[WeightedSource, ...] | None) -> tuple[WeightedSource, ...] | None:
        return sources or None  # `sources = []` overrides the list of an extended file

    @model_validator(mode="after")
    def _has_one_form(self) -> "ProblemsConfig":
        # Compare with the defaults, because in a section that was loaded from JSON every field is set.
        fields = [n for n, field in ProblemSource.model_fields.items() if getattr(self, n) != field.default]
        if self.sources and fields:
            default = ProblemSource.model_fields[fields[0]].default
            raise ValueError(
                f"`{fields[0]}` and `sources` are both set: put it into an entry of `sources`, or leave out one of "
                f"the two (of a file that this one extends, by `sources = []` or `{fields[0]} = {json.dumps(default)}`)"
            )
        return self


class SuperviseConfig(StartSection):
    """Supervised training on worked solutions: prompt, rationale, answer. Not of the paper.

    For a model that solves too few problems for reinforcement to find a signal in.
    """

    problems: ProblemsConfig  # with rationales: of "reasoning", "gsm8k", "math" or a file
    # Tokens of a prompt with its reply; longer rows are left out, and counted. None: the context of the model.
    row_length: PositiveInt | None = None
    epochs: PositiveInt = 1  # passes over the rows
    batch_rows: PositiveInt = 16  # rows in an update; that of fewer, at the end, has a learning rate that much lower
    optimizer: OptimizerConfig
    skip_limit: NonNegativeInt = 5  # updates in a row that may be skipped for a gradient that is not finite
    save_every: Operational[PositiveInt] = 100  # updates between checkpoints to resume from
    fsdp: Operational[PositiveInt] = 1  # devices that parameters are split over; the rest of the mesh splits rows alone


class RolloutConfig(Section):
    """Sampling of completions. A step has `prompts` problems with `group` completions each (paper §4.2: four)."""

    prompts: PositiveInt
    group: int = Field(default=4, ge=2)  # an advantage compares completions of one prompt
    max_tokens: PositiveInt  # of a completion
    prompt_length: PositiveInt = 64  # tokens; a longer prompt is an error before anything runs
    temperature: PositiveFloat = 1.0
    top_k: NonNegativeInt = 0  # sample from the so many likeliest tokens; 0: all
    top_p: Share = 1.0  # sample from the likeliest tokens with this total probability
    thinking_budget: PositiveInt | None = None  # tokens of reasoning, after which the end of thinking is inserted


class PolicyConfig(Section):
    """Settings of the learner, for the stages align and reason."""

    steps: PositiveInt
    optimizer: OptimizerConfig
    kl: NonNegativeFloat = 0.0  # weight of the KL divergence from the policy at the start of the stage; 0: none
    # Reward minus the group's mean ("dr", paper §4.2), or also divided by its standard deviation ("std", as in GRPO).
    advantage: Literal["dr", "std"] = "dr"
    # Equal weight of all tokens of a group ("group_tokens", paper §4.2), or of all completions ("sequence_mean").
    aggregate: Literal["group_tokens", "sequence_mean"] = "group_tokens"
    # A group's share of the loss: one of the groups with a signal ("live"), or of all that the step drew ("drawn"),
    # so that a step in which few groups have a signal is a small one.
    group_weights: Literal["live", "drawn"] = "live"
    # Leave completions that were cut at `rollout.max_tokens` out of the loss (DAPO's overlong filtering). Their rewards
    # still count in the mean of their group.
    mask_truncated: bool = False
    temperature: PositiveFloat | None = None  # of the learner's log-probabilities; None: that of `rollout`
    ratio: bool = True  # weigh by the clipped probability ratio to the sampler's policy; false: treat as on-policy
    # Updates that are not weighed by that ratio: weigh each token by the ratio to the sampler's program, at most this
    # (truncated importance sampling; 2 is usual). None: by 1, as if both programs computed the same.
    importance_cap: PositiveFloat | None = None
    inner_epochs: PositiveInt = 1  # passes over the rollouts of a step
    sync_every: PositiveInt = 1  # steps between copies of the policy to the sampler
    skip_limit: NonNegativeInt = 5  # updates in a row that may be skipped for a gradient that is not finite
    micro_rows: Operational[PositiveInt] = 8  # completions of a micro-batch, at most; only affects memory
    refill: NonNegativeInt = 3  # most additional draws to replace groups without a signal (all rewards equal)
    save_every: Operational[PositiveInt] = 10  # steps between checkpoints to resume from
    guard_every: PositiveInt | None = None  # steps between evaluations of the guard set; None: no guard
    # Number of guard problems; None: all of the guard split, at most MOST_GUARD.
    guard_problems: int | None = Field(default=None, ge=SMALLEST_GUARD)
    guard_action: Literal["stop", "roll_back"] = "stop"  # if two readings in a row are worse than the best one
    guard_returns: PositiveInt = 2  # "roll_back": how often to roll back to the best policy before stopping
    train: tuple[str, ...] = ()  # names of parameters or blocks ("blocks.7", "blocks.attention"); empty: all of them
    fsdp: Operational[PositiveInt] = 1  # devices that parameters are split over; the rest of the mesh splits rows alone


class JudgeConfig(Section):
    """The judge: its endpoint, and the weights of the reward (paper §4.2)."""

    endpoint: Worker[str]
    reason_weight: Share = 0.30  # of the score for the reasoning
    answer_weight: Share = 0.55  # of the score for the answer
    follow_weight: Share = 0.15  # of the score for following the instruction
    # What the judge is told to mark, in place of our rubric: it must define the marks reason, answer and follow from 1
    # to 5, and overall from 0 to 100.
    rubric: Worker[Annotated[str, Field(pattern=r"\S")] | None] = None
    reference: bool = False  # show the judge the right answer, where one is known: the reward is then nearly verifiable
    overlong_penalty: NonNegativeFloat = 0.5  # subtracted from the reward of a completion cut at `rollout.max_tokens`
    overlong_tokens: NonNegativeInt = 0  # the penalty rises linearly over so many tokens before the limit; 0: no ramp
    mastered_mean: float = 90.0  # a group whose overall scores (0 to 100) have a higher mean than this (rl/rewards.py)
    mastered_minimum: float = 85.0  # and a higher minimum than this is mastered, and left out
    max_tokens: PositiveInt = 64  # of a judge's reply
    calibration_items: NonNegativeInt = 32  # answers of known quality that the judge is measured on, in four kinds
    compare: Worker[tuple[str, ...]] = ()  # further endpoints to calibrate for comparison, only for the report
    hostile_items: NonNegativeInt = 80  # answers with a prompt injection: 40 forms, around right and wrong answers

    @property
    def endpoints(self) -> list[str]:
        """The names of all endpoints that act as judges."""
        return list(dict.fromkeys((self.endpoint, *self.compare)))


class PolicyGradientConfig(StartSection):
    """Common fields of the two policy-gradient stages."""

    rollout: RolloutConfig
    policy: PolicyConfig

    @model_validator(mode="after")
    def _samples_the_policy(self) -> "PolicyGradientConfig":
        """Refuse top-k and top-p: the policy gradient is valid only for completions sampled from the whole policy."""
        for name, value, off in (("top_k", self.rollout.top_k, 0), ("top_p", self.rollout.top_p, 1.0)):
            if value != off:
                raise ValueError(
                    f"rollout.{name} is {value}: top-k and top-p leave tokens out that the policy may choose, so the "
                    f"gradient would be that of another policy; set rollout.{name} = {off}. rollout.temperature may "
                    "have any value: the learner uses it too (or that of policy.temperature)"
                )
        return self


class AlignConfig(PolicyGradientConfig):
    """Stage 1, Dr. GRPO with an LLM judge (paper §4.2)."""

    judge: JudgeConfig
    problems: ProblemsConfig
    # Problems with answers for the guard and for the calibration of the judge; None: those of `problems` that have one.
    answered: ProblemsConfig | None = None


class ReasonConfig(PolicyGradientConfig):
    """Stage 2, gradient-balanced GRPO (paper §4.3)."""

    problems: ProblemsConfig
    # Of a completion: "verifiable" is 1 for a right answer, else 0 (paper §4.3); another is a plug-in's.
    reward: RewardName = DEFAULT_REWARD
    # What is made of the gradients of the completions above and below the mean of their group, g+ and g-: an entry of
    # rl/objectives.py, such as "balanced" (paper §4.3), "capped", "plain", "constant" or "positives".
    objective: str = "balanced"
    balance_over: Literal["step", "group"] = "group"  # norms of g+ and g- of each group (paper §4.3), or of the step
    negative_weight: NonNegativeFloat = 0.5  # objective "constant": the factor on g-
    least_success: LeastSuccess = None


class SelfDistillConfig(StartSection):
    """Stage 3, scored self-distillation (paper §4.4)."""

    rollout: RolloutConfig
    problems: ProblemsConfig
    reward: RewardName = DEFAULT_REWARD  # as `reason.reward`; what is above the mean of its group is trained on
    rounds: PositiveInt = 1  # rounds of sampling and training
    epochs: PositiveInt = 1  # passes over the traces of a round
    batch_rows: PositiveInt = 16  # traces in an update; that of fewer, at the end, has a learning rate that much lower
    # The loss of a batch: the mean over traces of advantage times mean cross-entropy ("example", paper §4.4), or over
    # all of its tokens of advantage times cross-entropy ("batch_tokens"), in which long traces weigh more.
    aggregate: Literal["example", "batch_tokens"] = "example"
    # The weight of a trace: its advantage (None, paper §4.4), or 1 for each ("ones"), which is rejection sampling with
    # fine-tuning (RFT, ReST-EM) over the same traces.
    weights: Literal["ones"] | None = None
    optimizer: OptimizerConfig
    least_success: LeastSuccess = None
    skip_limit: NonNegativeInt = 5  # updates in a row that may be skipped for a gradient that is not finite
    fsdp: Operational[PositiveInt] = 1  # devices that parameters are split over; the rest of the mesh splits rows alone
