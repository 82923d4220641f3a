"""Sampling and scoring of a step's groups, with refills for groups that carry no signal.

A refill samples only as many groups as are still missing and leaves the other rows of the batch empty. So every group
with a signal, whose judge may have been paid, is trained on in the step that sampled it, by the policy that sampled it.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

import numpy as np

from nautile.data.sources.reasoning_gym import Problem
from nautile.model.layers.common import Params
from nautile.model.processes import on_first
from nautile.rl.problems.load import ProblemOrder
from nautile.rl.rewards import AdvantageForm, advantages, carries_signal, known
from nautile.rl.rollouts import Group

CORRECT = "correct"  # the entry of `Rollout.parts` that says whether the strict grader accepts the answer
# What becomes of a group: trained on; skipped as mastered; all rewards equal (with `mask_truncated`, or no advantage
# but those of completions that were cut); fewer than two completions scored.
Use = Literal["live", "mastered", "no_signal", "dropped"]
TOTALS = ("groups", "mastered", "no_signal", "dropped", "unscored", "rollouts", "refilled", "missing")


class Scorer(Protocol):
    """Sets `reward` and `parts` of every rollout of the groups; `mastered` says which groups to skip."""

    def score(self, groups: Sequence[Group]) -> None: ...

    def mastered(self, group: Group) -> bool: ...


class Sampler(Protocol):
    """Samples a group for each (position, problem), as `rl.rollouts.RolloutEngine`."""

    def sample(self, params: Params, problems: Sequence[tuple[int, Problem]], draw: int) -> list[Group]: ...


class GroupDraw:
    """Samples groups for the next problems, scores them, and counts them by their use.

    State: `cursor`, the position of the next problem; `draw`, the number of draws so far, which seeds the samples; and
    `totals`, in which `refilled` counts the groups of all refills and `missing` those that steps lacked after the last
    refill. In a run of several processes only the first one scores, so that a judge is paid once; the others need no
    `scorer`.
    """

    def __init__(
        self,
        problems: Sequence[Problem],
        order: ProblemOrder,
        sampler: Sampler,
        scorer: Scorer | None,
        refill: int,
        advantage: AdvantageForm = "dr",
        mask_truncated: bool = False,
    ) -> None:
        self.problems, self.order, self.sampler, self.scorer, self.refill = problems, order, sampler, scorer, refill
        self.advantage, self.mask_truncated = advantage, mask_truncated
        self.cursor, self.draw = 0, 0
        self.totals = dict.fromkeys(TOTALS, 0)

    def step(self, params: Params, target: int) -> tuple[list[Group], list[Group], dict[str, float]]:
        """Sample until `target` groups carry a signal, in at most 1 + `refill` draws.

        Returns the groups with a signal, all groups that were sampled, and the metrics over all of them.
        """
        live_groups: list[Group] = []
        all_groups: list[Group] = []
        uses: list[Use] = []
        for attempt in range(1 + self.refill):
            missing = target - len(live_groups)
            if not missing:
                break
            # As many new problems as are missing: each problem is drawn once in an epoch, refill or not.
            positions = range(self.cursor, self.cursor + missing)
            problems = [(position, self.problems[self.order[position]]) for position in positions]
            groups = self.sampler.sample(params, problems, self.draw)
            self.cursor, self.draw = self.cursor + missing, self.draw + 1
            mastered = self._score(groups)
            all_groups += groups
            uses += [self._classify(group, is_mastered) for group, is_mastered in zip(groups, mastered, strict=True)]
            live_groups = [group for group, use in zip(all_groups, uses, strict=True) if use == "live"]
            self.totals["refilled"] += missing if attempt else 0
        self.totals["missing"] += target - len(live_groups)
        return live_groups, all_groups, group_metrics(all_groups, uses)

    def _score(self, groups: Sequence[Group]) -> list[bool]:
        """Score the groups on the first process and share the rewards with all; returns which groups are mastered."""

        def score() -> list[dict[str, Any]]:
            assert self.scorer
            self.scorer.score(groups)
            return [
                {
                    "scores": [(known(r.reward), r.parts) for r in group.rollouts],
                    "mastered": self.scorer.mastered(group),
                }
                for group in groups
            ]

        rows = on_first(score)
        for group, row in zip(groups, rows, strict=True):
            for rollout, (reward, parts) in zip(group.rollouts, row["scores"], strict=True):
                rollout.reward, rollout.parts = reward, parts
        return [row["mastered"] for row in rows]

    def _classify(self, group: Group, mastered: bool) -> Use:
        """Set the advantages of a group's rollouts, and count the group by its use for the update."""
        values = advantages([rollout.reward for rollout in group.rollouts], self.advantage)
        for rollout, advantage in zip(group.rollouts, values, strict=True):
            rollout.advantage = advantage
        use: Use = "live"
        # The order decides: a group without scores cannot be judged mastered, and a mastered one may still have a
        # signal.
        if all(advantage is None for advantage in values):
            use = "dropped"
        elif mastered:
            use = "mastered"
        elif not carries_signal([rollout.advantage for rollout in group.trained(self.mask_truncated)]):
            use = "no_signal"
        self.totals["groups"] += 1
        self.totals["rollouts"] += len(group.rollouts)
        self.totals["unscored"] += sum(rollout.reward is None for rollout in group.rollouts)
        if use != "live":
            self.totals[use] += 1
        return use


def without_update(totals: Mapping[str, int]) -> str:
    """Why groups counted as in `GroupDraw.totals` led to no update."""
    groups = totals["groups"]
    if totals["unscored"] == totals["rollouts"]:
        return "no completion was scored"
    reasons = {
        "no_signal": "had equal rewards",
        "mastered": "were mastered",
        "dropped": "had fewer than two scored completions",
    }
    counts = {text: totals[use] for use, text in reasons.items() if totals[use]}
    if sum(counts.values()) < groups:
        return "no update was finite"
    if len(counts) == 1:
        return f"all {groups} groups {next(iter(counts))}"
    return f"of {groups} groups {', '.join(f'{count} {text}' for text, count in counts.items())}"


def group_metrics(groups: Sequence[Group], uses: Sequence[Use]) -> dict[str, float]:
    """Metrics of a step's groups: shares by use, rewards, lengths, solve rate. A mean over nothing is left out.

    The shares of groups that are not trained on are `mastered_share`, `zero_signal_share` (all rewards are equal) and
    `dropped_share` (fewer than two completions have a score). `length` is the mean number of sampled tokens.
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
    # The mean of each numeric part of the rewards, such as a judge's marks, over the rollouts that have it.
    for name in sorted({name for rollout in rollouts for name in rollout.parts}):
        values = [r.parts[name] for r in rollouts if isinstance(r.parts.get(name), int | float)]
        if values:
            metrics["solve_rate" if name == CORRECT else f"reward_{name}"] = float(np.mean(values))
    return metrics
