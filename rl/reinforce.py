"""The training loop of the stages align and reason (paper §4.2 and §4.3): sample groups, score, update, save.

The state is (parameters, optimizer, cursor). The cursor determines the next problems, samples are seeded by draw and
prompt, and paid scores are cached. So a run that was killed at any point resumes and ends with the same bytes.
"""

import logging
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from nautile.common.errors import ConfigError, Retryable
from nautile.common.events import Emit, flush, silent
from nautile.configs.training import SMALLEST_GUARD, PolicyConfig, RolloutConfig
from nautile.data.tokenizer import tokenizer_for
from nautile.model.layers.common import Params
from nautile.model.processes import StopRequested, joint_termination
from nautile.model.sharding import make_mesh, whole_on_hosts
from nautile.model.training.checkpoint import open_checkpoints
from nautile.rl.group_draw import GroupDraw, Scorer, without_update
from nautile.rl.guard import IN_A_ROW, LEVEL, Guard, GuardReading
from nautile.rl.learner import Learner
from nautile.rl.objective_registry import Balance
from nautile.rl.parameter_subset import ParameterSubset
from nautile.rl.problems.load import ProblemOrder
from nautile.rl.rollouts import Group, RolloutEngine, append_rows, truncate_log
from nautile.rl.stage_inputs import StageInputs, on_device

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Reinforcement:
    """Inputs of one reinforcement run.

    `identity`: checkpoints with another identity are not resumed. `work`: folder of the checkpoints and the best
    policy. `rollouts`: JSON-lines file that every rollout is appended to; each is also emitted as a `sample` event.
    `scorer`: called by the first process only; the others may pass None. `shared_disk`: every process sees `work`.
    `balance`: how the gradients of positive and negative advantages are added (paper §4.3); None: their plain sum.
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

    With `policy.guard_every` the returned parameters are those of the best guard reading. Raises the `ConfigError` of
    `check` before anything is compiled or sampled.

    All processes of a pod (`jax.distributed`) call this with the same arguments. Each process samples its share of the
    completions and receives all of them; all update together; the first one scores, reports and writes. On SIGTERM
    they agree on a step, save it and raise `Retryable`. A single process just ends, and a rerun samples the steps since
    its last checkpoint again.
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
        self.step = 0
        self.factors: list[float] = []  # of g-, by step: where it depends on norms, the mean over the groups of a step

    def run(self, stop_requested: StopRequested) -> tuple[Params, dict[str, Any]]:
        """Run the remaining steps; returns the unsharded parameters, in the memory of every process, and facts."""
        # The guard's first reading is that of the start, with which all later ones are compared.
        self._resume()
        steps = self.config.policy.steps
        self._read_guard()
        while self.step < steps:
            if self.guard is not None and self.guard.has_fallen():
                break
            # One step: sample and score groups, update on those with a signal, measure, save when due.
            before = dict(self.groups.totals)
            live_groups, drawn_groups, metrics = self.groups.step(
                self.learner.sampling_params, self.config.rollout.prompts
            )
            # Before the update, and all groups: also those that carry no signal were sampled and paid for.
            self._record(drawn_groups)
            metrics |= self.learner.update(live_groups, len(drawn_groups))
            self.step += 1
            if "balance_factor" in metrics:
                self.factors.append(metrics["balance_factor"])
            # Counted over this step alone.
            counts = {name: count - before[name] for name, count in self.groups.totals.items()}
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
        # Without a guard the last policy is published, with one the best.
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
            facts["balance_factor"] = {"min": least, "median": middle, "max": most, "above_one": amplified}
            note = f"factor on g- {least:.2f} to {most:.2f}, median {middle:.2f}"
        if note:
            self.emit("progress", done=self.step, total=self.config.policy.steps, unit="steps", note=note)
        return facts

    def _save(self) -> None:
        """Save a checkpoint: the learner's arrays, and as JSON its counters, the draw's state and the guard readings.

        Events are flushed first, so that none of a saved step is lost.
        """
        # The readings are part of the state: a resumed run must compare with the same best one.
        readings = [asdict(reading) for reading in self.guard.readings] if self.guard else []
        arrays, learner_state = self.learner.state_to_save()
        draw_state = {"cursor": self.groups.cursor, "draw": self.groups.draw, "totals": self.groups.totals}
        flush(self.emit)
        other_state = {"guard": readings, "learner": learner_state, "factors": self.factors}
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
        if not self.guard.has_fallen():
            return
        policy, best = self.config.policy, self.guard.best
        rolls_back = policy.guard_action == "roll_back" and self.guard.roll_backs < policy.guard_returns
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
            if self.guard:
                self.guard.readings = [GuardReading(**reading) for reading in extra["guard"]]
        if self.is_first:
            truncate_log(self.config.rollouts, self.step)
