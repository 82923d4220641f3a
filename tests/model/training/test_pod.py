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

from nautile.common.processes import free_port
from tests.support.processes.training import sources

REPOSITORY = Path(__file__).parents[3]
pytestmark = [pytest.mark.slow, pytest.mark.heavy, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pod")
    sources(folder)
    return folder


def start(root, fsdp, devices, port, count, index, *runs):
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": str(devices)}
    numbers = map(str, (fsdp, port, count, index))
    return subprocess.Popen(
        [sys.executable, "-m", "tests.support.processes.pod", str(root), *numbers, *runs],
        cwd=REPOSITORY,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def run_pair(root, *runs):
    """Two processes of two devices, which do the runs one after the other: what each printed, and both exit codes.

    A run is a name, or NAME:STEP:SIGNAL for a signal that the first process sends itself there. A process that fails
    takes the other with it, as the launcher does, because the other would wait for it.
    """
    port, names = free_port(), [run.partition(":")[0] for run in runs]
    pair = [start(root, 2, 2, port, 2, 0, *runs), start(root, 2, 2, port, 2, 1, *names)]
    outputs: dict[int, tuple[str, str]] = {}

    def listen(index):
        outputs[index] = pair[index].communicate()
        if pair[index].returncode:
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
    assert set(codes) <= {0, -signal.SIGKILL}, outputs
    return [ended(outputs[index][0]) for index in (0, 1)], codes


def ended(out):
    """Of each run that ended: its losses by step, and why it stopped (None: it did not)."""
    rows = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    return [({int(step): loss for step, loss in row["losses"].items()}, row["stopped"]) for row in rows]


def weights(root, name):
    return (root / name / "out" / "weights.safetensors").read_bytes()


@pytest.fixture(scope="module")
def whole(root):
    """An undisturbed run of two processes, and its losses; then another that SIGKILL ends at step 7."""
    (first, _), codes = run_pair(root, "whole", f"disturbed:7:{int(signal.SIGKILL)}")
    assert codes == (-signal.SIGKILL, -signal.SIGKILL)
    [(losses, stopped)] = first
    assert (list(losses), stopped) == (list(range(1, 13)), None)
    return losses


def test_killed_and_preempted_the_weights_are_the_same_bytes(root, whole):
    """SIGKILL at step 7, SIGTERM at step 8, then to the end. After SIGTERM both processes save the same step."""
    both, codes = run_pair(root, f"disturbed:8:{int(signal.SIGTERM)}", "disturbed")
    assert codes == (0, 0)
    [preempted, finished], [other, last] = both
    step = int(preempted[1].partition("saved at step ")[2].split()[0])
    assert other[1] == preempted[1]
    assert list(preempted[0]) == list(range(5, step + 1))  # from the checkpoint of step 4
    assert 8 <= step <= 11
    assert min(finished[0]) == step + 1
    assert finished[1] is last[1] is None
    assert weights(root, "disturbed") == weights(root, "whole")


def test_another_number_of_processes_and_another_mesh_reach_the_same_losses(root, whole):
    """From the two processes' checkpoint of step 8, one process of four devices on a mesh 1 x 4."""
    shutil.copytree(root / "whole" / "work", root / "other" / "work")
    shutil.rmtree(root / "other" / "work" / "checkpoints" / "steps" / "12")
    alone = start(root, 4, 4, free_port(), 1, 0, "other")
    out, err = alone.communicate(timeout=280)
    assert alone.returncode == 0, err
    [(resumed, _)] = ended(out)
    assert list(resumed) == [9, 10, 11, 12]
    np.testing.assert_allclose(list(resumed.values()), [whole[step] for step in resumed], rtol=1e-5)
    bits = [json.loads((root / name / "facts.json").read_text())["train_bits_per_byte"] for name in ("whole", "other")]
    assert bits[0] == pytest.approx(bits[1], rel=1e-5), "per byte of all rows, not of those of the first process"
