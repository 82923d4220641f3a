"""Topologies: their names, and the mixing kernels compiled for chips that are not present."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from nautile.common.errors import ConfigError
from nautile.model.capacity.topology import CHIPS, parse_topology

REPOSITORY = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("name", "chips", "hosts"), [("v4:2x4x4", 32, 8), ("v4:4x4x4", 64, 16), ("v5e:8x8", 64, 16), ("h100:8", 8, 1)]
)
def test_a_topology_by_its_name(name, chips, hosts):
    topology = parse_topology(name)
    assert (topology.chips, topology.hosts, topology.chip) == (chips, hosts, CHIPS[name.partition(":")[0]])


@pytest.mark.parametrize("name", ["", "v4", "v4:", "v4:0x2", "v4:2x2x2x2", "v9:4", "v4:2,2", "h100:-1", "v4:99999x1"])
def test_an_unknown_name_is_refused(name):
    with pytest.raises(ConfigError, match=r"name a chip and a shape, as v4:2x4x4"):
        parse_topology(name)


def test_local_is_this_process():
    assert parse_topology("local").chip is None
    assert parse_topology("local").chips >= 1


@pytest.mark.heavy
@pytest.mark.slow
@pytest.mark.parametrize("device", ["tpu", "gpu"])
def test_the_kernels_compile_for_absent_chips(device):
    """Forward and backward are one kernel each; on a TPU nothing else is kept."""
    command = [sys.executable, "tests/support/processes/compile_kernels.py", device]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(report["dtype"], report["kernels"]) for report in reports] == [("float32", 2), ("bfloat16", 2)]
    assert all(report["temporaries"] < 8 * 2**20 for report in reports)
