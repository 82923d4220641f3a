"""Which parameters decay and which Muon updates; the clip; the schedules."""

import jax
import numpy as np
import optax
import pytest

from nautile.configs.base import OptimizerConfig
from nautile.model.nautile import shapes
from nautile.model.training.optimizer import applied, build, distance, matrix_axes, schedule
from tests.model.conftest import tiny_config

MATRICES = {
    "embedding", "sca.in_proj", "sca.gate_proj", "sca.readout", "sca.out_proj", "attention.q_proj",
    "attention.k_proj", "attention.v_proj", "attention.out_proj", "attention.ff_in", "attention.ff_out",
}  # fmt: skip


def small_tree():
    rng = np.random.default_rng(0)
    sizes = {"readout": (2, 3, 6, 8), "in_proj": (2, 8, 12), "theta": (2, 3, 4, 2), "norm": (2, 8)}
    block = {name: rng.standard_normal(size).astype(np.float32) for name, size in sizes.items()}
    return {"embedding": rng.standard_normal((16, 8)).astype(np.float32), "blocks": {"sca_0": block}}


def by_name(tree):
    return {path[-1].key: np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def one_update(config, gradient, params, steps=100):
    tx = build(config, steps)
    return by_name(jax.jit(lambda: tx.update(gradient, tx.init(params), params)[0])())


def test_the_matrices_of_the_model():
    leaves = jax.tree_util.tree_leaves_with_path(shapes(tiny_config()))
    names = {
        ".".join(part.key.split("_0")[0].split("_1")[0] for part in path if part.key != "blocks")
        for path, leaf in leaves
        if matrix_axes(path, leaf) is not None
    }
    assert names == MATRICES


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_only_matrices_decay(name):
    """With no gradient, an update is the decay alone: -rate * decay * parameter."""
    params = small_tree()
    config = OptimizerConfig(name=name, learning_rate=0.1, weight_decay=0.5, schedule="constant")
    updates = one_update(config, jax.tree.map(np.zeros_like, params), params)
    for leaf, value in by_name(params).items():
        expected = np.zeros_like(value) if leaf in ("theta", "norm") else -0.05 * value
        np.testing.assert_allclose(updates[leaf], expected, rtol=1e-6, atol=1e-7, err_msg=leaf)


def test_adamw_against_numpy():
    params = small_tree()
    gradient = jax.tree.map(lambda leaf: 0.001 * leaf, params)  # norm below the clip
    config = OptimizerConfig(learning_rate=0.1, beta1=0.8, beta2=0.95, weight_decay=0.5, schedule="constant")
    tx = build(config, 10)
    state, kept = tx.init(params), params

    @jax.jit
    def update(state, params):
        updates, state = tx.update(gradient, state, params)
        return state, optax.apply_updates(params, updates)

    for _ in range(3):
        state, kept = update(state, kept)
    g, x = (by_name(tree)["in_proj"].astype(np.float64) for tree in (gradient, params))
    m = v = np.zeros_like(x)
    for t in range(1, 4):
        m, v = 0.8 * m + 0.2 * g, 0.95 * v + 0.05 * g * g
        x = x - 0.1 * (m / (1 - 0.8**t) / (np.sqrt(v / (1 - 0.95**t)) + 1e-8) + 0.5 * x)
    np.testing.assert_allclose(by_name(kept)["in_proj"], x, rtol=1e-4)
    assert applied(state) == 3


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_the_grid_has_a_rate_of_its_own(name):
    params = small_tree()
    plain, faster = (
        one_update(OptimizerConfig(name=name, schedule="constant", grid_rate=rate), params, params)
        for rate in (None, 10.0)
    )
    np.testing.assert_allclose(faster.pop("theta"), 10 * plain.pop("theta"), rtol=1e-6)
    for leaf, value in plain.items():
        np.testing.assert_array_equal(faster[leaf], value)


def test_the_gradient_is_clipped_by_its_global_norm():
    params = small_tree()
    gradient = jax.tree.map(lambda leaf: 50.0 * leaf, params)
    tx = build(OptimizerConfig(clip=2.0, beta1=0.0), 10)
    _, state = jax.jit(lambda: tx.update(gradient, tx.init(params), params))()
    moments = jax.tree.leaves(optax.tree.get(state, "mu"))
    assert sum(np.sum(np.asarray(leaf) ** 2) for leaf in moments) == pytest.approx(4.0, rel=1e-5)


def test_muon_orthogonalises_each_matrix_alone():
    """Singular values of an update are near 0.2 * sqrt(longest side); other blocks and heads do not change it."""
    params = small_tree()
    config = OptimizerConfig(name="muon", learning_rate=1.0, weight_decay=0.0, schedule="constant", clip=1e9)
    gradient = params
    updates = one_update(config, gradient, params)
    louder = jax.tree.map(np.copy, params)
    louder["blocks"]["sca_0"]["readout"][0, 0] *= 1000
    after = one_update(config, louder, params)
    np.testing.assert_allclose(after["readout"][0, 1:], updates["readout"][0, 1:], rtol=1e-5)
    np.testing.assert_allclose(after["readout"][1], updates["readout"][1], rtol=1e-5)
    values = np.linalg.svd(updates["readout"], compute_uv=False) / (0.2 * 8**0.5)
    assert values.shape == (2, 3, 6)
    assert values.min() > 0.4
    assert values.max() < 1.4
    # Parameters that are no matrices, and the table, take AdamW's first step: the sign of the gradient.
    for leaf in ("embedding", "norm", "theta"):
        np.testing.assert_allclose(updates[leaf], -np.sign(by_name(gradient)[leaf]), rtol=1e-3)


def rates_of(rate, steps):
    return np.asarray(jax.jit(rate)(np.arange(steps)))


def test_schedules():
    fields = {"learning_rate": 1.0, "final_learning_rate": 0.1, "warmup_steps": 4}
    rates = {
        name: rates_of(schedule(OptimizerConfig(schedule=name, decay_share=0.25, **fields), 41), 41)
        for name in ("cosine", "linear", "wsd", "constant")
    }
    for values in rates.values():
        np.testing.assert_allclose(values[:5], [0.2, 0.4, 0.6, 0.8, 1.0], rtol=1e-6)
    share = (np.arange(4, 41) - 4) / 36
    np.testing.assert_allclose(rates["cosine"][4:], 0.1 + 0.9 * (1 + np.cos(np.pi * share)) / 2, rtol=1e-5)
    np.testing.assert_allclose(rates["linear"][4:], 1.0 - 0.9 * share, rtol=1e-5)
    assert (rates["wsd"][4:31] == 1.0).all()
    np.testing.assert_allclose(np.diff(rates["wsd"][30:]), -0.09, rtol=1e-4)
    assert rates["wsd"][-1] == pytest.approx(0.1)
    assert (rates["constant"][4:] == 1.0).all()


@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("name", ["cosine", "linear", "wsd", "constant"])
def test_a_run_of_few_steps_has_a_schedule(name, steps):
    values = rates_of(schedule(OptimizerConfig(schedule=name, warmup_steps=100), steps), steps)
    assert (values > 0).all()
    assert values.max() == pytest.approx(1e-3)


def test_the_distance_between_two_sets_of_parameters():
    start = {"a": np.array([1.0, 2.0], np.float32), "b": {"c": np.full((2, 2), 3.0, np.float32)}}
    end = {"a": np.array([4.0, 2.0], np.float32), "b": {"c": np.full((2, 2), 5.0, np.float32)}}
    assert distance(start, end) == 5.0
    assert distance(start, start) == 0.0
