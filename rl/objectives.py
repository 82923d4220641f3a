"""The policy-gradient objectives on per-token log-probabilities, and the loss weights of the paper's update rule.

Everything is a sum of token terms times row weights, so that gradients of micro-batches add up to the gradient of
the whole batch, whatever the split.
"""

import jax.numpy as jnp
from jax import Array, lax


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
