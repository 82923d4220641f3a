"""The learner: one optimizer step from a set of scored groups, by micro-batches whose gradients add up exactly.

For a balanced step the rows are split by the sign of their advantage, so that each completion is passed through once
and g+ and g- come out apart (paper §4.3). With a KL term they are pulled back separately, for the term stands outside
the balance; without one, and in a plain step, there is a single backward pass.

Everything runs on a mesh, of one device or of many: rows of a micro-batch go over all devices, parameters and moments
over `fsdp` of them, as in pretraining.
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
from rl import balance, objectives
from rl.advantages import carries_signal
from rl.parameter_subset import ParameterSubset
from rl.rollouts import Group
from rl.training_rows import RowBatch, TrainingRow, batches, by_length

Metrics = dict[str, float]
ROWS = ("tokens", "targets", "segments", "positions", "weights", "sampled", "advantage")


class Learner:
    """Holds the policy and its optimizer state. `mode` None: one plain sum of gradients; else the balance of §4.3."""

    def __init__(
        self,
        model: ModelConfig,
        config: PolicyConfig,
        params: Params,
        length: int,
        mode: balance.BalanceMode | None,
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
        """The policy, whole."""
        return self.program.trainable.join(self.trained, self.frozen)

    def set(self, params: Params) -> None:
        """Go on from these parameters with fresh moments and the schedule where it is."""
        applied = optimizer.applied(self.state)
        self.trained = self.program.placed(params)[0]
        self.state = _counted(self.program.begin(self.trained), applied)

    def update(self, groups: Sequence[Group]) -> Metrics:
        """One step (`inner_epochs` passes) on the groups that carry a signal; returns what was measured."""
        began = time.perf_counter()
        measured: Metrics = {}
        for epoch in range(self.config.inner_epochs):
            measured = self._pass(rows_of(groups), first=epoch == 0)
        self.seconds += time.perf_counter() - began
        return measured

    def _pass(self, rows: list[TrainingRow], first: bool) -> Metrics:
        positive = [row for row in rows if row.advantage > 0]
        negative = [row for row in rows if row.advantage < 0]
        idle = [row for row in rows if row.advantage == 0 and self.reference is not None]
        if self.mode is None:
            parts = {"plus": positive + negative + idle}
        else:
            parts = {"plus": positive, "minus": negative + idle}  # an idle row adds only to the KL term
        sums: dict[str, Any] = {}
        stats: dict[str, float] = {}
        for side, some in parts.items():
            for batch in batches(by_length(some), self.config.micro_rows, self.length):
                gradients, kl_gradients, counted = self.program.pull[first](
                    self.trained, self.frozen, self.reference, put_rows(batch, self.mesh)
                )
                self._gather(sums, side, gradients)
                self._gather(sums, "kl", kl_gradients)
                for name, value in jax.device_get(counted).items():
                    stats[name] = stats.get(name, 0.0) + float(value)
                self.tokens += int((batch["weights"] > 0).sum())
        if not sums:
            return {}
        zeros = jax.tree.map(jnp.zeros_like, next(iter(sums.values())))
        self.trained, self.state, norms = self._apply(
            self.trained, self.state, sums.get("plus", zeros), sums.get("minus", zeros), sums.get("kl", zeros)
        )
        return _means(stats) | {name: float(value) for name, value in jax.device_get(norms).items()}

    def _gather(self, sums: dict[str, Any], side: str, gradients: Any) -> None:
        if gradients is not None:
            sums[side] = self._add(sums[side], gradients) if side in sums else gradients

    def _update(
        self, params: Params, state: Any, plus: Any, minus: Any, kl: Any
    ) -> tuple[Params, Any, dict[str, Array]]:
        norms: dict[str, Array] = {"learning_rate": self._rate(optimizer.applied(state))}
        total = plus
        if self.mode is not None:
            total, measured = balance.combine(plus, minus, self.mode, self.epsilon)
            norms |= measured
            total = jax.tree.map(lambda a, b: a + self.config.kl * b, total, kl)
        norms["grad_norm"] = balance.norm(total)
        updates, state = self.program.tx.update(total, state, params)
        norms["update_norm"] = balance.norm(updates)
        return optax.apply_updates(params, updates), state, norms


class LearnerProgram:
    """The jitted gradients of a run, and where its arrays live: also what `rl.capacity` compiles without any data."""

    def __init__(self, model: ModelConfig, config: PolicyConfig, apart: bool, mesh: Mesh) -> None:
        self.mesh = mesh
        self.trainable = ParameterSubset(model, config.train)
        self.tx = optimizer.build(config.optimizer, config.steps * config.inner_epochs)
        kinds, still = jax.eval_shape(self.trainable.part, shapes(model))
        self.kinds, self.still = kinds, still
        self.shardings, self.frozen_shardings = parameter_shardings(kinds, mesh), parameter_shardings(still, mesh)
        self.moments = optimizer_shardings(self.tx, kinds, self.shardings, mesh)
        self.begin = jax.jit(self.tx.init, out_shardings=self.moments)
        whole = replicated(mesh)
        places = (
            self.shardings,
            self.frozen_shardings,
            self.shardings if config.kl else None,
            dict.fromkeys(ROWS, row_sharding(mesh)),
        )
        kept_apart = self.shardings if apart and config.kl else None
        outs = (self.shardings, kept_apart, whole)
        self.pull = {
            first: OnMesh(
                mesh,
                jax.jit(
                    partial(pull, model, config, apart, self.trainable, first), in_shardings=places, out_shardings=outs
                ),
            )
            for first in (True, False)
        }

    def placed(self, params: Params) -> tuple[Params, Params]:
        """(trained, frozen) of parameters on the mesh; without a copy where they are there already."""
        trained, frozen = self.trainable.part(params)
        return jax.device_put(trained, self.shardings), jax.device_put(frozen, self.frozen_shardings)


def rows_of(groups: Sequence[Group]) -> list[TrainingRow]:
    """Every scored completion of the groups with a signal, with the paper's token weights.

    A token that the sampler put in itself (the end of a thinking budget) is no choice of the policy and weighs nothing.
    """
    live = [group for group in groups if carries_signal([r.advantage for r in group.rollouts])]
    scored = [[r for r in group.rollouts if r.advantage is not None] for group in live]
    weights = objectives.token_weights([[len(r.ids) - (r.forced is not None) for r in group] for group in scored])
    return [
        TrainingRow(r.prompt_ids, r.ids, r.logprobs, r.advantage or 0.0, weight, r.forced)
        for group, group_weights in zip(scored, weights, strict=True)
        for r, weight in zip(group, group_weights, strict=True)
    ]


def pull(
    model: ModelConfig,
    config: PolicyConfig,
    apart: bool,
    trainable: ParameterSubset,
    first: bool,
    trained: Params,
    frozen: Params,
    reference: Params | None,
    batch: RowBatch | Mapping[str, Array],
) -> tuple[Any, Any, dict[str, Array]]:
    """Gradients of the weighted sums of one micro-batch: (policy, KL, counts). KL is None unless kept `apart`.

    They are taken to `trained` alone; `reference` is the start of it (None: no KL term), and shares `frozen`.
    """
    weights_BL = batch["weights"]
    reference_BL = None
    if reference is not None:
        reference_BL = lax.stop_gradient(logprobs(trainable.join(reference, frozen), model, batch)[0])

    def losses(trained: Params) -> tuple[tuple[Array, Array], dict[str, Array]]:
        logprobs_BL, entropy_BL = logprobs(trainable.join(trained, frozen), model, batch)
        sampled_BL = lax.stop_gradient(logprobs_BL) if first else batch["sampled"]
        policy_BL, clipped_BL = objectives.surrogate(logprobs_BL, sampled_BL, batch["advantage"], config.clip_ratio)
        kl_BL = jnp.zeros_like(policy_BL)
        if reference_BL is not None:
            kl_BL = objectives.kl_to_reference(logprobs_BL, reference_BL)
        counted_BL = (weights_BL > 0).astype(jnp.float32)
        counts = {
            "tokens": jnp.sum(counted_BL),
            "entropy": jnp.sum(entropy_BL * counted_BL),
            "sampler_gap": jnp.sum(jnp.abs(logprobs_BL - batch["sampled"]) * counted_BL),
            "clip_share": jnp.sum(clipped_BL * counted_BL),
        }
        if reference_BL is not None:
            counts["kl"] = jnp.sum(kl_BL * counted_BL)
        return (jnp.sum(policy_BL * weights_BL), jnp.sum(kl_BL * weights_BL)), counts

    values, back, counts = jax.vjp(losses, trained, has_aux=True)
    one, none = jnp.ones_like(values[0]), jnp.zeros_like(values[0])
    if reference is None:
        return back((one, none))[0], None, counts
    if not apart:
        return back((one, one * config.kl))[0], None, counts
    return back((one, none))[0], back((none, one))[0], counts


def logprobs(params: Params, model: ModelConfig, batch: RowBatch | Mapping[str, Array]) -> tuple[Array, Array]:
    """Of every target: log-probability and the entropy of its distribution [B, L], in float32."""
    hidden_BLD = forward(params, model, batch["tokens"], batch["segments"], batch["positions"])
    return token_logprobs(params, model, hidden_BLD, batch["targets"])


def _counted(state: Any, applied: Array) -> Any:
    """A fresh optimizer state whose schedule stands at `applied` updates."""

    def rule(leaf: Any) -> Any:
        return leaf._replace(count=applied) if isinstance(leaf, optax.ScaleByScheduleState) else leaf

    return jax.tree.map(rule, state, is_leaf=lambda leaf: isinstance(leaf, optax.ScaleByScheduleState))


def _means(stats: dict[str, float]) -> Metrics:
    tokens = stats.pop("tokens")
    return {name: total / tokens for name, total in stats.items()} if np.isfinite(tokens) and tokens else {}
