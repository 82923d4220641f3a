"""Rollouts, updates and self-distillation on eight devices give the results of one device."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from nautile.common.errors import ConfigError
from nautile.configs.training import RolloutConfig
from nautile.data.tokenizer import tokenizer_for
from nautile.model.sharding import make_mesh
from nautile.rl.ahead_of_time import estimate_memory
from nautile.rl.rollouts import RolloutEngine
from tests.rl.conftest import TOKENIZER, policy

REPOSITORY = Path(__file__).parents[2]
DEADLINE_S = 1500
pytestmark = pytest.mark.timeout(2 * DEADLINE_S)


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """compared(part, ...) -> the results of each part of `reinforced_mesh` on one device and on eight."""

    def run(*parts):
        environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "8"}
        command = [
            sys.executable,
            "-m",
            "tests.support.processes.reinforced_mesh",
            str(tmp_path_factory.mktemp("mesh")),
        ]
        done = subprocess.run(
            [*command, *parts], cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=DEADLINE_S
        )
        assert done.returncode == 0, done.stderr
        return [(results["one"], results["many"]) for results in map(json.loads(done.stdout).get, parts)]

    return run


@pytest.mark.heavy
def test_eight_devices_sample_and_update_as_one_does(compared):
    (result, many), fused = compared("updates", "fused_samples")
    assert many["ids"] == result["ids"]
    for a, b in zip(many["logprobs"], result["logprobs"], strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    for a, b in zip(many["measured"], result["measured"], strict=True):
        assert a.keys() == b.keys()
        for name in a:
            assert a[name] == pytest.approx(b[name], rel=1e-3, abs=1e-6), name
    assert (result["share"], many["share"]) == (1.0, 0.25)
    assert fused[1] == fused[0], "fewer prompts than devices"


@pytest.mark.slow
@pytest.mark.heavy
def test_eight_devices_distil_as_one_does_and_need_less_memory(compared):
    losses, (result, many) = compared("distilled_loss", "plan")
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert many["resident"] < result["resident"] / 3
    assert many["cache"] == pytest.approx(result["cache"] / 8, rel=0.1)
    assert many["rollout"] < result["rollout"]
    assert many["update"] < result["update"]


def test_what_does_not_divide_is_refused(model):
    rollout = RolloutConfig(prompts=3, group=3, prompt_length=60, max_tokens=6)
    mesh = make_mesh(1, 2 * make_mesh(1).devices.ravel().tolist())
    with pytest.raises(ConfigError, match="9 completions at once, which is not a multiple of the 2 devices"):
        RolloutEngine(model, tokenizer_for(TOKENIZER), rollout, 0, mesh)
    with pytest.raises(ConfigError, match=r"rollout\.prompts x rollout\.group: 9 is not a multiple of the 2 chips"):
        estimate_memory(model, rollout, None, None, mesh)
    even = rollout.model_copy(update={"group": 4})
    with pytest.raises(ConfigError, match=r"policy\.micro_rows: 3 is not a multiple of the 2 chips"):
        estimate_memory(model, even, policy(micro_rows=3), None, mesh)
