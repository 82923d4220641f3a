"""Every large array is split, moments like their parameters, and eight devices compute the same as a single device."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

from nautile.common.errors import ConfigError
from nautile.configs.base import OptimizerConfig
from nautile.configs.model import ModelConfig
from nautile.model.nautile import shapes
from nautile.model.sharding import make_mesh, parameter_shardings
from nautile.model.training.optimizer import build, state_shardings

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The output of `tests.support.processes.sharded`, run in its own process with eight devices."""
    root = tmp_path_factory.mktemp("sharded")
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "8"}
    command = [sys.executable, "-m", "tests.support.processes.sharded", str(root), str(root / "checkpoints")]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_no_large_array_is_replicated(report):
    for tree in ("params", "opt_state"):
        large = {name: share for name, (size, share) in report[tree].items() if size >= 256}
        assert len(large) >= 10
        assert set(large.values()) == {0.25}, large


@pytest.mark.slow
def test_eight_devices_and_micro_batches_agree_with_a_single_device(report):
    """Loss, gradient norm and update norm of four steps; steps 2 and 3 start from the other's checkpoint."""
    np.testing.assert_allclose(report["mesh"], report["single"], rtol=1e-5)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_the_published_model_over_32_chips(name):
    """Only vectors and the depthwise taps are replicated; a moment is split as its parameter is."""
    abstract = shapes(ModelConfig(vocabulary=100_300))
    mesh = AbstractMesh((1, 32), ("data", "fsdp"))
    params = parameter_shardings(abstract, mesh)
    assert params["embedding"].spec == PartitionSpec("fsdp")
    assert params["blocks"]["sca_0"]["in_proj"].spec == PartitionSpec(None, "fsdp")  # its 5,136 columns do not divide
    whole = sum(
        leaf.size
        for leaf, sharding in zip(jax.tree.leaves(abstract), jax.tree.leaves(params), strict=True)
        if sharding.is_fully_replicated
    )
    assert whole < 0.0015 * sum(leaf.size for leaf in jax.tree.leaves(abstract))
    state = state_shardings(build(OptimizerConfig(name=name), 10), abstract, params, mesh)
    tables = [leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state) if "embedding" in str(path)]
    assert [leaf.spec for leaf in tables] == [PartitionSpec("fsdp")] * 2
    split = [leaf for leaf in jax.tree.leaves(state) if not leaf.is_fully_replicated]
    matrices = sum(not leaf.is_fully_replicated for leaf in jax.tree.leaves(params))
    assert len(split) >= matrices


def test_a_mesh_that_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match=r"pretrain\.fsdp 3 does not divide the 8 devices"):
        make_mesh(3, list(range(8)))
