"""A tiny checkpoint of random weights, for every way of asking a model."""

import pytest

from nautile.configs.model import ModelConfig, TokenizerConfig
from nautile.model.nautile import initialise
from nautile.model.weights.files import save_weights

RANKS = 300


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    tokenizer = TokenizerConfig(ranks=RANKS)
    model = ModelConfig(
        vocabulary=tokenizer.vocabulary,
        width=16,
        blocks=1,
        pattern="SA",
        context=160,
        memory_heads=2,
        query_heads=2,
        spectral_samples=2,
        attention_heads=2,
        kv_heads=1,
        feed_forward=16,
        compute_dtype="float32",
        remat="none",
    )
    folder = tmp_path_factory.mktemp("checkpoint")
    save_weights(folder, initialise(model, 0), model, tokenizer)
    return folder
