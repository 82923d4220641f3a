"""The learner: one optimizer step from a set of scored groups, by micro-batches whose gradients add up exactly.

For a balanced step the rows are split by the sign of their advantage, so that each completion is passed through once
and g+ and g- come out apart (paper §4.3). With a KL term they are pulled back separately, for the term stands outside
the balance; without one, and in a plain step, there is a single backward pass.
"""

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax

from configs.model import ModelConfig
from configs.schema import PolicyConfig
from model import optimizer
from model.layers import Params
from model.loss import token_logprobs
from model.nautile import forward
from rl import balance, objectives
from rl.advantages import carries_signal
from rl.rollouts import Group
from rl.rows import Batch, Row, batches, by_length

Metrics = dict[str, float]


class Learner:
    """Holds parameters and optimizer state. `mode` None: one plain sum of gradients; else the balance of §4.3."""

    def __init__(
        self,
        model: ModelConfig,
        config: PolicyConfig,
        params: Params,
        length: int,
        mode: balance.Mode | None,
        epsilon: float = 1e-8,
    ) -> None:
        self.model, self.config, self.length, self.mode, self.epsilon = model, config, length, mode, epsilon
        # The reference is the start itself: the same arrays, kept alive only where a KL term needs them.
        self.reference = params if config.kl else None
        self.params = params
        self._tx = optimizer.build(config.optimizer, config.steps * config.inner_epochs)
        self._rate = optimizer.schedule(config.optimizer, config.steps * config.inner_epochs)
        self.state = jax.jit(self._tx.init)(params)
        self.tokens, self.seconds = 0, 0.0
        self._pull = jax.jit(partial(pull, model, config, mode is not None), static_argnames="first")
        self._add = jax.jit(partial(jax.tree.map, jnp.add), donate_argnums=0)
        self._apply = jax.jit(self._update, donate_argnums=1)

    def update(self, groups: Sequence[Group]) -> Metrics:
        """One step (`inner_epochs` passes) on the groups that carry a signal; returns what was measured."""
        began = time.perf_counter()
        measured: Metrics = {}
        for epoch in range(self.config.inner_epochs):
            measured = self._pass(rows_of(groups), first=epoch == 0)
        self.seconds += time.perf_counter() - began
        return measured

    def _pass(self, rows: list[Row], first: bool) -> Metrics:
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
                gradients, kl_gradients, counted = self._pull(self.params, self.reference, batch, first=first)
                self._gather(sums, side, gradients)
                self._gather(sums, "kl", kl_gradients)
                for name, value in jax.device_get(counted).items():
                    stats[name] = stats.get(name, 0.0) + float(value)
                self.tokens += int((batch["weights"] > 0).sum())
        if not sums:
            return {}
        zeros = jax.tree.map(jnp.zeros_like, next(iter(sums.values())))
        self.params, self.state, norms = self._apply(
            self.params, self.state, sums.get("plus", zeros), sums.get("minus", zeros), sums.get("kl", zeros)
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
        updates, state = self._tx.update(total, state, params)
        norms["update_norm"] = balance.norm(updates)
        return optax.apply_updates(params, updates), state, norms


def rows_of(groups: Sequence[Group]) -> list[Row]:
    """Every scored completion of the groups with a signal, with the paper's token weights."""
    live = [group for group in groups if carries_signal([r.advantage for r in group.rollouts])]
    scored = [[r for r in group.rollouts if r.advantage is not None] for group in live]
    weights = objectives.token_weights([[len(r.ids) for r in group] for group in scored])
    return [
        Row(r.prompt_ids, r.ids, r.logprobs, r.advantage or 0.0, weight)
        for group, group_weights in zip(scored, weights, strict=True)
        for r, weight in zip(group, group_weights, strict=True)
    ]


def pull(
    model: ModelConfig,
    config: PolicyConfig,
    apart: bool,
    params: Params,
    reference: Params | None,
    batch: Batch,
    first: bool,
) -> tuple[Any, Any, dict[str, Array]]:
    """Gradients of the weighted sums of one micro-batch: (policy, KL, counts). KL is None unless kept `apart`."""
    weights_BL = batch["weights"]
    reference_BL = None if reference is None else _logprobs(reference, model, batch)[0]

    def losses(params: Params) -> tuple[tuple[Array, Array], dict[str, Array]]:
        logprobs_BL, entropy_BL = _logprobs(params, model, batch)
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

    values, back, counts = jax.vjp(losses, params, has_aux=True)
    one, none = jnp.ones_like(values[0]), jnp.zeros_like(values[0])
    if reference is None:
        return back((one, none))[0], None, counts
    if not apart:
        return back((one, one * config.kl))[0], None, counts
    return back((one, none))[0], back((none, one))[0], counts


def _logprobs(params: Params, model: ModelConfig, batch: Batch) -> tuple[Array, Array]:
    hidden_BLD = forward(params, model, batch["tokens"], batch["segments"], batch["positions"])
    return token_logprobs(params, model, hidden_BLD, batch["targets"])


def _means(stats: dict[str, float]) -> Metrics:
    tokens = stats.pop("tokens")
    return {name: total / tokens for name, total in stats.items()} if np.isfinite(tokens) and tokens else {}
