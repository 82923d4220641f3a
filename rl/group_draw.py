"""The groups of a step: drawn and scored, and drawn again for those that give the update nothing.

A refill draws as many groups as are still missing and leaves the other rows of the batch idle. So every group with a
signal, which a judge may have been paid for, is trained on in the step that drew it, by the policy that sampled it.
"""

from collections.abc import Sequence
from typing import Any, Literal, Protocol

import numpy as np

from data.sources.reasoning_gym import Problem
from model.layers.common import Params
from model.processes import on_first
from rl.problems.load import ProblemOrder
from rl.rewards import AdvantageForm, advantages, carries_signal
from rl.rollouts import Group

CORRECT = "correct"  # the part of a reward that records whether the strict grader accepts the answer
Use = Literal["live", "mastered", "no_signal", "dropped"]
TOTALS = ("groups", "mastered", "no_signal", "dropped", "unscored", "rollouts", "refilled", "missing")


class Scorer(Protocol):
    """Sets `reward` and `parts` of every rollout of the groups; `mastered` is true for groups to skip."""

    def score(self, groups: Sequence[Group]) -> None: ...

    def mastered(self, group: Group) -> bool: ...


class Sampler(Protocol):
    """Samples a group for each (position, problem), as `rl.rollouts.RolloutEngine`."""

    def sample(self, params: Params, problems: Sequence[tuple[int, Problem]], draw: int) -> list[Group]: ...


class GroupDraw:
    """Draws problems in their order and counts what became of their groups.

    State: `cursor`, the position of the next problem; `draw`, the number of draws, which seeds the samples; `totals`.
    Of the totals `refilled` counts the groups of all refills, and `missing` those that steps lacked after the last one.
    Of several processes only the first scores, and a judge is paid once; the others need no `scorer`.
    """

    def __init__(
        self,
        problems: Sequence[Problem],
        order: ProblemOrder,
        sampler: Sampler,
        scorer: Scorer | None,
        refill: int,
        advantage: AdvantageForm = "dr",
    ) -> None:
        self.problems, self.order, self.sampler, self.scorer, self.refill = problems, order, sampler, scorer, refill
        self.advantage = advantage
        self.cursor, self.draw = 0, 0
        self.totals = dict.fromkeys(TOTALS, 0)

    def step(self, params: Params, wanted: int) -> tuple[list[Group], list[Group], dict[str, float]]:
        """Draw until `wanted` groups carry a signal, at most 1 + `refill` times.

        Returns those groups, all that were drawn, and the metrics of all.
        """
        live: list[Group] = []
        every: list[Group] = []
        uses: list[Use] = []
        for number in range(1 + self.refill):
            count = wanted - len(live)
            if not count:
                break
            positions = range(self.cursor, self.cursor + count)
            problems = [(position, self.problems[self.order[position]]) for position in positions]
            groups = self.sampler.sample(params, problems, self.draw)
            self.cursor, self.draw = self.cursor + count, self.draw + 1
            mastered = self._score(groups)
            every += groups
            uses += [self._judge(group, skip) for group, skip in zip(groups, mastered, strict=True)]
            live = [group for group, use in zip(every, uses, strict=True) if use == "live"]
            self.totals["refilled"] += count if number else 0
        self.totals["missing"] += wanted - len(live)
        return live, every, measure(every, uses)

    def _score(self, groups: Sequence[Group]) -> list[bool]:
        """Have the first process score the groups, and give every process the rewards; which groups are mastered."""

        def score() -> list[dict[str, Any]]:
            assert self.scorer
            self.scorer.score(groups)
            return [
                {"scores": [(r.reward, r.parts) for r in group.rollouts], "mastered": self.scorer.mastered(group)}
                for group in groups
            ]

        rows = on_first(score)
        for group, row in zip(groups, rows, strict=True):
            for rollout, (reward, parts) in zip(group.rollouts, row["scores"], strict=True):
                rollout.reward, rollout.parts = reward, parts
        return [row["mastered"] for row in rows]

    def _judge(self, group: Group, mastered: bool) -> Use:
        """Give the rollouts their advantages, and count the group by its use for the update."""
        values = advantages([rollout.reward for rollout in group.rollouts], self.advantage)
        for rollout, advantage in zip(group.rollouts, values, strict=True):
            rollout.advantage = advantage
        use: Use = "live"
        if all(advantage is None for advantage in values):
            use = "dropped"
        elif mastered:
            use = "mastered"
        elif not carries_signal(values):
            use = "no_signal"
        self.totals["groups"] += 1
        self.totals["rollouts"] += len(group.rollouts)
        self.totals["unscored"] += sum(rollout.reward is None for rollout in group.rollouts)
        if use != "live":
            self.totals[use] += 1
        return use


def measure(groups: Sequence[Group], uses: Sequence[Use]) -> dict[str, float]:
    """The metrics that a practitioner looks at first. A mean over nothing is left out, not zero.

    Of the groups, the shares that are mastered, that have a score but no signal (all rewards are equal), and that are
    dropped because fewer than two completions have a score; the rest are trained on.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    metrics = {
        "zero_signal_share": uses.count("no_signal") / len(groups),
        "mastered_share": uses.count("mastered") / len(groups),
        "dropped_share": uses.count("dropped") / len(groups),
        "unscored": float(len(rollouts) - len(rewards)),
        "truncated_share": sum(rollout.truncated for rollout in rollouts) / len(rollouts),
        "length": float(np.mean([len(rollout.ids) for rollout in rollouts])),
        "finished_thinking_share": sum(r.reply.finished_thinking for r in rollouts) / len(rollouts),
    }
    if rewards:
        metrics |= {"reward": float(np.mean(rewards)), "reward_deviation": float(np.std(rewards))}
    for name in sorted({name for rollout in rollouts for name in rollout.parts}):
        values = [r.parts[name] for r in rollouts if isinstance(r.parts.get(name), int | float)]
        if values:
            metrics["solve_rate" if name == CORRECT else f"reward_{name}"] = float(np.mean(values))
    return metrics
