"""Two processes of two devices train one model: the same bytes after a kill, the same losses on another mesh."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from common.processes import free_port
from tests.support.processes.training import sources

REPOSITORY = Path(__file__).parents[3]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pod")
    sources(folder)
    return folder


def start(root, name, fsdp, devices, port, count, index, *kill_at):
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": str(devices)}
    command = [
        sys.executable,
        "-m",
        "tests.support.processes.pod",
        str(root),
        name,
        *map(str, (fsdp, port, count, index)),
    ]
    return subprocess.Popen(
        [*command, *(str(int(part)) for part in kill_at)],
        cwd=REPOSITORY,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def run_pair(root, name, *kill_at):
    """Run two processes of two devices to their end; returns the first one's output and both exit codes.

    kill_at: a step and a signal that the first process sends itself there. A process that fails takes the other with
    it, as the launcher does, because the other would wait for it.
    """
    port = free_port()
    pair = [start(root, name, 2, 2, port, 2, 0, *kill_at), start(root, name, 2, 2, port, 2, 1)]
    outputs: dict[int, tuple[str, str]] = {}

    def listen(index):
        outputs[index] = pair[index].communicate()
        if pair[index].returncode not in (0, 75):
            pair[1 - index].kill()

    listeners = [threading.Thread(target=listen, args=(index,)) for index in (0, 1)]
    for listener in listeners:
        listener.start()
    for listener in listeners:
        listener.join(timeout=240)
    for process in pair:
        process.kill()
    for listener in listeners:
        listener.join()
    codes = tuple(process.returncode for process in pair)
    assert set(codes) <= {0, 75, -signal.SIGKILL}, outputs
    return outputs[0][0], codes


def losses(root, name):
    return json.loads((root / name / "losses.json").read_text(encoding="utf-8"))


def weights(root, name):
    return (root / name / "out" / "weights.safetensors").read_bytes()


@pytest.fixture(scope="module")
def whole(root):
    """An undisturbed run of two processes."""
    assert run_pair(root, "whole")[1] == (0, 0)
    assert sorted(map(int, losses(root, "whole"))) == list(range(1, 13))
    return root


def test_killed_and_preempted_the_weights_are_the_same_bytes(whole):
    """SIGKILL at step 7, SIGTERM at step 8, then to the end. After SIGTERM both processes save the same step."""
    assert run_pair(whole, "disturbed", 7, signal.SIGKILL)[1] == (-signal.SIGKILL, -signal.SIGKILL)
    out, codes = run_pair(whole, "disturbed", 8, signal.SIGTERM)
    assert codes == (75, 75)
    step = int(out.partition("saved at step ")[2].split()[0])
    assert list(map(int, losses(whole, "disturbed"))) == list(range(5, step + 1))  # from the checkpoint of step 4
    assert 8 <= step <= 11
    assert run_pair(whole, "disturbed")[1] == (0, 0)
    assert min(map(int, losses(whole, "disturbed"))) == step + 1
    assert weights(whole, "disturbed") == weights(whole, "whole")


def test_another_number_of_processes_and_another_mesh_reach_the_same_losses(whole):
    """From the two processes' checkpoint of step 8, one process of four devices on a mesh 1 x 4."""
    shutil.copytree(whole / "whole" / "work", whole / "other" / "work")
    steps = whole / "other" / "work" / "checkpoints" / "steps"
    shutil.rmtree(steps / "12")
    alone = start(whole, "other", 4, 4, free_port(), 1, 0)
    _, err = alone.communicate(timeout=280)
    assert alone.returncode == 0, err
    resumed, expected = losses(whole, "other"), losses(whole, "whole")
    assert list(map(int, resumed)) == [9, 10, 11, 12]
    np.testing.assert_allclose(list(resumed.values()), [expected[step] for step in resumed], rtol=1e-5)
