"""Rewards, and advantages within a group (paper §4.2): verifiable and judged rewards, signal, mastered groups.

`[reason] reward` and `[self_distill] reward` name an entry of the registry of rewards (`configs.rewards`): a function
of a problem and a completion, or a `Reward`. The default, `verifiable`, is computed where the stage is; every other in
processes of its own (`rl.reward_runner`). The judge's reward of `[align]` is none of them: its marks come from an
endpoint.

A reward is a number or `None`, which means that there is no score. A completion without a score does not count as
zero: it is left out of the group's mean and of the update.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from nautile.common.errors import ConfigError
from nautile.configs.rewards import REWARDS
from nautile.configs.training import JudgeConfig
from nautile.data.chat_template import ParsedReply
from nautile.data.sources.reasoning_gym import Problem, own_score
from nautile.evals.benchmarks.items import grade
from nautile.evals.benchmarks.stand_ins import problem_item
from nautile.rl.judge import JudgeScore

AdvantageForm = Literal["dr", "std"]

MINIMUM_SCORED = 2  # scores that a group needs for an advantage: a single one equals its mean
ROUNDING = 1e-9  # an advantage, or a standard deviation, up to this is the rounding error of equal rewards
MEASURED = 64  # problems whose completions `SuccessRate` judges: those of one problem are much alike


@dataclass(frozen=True)
class SampledReply(ParsedReply):
    """A sampled reply, its `length` in tokens, and whether it was cut off at `rollout.max_tokens` (`truncated`)."""

    length: int
    truncated: bool


@dataclass(frozen=True)
class Reward:
    """An entry of the registry of rewards: its function, and how it is called (`rl.reward_runner`).

    `score`: (problem, reply) -> number or None; with `batch`, (problems, replies), lists of at most so many, -> a list
    of numbers or None. `time_limit_s`: of a call. `workers`: processes that make calls at the same time. `attempts`:
    calls that are made, with growing pauses, for one that fails. `version`: without one, the digest of its source.
    """

    score: Callable[..., Any]
    batch: int | None = None
    time_limit_s: float = 10.0
    workers: int = 1
    attempts: int = 1
    version: int | None = None

    def __post_init__(self) -> None:
        for name in ("batch", "workers", "attempts"):
            value = getattr(self, name)
            if not (value is None and name == "batch") and not (type(value) is int and value >= 1):
                raise ValueError(f"a reward's `{name}` is {value!r}, and must be a whole number from 1")
        if not 0 < self.time_limit_s < math.inf:
            raise ValueError(f"a reward's `time_limit_s` is {self.time_limit_s!r}, and must be above 0")

    def __call__(self, *arguments: Any) -> Any:
        return self.score(*arguments)


def reward(**settings: Any) -> Callable[[Callable[..., Any]], Reward]:
    """Decorate a function as a reward with the fields of `Reward`: `@reward(batch=16, time_limit_s=60, workers=4)`."""
    return lambda score: Reward(score, **settings)


Score = Callable[[Sequence[tuple[Problem, SampledReply]]], list[float | None]]  # rewards of a batch of completions


def sampled_reply(reply: ParsedReply, length: int, truncated: bool) -> SampledReply:
    """What a reward sees of a completion of `length` tokens."""
    return SampledReply(reply.reasoning, reply.answer, reply.finished_thinking, reply.finished, length, truncated)


def reward_named(name: str) -> Reward:
    """The reward of that name. Raises `ConfigError` if a plug-in's cannot be imported."""
    entry = REWARDS[name]
    return entry if isinstance(entry, Reward) else Reward(entry, version=getattr(entry, "version", None))


def graded_item(problem: Problem, reply: SampledReply) -> dict[str, Any]:
    """All that a reward sees, as JSON data."""
    fields = {name: value for name, value in vars(problem).items() if name != "operations"}
    return {"problem": fields, "reply": vars(reply)}


def verifiable(problem: Problem, reply: ParsedReply) -> float | None:
    """Verifiable reward (paper §4.3): 1.0 if the strict grader of the evaluations accepts the reply, else 0.0.

    None if the grader gave no verdict.
    """
    strict = grade(problem_item("rollout", problem.index, problem), reply).verdict.strict
    return None if strict is None else float(strict)


@reward(time_limit_s=60.0, version=1)  # another with a new version of the package, whose scorers may differ
def reasoning_gym(problem: Problem, reply: SampledReply) -> float | None:
    """The score of reasoning-gym's own scorer, from 0 to 1, often with partial credit; None of another's problem."""
    return own_score(problem, reply.answer)


@dataclass
class SuccessRate:
    """The share of right completions of a stage's first `MEASURED` problems; stops it where `least` is not reached.

    `problems`, `graded`, `right`: counts so far; a completion that could not be graded is in no share.
    """

    stage: str
    least: float | None
    problems: int = 0
    graded: int = 0
    right: int = 0

    def add(self, problems: int, verdicts: Sequence[float | None], *, last: bool) -> None:
        """Add the verdicts of so many problems; with the last that are measured, raise `ConfigError` below `least`."""
        if self.problems >= MEASURED:
            return
        graded = [verdict for verdict in verdicts if verdict is not None]
        self.problems, self.graded = self.problems + problems, self.graded + len(graded)
        self.right += sum(verdict == 1 for verdict in graded)
        if not self.least or not self.graded or not (last or self.problems >= MEASURED):
            return
        if self.right < self.least * self.graded:
            raise ConfigError(
                f"{self.stage}: {self.right} of its first {self.graded:,} completions, of {self.problems} problems, "
                f"are right ({self.right / self.graded:.1%}), fewer than {self.stage}.least_success = {self.least:g}: "
                "it would have next to no right one to learn from. Train on worked solutions first, by a section "
                '[supervise] with problems = { source = "gsm8k", count = 7000 } (docs/problems.md), pretrain for '
                f"longer, or choose easier {self.stage}.problems; {self.stage}.least_success = 0 goes on"
            )


def judged(
    score: JudgeScore | None, config: JudgeConfig, length: int, max_tokens: int, truncated: bool
) -> float | None:
    """Reward from a judge's marks (paper §4.2, reward design); None without marks.

    r = 0.5 * (0.30 reason + 0.55 answer + 0.15 follow) / 5 + 0.5 * overall / 100, less the overlong penalty of a
    completion of `length` tokens, of at most `max_tokens`. The weights come from `config`.
    """
    if score is None:
        return None
    criteria = (
        config.reason_weight * score.reason + config.answer_weight * score.answer + config.follow_weight * score.follow
    )
    return 0.5 * criteria / 5 + 0.5 * score.overall / 100 - overlong(config, length, max_tokens, truncated)


def overlong(config: JudgeConfig, length: int, max_tokens: int, truncated: bool) -> float:
    """The overlong penalty of paper §4.2, which gives no formula: from 0 to `config.overlong_penalty`.

    It rises linearly over the last `config.overlong_tokens` tokens before `max_tokens`, as in the author's code and in
    DAPO (arXiv:2503.14476, soft overlong punishment). Without such tokens only a completion that was cut off has it.
    """
    ramp = min(config.overlong_tokens, max_tokens)
    over = 0.0 if not ramp else max(0.0, length - (max_tokens - ramp)) / ramp
    return config.overlong_penalty * (1.0 if truncated else min(over, 1.0))


def advantages(rewards: Sequence[float | None], form: AdvantageForm = "dr") -> list[float | None]:
    """Group-relative advantages A_i = r_i - mean(r) over the scored completions of one group (Dr. GRPO, paper §4.2).

    `form` "std" divides them by the population standard deviation of the group (over n), as GRPO does. All are `None`
    if fewer than two completions are scored; a reward that is no finite number is missing. Rewards that are equal, or
    differ by rounding errors alone, give exactly zero, since even an advantage of 1e-17 would count as a signal.
    """
    rewards = [known(reward) for reward in rewards]
    scored = [reward for reward in rewards if reward is not None]
    if len(scored) < MINIMUM_SCORED:
        return [None] * len(rewards)
    # Sums of equal numbers are rounded: the mean of ten times 0.1 is not 0.1. Differences of equal numbers are exact.
    base = scored[0]
    shift = sum(reward - base for reward in scored) / len(scored)
    centred = [None if reward is None else (reward - base) - shift for reward in rewards]
    scale = 1.0
    if form == "std":
        deviation = math.sqrt(sum(value * value for value in centred if value is not None) / len(scored))
        scale = 1.0 / deviation if deviation > ROUNDING else 0.0
    scaled = [None if value is None else value * scale for value in centred]
    return [value if value is None or abs(value) > ROUNDING else 0.0 for value in scaled]


def known(reward: float | None) -> float | None:
    """The reward; None, as for a missing one, if it is NaN or infinite: a group's mean would be that too."""
    return reward if reward is not None and math.isfinite(reward) else None


def carries_signal(group: Sequence[float | None]) -> bool:
    """Whether any completion of the group has a positive or negative advantage."""
    return any(advantage not in (None, 0.0) for advantage in group)


def is_mastered(overalls: Sequence[float | None], mean_above: float = 90.0, minimum_above: float = 85.0) -> bool:
    """Whether a group is skipped as mastered (paper §4.2): overall marks above 90 on average, and each above 85.

    The paper says that "every completion receives an overall score above ~90 (and a minimum above ~85)". Read as the
    mean, as in the author's code, both numbers mean something. An unscored completion may be a low one: not mastered.
    """
    if not overalls or any(overall is None for overall in overalls):
        return False
    marks = [overall for overall in overalls if overall is not None]
    return sum(marks) / len(marks) > mean_above and min(marks) > minimum_above
