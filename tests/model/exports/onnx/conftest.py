"""One small model as a checkpoint and as exports with 32, 8 and 4 bits. Heads of 16, which onnxruntime needs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nautile.configs.model import TokenizerConfig
from nautile.model.exports.onnx.folder import export_onnx
from nautile.model.nautile import initialise
from nautile.model.weights.files import save_weights
from tests.model.conftest import tiny_config

TOKENIZER = TokenizerConfig(ranks=256)
MODEL = tiny_config(vocabulary=TOKENIZER.vocabulary, width=64, context=256)


@pytest.fixture(scope="session")
def weights():
    """Moved away from their initial values, so that each has an effect."""
    rng = np.random.default_rng(1)
    start = initialise(MODEL, 0)
    return jax.tree.map(lambda leaf: jnp.asarray(leaf + 0.05 * rng.normal(size=leaf.shape), jnp.float32), start)


@pytest.fixture(scope="session")
def exports(tmp_path_factory, weights):
    """The folder of the checkpoint under "checkpoint", and of each export under its bits."""
    root = tmp_path_factory.mktemp("exports")
    save_weights(root / "checkpoint", weights, MODEL, TOKENIZER)
    for bits in (32, 8, 4):
        export_onnx(root / "checkpoint", root / str(bits), bits)
    return {**{bits: root / str(bits) for bits in (32, 8, 4)}, "checkpoint": root / "checkpoint"}
