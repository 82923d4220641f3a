"""The training loop of the stages align and reason (paper §4.2 and §4.3): sample groups, score, update, save.

The state is (parameters, optimizer, cursor). The cursor determines the next problems, samples are seeded by draw and
prompt, and paid scores are cached. So a run that was killed at any point resumes and ends with the same bytes.

Groups that carry no signal are replaced by refills of only as many groups as are missing. So every group with a signal,
whose judge may have been paid, is trained on in the step that sampled it, by the policy that sampled it.

The guard measures accuracy on problems of its own, to save the best policy and to stop or roll back when it drops.
Every reading uses the same problems, so policies are compared by McNemar's exact test on those whose outcome differs,
which needs far fewer than separate intervals. A policy "has fallen" when two readings in a row are significantly worse
than the best one: the maximum of many readings is biased upwards (tests/rl/test_guard.py measures the error rates).
"""

import logging
import shutil
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import jax
import numpy as np
from jax.sharding import Mesh

from nautile.common.errors import ConfigError, Retryable
from nautile.common.events import Emit, flush, silent
from nautile.configs.training import SMALLEST_GUARD, PolicyConfig, RolloutConfig
from nautile.data.chat_template import encode_prompt, parse_completion
from nautile.data.sources.reasoning_gym import Problem
from nautile.data.tokenizer import tokenizer_for
from nautile.evals.scoring.intervals import paired
from nautile.model.layers.common import Params
from nautile.model.nautile import shapes
from nautile.model.processes import StopRequested, arrays_of_first, joint_termination, on_first
from nautile.model.sharding import make_mesh, whole_on_hosts
from nautile.model.training.checkpoint import open_checkpoints
from nautile.model.weights.files import load_weights, save_weights
from nautile.rl.learner import Learner
from nautile.rl.objective_registry import Balance
from nautile.rl.policy_gradient import ParameterSubset
from nautile.rl.problems import ProblemOrder
from nautile.rl.rewards import MEASURED, AdvantageForm, SuccessRate, advantages, carries_signal, known, verifiable
from nautile.rl.rollouts import Group, RolloutEngine, StageInputs, append_rows, generator, on_device, truncate_log

CORRECT = "correct"  # the entry of `Rollout.parts` that says whether the strict grader accepts the answer
# What becomes of a group: trained on; skipped as mastered; all rewards equal (with `mask_truncated`, or no advantage
# but those of completions that were cut); fewer than two completions scored.
Use = Literal["live", "mastered", "no_signal", "dropped"]
TOTALS = ("groups", "mastered", "no_signal", "dropped", "unscored", "rollouts", "refilled", "missing")
NOT_GRADED = "-"  # the outcome of a problem whose reply could not be graded
LEVEL = 0.01  # significance level of the two-sided test against the best reading
IN_A_ROW = 2  # consecutive worse readings that stop a run or roll it back
CHECKPOINTS = 3  # from which a run may resume: two are kept, and a third is being written
logger = logging.getLogger(__name__)


class Scorer(Protocol):
    """Sets `reward` and `parts` of every rollout of the groups; `mastered` says which groups to skip."""

    def score(self, groups: Sequence[Group]) -> None: ...

    def mastered(self, group: Group) -> bool: ...


class GroupDraw:
    """Samples groups for the next problems, scores them, and counts them by their use.

    State: `cursor`, the position of the next problem; `draw`, the number of draws so far, which seeds the samples; and
    `totals`, in which `refilled` counts the groups of all refills and `missing` those that steps lacked after the last.
    Only the first process scores, so that a judge is paid once; the others need no `scorer`.
    """

    def __init__(
        self,
        problems: Sequence[Problem],
        order: ProblemOrder,
        sampler: RolloutEngine,
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
        lacking = target - len(live_groups)
        self.totals["missing"] += lacking
        replaced = {"refilled": float(len(all_groups) - target), "missing_groups": float(lacking)}
        return live_groups, all_groups, group_metrics(all_groups, uses) | replaced

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
    """Metrics of a step's groups: shares by use, rewards, lengths in tokens, solve rate. A mean over nothing is left
    out.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    metrics = {
        "live_share": uses.count("live") / len(groups),
        "zero_signal_share": uses.count("no_signal") / len(groups),
        "mastered_share": uses.count("mastered") / len(groups),
        "dropped_share": uses.count("dropped") / len(groups),
        "unscored": float(len(rollouts) - len(rewards)),
        "truncated_share": sum(rollout.truncated for rollout in rollouts) / len(rollouts),
        "length": float(np.mean([len(rollout.ids) for rollout in rollouts])),
        "finished_thinking_share": sum(r.reply.finished_thinking for r in rollouts) / len(rollouts),
    }
    trained = [r for group, use in zip(groups, uses, strict=True) if use == "live" for r in group.trained()]
    for name, sign in (("length_positive", 1), ("length_negative", -1)):
        if lengths := [len(r.ids) for r in trained if sign * (r.advantage or 0.0) > 0]:
            metrics[name] = float(np.mean(lengths))
    if rewards:
        metrics |= {"reward": float(np.mean(rewards)), "reward_deviation": float(np.std(rewards))}
    for name in sorted({name for rollout in rollouts for name in rollout.parts}):
        values = [r.parts[name] for r in rollouts if isinstance(r.parts.get(name), int | float)]
        if values:
            metrics["solve_rate" if name == CORRECT else f"reward_{name}"] = float(np.mean(values))
    return metrics


@dataclass(frozen=True)
class GuardReading:
    """Outcomes of greedy decoding on the guard problems after `step` updates: "1" for solved, "0" for not solved.

    `NOT_GRADED` counts neither way. `p`: p-value of McNemar's exact test against the best earlier reading on the
    problems that both graded, if this one solves fewer of them; else None. `went_back`: the run then rolled back to its
    best policy.
    """

    step: int
    outcomes: str
    p: float | None = None
    went_back: bool = False

    @property
    def correct(self) -> int:
        return self.outcomes.count("1")

    @property
    def graded(self) -> int:
        return len(self.outcomes) - self.outcomes.count(NOT_GRADED)

    @property
    def accuracy(self) -> float | None:
        """The share solved of the problems whose replies were graded; None if none was."""
        return self.correct / self.graded if self.graded else None

    def row(self) -> dict[str, Any]:
        """The reading as a row of the checkpoint's manifest."""
        fields = {"step": self.step, "correct": self.correct, "n": self.graded, "p": self.p}
        return {**fields, "went_back": self.went_back, "outcomes": self.outcomes}


def best_of(readings: Sequence[GuardReading]) -> GuardReading:
    """The reading with the largest share of solved problems; of equal ones the latest, which is trained longer."""
    return max(readings, key=lambda reading: (-1.0 if reading.accuracy is None else reading.accuracy, reading.step))


def compare_reading(step: int, outcomes: str, earlier: Sequence[GuardReading]) -> GuardReading:
    """Make the reading of these outcomes and test it against the best of the earlier ones."""
    reading = GuardReading(step, outcomes)
    if not earlier:
        return reading
    both = [
        (int(a), int(b)) for a, b in zip(best_of(earlier).outcomes, outcomes, strict=True) if NOT_GRADED not in (a, b)
    ]
    best, own = [a for a, _ in both], [b for _, b in both]
    # Only the problems with different outcomes count: many that both solve say nothing about the difference.
    return replace(reading, p=paired(best, own).p) if sum(own) < sum(best) else reading


def has_fallen(readings: Sequence[GuardReading]) -> bool:
    """Whether the last `IN_A_ROW` readings were all worse than the best one, with no roll-back since."""
    last = readings[-IN_A_ROW:]
    return len(last) == IN_A_ROW and all(r.p is not None and r.p < LEVEL and not r.went_back for r in last)


class Guard:
    """Measures the policy on the guard problems, and saves the best one in `folder`, so that a resumed run has it.

    A policy is saved under the number of its step, and kept while the readings or a checkpoint have it as the best: a
    resumed run must find the best policy of its checkpoint. Each process samples its share; the first grades and
    writes.
    """

    def __init__(self, inputs: StageInputs, rollout: RolloutConfig, folder: Path, mesh: Mesh) -> None:
        self.inputs, self.folder, self.mesh = inputs, folder, mesh
        self._tokenizer = tokenizer_for(inputs.tokenizer)
        # Greedy decoding has no sampling noise, so a difference is one of the policies.
        greedy = rollout.model_copy(update={"temperature": 0.0})
        self._generate = generator(inputs.model, self._tokenizer, greedy, mesh)
        self.readings: list[GuardReading] = []
        # Steps of the policies that the checkpoints have as the best, and of those that an earlier attempt left here.
        self._of_checkpoints: deque[int] = deque(maxlen=CHECKPOINTS)
        self._left: set[int] = self._saved_steps()

    def read(self, params: Params, step: int) -> GuardReading:
        """Measure `params`, and save them if no earlier reading is better. A step can be read again."""
        problems = self.inputs.guard_problems
        prompts = [encode_prompt(self._tokenizer, problem.question) for problem in problems]
        completions = self._generate(params, prompts, [(0, index) for index in range(len(prompts))])

        def grade() -> str:
            replies = [parse_completion(self._tokenizer, completion.ids) for completion in completions]
            rewards = [verifiable(problem, reply) for problem, reply in zip(problems, replies, strict=True)]
            return "".join(NOT_GRADED if reward is None else str(int(reward)) for reward in rewards)

        # A resumed run may have readings of steps that it repeats: they are replaced.
        earlier = [reading for reading in self.readings if reading.step < step]
        reading = compare_reading(step, on_first(grade), earlier)
        self.readings = [*earlier, reading]
        # Saved before the checkpoint of the step. A run killed in between repeats the step, and with it this reading.
        if self.best == reading:
            whole = whole_on_hosts(params, self.mesh)
            if jax.process_index() == 0:
                save_weights(self.folder / str(step), whole, self.inputs.model, self.inputs.tokenizer)
                # Only the policies that the readings or a checkpoint have as the best are kept.
                for other in self._saved_steps() - {step, *self._of_checkpoints, *self._left}:
                    shutil.rmtree(self.folder / str(other))
        return reading

    def checkpointed(self) -> None:
        """Keep the best policy for as long as the run may resume from the checkpoint that is saved now."""
        self._of_checkpoints.append(self.best.step)
        if len(self._of_checkpoints) == CHECKPOINTS:  # the earlier attempt's checkpoints are gone by now
            self._left = set()

    @property
    def best(self) -> GuardReading:
        return best_of(self.readings)

    def roll_back(self) -> Params:
        """Record a roll-back in the last reading; returns the best policy."""
        self.readings[-1] = replace(self.readings[-1], went_back=True)
        return self.best_params()

    def best_params(self) -> Params:
        """The parameters of the best policy, in the host memory of every process."""
        if jax.process_index() == 0:
            return arrays_of_first(load_weights(self.folder / str(self.best.step))[0])
        # The other processes pass arrays of the same shapes and receive the values of the first.
        return arrays_of_first(jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes(self.inputs.model)))

    def _saved_steps(self) -> set[int]:
        return {int(path.name) for path in self.folder.glob("*") if path.name.isdigit()}


@dataclass(frozen=True)
class Reinforcement:
    """Inputs of one reinforcement run.

    `identity`: checkpoints with another identity are not resumed. `work`: folder of the checkpoints and the best
    policy. `rollouts`: JSON-lines file that every rollout is appended to. `scorer`: needed by the first process only.
    `shared_disk`: every process sees `work`. `balance`: how the gradients of positive and negative advantages are added
    (paper §4.3); None: their plain sum. `least_success`: see `rl.rewards.SuccessRate`.
    """

    inputs: StageInputs
    rollout: RolloutConfig
    policy: PolicyConfig
    scorer: Scorer | None
    identity: dict[str, Any]
    work: Path
    rollouts: Path
    data_seed: int  # of the order of the problems
    sampling_seed: int  # of the completions
    balance: Balance | None = None
    least_success: float | None = None
    emit: Emit = silent
    shared_disk: bool = True


def check(config: Reinforcement) -> tuple[Mesh, RolloutEngine]:
    """Validate the settings and return the mesh and the rollout engine; raises `ConfigError` if they contradict.

    Nothing is compiled or sampled, and no paid request is sent.
    """
    mesh = make_mesh(config.policy.fsdp, part="policy")
    if config.policy.micro_rows % mesh.size:
        raise ConfigError(
            f"policy.micro_rows is {config.policy.micro_rows}, which is not a multiple of the {mesh.size} devices of "
            "this run"
        )
    inputs = config.inputs
    if config.policy.guard_every is not None and len(inputs.guard_problems) < SMALLEST_GUARD:
        raise ConfigError(
            f"policy.guard_every: the guard split has {len(inputs.guard_problems)} problems, but a significant drop in "
            f"accuracy needs {SMALLEST_GUARD} or more; add problems, or remove guard_every"
        )
    ParameterSubset(inputs.model, config.policy.train)
    engine = RolloutEngine(inputs.model, tokenizer_for(inputs.tokenizer), config.rollout, config.sampling_seed, mesh)
    engine.check([*inputs.problems, *inputs.guard_problems])
    return mesh, engine


def reinforce(config: Reinforcement, params: Params) -> tuple[Params, dict[str, Any]]:
    """Run `policy.steps` updates from `params`; returns the parameters to publish and facts about the run.

    With `policy.guard_every` these are the parameters of the best guard reading. Raises the `ConfigError` of `check`.

    All processes of a pod (`jax.distributed`) call this with the same arguments. Each samples its share of the
    completions and receives all; all update together; the first one scores, reports and writes. On SIGTERM they agree
    on a step, save it and raise `Retryable`; a single process just ends, and a rerun repeats the steps since its last
    checkpoint.
    """
    with joint_termination() as stop_requested:
        return _Run(config, on_device(params)).run(stop_requested)


class _Run:
    def __init__(self, config: Reinforcement, params: Params) -> None:
        self.config, self.inputs, self.is_first = config, config.inputs, jax.process_index() == 0
        self.emit = config.emit if self.is_first else silent
        # Everything that can be refused is refused here, before the learner compiles or a judge is paid.
        self.mesh, self.engine = check(config)
        self.learner = Learner(self.inputs.model, config.policy, config.rollout, params, config.balance, self.mesh)
        order = ProblemOrder(len(self.inputs.problems), config.data_seed)
        self.groups = GroupDraw(
            self.inputs.problems, order, self.engine, config.scorer, config.policy.refill, config.policy.advantage,
            config.policy.mask_truncated,
        )  # fmt: skip
        self.checkpoints = open_checkpoints(
            config.work / "checkpoints", 2, config.identity, self.mesh, shared_disk=config.shared_disk
        )
        self.guard: Guard | None = None
        if config.policy.guard_every is not None:
            self.guard = Guard(self.inputs, config.rollout, config.work / "best", self.mesh)
        self.success = SuccessRate("reason", config.least_success)
        self.step = 0
        self.factors: list[float] = []  # on g-, of all steps: of each group, where a group is balanced by itself

    def run(self, stop_requested: StopRequested) -> tuple[Params, dict[str, Any]]:
        """Run the remaining steps; returns the unsharded parameters, in the memory of every process, and facts."""
        # The guard's first reading is that of the start, with which all later ones are compared.
        self._resume()
        steps = self.config.policy.steps
        self._read_guard()
        while self.step < steps:
            if self.guard is not None and has_fallen(self.guard.readings):
                break
            before = dict(self.groups.totals)
            live_groups, drawn_groups, metrics = self.groups.step(
                self.learner.sampling_params, self.config.rollout.prompts
            )
            # Before the update, and all groups: also those that carry no signal were sampled and paid for.
            self._record(drawn_groups)
            verdicts = [rollout.parts.get(CORRECT) for group in drawn_groups for rollout in group.rollouts]
            self.success.add(len(drawn_groups), verdicts, last=self.step + 1 == steps)
            metrics |= self.learner.update(live_groups, len(drawn_groups))
            self.step += 1
            # Few digits, since a checkpoint has them all.
            self.factors += [float(f"{factor:.4g}") for factor in self.learner.factors] if live_groups else []
            counts = {name: count - before[name] for name, count in self.groups.totals.items()}
            self._warn_of_empty_groups(before["groups"])
            self._report(metrics, "" if live_groups else without_update(counts))
            self._read_guard()
            # Asked in every step by every process, in the same order, because the answer is agreed on by all.
            stopping = stop_requested(self.step) and self.step < steps
            if stopping or self.step % self.config.policy.save_every == 0 or self.step == steps:
                self._save()
            if stopping:
                self.checkpoints.wait()
                raise Retryable(
                    f"reinforcement was asked to stop; it is saved at step {self.step} of {steps}, and a rerun "
                    "resumes there"
                )
        self.checkpoints.close()
        facts: dict[str, Any] = {"steps": self.step, **self.groups.totals}
        facts["skipped_updates"] = self.learner.skipped.total
        facts |= self._update_facts()
        if self.guard is None:
            return whole_on_hosts(self.learner.params, self.mesh), facts
        best = self.guard.best
        facts |= {"guard": [reading.row() for reading in self.guard.readings], "published_step": best.step}
        return self.guard.best_params(), facts

    def _update_facts(self) -> dict[str, Any]:
        """The number of updates, why there is none, and the range of the factor on g-; the last line says the same."""
        facts: dict[str, Any] = {"updates": self.learner.updates}
        note = ""
        if not self.learner.updates:
            facts["no_update"] = without_update(self.groups.totals)
            note = f"no update: {facts['no_update']}"
            logger.warning("the policy is the one that the stage began with: no update, since %s", facts["no_update"])
        elif self.factors and self.config.balance and self.config.balance.objective.by_norms:
            least, middle, most = min(self.factors), statistics.median(self.factors), max(self.factors)
            amplified = sum(factor > 1 for factor in self.factors) / len(self.factors)
            facts["balance_factor"] = {
                "min": least,
                "median": middle,
                "max": most,
                "above_one": amplified,
                "deciles": np.quantile(self.factors, np.arange(1, 10) / 10).tolist(),
            }
            note = f"factor on g- {least:.2f} to {most:.2f}, median {middle:.2f}"
        if note:
            self.emit("progress", done=self.step, total=self.config.policy.steps, unit="steps", note=note)
        return facts

    def _warn_of_empty_groups(self, before: int) -> None:
        """Say once that most groups teach nothing: when the first `MEASURED` are drawn. `before`: drawn earlier."""
        totals, rollout, policy = self.groups.totals, self.config.rollout, self.config.policy
        is_last = before < MEASURED and self.step == policy.steps
        if not (before < MEASURED <= totals["groups"] or is_last) or totals["no_signal"] <= totals["groups"] / 2:
            return
        logger.warning(
            "policy: %d of the first %d groups have equal rewards, and nothing is learnt from them; %s. Raise "
            "rollout.group (%d), choose problems that the policy solves more often, or less often if nearly all are "
            "right, or train on worked solutions first ([supervise], docs/problems.md). policy.refill (%d) draws new "
            "groups in place of such ones, at most so many times in a step",
            totals["no_signal"], totals["groups"], self._solved(), rollout.group, policy.refill,
        )  # fmt: skip

    def _solved(self) -> str:
        """The share of right completions of those groups, and that at which most groups of this size are empty."""
        size, right, graded = self.config.rollout.group, self.success.right, self.success.graded
        # All of a group are wrong with (1 - p)^G, which is a half at p = 1 - 2^(-1/G).
        limit = f"below {1 - 0.5 ** (1 / size):.1%} right most groups of {size} are all wrong"
        return f"{right / graded:.1%} of {graded:,} completions are right, and {limit}" if graded else limit

    def _save(self) -> None:
        """Save the learner's arrays, and as JSON its counters, the draw's state and the readings, after the events of
        before.
        """
        # The readings are part of the state: a resumed run must compare with the same best one.
        readings = [asdict(reading) for reading in self.guard.readings] if self.guard else []
        arrays, learner_state = self.learner.state_to_save()
        draw_state = {"cursor": self.groups.cursor, "draw": self.groups.draw, "totals": self.groups.totals}
        flush(self.emit)
        success = [self.success.problems, self.success.graded, self.success.right]
        other_state = {"guard": readings, "learner": learner_state, "factors": self.factors, "success": success}
        self.checkpoints.save(self.step, arrays, {**draw_state, **other_state})
        if self.guard:
            self.guard.checkpointed()

    def _record(self, groups: list[Group]) -> None:
        """Append the step's rollouts to the log in one write, and emit them as events."""
        if not self.is_first:
            return
        rows = [{"step": self.step, **group.row(i)} for group in groups for i in range(len(group.rollouts))]
        first_index = self.groups.totals["rollouts"] - len(rows)  # `totals` counts the rows of this step already
        append_rows(self.config.rollouts, rows)
        sample_fields = ("task", "question", "expected", "text", "reward", "parts", "advantage", "length", "truncated")
        for index, row in enumerate(rows, first_index):
            # Events count steps from one, as the metrics do. The log counts from zero, because a resumed run compares
            # its steps with the number of steps in the checkpoint (`truncate_log`).
            fields = {"step": row["step"] + 1, **{name: row[name] for name in sample_fields}}
            self.emit("sample", set="rollouts", index=index, **fields)

    def _report(self, metrics: dict[str, float], no_update: str) -> None:
        """Emit the metrics of a step and its progress; speeds are averages since the start of this process.

        `no_update`: why the step made no update; "" if it made one.
        """
        if self.engine.seconds:
            metrics["rollout_tokens_per_second"] = self.engine.tokens / self.engine.seconds
        if self.learner.seconds:
            metrics["update_tokens_per_second"] = self.learner.tokens / self.learner.seconds
        for name, value in metrics.items():
            self.emit("metric", name=name, step=self.step, value=value)
        note = f"reward {metrics['reward']:.3f}" if "reward" in metrics else "no reward yet"
        note += f", {metrics['unscored']:.0f} completions without a score" if metrics["unscored"] else ""
        note += f", no update: {no_update}" if no_update else ""
        self.emit("progress", done=self.step, total=self.config.policy.steps, unit="steps", note=note)

    def _read_guard(self) -> None:
        """Measure the policy when a reading is due; roll back to the best policy if it has fallen and that is allowed.

        A reading is due before the first step, every `guard_every` steps and after the last step.
        """
        if self.guard is None or (self.guard.readings and self.guard.readings[-1].step >= self.step):
            return
        # Due at multiples, and after the last step in any case: the policy to publish is chosen among readings.
        if self.step % (self.config.policy.guard_every or 1) and self.step != self.config.policy.steps:
            return
        reading = self.guard.read(self.learner.params, self.step)
        if reading.accuracy is not None:
            self.emit("metric", name="guard_accuracy", step=self.step, value=reading.accuracy)
        if reading.p is not None:
            self.emit("metric", name="guard_p", step=self.step, value=reading.p)
        if not has_fallen(self.guard.readings):
            return
        policy, best = self.config.policy, self.guard.best
        roll_backs = sum(earlier.went_back for earlier in self.guard.readings)
        rolls_back = policy.guard_action == "roll_back" and roll_backs < policy.guard_returns
        logger.warning(
            "guard accuracy %.3f: %d readings in a row are worse than that of step %d (%.3f), p < %g each: %s",
            reading.accuracy, IN_A_ROW, best.step, best.accuracy, LEVEL,
            "restoring that policy" if rolls_back else "stopping",
        )  # fmt: skip
        if rolls_back:
            self.learner.set(on_device(self.guard.roll_back()))

    def _resume(self) -> None:
        """Restore the newest checkpoint and remove rollouts of later steps from the log; they are sampled again."""
        latest = self.checkpoints.latest()
        if latest is not None:
            arrays, extra = self.checkpoints.restore(latest, self.learner.state_to_save()[0])
            self.learner.restore(arrays, extra["learner"])
            self.groups.cursor, self.groups.draw = extra["cursor"], extra["draw"]
            self.groups.totals, self.step, self.factors = extra["totals"], latest, extra["factors"]
            self.success.problems, self.success.graded, self.success.right = extra.get("success", (MEASURED, 0, 0))
            if self.guard:
                self.guard.readings = [GuardReading(**reading) for reading in extra["guard"]]
        if self.is_first:
            truncate_log(self.config.rollouts, self.step)
