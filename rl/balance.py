"""Gradient balance (paper §4.3): g = g+ + ||g+|| / (||g-|| + eps) * g-, over all parameters, norms in float32."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array

BalanceMode = Literal["equalise", "cap", "off"]


def norm(tree: Any) -> Array:
    """The Euclidean norm of all leaves together, summed in float32 whatever their type."""
    squares = [jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(tree)]
    return jnp.sqrt(jnp.sum(jnp.stack(squares)))


def factor(positive: Array, negative: Array, mode: BalanceMode, epsilon: float) -> Array:
    """What g- is multiplied by, given both norms.

    `equalise` is the paper's; `cap` never amplifies g-; `off` is plain GRPO. Where there are no positive completions
    `equalise` and `cap` give 0: nothing is suppressed that nothing is reinforced against.
    """
    if mode == "off":
        return jnp.ones(())
    ratio = positive / (negative + epsilon)
    return jnp.minimum(ratio, 1.0) if mode == "cap" else ratio


def combine(g_plus: Any, g_minus: Any, mode: BalanceMode, epsilon: float) -> tuple[Any, dict[str, Array]]:
    """The balanced gradient, with both norms and the factor as metrics."""
    positive, negative = norm(g_plus), norm(g_minus)
    scale = factor(positive, negative, mode, epsilon)
    balanced = jax.tree.map(lambda up, down: up + scale.astype(down.dtype) * down, g_plus, g_minus)
    return balanced, {"norm_positive": positive, "norm_negative": negative, "balance_factor": scale}
