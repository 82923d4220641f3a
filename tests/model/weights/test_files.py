"""Checkpoints of an earlier format: what they cost is not paid again."""

import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from nautile.common.errors import ConfigError
from nautile.configs.model import TokenizerConfig
from nautile.model.nautile import shapes
from nautile.model.weights.files import load_weights, save_weights
from tests.model.conftest import tiny_config


@pytest.fixture
def of_format_1(tmp_path):
    """A checkpoint whose config.json counts the SCA layers before the only attention layer, as those of format 1 do."""
    shape = tiny_config(blocks=1, pattern="SSA", context=16)
    params = jax.tree.map(lambda leaf: np.ones(leaf.shape, np.float32), shapes(shape))
    save_weights(tmp_path, params, shape, TokenizerConfig(ranks=256))
    settings = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))

    def write(sca_per_block, format_=1):
        model = {**settings["model"], "sca_per_block": sca_per_block}
        for name in ("pattern", "grid", "integration"):
            del model[name]
        old = {**settings, "format": format_, "model": model}
        (tmp_path / "config.json").write_text(json.dumps(old), encoding="utf-8")
        return tmp_path

    return write


def test_a_checkpoint_of_format_1_has_its_pattern_by_the_number_of_sca_layers(of_format_1):
    _, model, _ = load_weights(of_format_1(2))
    assert (model.pattern, model.grid, model.integration) == ("SSA", "ordered", "normalised")


@pytest.mark.parametrize("number", [10**9, -1, 3, "2", None])
def test_a_number_that_the_weights_do_not_have_is_refused(of_format_1, number):
    with pytest.raises(ConfigError, match=r"letters|unknown parameter|lacks"):
        load_weights(of_format_1(number))


def test_another_format_is_refused(of_format_1):
    with pytest.raises(ConfigError, match="format 3, and this version reads formats 1 and 2"):
        load_weights(of_format_1(2, format_=3))


def test_a_checkpoint_with_numbers_that_are_not_finite_is_not_loaded(tmp_path):
    """It would answer every question with the same id."""
    params = jax.tree.map(lambda leaf: np.ones(leaf.shape, np.float32), shapes(tiny_config()))
    save_weights(tmp_path, params, tiny_config(), TokenizerConfig(ranks=256))
    arrays = load_file(tmp_path / "weights.safetensors")
    arrays["embedding"][3, 0] = np.nan
    save_file(arrays, tmp_path / "weights.safetensors")
    with pytest.raises(ConfigError, match=r"weights\.safetensors: cannot be used: 1 of the \d+ numbers of `embedding`"):
        load_weights(tmp_path)
