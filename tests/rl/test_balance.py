import jax.numpy as jnp
import numpy as np
import pytest

from rl.balance import combine, norm


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
    balanced, measured = combine(plus, minus, "equalise", 1e-8)
    up, down = flat(plus), flat(minus)
    expected = up + np.linalg.norm(up) / (np.linalg.norm(down) + 1e-8) * down
    assert flat(balanced) == pytest.approx(expected, rel=1e-5)
    assert float(measured["norm_positive"]) == pytest.approx(np.linalg.norm(up), rel=1e-6)
    assert float(measured["norm_negative"]) == pytest.approx(np.linalg.norm(down), rel=1e-6)


def test_cap_never_amplifies_and_off_is_the_plain_sum():
    plus, minus = trees(scale=0.1)
    assert flat(combine(plus, minus, "cap", 1e-8)[0]) == pytest.approx(flat(plus) + flat(minus), rel=1e-5)
    plus, minus = trees(scale=10.0)
    assert float(combine(plus, minus, "cap", 1e-8)[1]["balance_factor"]) < 1
    assert flat(combine(plus, minus, "off", 1e-8)[0]) == pytest.approx(flat(plus) + flat(minus), rel=1e-5)


def test_without_positive_completions_nothing_is_suppressed():
    plus, minus = trees()
    nothing = {"a": plus["a"] * 0, "b": [plus["b"][0] * 0]}
    assert np.all(flat(combine(nothing, minus, "equalise", 1e-8)[0]) == 0)
    assert flat(combine(plus, nothing, "equalise", 1e-8)[0]) == pytest.approx(flat(plus))


def test_norms_are_float32_for_low_precision():
    many = jnp.full((4096,), 1.0, jnp.bfloat16)
    assert float(norm([many])) == pytest.approx(64.0)  # summed in bfloat16 this would stop at 16
