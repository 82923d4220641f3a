"""The learner: one optimizer step from a set of scored groups, by micro-batches whose gradients add up exactly.

For a balanced step the rows are split by the sign of their advantage, so that each completion is passed through once
and g+ and g- come out apart (paper §4.3), over the step or over each group. A KL term stands outside the balance and
gets a backward pass of its own; without one, and in a plain step, there is a single backward pass.

Log-probabilities, of the policy and of its reference, are those at the temperature that completions are sampled with.
`rl.policy_gradient` computes each prompt once for all its completions.

Everything runs on a mesh, of one device or of many: the rows of a micro-batch are split over all devices, parameters
and moments over `fsdp` of them, as in pretraining.
"""

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.sharding import Mesh

from configs.model import ModelConfig
from configs.training import PolicyConfig, RolloutConfig
from model.compile_time import working_seconds
from model.layers.common import Params
from model.sharding import put_shared_rows, replicated
from model.training import optimizer
from rl.finite_updates import SkippedUpdates
from rl.objectives import Aggregate, Balance, balance, token_weights
from rl.policy_gradient import LearnerProgram
from rl.rewards import carries_signal
from rl.rollouts import Group
from rl.training_rows import TrainingRow, completion_batches, prompts_of

logger = logging.getLogger(__name__)


class Learner:
    """The policy and its optimizer state, and the parameters that the sampler has.

    `balance` None: one plain sum of gradients; else that of §4.3. `tokens` and `seconds` are totals of all updates,
    without compilation, for the speed metric.
    """

    def __init__(
        self,
        model: ModelConfig,
        config: PolicyConfig,
        rollout: RolloutConfig,
        params: Params,
        balance: Balance | None,
        mesh: Mesh,
    ) -> None:
        self.config, self.rollout, self.balance, self.mesh = config, rollout, balance, mesh
        self.program = LearnerProgram(model, config, rollout, balance is not None, mesh)
        self.trained, self.frozen = self.program.placed(params)
        # The reference is the start itself: the same arrays, kept alive only where a KL term needs them, and what is
        # frozen is never held twice.
        self.reference = self.trained if config.kl else None
        self._rate = optimizer.schedule(config.optimizer, config.steps * config.inner_epochs)
        self.state = self.program.moments_of(self.trained)
        self.steps = 0  # calls of `update`
        self._sampling, self._copied = self.trained, 0  # what the sampler has, and `steps` when it was copied
        self.skipped = SkippedUpdates(config.skip_limit, "policy")
        self.tokens, self.seconds = 0, 0.0
        trees, whole = self.program.shardings, replicated(mesh)
        self._add_group = jax.jit(self._balanced, donate_argnums=0, out_shardings=(trees, whole))
        outs = (trees, self.program.moments, whole)
        self._apply = jax.jit(self._update, donate_argnums=1, out_shardings=outs)
        if not config.ratio and (config.inner_epochs > 1 or config.sync_every > 1):
            logger.warning(
                "policy.ratio is false with policy.inner_epochs %d and policy.sync_every %d: updates on completions of "
                "an earlier policy are neither weighed by the probability ratio nor clipped, as if they were on-policy",
                config.inner_epochs, config.sync_every,
            )  # fmt: skip

    @property
    def params(self) -> Params:
        """All parameters of the policy."""
        return self.program.subset.join(self.trained, self.frozen)

    @property
    def sampling_params(self) -> Params:
        """All parameters of the policy that completions are drawn from, up to `sync_every` - 1 steps old."""
        return self.program.subset.join(self._sampling, self.frozen)

    def set(self, params: Params) -> None:
        """Continue from these parameters with fresh moments; the learning-rate schedule keeps its place."""
        applied = optimizer.applied(self.state)
        self.trained = self.program.placed(params)[0]
        self.state = _at_update(self.program.moments_of(self.trained), applied)
        self._sampling, self._copied = self.trained, self.steps

    def saved(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """What `restore` continues from: arrays, and JSON data."""
        arrays = {"params": self.trained, "state": self.state}
        if self.config.sync_every > 1:
            arrays["sampling"] = self._sampling
        skipped = {"total": self.skipped.total, "in_row": self.skipped.in_row}
        return arrays, {"steps": self.steps, "copied": self._copied, "skipped": skipped}

    def restore(self, arrays: Mapping[str, Any], extra: Mapping[str, Any]) -> None:
        """Continue where `saved` was called."""
        self.trained, self.state = arrays["params"], arrays["state"]
        self._sampling = arrays.get("sampling", self.trained)
        self.steps, self._copied = extra["steps"], extra["copied"]
        self.skipped.total, self.skipped.in_row = extra["skipped"]["total"], list(extra["skipped"]["in_row"])

    def update(self, groups: Sequence[Group]) -> dict[str, float]:
        """One step (`inner_epochs` passes) on the groups that carry a signal; returns its metrics.

        A metric that has no value (a mean over nothing, the norm of what is not finite) is left out. Raises
        `ConfigError` after more than `skip_limit` updates in a row that were not finite.
        """
        began = working_seconds()
        metrics: dict[str, float] = {}
        rows = rows_of(groups, self.config.aggregate)
        for epoch in range(self.config.inner_epochs if rows else 0):
            stale = epoch > 0 or self._copied < self.steps
            metrics = self._pass(rows, self.config.ratio and stale)
        self.steps += 1
        if self.steps - self._copied >= self.config.sync_every:
            self._sampling, self._copied = self.trained, self.steps
        self.seconds += working_seconds() - began
        return metrics

    def _pass(self, groups: list[list[TrainingRow]], ratio: bool) -> dict[str, float]:
        shared: dict[str, Any] = {}  # sums over all rows: the counts, and a KL term's gradient where it is apart
        measured: list[dict[str, Array]] = []  # of each balanced group
        if self.balance is None or self.balance.over == "step":
            rows = [row for group in groups for row in group]
            plus, minus = self._sides(rows, ratio, shared)
        else:
            # Either side of a group has a few rows: in batches of half a group little of them is padding.
            half = -(-max(map(len, groups)) // 2)
            limit = -(-half // self.mesh.size) * self.mesh.size
            plus, minus = None, None  # the sum of the balanced gradients
            for group in groups:
                plus, norms = self._add_group(plus, *self._sides(group, ratio, shared, limit))
                measured.append(norms)
        self.trained, self.state, applied = self._apply(self.trained, self.state, plus, minus, shared.get("kl"))
        # The only wait for the device: until here each micro-batch was dispatched behind the one before.
        counts, measured, applied = jax.device_get((shared["counts"], measured, applied))
        self.skipped.record(self.steps + 1, applied, self.trained)
        values = means_of(counts)
        values |= {name: value for name, value in applied.items() if name not in ("applied", "not_finite")}
        for name in measured[0] if measured else ():  # the means over the groups that have a value
            values[name] = np.mean([norms[name] for norms in measured if np.isfinite(norms[name])] or [np.nan])
        finite = {name: float(value) for name, value in values.items() if np.isfinite(value)}
        return finite | {"skipped_updates": float(self.skipped.total)}

    def _sides(
        self, rows: list[TrainingRow], ratio: bool, shared: dict[str, Any], limit: int | None = None
    ) -> tuple[Any, Any]:
        """(g+, g-) of the rows; in a plain step (their sum, None). Adds to `shared`.

        `limit`: of the rows of a micro-batch; the rows are then of a single group.
        """
        program, rollout, every = self.program, self.rollout, self.mesh.size
        least, multiple = (rollout.prompts, program.prompts_at_once) if limit is None else (1, every)
        prompts, numbered = prompts_of(rows, rollout.prompt_length, least, multiple)
        begun = program.begin(self.trained, self.frozen, prompts)
        reference = None if self.reference is None else program.begin(self.reference, self.frozen, prompts)
        positive = [(row, source) for row, source in numbered if row.advantage > 0]
        negative = [(row, source) for row, source in numbered if row.advantage < 0]
        idle = [(row, source) for row, source in numbered if row.advantage == 0 and self.reference is not None]
        if self.balance is None:
            parts = {"plus": positive + negative + idle}
        else:
            parts = {"plus": positive, "minus": negative + idle}  # an idle row adds only to the KL term
        pairs: dict[str, Any] = {}
        # Micro-batch gradients are summed on the device, separately for g+, g- and the KL term.
        for side, members in parts.items():
            for batch in completion_batches(members, rollout.max_tokens, partial(program.at_once, limit=limit)):
                gradients, kl_gradients, counts = program.gradients(
                    ratio, self.trained, self.frozen, begun, self.reference, reference, prompts["lengths"],
                    put_shared_rows(batch, self.mesh),
                )  # fmt: skip
                self._accumulate(program.add_pairs, pairs, side, gradients)
                self._accumulate(program.add_pairs, pairs, "kl", kl_gradients)
                self._accumulate(program.add_counts, shared, "counts", counts)
                self.tokens += int((batch["weights"] > 0).sum())
        sums = {side: program.finish(self.trained, self.frozen, prompts, pair) for side, pair in pairs.items()}
        self._accumulate(program.add, shared, "kl", sums.get("kl"))
        for side in parts.keys() - sums.keys():
            sums[side] = jax.tree.map(jnp.zeros_like, next(iter(sums.values())))
        return sums["plus"], sums.get("minus")

    def _accumulate(self, add: Any, sums: dict[str, Any], name: str, values: Any) -> None:
        if values is not None:
            sums[name] = add(sums[name], values) if name in sums else values

    def _balanced(self, total: Any, plus: Any, minus: Any) -> tuple[Any, dict[str, Array]]:
        """`total` (None: nothing yet) and the balanced gradient of one group; also returns the group's norms."""
        assert self.balance is not None
        balanced, norms = balance(plus, minus, self.balance)
        return (balanced if total is None else jax.tree.map(jnp.add, total, balanced)), norms

    def _update(
        self, params: Params, state: Any, plus: Any, minus: Any, kl: Any
    ) -> tuple[Params, Any, dict[str, Array]]:
        """The optimizer step on g+, g- (None: g+ is the whole) and the KL gradient (None: no term, or it is in g+).

        Also returns the learning rate, norms, and what `finite_update` measured.
        """
        norms: dict[str, Array] = {"learning_rate": self._rate(optimizer.applied(state))}
        total = plus
        if minus is not None and self.balance is not None:
            total, balance_norms = balance(plus, minus, self.balance)
            norms |= balance_norms
        if kl is not None:
            total = jax.tree.map(lambda a, b: a + self.config.kl * b, total, kl)
        params, state, measured = optimizer.finite_update(self.program.tx, params, state, total)
        return params, state, norms | measured


def rows_of(groups: Sequence[Group], aggregate: Aggregate = "group_tokens") -> list[list[TrainingRow]]:
    """Every scored completion of the groups with a signal, group by group, with its token weight.

    A token that the sampler inserted (the end of a thinking budget) was not chosen by the policy and weighs nothing.
    """
    live = [group for group in groups if carries_signal([r.advantage for r in group.rollouts])]
    scored = [[r for r in group.rollouts if r.advantage is not None] for group in live]
    weights = token_weights([[len(r.ids) - (r.forced is not None) for r in group] for group in scored], aggregate)
    return [
        [
            TrainingRow(r.prompt_ids, r.ids, r.logprobs, r.advantage or 0.0, weight, r.forced)
            for r, weight in zip(group, group_weights, strict=True)
        ]
        for group, group_weights in zip(scored, weights, strict=True)
    ]


def means_of(counts: Mapping[str, float]) -> dict[str, float]:
    """The means of the sums in `counts` over the tokens that each is of. A mean over none is left out."""
    means = {}
    for name, total in counts.items():
        tokens = counts[name.replace("logprob", "tokens") if name.startswith("logprob") else "tokens"]
        if tokens and not name.startswith("tokens"):
            means[name] = total / tokens
    return means


def _at_update(state: Any, applied: Array) -> Any:
    """A fresh optimizer state whose schedule stands at `applied` updates."""

    def rule(leaf: Any) -> Any:
        return leaf._replace(count=applied) if isinstance(leaf, optax.ScaleByScheduleState) else leaf

    return jax.tree.map(rule, state, is_leaf=lambda leaf: isinstance(leaf, optax.ScaleByScheduleState))
