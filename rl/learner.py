"""The learner: one optimizer step from a set of scored groups, by micro-batches whose gradients add up exactly.

For a balanced step the rows are split by the sign of their advantage, so that each completion is passed through once
and g+ and g- come out apart (paper §4.3). A KL term stands outside the balance and gets a backward pass of its own;
without one, and in a plain step, there is a single backward pass.

Everything runs on a mesh, of one device or of many: the rows of a micro-batch are split over all devices, parameters
and moments over `fsdp` of them, as in pretraining.
"""

import time
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
from model.layers.common import Params
from model.loss import token_logprobs
from model.nautile import forward, shapes
from model.sharding import OnMesh, optimizer_shardings, parameter_shardings, put_rows, replicated, row_sharding
from model.training import optimizer
from rl.objectives import BalanceMode, balance, kl_to_reference, norm, surrogate, token_weights
from rl.parameter_subset import ParameterSubset
from rl.rewards import carries_signal
from rl.rollouts import Group
from rl.training_rows import RowBatch, TrainingRow, batches

BATCH_ARRAYS = ("tokens", "targets", "segments", "positions", "weights", "sampled", "advantage")


class Learner:
    """The policy and its optimizer state. `mode` None: one plain sum of gradients; else the balance of §4.3."""

    def __init__(
        self,
        model: ModelConfig,
        config: PolicyConfig,
        params: Params,
        length: int,
        mode: BalanceMode | None,
        mesh: Mesh,
        epsilon: float = 1e-8,
    ) -> None:
        self.config, self.length, self.mode, self.epsilon, self.mesh = config, length, mode, epsilon, mesh
        self.program = LearnerProgram(model, config, mode is not None, mesh)
        self.trained, self.frozen = self.program.placed(params)
        # The reference is the start itself: the same arrays, kept alive only where a KL term needs them, and what is
        # frozen is never held twice.
        self.reference = self.trained if config.kl else None
        self._rate = optimizer.schedule(config.optimizer, config.steps * config.inner_epochs)
        self.state = self.program.begin(self.trained)
        self.tokens, self.seconds = 0, 0.0
        trees = self.program.shardings
        self._add = jax.jit(partial(jax.tree.map, jnp.add), donate_argnums=0, out_shardings=trees)
        outs = (trees, self.program.moments, replicated(mesh))
        self._apply = jax.jit(self._update, donate_argnums=1, out_shardings=outs)

    @property
    def params(self) -> Params:
        """All parameters of the policy."""
        return self.program.subset.join(self.trained, self.frozen)

    def set(self, params: Params) -> None:
        """Continue from these parameters with fresh moments; the learning-rate schedule keeps its place."""
        applied = optimizer.applied(self.state)
        self.trained = self.program.placed(params)[0]
        self.state = _at_update(self.program.begin(self.trained), applied)

    def update(self, groups: Sequence[Group]) -> dict[str, float]:
        """One step (`inner_epochs` passes) on the groups that carry a signal; returns its metrics."""
        began = time.perf_counter()
        metrics: dict[str, float] = {}
        for epoch in range(self.config.inner_epochs):
            metrics = self._pass(rows_of(groups), first=epoch == 0)
        self.seconds += time.perf_counter() - began
        return metrics

    def _pass(self, rows: list[TrainingRow], first: bool) -> dict[str, float]:
        positive = [row for row in rows if row.advantage > 0]
        negative = [row for row in rows if row.advantage < 0]
        idle = [row for row in rows if row.advantage == 0 and self.reference is not None]
        if self.mode is None:
            parts = {"plus": positive + negative + idle}
        else:
            parts = {"plus": positive, "minus": negative + idle}  # an idle row adds only to the KL term
        sums: dict[str, Any] = {}
        stats: dict[str, float] = {}
        # Micro-batch gradients are summed on the device, separately for g+, g- and the KL term.
        for side, side_rows in parts.items():
            # From short to long, so that the rows of one micro-batch are padded little; equals keep their order.
            for batch in batches(sorted(side_rows, key=len), self.config.micro_rows, self.length):
                gradients, kl_gradients, counts = self.program.pull[first](
                    self.trained, self.frozen, self.reference, put_rows(batch, self.mesh)
                )
                self._accumulate(sums, side, gradients)
                self._accumulate(sums, "kl", kl_gradients)
                for name, value in jax.device_get(counts).items():
                    stats[name] = stats.get(name, 0.0) + float(value)
                self.tokens += int((batch["weights"] > 0).sum())
        if not sums:
            return {}
        zeros = jax.tree.map(jnp.zeros_like, next(iter(sums.values())))
        self.trained, self.state, norms = self._apply(
            self.trained, self.state, sums.get("plus", zeros), sums.get("minus", zeros), sums.get("kl", zeros)
        )
        tokens = stats.pop("tokens")
        means = {name: total / tokens for name, total in stats.items()} if np.isfinite(tokens) and tokens else {}
        return means | {name: float(value) for name, value in jax.device_get(norms).items()}

    def _accumulate(self, sums: dict[str, Any], side: str, gradients: Any) -> None:
        if gradients is not None:
            sums[side] = self._add(sums[side], gradients) if side in sums else gradients

    def _update(
        self, params: Params, state: Any, plus: Any, minus: Any, kl: Any
    ) -> tuple[Params, Any, dict[str, Array]]:
        """The optimizer step on g+, g- and the KL gradient; also returns learning rate and norms."""
        norms: dict[str, Array] = {"learning_rate": self._rate(optimizer.applied(state))}
        total = plus
        if self.mode is not None:
            total, balance_norms = balance(plus, minus, self.mode, self.epsilon)
            norms |= balance_norms
            total = jax.tree.map(lambda a, b: a + self.config.kl * b, total, kl)
        norms["grad_norm"] = norm(total)
        updates, state = self.program.tx.update(total, state, params)
        norms["update_norm"] = norm(updates)
        return optax.apply_updates(params, updates), state, norms


class LearnerProgram:
    """The compiled gradients of a run and the shardings of its arrays; `rl.capacity` compiles it without any data."""

    def __init__(self, model: ModelConfig, config: PolicyConfig, apart: bool, mesh: Mesh) -> None:
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
        self.pull = {
            first: OnMesh(
                mesh,
                jax.jit(
                    partial(pull, model, config, apart, self.subset, first),
                    in_shardings=argument_shardings,
                    out_shardings=outs,
                ),
            )
            for first in (True, False)
        }

    def placed(self, params: Params) -> tuple[Params, Params]:
        """(trained, frozen) of parameters on the mesh; without a copy where they are there already."""
        trained, frozen = self.subset.split(params)
        return jax.device_put(trained, self.shardings), jax.device_put(frozen, self.frozen_shardings)


def rows_of(groups: Sequence[Group]) -> list[TrainingRow]:
    """Every scored completion of the groups with a signal, with the paper's token weights.

    A token that the sampler inserted (the end of a thinking budget) was not chosen by the policy and weighs nothing.
    """
    live = [group for group in groups if carries_signal([r.advantage for r in group.rollouts])]
    scored = [[r for r in group.rollouts if r.advantage is not None] for group in live]
    weights = token_weights([[len(r.ids) - (r.forced is not None) for r in group] for group in scored])
    return [
        TrainingRow(r.prompt_ids, r.ids, r.logprobs, r.advantage or 0.0, weight, r.forced)
        for group, group_weights in zip(scored, weights, strict=True)
        for r, weight in zip(group, group_weights, strict=True)
    ]


def pull(
    model: ModelConfig,
    config: PolicyConfig,
    apart: bool,
    subset: ParameterSubset,
    first: bool,
    trained: Params,
    frozen: Params,
    reference: Params | None,
    batch: RowBatch | Mapping[str, Array],
) -> tuple[Any, Any, dict[str, Array]]:
    """Gradients of the weighted sums of one micro-batch: (policy, KL, counts). KL is None unless kept `apart`.

    They are with respect to `trained` alone; `reference` is its start (None: no KL term), and shares `frozen`.
    """
    weights_BL = batch["weights"]
    reference_BL = None
    if reference is not None:
        reference_BL = lax.stop_gradient(logprobs(subset.join(reference, frozen), model, batch)[0])

    def losses(trained: Params) -> tuple[tuple[Array, Array], dict[str, Array]]:
        logprobs_BL, entropy_BL = logprobs(subset.join(trained, frozen), model, batch)
        sampled_BL = lax.stop_gradient(logprobs_BL) if first else batch["sampled"]
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


def logprobs(params: Params, model: ModelConfig, batch: RowBatch | Mapping[str, Array]) -> tuple[Array, Array]:
    """Log-probability of every target and the entropy of its distribution [B, L], in float32."""
    hidden_BLD = forward(params, model, batch["tokens"], batch["segments"], batch["positions"])
    return token_logprobs(params, model, hidden_BLD, batch["targets"])


def _at_update(state: Any, applied: Array) -> Any:
    """A fresh optimizer state whose schedule stands at `applied` updates."""

    def rule(leaf: Any) -> Any:
        return leaf._replace(count=applied) if isinstance(leaf, optax.ScaleByScheduleState) else leaf

    return jax.tree.map(rule, state, is_leaf=lambda leaf: isinstance(leaf, optax.ScaleByScheduleState))
