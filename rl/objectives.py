"""The formulas of an update (paper §4.2 and §4.3): token losses, their weights, and the balance of g+ and g-.

The loss is a sum of token terms times row weights, so that gradients of micro-batches add up to the gradient of the
whole batch, whatever the split.
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
    """How g+ and g- are added (paper §4.3): the fields `balance*` of `configs.training.ReasonConfig`."""

    mode: BalanceMode = "equalise"
    over: Literal["step", "group"] = "step"
    maximum: float | None = None
    epsilon: float = 1e-8

    @classmethod
    def of(cls, config: ReasonConfig) -> "Balance":
        return cls(config.balance, config.balance_over, config.balance_max, config.balance_epsilon)


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


def token_weights(lengths: list[list[int]], aggregate: Aggregate = "group_tokens") -> list[list[float]]:
    """The weight of each token of each completion, group by group; every group counts alike.

    "group_tokens": 1 / (tokens in the group * groups), so that a completion counts by its share of the group's tokens
    (paper §4.2, token-level normalisation). "sequence_mean": 1 / (tokens of the completion * completions of the group *
    groups), the mean over completions of the mean over tokens (GRPO, arXiv:2402.03300 equation 3).
    """
    totals = [sum(group) for group in lengths]
    live = sum(1 for total in totals if total)
    if aggregate == "sequence_mean":
        return [[1.0 / (length * len(group) * live) if length else 0.0 for length in group] for group in lengths]
    return [[1.0 / (total * live) if total else 0.0] * len(group) for group, total in zip(lengths, totals, strict=True)]


def balance(g_plus: Any, g_minus: Any, settings: Balance) -> tuple[Any, dict[str, Array]]:
    """The gradient g+ + f * g-, with both norms, the factor f and the cosine of g+ and g- (NaN where one is zero).

    f is ||g+|| / (||g-|| + eps) for `equalise`, the paper's; the same but at most 1 for `cap`; 1 for `off`, which is
    plain GRPO; 0 for `positives`. `settings.maximum` bounds f from above in every mode. Where there are no positive
    completions `equalise` and `cap` give 0 for it: nothing is suppressed that nothing is reinforced against.
    """
    positive, negative = norm(g_plus), norm(g_minus)
    fixed = {"off": 1.0, "positives": 0.0}.get(settings.mode)
    factor = positive / (negative + settings.epsilon) if fixed is None else jnp.full((), fixed)
    if settings.mode == "cap":
        factor = jnp.minimum(factor, 1.0)
    if settings.maximum is not None:
        factor = jnp.minimum(factor, settings.maximum)
    balanced = g_plus
    if settings.mode != "positives":  # zero times what is not finite would not be zero
        balanced = jax.tree.map(lambda up, down: up + factor.astype(down.dtype) * down, g_plus, g_minus)
    products = jax.tree.map(lambda up, down: jnp.sum(up.astype(jnp.float32) * down), g_plus, g_minus)
    cosine = jnp.sum(jnp.stack(jax.tree.leaves(products))) / (positive * negative)
    return balanced, {
        "norm_positive": positive,
        "norm_negative": negative,
        "balance_factor": factor,
        "gradient_cosine": cosine,
    }
