"""The formulas of an update (paper §4.2 and §4.3): policy loss, KL term, token weights, and the balance of g+ and g-.

The loss is a weighted sum over tokens, with weights that are computed for the whole batch. So the gradients of
micro-batches add up to the gradient of the batch, however it is split.

Letters of array names: B completions, L tokens of the longest.
"""

from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array, lax

from configs.training import ReasonConfig
from model.training.optimizer import norm

BalanceMode = Literal["equalise", "cap", "off", "positives"]
Aggregate = Literal["group_tokens", "sequence_mean"]


@dataclass(frozen=True)
class Balance:
    """How g+ and g- are combined (paper §4.3): the fields `balance*` of `configs.training.ReasonConfig`."""

    mode: BalanceMode = "equalise"
    over: Literal["step", "group"] = "step"
    maximum: float | None = None
    epsilon: float = 1e-8

    @classmethod
    def of(cls, config: ReasonConfig) -> "Balance":
        return cls(config.balance, config.balance_over, config.balance_max, config.balance_epsilon)


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

    Also on-policy sampler and learner are two programs, whose roundings differ: in bfloat16 the tokens come from a
    distribution that is not quite the learner's. Times the policy loss this corrects the expectation, and the cap
    bounds the variance (truncated importance sampling, Ionides 2008; between two programs of one policy, Yao et al.
    2025, who use a cap of 2).
    """
    ratio_BL = lax.stop_gradient(jnp.exp(logprobs_BL - sampled_BL))
    return ratio_BL if cap is None else jnp.minimum(ratio_BL, cap)


def kl_to_reference(logprobs_BL: Array, reference_BL: Array) -> Array:
    """Estimate KL(pi || reference) by token as exp(d) - d - 1, where d = log reference - log pi.

    Unbiased for tokens sampled from pi, never negative, and of low variance (as in GRPO, arXiv:2402.03300
    equation 4). Its gradient is (1 - exp(d)) * grad log pi.
    """
    # The reference is a constant, even where it shares parameters with the policy.
    difference_BL = lax.stop_gradient(reference_BL) - logprobs_BL
    return jnp.exp(difference_BL) - difference_BL - 1.0


def token_weights(lengths: list[list[int]], aggregate: Aggregate = "group_tokens") -> list[list[float]]:
    """The loss weight of a token of each completion, by group. `lengths`: tokens of each completion, by group.

    "group_tokens": 1 / (tokens of the group * groups), so that every token of a group has the same weight (paper §4.2,
    token-level normalisation). "sequence_mean": 1 / (tokens of the completion * completions of the group * groups),
    the mean over completions of the mean over tokens (GRPO, arXiv:2402.03300 equation 3). Every group with tokens has
    the same total weight, 1 / groups.
    """
    totals = [sum(group) for group in lengths]
    group_count = sum(1 for total in totals if total)
    if aggregate == "sequence_mean":
        return [[1.0 / (length * len(group) * group_count) if length else 0.0 for length in group] for group in lengths]
    return [
        [1.0 / (total * group_count) if total else 0.0] * len(group)
        for group, total in zip(lengths, totals, strict=True)
    ]


def balance(g_plus: Any, g_minus: Any, settings: Balance) -> tuple[Any, dict[str, Array]]:
    """Combine the gradients as g+ + f * g- (paper §4.3); also returns the metrics.

    The factor f by `settings.mode`: "equalise", the paper's, is ||g+|| / (||g-|| + eps); "cap" is the same but at most
    1; "off" is 1, which is plain GRPO; "positives" is 0. `settings.maximum` is an upper limit of f in every mode. A
    step without positive completions has ||g+|| = 0, so that in "equalise" and "cap" it changes nothing.

    Metrics: the norms of g+ and g-, f, and the cosine between g+ and g- (NaN where one of them is zero).
    """
    positive, negative = norm(g_plus), norm(g_minus)
    constant = {"off": 1.0, "positives": 0.0}.get(settings.mode)
    # epsilon: a step without negative completions has ||g-|| = 0, and the factor then does not matter.
    factor = positive / (negative + settings.epsilon) if constant is None else jnp.full((), constant)
    if settings.mode == "cap":
        factor = jnp.minimum(factor, 1.0)
    if settings.maximum is not None:
        factor = jnp.minimum(factor, settings.maximum)
    balanced = g_plus
    if settings.mode != "positives":  # not by a factor of zero: g- may have infinities, and 0 * inf is NaN
        balanced = jax.tree.map(lambda plus, minus: plus + factor.astype(minus.dtype) * minus, g_plus, g_minus)
    # The cosine is only reported; in float32, whatever the gradients are.
    products = jax.tree.map(lambda plus, minus: jnp.sum(plus.astype(jnp.float32) * minus), g_plus, g_minus)
    cosine = jnp.sum(jnp.stack(jax.tree.leaves(products))) / (positive * negative)
    return balanced, {
        "norm_positive": positive,
        "norm_negative": negative,
        "balance_factor": factor,
        "gradient_cosine": cosine,
    }
