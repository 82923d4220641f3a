import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl.objectives import kl_to_reference, surrogate, token_weights


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
