"""The learner: one optimizer step from a set of scored groups, by micro-batches whose gradients add up exactly.

For a balanced step the rows are split by the sign of their advantage, so that each completion is passed through once
and g+ and g- come out apart (paper §4.3), over the step or over each group. A KL term stands outside the balance and
gets a backward pass of its own; without one, and in a plain step, there is a single backward pass.

Log-probabilities, of the policy and of its reference, are those at the temperature that completions are sampled with.

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
from jax import Array, lax
from jax.sharding import Mesh

from configs.model import ModelConfig
from configs.training import PolicyConfig
from model.compile_time import working_seconds
from model.layers.common import Params
from model.loss import token_logprobs
from model.nautile import forward, shapes
from model.sharding import OnMesh, optimizer_shardings, parameter_shardings, put_shared_rows, replicated, row_sharding
from model.training import optimizer
from rl.finite_updates import SkippedUpdates
from rl.objectives import Aggregate, Balance, balance, kl_to_reference, surrogate, token_weights
from rl.parameter_subset import ParameterSubset
from rl.rewards import carries_signal
from rl.rollouts import Group
from rl.training_rows import RowBatch, TrainingRow, batches

logger = logging.getLogger(__name__)

BATCH_ARRAYS = ("tokens", "targets", "segments", "positions", "weights", "sampled", "advantage")


class Learner:
    """The policy and its optimizer state, and the parameters that the sampler has.

    `balance` None: one plain sum of gradients; else that of §4.3. `tokens` and `seconds` are totals of all updates,
    without compilation, for the speed metric.
    """

    def __init__(
        self,
        model: ModelConfig,
        config: PolicyConfig,
        params: Params,
        length: int,
        balance: Balance | None,
        mesh: Mesh,
        temperature: float = 1.0,
    ) -> None:
        self.config, self.length, self.balance, self.mesh = config, length, balance, mesh
        self.program = LearnerProgram(model, config, balance is not None, mesh, temperature)
        self.trained, self.frozen = self.program.placed(params)
        # The reference is the start itself: the same arrays, kept alive only where a KL term needs them, and what is
        # frozen is never held twice.
        self.reference = self.trained if config.kl else None
        self._rate = optimizer.schedule(config.optimizer, config.steps * config.inner_epochs)
        self.state = self.program.begin(self.trained)
        self.steps = 0  # calls of `update`
        self._sampling, self._copied = self.trained, 0  # what the sampler has, and `steps` when it was copied
        self.skipped = SkippedUpdates(config.skip_limit, "policy")
        self.tokens, self.seconds = 0, 0.0
        trees = self.program.shardings
        self._add = jax.jit(partial(jax.tree.map, jnp.add), donate_argnums=0, out_shardings=trees)
        self._add_counts = jax.jit(partial(jax.tree.map, jnp.add), donate_argnums=0, out_shardings=replicated(mesh))
        self._add_group = jax.jit(self._balanced, donate_argnums=0, out_shardings=(trees, replicated(mesh)))
        outs = (trees, self.program.moments, replicated(mesh))
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
        self.state = _at_update(self.program.begin(self.trained), applied)
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
            plus, minus = self._sides(rows, self.config.micro_rows, ratio, shared)
        else:
            # Either side of a group has a few rows: in batches of half a group little of them is padding.
            half = -(-max(map(len, groups)) // 2)
            size = min(self.config.micro_rows, -(-half // self.mesh.size) * self.mesh.size)
            plus, minus = None, None  # the sum of the balanced gradients
            for group in groups:
                plus, norms = self._add_group(plus, *self._sides(group, size, ratio, shared))
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

    def _sides(self, rows: list[TrainingRow], size: int, ratio: bool, shared: dict[str, Any]) -> tuple[Any, Any]:
        """(g+, g-) of the rows, by micro-batches of `size`; in a plain step (their sum, None). Adds to `shared`."""
        positive = [row for row in rows if row.advantage > 0]
        negative = [row for row in rows if row.advantage < 0]
        idle = [row for row in rows if row.advantage == 0 and self.reference is not None]
        if self.balance is None:
            parts = {"plus": positive + negative + idle}
        else:
            parts = {"plus": positive, "minus": negative + idle}  # an idle row adds only to the KL term
        sums: dict[str, Any] = {}
        # Micro-batch gradients are summed on the device, separately for g+, g- and the KL term.
        for side, side_rows in parts.items():
            # From short to long, so that the rows of one micro-batch are padded little; equals keep their order.
            for batch in batches(sorted(side_rows, key=len), size, self.length):
                gradients, kl_gradients, counts = self.program.pull[ratio](
                    self.trained, self.frozen, self.reference, put_shared_rows(batch, self.mesh)
                )
                self._accumulate(sums, side, gradients)
                self._accumulate(shared, "kl", kl_gradients)
                self._accumulate(shared, "counts", counts)
                self.tokens += int((batch["weights"] > 0).sum())
        for side in parts.keys() - sums.keys():
            sums[side] = jax.tree.map(jnp.zeros_like, next(iter(sums.values())))
        return sums["plus"], sums.get("minus")

    def _accumulate(self, sums: dict[str, Any], name: str, values: Any) -> None:
        if values is not None:
            add = self._add_counts if name == "counts" else self._add
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


class LearnerProgram:
    """The compiled gradients of a run and the shardings of its arrays; `rl.capacity` compiles it without any data."""

    def __init__(
        self, model: ModelConfig, config: PolicyConfig, apart: bool, mesh: Mesh, temperature: float = 1.0
    ) -> None:
        self.mesh = mesh
        self.subset = ParameterSubset(model, config.train)
        self.tx = optimizer.build(config.optimizer, config.steps * config.inner_epochs)
        kinds, frozen_kinds = jax.eval_shape(self.subset.split, shapes(model))
        self.kinds, self.frozen_kinds = kinds, frozen_kinds
        self.shardings = parameter_shardings(kinds, mesh)
        self.frozen_shardings = parameter_shardings(frozen_kinds, mesh)
        self.moments = optimizer_shardings(self.tx, kinds, self.shardings, mesh)
        self.begin = jax.jit(self.tx.init, out_shardings=self.moments)
        whole = replicated(mesh)
        argument_shardings = (
            self.shardings,
            self.frozen_shardings,
            self.shardings if config.kl else None,
            dict.fromkeys(BATCH_ARRAYS, row_sharding(mesh)),
        )
        kept_apart = self.shardings if apart and config.kl else None
        outs = (self.shardings, kept_apart, whole)
        # With and without the ratio to the sampler's recorded log-probabilities.
        self.pull = {
            ratio: OnMesh(
                mesh,
                jax.jit(
                    partial(pull, model, config, apart, self.subset, temperature, ratio),
                    in_shardings=argument_shardings,
                    out_shardings=outs,
                ),
            )
            for ratio in (True, False)
        }

    def placed(self, params: Params) -> tuple[Params, Params]:
        """(trained, frozen) of parameters on the mesh; without a copy where they are there already."""
        trained, frozen = self.subset.split(params)
        return jax.device_put(trained, self.shardings), jax.device_put(frozen, self.frozen_shardings)


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


def pull(
    model: ModelConfig,
    config: PolicyConfig,
    apart: bool,
    subset: ParameterSubset,
    temperature: float,
    ratio: bool,
    trained: Params,
    frozen: Params,
    reference: Params | None,
    batch: RowBatch | Mapping[str, Array],
) -> tuple[Any, Any, dict[str, Array]]:
    """Gradients of the weighted sums of one micro-batch: (policy, KL, counts). KL is None unless kept `apart`.

    They are with respect to `trained` alone; `reference` is its start (None: no KL term), and shares `frozen`. `ratio`
    false: the policy is taken to be the one that was sampled (on-policy), else it is weighed by the recorded
    log-probabilities. The counts are sums over tokens, `*_positive` and `*_negative` over those of completions above
    and below the mean of their group.
    """
    weights_BL = batch["weights"]
    reference_BL = None
    if reference is not None:
        reference_BL = lax.stop_gradient(logprobs(subset.join(reference, frozen), model, batch, temperature)[0])

    def losses(trained: Params) -> tuple[tuple[Array, Array], dict[str, Array]]:
        logprobs_BL, entropy_BL = logprobs(subset.join(trained, frozen), model, batch, temperature)
        sampled_BL = batch["sampled"] if ratio else lax.stop_gradient(logprobs_BL)
        policy_BL, clipped_BL = surrogate(logprobs_BL, sampled_BL, batch["advantage"], config.clip_ratio)
        kl_BL = jnp.zeros_like(policy_BL)
        if reference_BL is not None:
            kl_BL = kl_to_reference(logprobs_BL, reference_BL)
        mask_BL = (weights_BL > 0).astype(jnp.float32)
        counts = {
            "tokens": jnp.sum(mask_BL),
            "entropy": jnp.sum(entropy_BL * mask_BL),
            "sampler_gap": jnp.sum(jnp.abs(logprobs_BL - batch["sampled"]) * mask_BL),
            "clip_share": jnp.sum(clipped_BL * mask_BL),
        }
        signs_B1 = jnp.sign(batch["advantage"])[:, None]
        for name, sign in (("positive", 1.0), ("negative", -1.0)):
            side_BL = mask_BL * (signs_B1 == sign)
            counts |= {f"tokens_{name}": jnp.sum(side_BL), f"logprob_{name}": jnp.sum(logprobs_BL * side_BL)}
        if reference_BL is not None:
            counts["kl"] = jnp.sum(kl_BL * mask_BL)
        return (jnp.sum(policy_BL * weights_BL), jnp.sum(kl_BL * weights_BL)), counts

    values, backward, counts = jax.vjp(losses, trained, has_aux=True)
    unit, zero = jnp.ones_like(values[0]), jnp.zeros_like(values[0])
    if reference is None:
        return backward((unit, zero))[0], None, counts
    if not apart:
        return backward((unit, unit * config.kl))[0], None, counts
    return backward((unit, zero))[0], backward((zero, unit))[0], counts


def means_of(counts: Mapping[str, float]) -> dict[str, float]:
    """The means of the sums in `counts` over the tokens that each is of. A mean over none is left out."""
    means = {}
    for name, total in counts.items():
        tokens = counts[name.replace("logprob", "tokens") if name.startswith("logprob") else "tokens"]
        if tokens and not name.startswith("tokens"):
            means[name] = total / tokens
    return means


def logprobs(
    params: Params, model: ModelConfig, batch: RowBatch | Mapping[str, Array], temperature: float = 1.0
) -> tuple[Array, Array]:
    """Log-probability of every target at `temperature` and the entropy of that distribution [B, L], in float32."""
    hidden_BLD = forward(params, model, batch["tokens"], batch["segments"], batch["positions"])
    return token_logprobs(params, model, hidden_BLD, batch["targets"], temperature=temperature)


def _at_update(state: Any, applied: Array) -> Any:
    """A fresh optimizer state whose schedule stands at `applied` updates."""

    def rule(leaf: Any) -> Any:
        return leaf._replace(count=applied) if isinstance(leaf, optax.ScaleByScheduleState) else leaf

    return jax.tree.map(rule, state, is_leaf=lambda leaf: isinstance(leaf, optax.ScaleByScheduleState))
