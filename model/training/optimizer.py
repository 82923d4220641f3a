"""AdamW and Muon from optax, with gradient clipping, one learning-rate schedule and one rule for what is a matrix.

A matrix multiplies activations: it is the last two axes of a parameter, after its stacking axes (blocks, and heads of
the readout). Only matrices have weight decay, and Muon updates only those inside blocks, each separately. In norms,
biases, depthwise taps and spectral parameters (grid, integration weights, decay slopes, phase and score scales) each
number has its own meaning, which weight decay or orthogonalisation would destroy.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from optax.contrib import MuonDimensionNumbers, scale_by_muon

from nautile.configs.base import OptimizerConfig
from nautile.model.layers.common import Params
from nautile.model.sharding import is_stacked, replicated

MUON_RMS = 0.2  # root mean square of an AdamW update (arXiv:2502.16982 §2.2): both share one learning rate
# The values of Muon's author (Keller Jordan): momentum, and steps of the Newton-Schulz iteration.
MUON_BETA = 0.95
MUON_STEPS = 5

NOT_MATRICES = frozenset({"conv", "theta", "integration"})  # have two axes or more, but are no matrices


def build(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """The optimizer of a run of `steps` updates: clip by global norm, then AdamW, or Muon plus AdamW for non-matrices.

    `update` needs `params`. The state holds a `ScaleByScheduleState` for each group of parameters, whose count is the
    number of updates applied (see `applied`).
    """
    return build_with_rate(config, schedule(config, steps))


def build_with_rate(config: OptimizerConfig, rate: Callable[[Any], jax.Array]) -> optax.GradientTransformation:
    """The optimizer of `build` with the learning rate `rate(count of applied updates)`.

    In a jitted function `rate` may return one of its arguments, so that one program serves any number of steps.
    """
    # Under `partition` the leaves of the other group are MaskedNodes, which tree_map skips.
    is_matrix = _tree(lambda path, leaf: matrix_axes(path, leaf) is not None)
    adamw = optax.adamw(rate, config.beta1, config.beta2, weight_decay=config.weight_decay, mask=is_matrix)
    if config.grid_rate is not None:
        is_grid = _tree(lambda path, _: _names(path)[-1] == "theta")
        adamw = optax.chain(adamw, optax.masked(optax.scale(config.grid_rate), is_grid))
    if config.name == "adamw":
        return optax.chain(optax.clip_by_global_norm(config.clip), adamw)
    last_two = partial(jax.tree.map, lambda leaf: MuonDimensionNumbers(leaf.ndim - 2, leaf.ndim - 1))
    # Muon orthogonalises the momentum of each matrix; its updates are scaled to the root mean square of AdamW's.
    muon = optax.chain(
        scale_by_muon(ns_steps=MUON_STEPS, beta=MUON_BETA, weight_dimension_numbers=last_two),
        optax.stateless(lambda updates, _: jax.tree.map(lambda u: u * (MUON_RMS * max(u.shape[-2:]) ** 0.5), updates)),
        optax.add_decayed_weights(config.weight_decay),
        optax.scale_by_learning_rate(rate),
    )
    group_of = _tree(lambda path, leaf: "muon" if is_stacked(path) and matrix_axes(path, leaf) is not None else "adamw")
    # Clipped before they are parted, by the norm of all parameters together.
    groups = optax.partition({"muon": muon, "adamw": adamw}, group_of)
    return optax.chain(optax.clip_by_global_norm(config.clip), groups)


def schedule(config: OptimizerConfig, steps: int) -> Callable[[Any], jax.Array]:
    """Learning rate of updates 0, 1, ...: linear warm-up to the peak, then as `config.schedule`.

    Update `warmup_steps` is the first at the peak, and update `steps - 1` is at `final_learning_rate` (with `constant`
    at the peak). The warm-up takes at most half of the run, so that a short run still learns.
    """
    peak, final = config.learning_rate, config.final_learning_rate
    warmup = min(config.warmup_steps, steps // 2)
    last = max(steps - 1, warmup + 1)
    if config.schedule == "cosine":
        body = optax.cosine_decay_schedule(peak, last - warmup, alpha=final / peak)
    elif config.schedule == "linear":
        body = optax.linear_schedule(peak, final, last - warmup)
    elif config.schedule == "wsd":
        falling = min(max(round(config.decay_share * steps), 1), last - warmup)
        flat = last - warmup - falling
        body = optax.join_schedules(
            [optax.constant_schedule(peak), optax.linear_schedule(peak, final, falling)], [flat]
        )
    else:
        body = optax.constant_schedule(peak)
    if not warmup:
        return lambda count: jnp.asarray(body(count), jnp.float32)
    # Not from zero: the first update would change nothing.
    rise = optax.linear_schedule(peak / (warmup + 1), peak, warmup)
    rate = optax.join_schedules([rise, body], [warmup])
    return lambda count: jnp.asarray(rate(count), jnp.float32)


def applied(state: optax.OptState) -> jax.Array:
    """Number of updates applied so far, int32 scalar: the argument of `schedule` for the next one."""
    leaves = jax.tree.leaves(state, is_leaf=lambda leaf: isinstance(leaf, optax.ScaleByScheduleState))
    return next(leaf.count for leaf in leaves if isinstance(leaf, optax.ScaleByScheduleState))


def finite_update(
    tx: optax.GradientTransformation,
    params: Params,
    state: optax.OptState,
    gradient: Params,
    loss: jax.Array | None = None,
) -> tuple[Params, optax.OptState, dict[str, jax.Array]]:
    """Apply an update of `tx`, unless the loss (None: not checked), the gradient or the update is not finite.

    Returns the new parameters and state (unchanged if skipped, including moments and the schedule's count), and
    `grad_norm`, `update_norm`, `applied`, and `not_finite`: bool [leaves], for each leaf of the gradient whether it
    holds a number that is not finite.
    """
    updates, new_state = tx.update(gradient, state, params)
    measured = {"grad_norm": norm(gradient), "update_norm": norm(updates)}
    # The update too: it also depends on the moments and, by the weight decay, on the parameters.
    finite = jnp.isfinite(measured["grad_norm"]) & jnp.isfinite(measured["update_norm"])
    if loss is not None:
        finite &= jnp.isfinite(loss)
    # Which leaves are at fault, for the error message.
    not_finite = jnp.stack([~jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(gradient)])
    updated = optax.apply_updates(params, updates), new_state
    # `finite` is a traced value: both states are computed, and one is selected.
    selected = jax.tree.map(lambda new, old: jnp.where(finite, new, old), updated, (params, state))
    return *selected, {**measured, "applied": finite, "not_finite": not_finite}


def norm(tree: Any) -> jax.Array:
    """The Euclidean norm of all leaves together, accumulated in float32."""
    squares = [jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(tree)]
    return jnp.sqrt(jnp.sum(jnp.stack(squares)))


def distance(start: Params, end: Params) -> float:
    """The Euclidean norm of `end` - `start`, of arrays in host memory: how far a training moved the parameters."""
    pairs = zip(jax.tree.leaves(start), jax.tree.leaves(end), strict=True)
    squares = (float(np.sum(np.square(np.asarray(b, np.float32) - np.asarray(a, np.float32)))) for a, b in pairs)
    return math.sqrt(sum(squares))


def state_shardings(tx: optax.GradientTransformation, shapes: Params, shardings: Params, mesh: Mesh) -> Any:
    """Shardings of the optimizer state: a moment is split as its parameter is; counts and other scalars are replicated.

    A leaf is a moment if its path in the state ends with the path of a parameter.
    """
    by_path = {_names(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(shardings)}

    def rule(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        keys = _names(path)
        suffixes = (keys[start:] for start in range(len(keys)))
        sharding = next((by_path[suffix] for suffix in suffixes if suffix in by_path), None)
        return replicated(mesh) if sharding is None or leaf.ndim == 0 else sharding

    return jax.tree_util.tree_map_with_path(rule, jax.eval_shape(tx.init, shapes))


def matrix_axes(path: tuple[Any, ...], leaf: Any) -> tuple[int, int] | None:
    """The axes (in, out) of a parameter's matrices; None if it is not a matrix."""
    names = _names(path)
    stacked = int(is_stacked(path))
    if leaf.ndim - stacked < 2 or names[-1] in NOT_MATRICES:
        return None
    return leaf.ndim - 2, leaf.ndim - 1


def _tree(rule: Callable[[tuple[Any, ...], Any], Any]) -> Callable[[Any], Any]:
    return lambda params: jax.tree_util.tree_map_with_path(rule, params)


def _names(path: tuple[Any, ...]) -> tuple[str, ...]:
    """A pytree path as names, whether its parts are dict keys, attributes or indices."""
    return tuple(str(getattr(part, "key", getattr(part, "name", getattr(part, "idx", part)))) for part in path)
