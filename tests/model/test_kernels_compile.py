"""The fused kernels compile for the devices they are written for, a TPU v4 and an H100, with neither of them here.

Each in a process of its own: the compilers come as plugins, and JAX takes them in once a process.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("device", ["tpu", "gpu"])
def test_both_passes_compile_at_the_published_size(device):
    done = subprocess.run(
        [sys.executable, "tests/model/compile_kernels.py", device],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    reports = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [report["dtype"] for report in reports] == ["float32", "bfloat16"]
    for report in reports:
        assert report["kernels"] == 2, "one kernel forward, one back"
        # Nothing of B·L·K·H·M (16 MiB in float32) is kept between them: the states before each chunk take 2 MiB.
        assert report["temporaries"] < 3 * 2**20
