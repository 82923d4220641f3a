"""The formulas of an update (paper §4.2 and §4.3): token losses, their weights, and the balance of g+ and g-.

The loss is a sum of token terms times row weights, so that gradients of micro-batches add up to the gradient of the
whole batch, whatever the split.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array, lax

BalanceMode = Literal["equalise", "cap", "off"]


def surrogate(logprobs_BL: Array, sampled_BL: Array, advantage_B: Array, clip: float) -> tuple[Array, Array]:
    """-min(rho*A, clip(rho)*A) by token, and whether the clip is active there; rho = pi / pi_sampled.

    On the first inner epoch pass `lax.stop_gradient(logprobs)` as `sampled`: rho is 1 and the gradient is
    -A * grad log pi (paper §4.3, g+ and g-).
    """
    ratio_BL = jnp.exp(logprobs_BL - sampled_BL)
    advantage_B1 = advantage_B[:, None]
    plain_BL = ratio_BL * advantage_B1
    clipped_BL = jnp.clip(ratio_BL, 1.0 - clip, 1.0 + clip) * advantage_B1
    return -jnp.minimum(plain_BL, clipped_BL), lax.stop_gradient((clipped_BL < plain_BL).astype(jnp.float32))


def kl_to_reference(logprobs_BL: Array, reference_BL: Array) -> Array:
    """KL(pi || reference) by token: exp(d) - d - 1 with d = log reference - log pi, as sampled from pi.

    Never negative, of low variance, and its gradient, (1 - exp(d)) * grad log pi, depends on the reference.
    """
    difference_BL = lax.stop_gradient(reference_BL) - logprobs_BL
    return jnp.exp(difference_BL) - difference_BL - 1.0


def token_weights(lengths: list[list[int]]) -> list[list[float]]:
    """The weight of each token of each completion, group by group: 1 / (tokens in the group * groups).

    So a completion counts by its share of the group's tokens (paper §4.2, token-level normalisation) and every
    group counts alike.
    """
    totals = [sum(group) for group in lengths]
    live = sum(1 for total in totals if total)
    return [[1.0 / (total * live) if total else 0.0] * len(group) for group, total in zip(lengths, totals, strict=True)]


def norm(tree: Any) -> Array:
    """The Euclidean norm of all leaves together, summed in float32 whatever their type."""
    squares = [jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(tree)]
    return jnp.sqrt(jnp.sum(jnp.stack(squares)))


def balance(g_plus: Any, g_minus: Any, mode: BalanceMode, epsilon: float) -> tuple[Any, dict[str, Array]]:
    """The gradient g+ + ||g+|| / (||g-|| + eps) * g-, with both norms and the factor as metrics.

    `equalise` is the paper's; `cap` never amplifies g-; `off` is plain GRPO. Where there are no positive completions
    `equalise` and `cap` give 0 for the factor: nothing is suppressed that nothing is reinforced against.
    """
    positive, negative = norm(g_plus), norm(g_minus)
    factor = jnp.ones(()) if mode == "off" else positive / (negative + epsilon)
    if mode == "cap":
        factor = jnp.minimum(factor, 1.0)
    balanced = jax.tree.map(lambda up, down: up + factor.astype(down.dtype) * down, g_plus, g_minus)
    return balanced, {"norm_positive": positive, "norm_negative": negative, "balance_factor": factor}
