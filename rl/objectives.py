"""The formulas of an update (paper §4.2 and §4.3): policy loss, KL term, token weights, and the sum of g+ and g-.

The loss is a weighted sum over tokens, with weights that are computed for the whole batch. So the gradients of
micro-batches add up to the gradient of the batch. Array names: B completions, L tokens of the longest.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array, lax

from nautile.model.training.optimizer import norm
from nautile.rl.objective_registry import Balance

Aggregate = Literal["group_tokens", "sequence_mean"]


def surrogate(logprobs_BL: Array, sampled_BL: Array, advantage_B: Array, clip: float) -> tuple[Array, Array]:
    """Clipped policy loss of PPO and GRPO by token, -min(rho*A, clip(rho)*A), and 1.0 where the clip is active.

    rho = pi / pi_sampled is the probability ratio, clipped to [1 - clip, 1 + clip]. On-policy, pass
    `lax.stop_gradient(logprobs_BL)` as `sampled_BL`: rho is then 1, and the gradient is -A * grad log pi, of which
    paper §4.3 makes g+ and g-.
    """
    ratio_BL = jnp.exp(logprobs_BL - sampled_BL)
    advantage_B1 = advantage_B[:, None]
    plain_BL = ratio_BL * advantage_B1
    clipped_BL = jnp.clip(ratio_BL, 1.0 - clip, 1.0 + clip) * advantage_B1
    # The minimum is pessimistic: clipping removes the gradient only where the ratio already moved the way A asks for.
    return -jnp.minimum(plain_BL, clipped_BL), lax.stop_gradient((clipped_BL < plain_BL).astype(jnp.float32))


def importance_weights(logprobs_BL: Array, sampled_BL: Array, cap: float | None) -> Array:
    """Importance weight of each token, min(pi / pi_sampled, cap), without a gradient; `cap` None: not truncated.

    Also on-policy sampler and learner are two programs, whose roundings differ (bfloat16). Times the policy loss this
    corrects the expectation, and the cap bounds the variance (truncated importance sampling, Ionides 2008; between two
    programs of one policy, Yao et al. 2025, who use a cap of 2).
    """
    ratio_BL = lax.stop_gradient(jnp.exp(logprobs_BL - sampled_BL))
    return ratio_BL if cap is None else jnp.minimum(ratio_BL, cap)


def tapered_weights(logprobs_BL: Array, sampled_BL: Array, mask_BL: Array, advantage_B: Array) -> Array:
    """Weights [B, 1] of completions of an older policy, without a gradient (TOPR, arXiv:2503.14286).

    1 for a completion above the mean of its group; for one below it pi / pi_sampled of the whole completion, at most 1:
    what the policy no longer does is pushed down no further. `mask_BL`: 1 for the tokens of a completion.
    """
    difference_BL = jnp.where(mask_BL > 0, logprobs_BL - sampled_BL, 0.0)
    ratio_B1 = jnp.exp(jnp.minimum(jnp.sum(lax.stop_gradient(difference_BL), axis=1, keepdims=True), 0.0))
    return jnp.where(advantage_B[:, None] < 0, ratio_B1, 1.0)


def kl_to_reference(logprobs_BL: Array, reference_BL: Array) -> Array:
    """Estimate KL(pi || reference) by token as exp(d) - d - 1, where d = log reference - log pi.

    Unbiased for tokens sampled from pi, never negative, and of low variance (as in GRPO, arXiv:2402.03300
    equation 4). Its gradient is (1 - exp(d)) * grad log pi.
    """
    # The reference is a constant, even where it shares parameters with the policy.
    difference_BL = lax.stop_gradient(reference_BL) - logprobs_BL
    return jnp.exp(difference_BL) - difference_BL - 1.0


def token_weights(
    lengths: list[list[int]], aggregate: Aggregate = "group_tokens", group_count: int | None = None
) -> list[list[float]]:
    """The loss weight of a token of each completion, by group. `lengths`: tokens of each completion, by group.

    "group_tokens": 1 / (tokens of the group * groups), so that every token of a group has the same weight (paper §4.2,
    token-level normalisation). "sequence_mean": 1 / (tokens of the completion * completions of the group * groups),
    the mean over completions of the mean over tokens (GRPO, arXiv:2402.03300 equation 3). Every group with tokens has
    the same total weight, 1 / groups. `group_count`: the number of groups, if not that of those with tokens.
    """
    totals = [sum(group) for group in lengths]
    group_count = group_count or sum(1 for total in totals if total)
    if aggregate == "sequence_mean":
        return [[1.0 / (length * len(group) * group_count) if length else 0.0 for length in group] for group in lengths]
    return [
        [1.0 / (total * group_count) if total else 0.0] * len(group)
        for group, total in zip(lengths, totals, strict=True)
    ]


def balance(g_plus: Any, g_minus: Any, settings: Balance) -> tuple[Any, dict[str, Array]]:
    """Combine the gradients as g+ + f * g- (paper §4.3), f by the objective; also returns the metrics.

    Metrics: the norms of g+ and g-, f (NaN where g- is zero: a ratio to nothing, which multiplies nothing), and the
    cosine between g+ and g- (NaN where one of them is zero).
    """
    positive, negative = norm(g_plus), norm(g_minus)
    factor = jnp.asarray(settings.objective.factor(positive, negative, settings), jnp.float32)
    combined = g_plus
    if not settings.objective.drops_negative:  # g- may have infinities, and 0 * inf is NaN
        combined = jax.tree.map(lambda plus, minus: plus + factor.astype(minus.dtype) * minus, g_plus, g_minus)
    # The cosine is only reported; in float32, whatever the gradients are.
    products = jax.tree.map(lambda plus, minus: jnp.sum(plus.astype(jnp.float32) * minus), g_plus, g_minus)
    cosine = jnp.sum(jnp.stack(jax.tree.leaves(products))) / (positive * negative)
    return combined, {
        "norm_positive": positive,
        "norm_negative": negative,
        "balance_factor": jnp.where(negative == 0, jnp.nan, factor),
        "gradient_cosine": cosine,
    }
