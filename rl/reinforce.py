"""The loop of both reinforcement stages: draw groups, score them, refill those without a signal, update, save.

State is (parameters, optimizer, cursor). Problems follow the cursor, samples are seeded by draw and prompt, and scores
are cached where they cost, so a run that was killed anywhere goes on to the same bytes.
"""

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh

from common.errors import ConfigError
from common.events import Emit, flush, silent
from common.files import write_text
from configs.model import ModelConfig, TokenizerConfig
from configs.training import PolicyConfig, RolloutConfig
from data.sources.reasoning_gym import Problem
from data.tokenizer import tokenizer_for
from model.layers.common import Params
from model.sharding import make_mesh
from model.training.checkpoint import TrainCheckpoints
from rl.advantages import advantages, carries_signal
from rl.balance import BalanceMode
from rl.guard import Guard, GuardReading
from rl.learner import Learner
from rl.parameter_subset import ParameterSubset
from rl.problems import ProblemOrder
from rl.rollouts import Group, RolloutEngine

logger = logging.getLogger(__name__)

CORRECT = "correct"  # the part that says whether the verifier accepts it, beside whatever the reward is made of


class Scorer(Protocol):
    """Gives every rollout of the groups its `reward` and `parts`; `mastered` says which groups to skip."""

    def score(self, groups: Sequence[Group]) -> None: ...

    def mastered(self, group: Group) -> bool: ...


@dataclass(frozen=True)
class Reinforcement:
    """What a reinforcement run is made of; `mode` None is the plain sum of gradients.

    `identity` says what makes two runs the same one; `work` keeps checkpoints and the best policy; every rollout goes
    to the file `rollouts` (JSON lines) and, as a `sample` event, to `emit`.
    """

    model: ModelConfig
    tokenizer: TokenizerConfig
    rollout: RolloutConfig
    policy: PolicyConfig
    problems: Sequence[Problem]
    scorer: Scorer
    identity: dict[str, Any]
    work: Path
    rollouts: Path
    seed: int
    mode: BalanceMode | None = None
    epsilon: float = 1e-8
    guard_problems: Sequence[Problem] = ()
    emit: Emit = silent


def check(plan: Reinforcement) -> tuple[Mesh, RolloutEngine]:
    """Refuse with a `ConfigError`, before any compute or call is paid for, what does not fit together."""
    mesh = make_mesh(plan.policy.fsdp, part="policy")
    if plan.policy.micro_rows % mesh.size:
        raise ConfigError(
            f"policy.micro_rows {plan.policy.micro_rows} does not divide among the {mesh.size} devices of this run"
        )
    ParameterSubset(plan.model, plan.policy.train)
    engine = RolloutEngine(plan.model, tokenizer_for(plan.tokenizer), plan.rollout, plan.seed, mesh)
    engine.check([*plan.problems, *plan.guard_problems])
    return mesh, engine


def reinforce(plan: Reinforcement, params: Params) -> tuple[Params, dict[str, Any]]:
    """Run `plan.policy.steps` updates from `params`; returns the parameters to publish and facts about the run.

    With `policy.guard_every` the parameters returned are those of the best guard reading. Raises `ConfigError` for
    what does not fit together before anything is compiled or sampled.
    """
    return _Run(plan, params).run()


class _Run:
    def __init__(self, plan: Reinforcement, params: Params) -> None:
        self.plan = plan
        self.mesh, self.engine = check(plan)
        length = plan.rollout.prompt_length + plan.rollout.max_tokens
        self.learner = Learner(plan.model, plan.policy, params, length, plan.mode, self.mesh, plan.epsilon)
        self.order = ProblemOrder(len(plan.problems), plan.seed)
        self.checkpoints = TrainCheckpoints(plan.work / "checkpoints", keep=2, identity=plan.identity)
        self.guard = self._guard()
        self.step, self.cursor, self.draw = 0, 0, 0
        self.totals = dict.fromkeys(("groups", "mastered", "no_signal", "dropped", "unscored", "rollouts"), 0)

    def run(self) -> tuple[Params, dict[str, Any]]:
        self._resume()
        steps = self.plan.policy.steps
        self._read_guard()
        while self.step < steps and not self._stopped():
            groups, measured = self._gather()
            measured |= self.learner.update(groups)
            self.step += 1
            self._report(measured)
            self._read_guard()
            if self.step % self.plan.policy.save_every == 0 or self.step == steps:
                self._save()
        self.checkpoints.close()
        facts: dict[str, Any] = {"steps": self.step, **self.totals}
        if self.guard is None:
            return self.learner.params, facts
        best = self.guard.best
        facts |= {"guard": [asdict(reading) for reading in self.guard.readings], "published_step": best.step}
        return self.guard.best_params(), facts

    def _gather(self) -> tuple[list[Group], dict[str, float]]:
        """Draw until `rollout.prompts` groups carry a signal, at most 1 + `policy.refill` times."""
        wanted, kept, every = self.plan.rollout.prompts, list[Group](), list[Group]()
        for _ in range(1 + self.plan.policy.refill):
            positions = range(self.cursor, self.cursor + wanted)
            asked = [(position, self.plan.problems[self.order[position]]) for position in positions]
            groups = self.engine.sample(self.learner.params, asked, self.draw)
            self.cursor, self.draw = self.cursor + wanted, self.draw + 1
            self.plan.scorer.score(groups)
            for group in groups:
                self._judge_group(group, kept)
            every += groups
            if len(kept) >= wanted:
                break
        self._record(every)
        return kept[:wanted], _measure(every)

    def _judge_group(self, group: Group, kept: list[Group]) -> None:
        self.totals["groups"] += 1
        self.totals["rollouts"] += len(group.rollouts)
        given = advantages([rollout.reward for rollout in group.rollouts])
        self.totals["unscored"] += sum(rollout.reward is None for rollout in group.rollouts)
        if all(advantage is None for advantage in given):
            self.totals["dropped"] += 1
            return
        for rollout, advantage in zip(group.rollouts, given, strict=True):
            rollout.advantage = advantage
        if self.plan.scorer.mastered(group):
            self.totals["mastered"] += 1
        elif not carries_signal(given):
            self.totals["no_signal"] += 1
        else:
            kept.append(group)

    def _record(self, groups: list[Group]) -> None:
        """Append the step's rollouts to the log in one write, and say them as events."""
        first = self.totals["rollouts"] - sum(len(group.rollouts) for group in groups)
        rows = [{"step": self.step, **group.row(i)} for group in groups for i in range(len(group.rollouts))]
        with self.plan.rollouts.open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        shown = ("step", "task", "question", "expected", "text", "reward", "parts", "advantage", "length", "truncated")
        for index, row in enumerate(rows, first):
            self.plan.emit("sample", set="rollouts", index=index, **{name: row[name] for name in shown})

    def _report(self, measured: dict[str, float]) -> None:
        if self.engine.seconds:
            measured["rollout_tokens_per_second"] = self.engine.tokens / self.engine.seconds
        if self.learner.seconds:
            measured["update_tokens_per_second"] = self.learner.tokens / self.learner.seconds
        for name, value in measured.items():
            self.plan.emit("metric", name=name, step=self.step, value=value)
        note = f"reward {measured['reward']:.3f}" if "reward" in measured else "no reward yet"
        self.plan.emit("progress", done=self.step, total=self.plan.policy.steps, unit="steps", note=note)

    def _guard(self) -> Guard | None:
        plan = self.plan
        if plan.policy.guard_every is None:
            return None
        return Guard(plan.model, plan.tokenizer, plan.rollout, plan.guard_problems, plan.work / "best", self.mesh)

    def _read_guard(self) -> None:
        if self.guard is None or (self.guard.readings and self.guard.readings[-1].step >= self.step):
            return
        if self.step % (self.plan.policy.guard_every or 1) and self.step != self.plan.policy.steps:
            return
        reading = self.guard.read(self.learner.params, self.step)
        self.plan.emit("metric", name="guard_accuracy", step=self.step, value=reading.accuracy)
        if not self.guard.fell():
            return
        policy, best = self.plan.policy, self.guard.best
        back = policy.guard_action == "roll_back" and self.guard.returns < policy.guard_returns
        logger.warning(
            "guard accuracy %.3f is under the interval of step %d (%.3f): %s",
            reading.accuracy, best.step, best.accuracy, "going back to it" if back else "stopping",
        )  # fmt: skip
        if back:
            self.learner.set(on_device(self.guard.go_back()))

    def _stopped(self) -> bool:
        return self.guard is not None and self.guard.fell() and not self.guard.readings[-1].went_back

    def _save(self) -> None:
        readings = [asdict(reading) for reading in self.guard.readings] if self.guard else []
        extra = {"cursor": self.cursor, "draw": self.draw, "totals": self.totals, "guard": readings}
        flush(self.plan.emit)
        self.checkpoints.save(self.step, {"params": self.learner.trained, "state": self.learner.state}, extra)

    def _resume(self) -> None:
        """Go on from the newest save; rollouts of steps after it are dropped from the log, to be drawn again."""
        latest = self.checkpoints.latest()
        if latest is not None:
            like = {"params": self.learner.trained, "state": self.learner.state}
            state, extra = self.checkpoints.restore(latest, like)
            self.learner.trained, self.learner.state = state["params"], state["state"]
            self.step, self.cursor, self.draw, self.totals = latest, extra["cursor"], extra["draw"], extra["totals"]
            if self.guard:
                self.guard.readings = [GuardReading(**reading) for reading in extra["guard"]]
        keep_steps(self.plan.rollouts, self.step)


def keep_steps(log: Path, before: int) -> None:
    """Cut a JSON-lines log to its rows of steps under `before`; a torn last line goes too."""
    if not log.exists():
        return
    kept = []
    for line in log.read_text(encoding="utf-8").splitlines(keepends=True):
        if not line.endswith("\n") or json.loads(line)["step"] >= before:
            break
        kept.append(line)
    write_text(log, "".join(kept))


def _measure(groups: Sequence[Group]) -> dict[str, float]:
    """What a practitioner looks at first. A mean over nothing is left out, not zero."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    live = sum(carries_signal([rollout.advantage for rollout in group.rollouts]) for group in groups)
    measured = {
        "zero_signal_share": 1 - live / len(groups),
        "unscored": float(len(rollouts) - len(rewards)),
        "truncated_share": sum(rollout.truncated for rollout in rollouts) / len(rollouts),
        "length": float(np.mean([len(rollout.ids) for rollout in rollouts])),
        "finished_thinking_share": sum(r.reply.finished_thinking for r in rollouts) / len(rollouts),
    }
    if rewards:
        measured |= {"reward": float(np.mean(rewards)), "reward_deviation": float(np.std(rewards))}
    for name in sorted({name for rollout in rollouts for name in rollout.parts}):
        values = [r.parts[name] for r in rollouts if isinstance(r.parts.get(name), int | float)]
        if values:
            measured["solve_rate" if name == CORRECT else f"reward_{name}"] = float(np.mean(values))
    return measured


def on_device(params: Params) -> Params:
    """Parameters as device arrays, however they were loaded."""
    return jax.tree.map(jax.numpy.asarray, params)
