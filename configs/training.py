"""The sections of the training stages: pretraining (paper §3.1), and the three reinforcement stages (paper §4)."""

import json
import re
from typing import Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from configs.base import Operational, OptimizerConfig, Section, Share, TaskConfig

SMALLEST_GUARD = 8  # problems: with fewer the guard's test never rejects (2 / 2**8 < 0.01)
MOST_GUARD = 400  # problems of a guard split that are read unless a configuration asks for more; GSM8K has 393


class StartSection(Section):
    """The section of a step that may begin from a checkpoint of the store instead of the one made before it.

    `start`: "checkpoint/ID", "newest", or "newest:LABEL", the newest of that label or stage. What it means is
    looked up before anything runs (`flows.starts`); the checkpoint is an input of the step, and in its key as one.
    """

    start: str | None = None

    @field_validator("start")
    @classmethod
    def _is_an_id_or_newest(cls, start: str | None) -> str | None:
        if start is not None and not re.fullmatch(r"checkpoint/[0-9a-f]{1,64}|newest(:\S+)?", start):
            raise ValueError(f'{start!r} must be "checkpoint/ID", "newest" or "newest:LABEL", as in "newest:align"')
        return start


class PhaseConfig(Section):
    """A stretch of pretraining."""

    name: str
    tokens: PositiveInt  # its length
    mixture: dict[str, PositiveFloat]  # token source -> weight; rows are drawn in proportion


class PretrainConfig(StartSection):
    """Paper §3.1: phase 1 on web text, phase 2 on SYNTH with the distilled documents."""

    phases: tuple[PhaseConfig, ...]
    batch_rows: PositiveInt  # rows in an update, over all devices
    micro_rows: Operational[PositiveInt | None] = (
        None  # rows at a time, at least one a device; None: all of `batch_rows`
    )
    optimizer: OptimizerConfig = OptimizerConfig()
    loss_chunk: Operational[PositiveInt] = 128  # positions whose logits are in memory together
    z_loss: NonNegativeFloat = 0.0  # weight of the squared log-partition, which keeps logits small
    fsdp: Operational[PositiveInt] = 1  # devices that parameters are split over; the rest of the mesh splits rows alone
    save_every: Operational[PositiveInt] = 1000  # steps between checkpoints to resume from
    keep: Operational[PositiveInt] = 3  # newest checkpoints that stay on disk
    log_every: Operational[PositiveInt] = 10  # steps over which a row of metrics is averaged
    validate_every: Operational[PositiveInt] = 1000  # steps
    validation_rows: Operational[PositiveInt] = 64  # rows of each source in a validation
    sample_every: Operational[PositiveInt] = 5000  # steps between samples of text
    skip_limit: NonNegativeInt = 5  # updates in a row that may be skipped for a loss or gradient that is not finite
    spike_factor: NonNegativeFloat = 10.0  # a spike is so many robust deviations above the recent median; 0: ignore
    spike_steps: NonNegativeInt = 3  # spikes in a row that are tolerated
    rollbacks: NonNegativeInt = 3  # times to go back to a checkpoint and skip the rows after it, before giving up


class ProblemSource(Section):
    """Where problems come from: generators, a training set of the Hub (`rl.problems.sets`), or a file of one's own."""

    source: Literal[
        "reasoning", "gsm8k", "math", "arc_easy", "arc_challenge", "commonsense_qa", "openbookqa", "jsonl"
    ] = "reasoning"
    tasks: tuple[TaskConfig, ...] = ()  # source "reasoning": what it generates
    revision: str = ""  # a training set: a commit of the Hub instead of the pinned one
    path: str = ""  # source "jsonl": a file of {question, answer, ...}; docs/problems.md has its format
    license: Operational[str] = ""  # of the problems, for the cards of models that are trained on them


class WeightedSource(ProblemSource):
    """One of several sources; `weight` is its share of the problems, relative to the weights of the others."""

    weight: PositiveFloat = 1.0


class ProblemsConfig(ProblemSource):
    """A set of problems with checkable answers, or prompts for the judge: of one source, or of several by weight."""

    count: PositiveInt = 1024  # of all sources together
    sources: tuple[WeightedSource, ...] | None = None

    @field_validator("sources")
    @classmethod
    def _empty_is_none(cls, sources: tuple[WeightedSource, ...] | None) -> tuple[WeightedSource, ...] | None:
        return sources or None  # `sources = []` takes back the list of a file that is extended

    @model_validator(mode="after")
    def _has_one_form(self) -> "ProblemsConfig":
        # Compared with the defaults, because a section that was written out as JSON has every field set.
        both = [n for n, field in ProblemSource.model_fields.items() if getattr(self, n) != field.default]
        if self.sources and both:
            default = ProblemSource.model_fields[both[0]].default
            raise ValueError(
                f"`{both[0]}` and `sources` are both given: put it into an entry of `sources`, or leave out one of "
                f"the two (of a file that this one extends, by `sources = []` or `{both[0]} = {json.dumps(default)}`)"
            )
        return self


class RolloutConfig(Section):
    """How completions are sampled. A step has `prompts` questions with `group` completions each (paper §4.2: four)."""

    prompts: PositiveInt
    group: int = Field(default=4, ge=2)  # an advantage compares completions of one prompt
    max_tokens: PositiveInt  # of a completion
    prompt_length: PositiveInt = 64  # tokens; a problem with a longer prompt is refused before anything runs
    temperature: PositiveFloat = 1.0
    top_k: NonNegativeInt = 0  # sample among so many likeliest tokens; 0: all
    top_p: Share = 1.0  # sample among the likeliest tokens that have this probability together
    thinking_budget: PositiveInt | None = None  # tokens of reasoning, after which the end of thinking is inserted


class PolicyConfig(Section):
    """The learner's settings, shared by the reinforcement stages."""

    steps: PositiveInt
    optimizer: OptimizerConfig
    kl: NonNegativeFloat = 0.0  # weight of the divergence from the policy that the stage began with; 0: none
    # Reward minus the group's mean ("dr", paper §4.2), or that divided by the group's deviation ("std", as in GRPO).
    advantage: Literal["dr", "std"] = "dr"
    # Every token of a group weighs alike ("group_tokens", paper §4.2), or every completion's mean ("sequence_mean").
    aggregate: Literal["group_tokens", "sequence_mean"] = "group_tokens"
    ratio: bool = True  # weigh by the probability ratio to the sampler's policy, and clip; false: as if they were equal
    clip_ratio: PositiveFloat = 0.2  # of the probability ratio, as in PPO
    inner_epochs: PositiveInt = 1  # passes over the rollouts of a step
    sync_every: PositiveInt = 1  # steps that the sampler keeps the parameters of its last copy of the policy
    skip_limit: NonNegativeInt = 5  # updates in a row that may be skipped for a gradient that is not finite
    micro_rows: Operational[PositiveInt] = 8  # completions at a time in the gradient, at most; changes memory alone
    refill: NonNegativeInt = 3  # further draws, at most, to replace groups without a signal (all rewards equal)
    save_every: Operational[PositiveInt] = 10  # steps between checkpoints to resume from
    guard_every: PositiveInt | None = None  # steps between evaluations of the guard set; None: no guard
    # In the guard set; None: all of the guard split, at most MOST_GUARD.
    guard_problems: int | None = Field(default=None, ge=SMALLEST_GUARD)
    guard_action: Literal["stop", "roll_back"] = "stop"  # when two readings in a row are worse than the best one
    guard_returns: PositiveInt = 2  # "roll_back": times to return to the best policy before stopping after all
    train: tuple[str, ...] = ()  # names of parameters or blocks ("blocks.7", "blocks.attention"); empty: all of them
    fsdp: Operational[PositiveInt] = 1  # devices that parameters are split over; the rest of the mesh splits rows alone


class JudgeConfig(Section):
    """The judge's rubric and the paper's weights (§4.2)."""

    endpoint: str
    rubric: str = "nautile-judge-3"  # version of the rubric's prompt
    reason_weight: Share = 0.30  # of the score for the reasoning
    answer_weight: Share = 0.55  # of the score for the answer
    follow_weight: Share = 0.15  # of the score for following the instruction
    overlong_penalty: NonNegativeFloat = 0.5  # subtracted from the reward of a completion cut at `max_tokens`
    mastered_mean: float = 90.0  # a group whose overall scores (0 to 100) have a higher mean than this
    mastered_minimum: float = 85.0  # and a higher minimum than this is mastered, and left out
    max_tokens: PositiveInt = 64  # of a judge's reply
    calibration_items: NonNegativeInt = 32  # answers of known quality that the judge is measured on, in four kinds
    compare: tuple[str, ...] = ()  # other endpoints that are measured beside the judge, for the report alone
    compare_items: NonNegativeInt = 24  # answers of known quality that each of them marks, half of them wrong
    hostile_items: NonNegativeInt = 80  # answers that try to tell the judge their marks: 40 forms, right and wrong

    @property
    def endpoints(self) -> list[str]:
        """The names of all endpoints that are asked for marks."""
        return list(dict.fromkeys((self.endpoint, *self.compare)))


class PolicyGradientConfig(StartSection):
    """What both stages of policy gradients have."""

    rollout: RolloutConfig
    policy: PolicyConfig

    @model_validator(mode="after")
    def _samples_the_policy(self) -> "PolicyGradientConfig":
        """A gradient of log pi is one of the policy only if completions were drawn from all of it."""
        for name, value, whole in (("top_k", self.rollout.top_k, 0), ("top_p", self.rollout.top_p, 1.0)):
            if value != whole:
                raise ValueError(
                    f"rollout.{name} is {value}: top-k and top-p leave tokens out that the policy may choose, so the "
                    f"gradient would be that of another policy; set rollout.{name} = {whole}. rollout.temperature may "
                    "be any: the learner computes with it"
                )
        return self


class AlignConfig(PolicyGradientConfig):
    """Stage 1, Dr. GRPO with an LLM judge (paper §4.2)."""

    judge: JudgeConfig
    problems: ProblemsConfig


class ReasonConfig(PolicyGradientConfig):
    """Stage 2, gradient-balanced GRPO (paper §4.3)."""

    problems: ProblemsConfig
    # The gradient of completions below the mean is scaled to the norm of the others' ("equalise"), the same but never
    # amplified ("cap"), left alone ("off") or left out ("positives"); see rl/objectives.py.
    balance: Literal["equalise", "cap", "off", "positives"] = "equalise"
    balance_over: Literal["step", "group"] = "step"  # the norms are of the step's gradients, or of every group's
    balance_max: PositiveFloat | None = None  # upper bound of the factor on that gradient; None: none
    balance_epsilon: PositiveFloat = 1e-8  # added to a norm before dividing by it


class SelfDistillConfig(StartSection):
    """Stage 3, scored self-distillation (paper §4.4)."""

    rollout: RolloutConfig
    problems: ProblemsConfig
    rounds: PositiveInt = 1  # of sampling, then training on the kept traces
    epochs: PositiveInt = 1  # passes over the kept traces of a round
    batch_rows: PositiveInt = 16  # traces in an update
    optimizer: OptimizerConfig
    skip_limit: NonNegativeInt = 5  # updates in a row that may be skipped for a gradient that is not finite
    fsdp: Operational[PositiveInt] = 1  # devices that parameters are split over; the rest of the mesh splits rows alone
