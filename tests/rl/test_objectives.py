from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nautile.common.errors import ConfigError
from nautile.common.text import markdown_table
from nautile.model.training.optimizer import norm
from nautile.rl.objective_registry import OBJECTIVES, Balance
from nautile.rl.objectives import (
    balance,
    importance_weights,
    kl_to_reference,
    surrogate,
    tapered_weights,
    token_weights,
)
from nautile.rl.rewards import advantages


def test_first_epoch_gradient_is_minus_the_advantage():
    logprobs = np.log([[0.2, 0.7], [0.5, 0.1]])
    advantage = np.array([0.75, -0.25])

    @jax.jit
    @jax.grad
    def slope(logprobs):
        return surrogate(logprobs, jax.lax.stop_gradient(logprobs), advantage, 0.2)[0].sum()

    assert slope(logprobs) == pytest.approx(-np.broadcast_to(advantage[:, None], (2, 2)))


def test_clip_against_straight_numpy():
    rng = np.random.default_rng(0)
    new, old = -rng.random((6, 5)), -rng.random((6, 5))
    advantage = rng.normal(size=6)
    ratio = np.exp(new - old)
    expected = -np.minimum(ratio * advantage[:, None], np.clip(ratio, 0.8, 1.2) * advantage[:, None])
    values, clipped = jax.jit(surrogate)(new, old, advantage, 0.2)
    assert np.asarray(values) == pytest.approx(expected, rel=1e-5)
    high = (ratio > 1.2) & (advantage > 0)[:, None]
    low = (ratio < 0.8) & (advantage < 0)[:, None]
    assert np.array_equal(np.asarray(clipped) > 0, high | low)


@pytest.mark.parametrize("cap", [None, 2.0])
def test_importance_weights_against_straight_numpy(cap):
    """min(pi / pi_sampled, cap) on the gradient -A grad log pi of a token; no gradient of its own."""
    rng = np.random.default_rng(0)
    new, old, advantage = -3 * rng.random((6, 5)), -3 * rng.random((6, 5)), rng.normal(size=6)
    ratio = np.exp(new - old)
    expected = ratio if cap is None else np.where(ratio > cap, cap, ratio)
    assert (ratio > 2).any()

    @jax.grad
    def slope(new):
        on_policy = surrogate(new, jax.lax.stop_gradient(new), advantage, 0.2)[0]
        return jnp.sum(on_policy * importance_weights(new, old, cap))

    np.testing.assert_allclose(importance_weights(new, old, cap), expected, rtol=1e-5)
    np.testing.assert_allclose(slope(jnp.asarray(new)), -advantage[:, None] * expected, rtol=1e-5)


def test_tapered_weights_against_straight_numpy():
    """[pi / pi_sampled] of a whole completion, at most 1, below the mean; 1 above it; tokens that pad do not count."""
    rng = np.random.default_rng(0)
    new, old, advantage = -2 * rng.random((6, 5)), -2 * rng.random((6, 5)), np.array([1, 0.2, -1, -0.5, -2, -0.1])
    mask = np.array([[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]] * 3)
    old[0::2, 4] = -np.inf  # whatever stands there
    expected = [
        1.0 if a > 0 else min(1.0, float(np.prod(np.exp(n - o)[m > 0])))
        for n, o, m, a in zip(new, old, mask, advantage, strict=True)
    ]
    assert 0 < min(expected) < max(expected[2:]) == 1

    @jax.grad
    def slope(new):
        return jnp.sum(tapered_weights(new, old, mask, advantage) * new)

    np.testing.assert_allclose(tapered_weights(new, old, mask, advantage)[:, 0], expected, rtol=1e-5)
    np.testing.assert_allclose(slope(jnp.asarray(new)), np.tile(np.array(expected)[:, None], 5), rtol=1e-5)


def test_kl_is_positive_and_its_gradient_depends_on_the_reference():
    logprobs, reference = np.log([[0.2, 0.7, 0.4]]), np.log([[0.3, 0.6, 0.4]])

    @jax.jit
    def run(logprobs, reference):
        values, back = jax.vjp(kl_to_reference, logprobs, reference)
        return values, *back(values * 0 + 1)

    values, gradient, of_reference = map(np.asarray, run(logprobs, reference))
    assert np.all(values >= 0)
    assert values[0, 2] == 0
    assert gradient == pytest.approx(1 - np.exp(reference - logprobs), rel=1e-5)
    assert np.all(of_reference == 0)


def test_kl_is_unbiased():
    """Summed over the whole distribution with its own weights, the estimator is the divergence itself."""
    rng = np.random.default_rng(1)
    p, q = rng.dirichlet(np.ones(7)), rng.dirichlet(np.ones(7))
    values = np.asarray(jax.jit(kl_to_reference)(np.log([p]), np.log([q])))[0]
    assert (p * values).sum() == pytest.approx((p * np.log(p / q)).sum(), rel=1e-4)


@given(st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=5), min_size=1, max_size=5))
def test_every_token_of_a_group_and_every_group_counts_alike(lengths):
    weights = token_weights(lengths)
    for group, group_weights in zip(lengths, weights, strict=True):
        assert len(set(group_weights)) == 1
        total = sum(length * weight for length, weight in zip(group, group_weights, strict=True))
        assert total == pytest.approx(1 / len(lengths))


def trees(seed=0, scale=3.0):
    rng = np.random.default_rng(seed)
    results, two = ({"a": rng.normal(size=(3, 4)), "b": [rng.normal(size=5)]} for _ in range(2))
    return results, {"a": two["a"] * scale, "b": [two["b"][0] * scale]}


balanced_as = jax.jit(balance, static_argnums=2)


def flat(tree):
    return np.concatenate([np.ravel(tree["a"]), np.ravel(tree["b"][0])]).astype(np.float64)


# Each objective as its formula reads, from g+ and g- as flat vectors.
FORMULAS = {
    "balanced": lambda up, down: up + np.linalg.norm(up) / (np.linalg.norm(down) + 1e-8) * down,
    "capped": lambda up, down: up + min(1.0, np.linalg.norm(up) / (np.linalg.norm(down) + 1e-8)) * down,
    "plain": lambda up, down: up + down,
    "constant": lambda up, down: up + 0.3 * down,
    "positives": lambda up, down: up,
    "tapered": lambda up, down: up + down,
}


def test_every_objective_has_a_formula_here_and_describes_itself():
    assert FORMULAS.keys() == OBJECTIVES.keys()
    for name, entry in OBJECTIVES.items():
        assert entry.name == name
        assert all((entry.title, entry.formula, entry.source, entry.meaning))


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("scale", [3.0, 0.1])
def test_objectives_against_numpy(name, scale):
    plus, minus = trees(scale=scale)
    up, down = flat(plus), flat(minus)
    combined, measured = balanced_as(plus, minus, Balance(name, negative_weight=0.3))
    expected = FORMULAS[name](up, down)
    assert flat(combined) == pytest.approx(expected, rel=1e-5, abs=1e-6)
    factor = (expected - up) @ down / (down @ down)
    assert float(measured["balance_factor"]) == pytest.approx(factor, rel=1e-5, abs=1e-6)
    assert float(measured["norm_positive"]) == pytest.approx(np.linalg.norm(up), rel=1e-6)
    assert float(measured["norm_negative"]) == pytest.approx(np.linalg.norm(down), rel=1e-6)
    cosine = up @ down / np.linalg.norm(up) / np.linalg.norm(down)
    assert float(measured["gradient_cosine"]) == pytest.approx(cosine, rel=1e-4)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_factor_of_the_norms_is_declared_as_one(name):
    """A factor that no norm enters is the same for every group, so that the groups need no gradients of their own."""
    settings = Balance(name)
    near, far = (settings.objective.factor(np.float32(1), np.float32(size), settings) for size in (2.0, 4.0))
    assert settings.by_group == (near != far)
    assert not Balance(name, over="step").by_group


def test_the_documentation_has_the_registry():
    text = (Path(__file__).parents[2] / "docs" / "theory.md").read_text(encoding="utf-8")
    rows = [[f"`{o.name}`", o.title, f"`{o.formula}`", o.meaning, o.source] for o in OBJECTIVES.values()]
    table = markdown_table(["objective", "", "gradient", "factor on g-", "source"], rows)
    assert table in text, f"put this into docs/theory.md:\n{table}"


def test_an_unknown_objective_lists_the_known_ones():
    with pytest.raises(ConfigError, match=r"^reason\.objective: unknown objective 'most'; .*balanced, capped, plain"):
        Balance("most")


def test_positives_alone_do_not_see_a_broken_negative_gradient():
    plus, minus = trees()
    broken = {"a": minus["a"] * np.inf, "b": minus["b"]}
    assert flat(balanced_as(plus, broken, Balance("positives"))[0]) == pytest.approx(flat(plus))


@given(st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=5), min_size=1, max_size=5))
def test_sequence_mean_against_numpy(lengths):
    """The mean over groups of the mean over completions of the mean over tokens; a completion without tokens adds 0."""
    weights = token_weights(lengths, "sequence_mean")
    rng = np.random.default_rng(0)
    values = [[rng.normal(size=length) for length in group] for group in lengths]
    live = [group for group in values if sum(map(len, group))]
    means = [np.mean([tokens.mean() if len(tokens) else 0.0 for tokens in group]) for group in live]
    total = sum((w * v).sum() for ws, vs in zip(weights, values, strict=True) for w, v in zip(ws, vs, strict=True))
    assert total == pytest.approx(np.mean(means) if means else 0.0)


def test_without_positive_completions_nothing_is_suppressed():
    plus, minus = trees()
    nothing = {"a": plus["a"] * 0, "b": [plus["b"][0] * 0]}
    assert np.all(flat(balanced_as(nothing, minus, Balance())[0]) == 0)
    assert flat(balanced_as(plus, nothing, Balance())[0]) == pytest.approx(flat(plus))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_without_negative_completions_there_is_no_factor(name):
    """With `mask_truncated` a group may have none: ||g+|| / 1e-8 would be its factor, and hide all others."""
    plus, minus = trees()
    nothing = {"a": minus["a"] * 0, "b": [minus["b"][0] * 0]}
    assert np.isnan(balanced_as(plus, nothing, Balance(name))[1]["balance_factor"])


@pytest.mark.parametrize("form", ["dr", "std"])
@pytest.mark.parametrize(("right", "of"), [(1, 8), (2, 8), (4, 8), (7, 8), (1, 4)])
def test_the_ratio_of_norms_follows_from_the_identity(form, right, of):
    """docs/theory.md: for gradients that are nearly orthogonal, ||g-|| / ||g+|| is near sqrt(k / (G - k)) * s- / s+."""
    rng = np.random.default_rng(right)
    sizes = np.where(np.arange(of) < right, 1.0, 1.4)
    gradients_GD = rng.normal(size=(of, 20_000)) * sizes[:, None]
    weighed_GD = np.array(advantages((np.arange(of) < right).astype(float).tolist(), form))[:, None] * gradients_GD
    plus_D, minus_D = weighed_GD[:right].sum(axis=0), weighed_GD[right:].sum(axis=0)
    measured = np.linalg.norm(minus_D) / np.linalg.norm(plus_D)
    assert measured == pytest.approx(np.sqrt(right / (of - right)) * 1.4, rel=0.05)


def test_norms_are_float32_for_low_precision():
    many = jnp.full((4096,), 1.0, jnp.bfloat16)
    assert float(norm([many])) == pytest.approx(64.0)  # summed in bfloat16 this would stop at 16
