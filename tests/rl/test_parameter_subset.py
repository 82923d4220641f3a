"""Parameters by name: split and joined they are the same; an unknown name is refused."""

import jax
import numpy as np
import pytest

from nautile.common.errors import ConfigError
from nautile.model.nautile import shapes
from nautile.rl.policy_gradient import ParameterSubset
from tests.rl.conftest import tiny_model

MODEL = tiny_model().model_copy(update={"blocks": 3})


@pytest.fixture(scope="module")
def params():
    """Arrays of numpy, no two of whose entries are the same: on a device each slice would be a program to compile."""
    kinds, places = shapes(MODEL), np.arange(2**20, dtype=np.float32)
    leaves, tree = jax.tree.flatten(kinds)
    ends = np.cumsum([leaf.size for leaf in leaves])
    return tree.unflatten(
        places[end - leaf.size : end].reshape(leaf.shape) for leaf, end in zip(leaves, ends, strict=True)
    )


def size(tree):
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [(), ("embedding",), ("blocks",), ("blocks.2",), ("blocks.0", "blocks.2"), ("blocks.0", "blocks.1", "blocks.2"),
     ("blocks.1.attention", "blocks.attention.q_proj"), ("blocks.sca_0", "blocks.1", "embedding")],
)  # fmt: skip
def test_split_and_joined_parameters_are_the_same(params, names):
    subset = ParameterSubset(MODEL, names)
    trained, frozen = subset.split(params)
    assert size(trained) + size(frozen) == size(params)
    assert size(trained) > 0
    joined = jax.jit(subset.join)(trained, frozen)
    assert jax.tree.structure(joined) == jax.tree.structure(params)
    for leaf, other in zip(jax.tree.leaves(joined), jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(other))


@pytest.mark.slow
def test_one_block_is_a_third_of_the_blocks(params):
    trained, _ = ParameterSubset(MODEL, ("blocks.1",)).split(params)
    assert 3 * size(trained) == size(params["blocks"])
    assert list(trained) == ["blocks"]


def test_each_attention_layer_of_a_block_has_a_name():
    model = MODEL.model_copy(update={"pattern": "ASA"})
    trained, frozen = ParameterSubset(model, ("blocks.attention_1",)).split(shapes(model))
    assert list(trained["blocks"]) == ["attention_1"]
    assert set(frozen["blocks"]) == {"attention_0", "sca_0"}
    with pytest.raises(ConfigError, match=r"there are blocks\.attention_0, blocks\.attention_1, blocks\.sca_0"):
        ParameterSubset(model, ("blocks.attention",))


@pytest.mark.parametrize("name", ["blocks.3", "block.1", "attention", "blocks.0.mlp", "embed", ""])
def test_an_unknown_name_is_refused(name):
    with pytest.raises(ConfigError, match=r"policy\.train: no parameter .*blocks\.attention.*blocks\.2"):
        ParameterSubset(MODEL, ("embedding", name))
