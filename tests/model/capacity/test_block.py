"""A block as two programs, which together are its gradient; and the cache of compilations."""

import jax
import numpy as np
import pytest

from nautile.model.capacity import compiled
from nautile.model.capacity.topology import parse_topology
from nautile.model.nautile import initialise, run_blocks
from tests.model.conftest import tiny_config


@pytest.mark.slow
def test_the_two_programs_are_a_blocks_gradient(monkeypatch):
    monkeypatch.setattr(compiled, "devices", lambda topology: jax.devices())
    config = tiny_config(blocks=1, remat="dots")
    traced = compiled._trace_block(config, 2, 8, parse_topology("v4:2x2x1"))
    blocks = initialise(config, 0)["blocks"]
    x_BLD, slope_BLD = np.random.default_rng(0).normal(size=(2, 2, 8, 32)).astype(np.float32)
    ones_BL, positions_BL = np.ones((2, 8), np.int32), np.arange(8, dtype=np.int32)[None].repeat(2, 0)
    arguments = (blocks, x_BLD, ones_BL, positions_BL)
    y_BLD, residuals = jax.jit(traced.forward)(*arguments)
    assert [(array.shape, array.dtype) for array in residuals] == [
        (leaf.shape, leaf.dtype) for leaf in traced.residuals
    ]
    gradient = jax.jit(traced.backward)(arguments, residuals, slope_BLD)

    @jax.jit
    def in_a_piece(blocks, x_BLD, slope_BLD):
        y_BLD, pull = jax.vjp(lambda blocks, x: run_blocks(blocks, config, x, ones_BL, positions_BL)[0], blocks, x_BLD)
        return y_BLD, pull(slope_BLD)

    expected_BLD, expected = in_a_piece(blocks, x_BLD, slope_BLD)
    np.testing.assert_allclose(y_BLD, expected_BLD, atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4, rtol=1e-4), gradient, expected)


@pytest.mark.slow
def test_with_remat_block_only_the_input_is_saved(monkeypatch):
    """Float32 [2, 8, 32], and the frequencies of RoPE; with "dots" more than that."""
    monkeypatch.setattr(compiled, "devices", lambda topology: jax.devices())
    sizes = {
        remat: compiled._trace_block(
            tiny_config(blocks=1, remat=remat), 2, 8, parse_topology("v4:2x2x1")
        ).residual_bytes
        for remat in ("block", "dots")
    }
    assert sizes["block"] == 4 * (2 * 8 * 32 + 4) < sizes["dots"]


def test_a_compilation_is_cached_and_a_damaged_file_is_not_read(tmp_path):
    identity = {"part": "head"}
    assert compiled._read_cached(tmp_path, identity) is None
    compiled._write_cached(tmp_path, identity, {"text": "x"})
    assert compiled._read_cached(tmp_path, identity) == {"text": "x"}
    assert compiled._read_cached(tmp_path, {"part": "forward"}) is None
    [path] = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:20])
    assert compiled._read_cached(tmp_path, identity) is None
