"""Tiny models that the tests of this folder share: built once, never changed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nautile.configs.model import ModelConfig
from nautile.model.nautile import initialise


def tiny_config(**changes) -> ModelConfig:
    """Two blocks of width 32; K = 4 memory heads served by 2 query heads, H = 8, M = 2; 2 kv heads for 4 heads.

    One SCA layer a block, because compilation is most of these tests' time.
    """
    settings = {
        "vocabulary": 150, "width": 32, "blocks": 2, "pattern": "SA", "context": 64,
        "memory_heads": 4, "query_heads": 2, "spectral_samples": 2, "chunk": 8,
        "attention_heads": 4, "kv_heads": 2, "feed_forward": 40,
        "compute_dtype": "float32", "remat": "block",
    }  # fmt: skip
    return ModelConfig(**{**settings, **changes})


def packed_rows(vocabulary: int, lengths: list[list[int]], row_length: int, seed: int = 0) -> dict[str, jax.Array]:
    """A batch as the loader builds it: each row holds documents of the given lengths, then padding."""
    rng = np.random.default_rng(seed)
    shape = (len(lengths), row_length)
    names = ("tokens", "targets", "segments", "positions")
    batch = {name: np.zeros(shape, np.int32) for name in names} | {"weights": np.zeros(shape, np.float32)}
    for row, documents in enumerate(lengths):
        start = 0
        for number, length in enumerate(documents, start=1):
            columns = slice(start, start + length)
            batch["tokens"][row, columns] = rng.integers(0, vocabulary, length)
            batch["segments"][row, columns] = number
            batch["positions"][row, columns] = np.arange(length)
            batch["targets"][row, start : start + length - 1] = batch["tokens"][row, start + 1 : start + length]
            batch["weights"][row, start : start + length - 1] = 1
            start += length
    return {name: jnp.asarray(array) for name, array in batch.items()}


@pytest.fixture(scope="session")
def config():
    return tiny_config()


@pytest.fixture(scope="session")
def params(config):
    """Weights away from their initial values: norms, biases and scales are moved too, so that each has an effect."""
    rng = np.random.default_rng(1)
    start = initialise(config, 0)
    return jax.tree.map(lambda leaf: jnp.asarray(leaf + 0.1 * rng.normal(size=leaf.shape), jnp.float32), start)
