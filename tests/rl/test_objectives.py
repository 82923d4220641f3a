import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl.objectives import balance, kl_to_reference, norm, surrogate, token_weights


def test_first_epoch_gradient_is_minus_the_advantage():
    logprobs = jnp.log(jnp.array([[0.2, 0.7], [0.5, 0.1]]))
    advantage = jnp.array([0.75, -0.25])

    def loss(logprobs):
        return surrogate(logprobs, jax.lax.stop_gradient(logprobs), advantage, 0.2)[0].sum()

    assert jax.grad(loss)(logprobs) == pytest.approx(-np.broadcast_to(advantage[:, None], (2, 2)))


def test_clip_against_straight_numpy():
    rng = np.random.default_rng(0)
    new, old = -rng.random((6, 5)), -rng.random((6, 5))
    advantage = rng.normal(size=6)
    ratio = np.exp(new - old)
    expected = -np.minimum(ratio * advantage[:, None], np.clip(ratio, 0.8, 1.2) * advantage[:, None])
    values, clipped = surrogate(jnp.array(new), jnp.array(old), jnp.array(advantage), 0.2)
    assert np.asarray(values) == pytest.approx(expected, rel=1e-5)
    high = (ratio > 1.2) & (advantage > 0)[:, None]
    low = (ratio < 0.8) & (advantage < 0)[:, None]
    assert np.array_equal(np.asarray(clipped) > 0, high | low)


def test_kl_is_positive_and_its_gradient_depends_on_the_reference():
    logprobs = jnp.log(jnp.array([[0.2, 0.7, 0.4]]))
    reference = jnp.log(jnp.array([[0.3, 0.6, 0.4]]))
    values = kl_to_reference(logprobs, reference)
    assert np.all(np.asarray(values) >= 0)
    assert float(values[0, 2]) == 0
    gradient = jax.grad(lambda x: kl_to_reference(x, reference).sum())(logprobs)
    assert gradient == pytest.approx(1 - np.exp(reference - logprobs), rel=1e-5)
    assert np.all(np.asarray(jax.grad(lambda r: kl_to_reference(logprobs, r).sum())(reference)) == 0)


def test_kl_is_unbiased():
    """Summed over the whole distribution with its own weights, the estimator is the divergence itself."""
    rng = np.random.default_rng(1)
    p, q = rng.dirichlet(np.ones(7)), rng.dirichlet(np.ones(7))
    values = np.asarray(kl_to_reference(jnp.log(jnp.array([p])), jnp.log(jnp.array([q]))))[0]
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
    return (
        {"a": jnp.array(results["a"]), "b": [jnp.array(results["b"][0])]},
        {"a": jnp.array(two["a"]) * scale, "b": [jnp.array(two["b"][0]) * scale]},
    )


def flat(tree):
    return np.concatenate([np.ravel(tree["a"]), np.ravel(tree["b"][0])]).astype(np.float64)


@pytest.mark.parametrize("scale", [3.0, 0.1])
def test_the_papers_formula_over_all_parameters(scale):
    plus, minus = trees(scale=scale)
    balanced, measured = balance(plus, minus, "equalise", 1e-8)
    up, down = flat(plus), flat(minus)
    expected = up + np.linalg.norm(up) / (np.linalg.norm(down) + 1e-8) * down
    assert flat(balanced) == pytest.approx(expected, rel=1e-5)
    assert float(measured["norm_positive"]) == pytest.approx(np.linalg.norm(up), rel=1e-6)
    assert float(measured["norm_negative"]) == pytest.approx(np.linalg.norm(down), rel=1e-6)


def test_cap_never_amplifies_and_off_is_the_plain_sum():
    plus, minus = trees(scale=0.1)
    assert flat(balance(plus, minus, "cap", 1e-8)[0]) == pytest.approx(flat(plus) + flat(minus), rel=1e-5)
    plus, minus = trees(scale=10.0)
    assert float(balance(plus, minus, "cap", 1e-8)[1]["balance_factor"]) < 1
    assert flat(balance(plus, minus, "off", 1e-8)[0]) == pytest.approx(flat(plus) + flat(minus), rel=1e-5)


def test_without_positive_completions_nothing_is_suppressed():
    plus, minus = trees()
    nothing = {"a": plus["a"] * 0, "b": [plus["b"][0] * 0]}
    assert np.all(flat(balance(nothing, minus, "equalise", 1e-8)[0]) == 0)
    assert flat(balance(plus, nothing, "equalise", 1e-8)[0]) == pytest.approx(flat(plus))


def test_norms_are_float32_for_low_precision():
    many = jnp.full((4096,), 1.0, jnp.bfloat16)
    assert float(norm([many])) == pytest.approx(64.0)  # summed in bfloat16 this would stop at 16
