"""Two processes with four devices each train as one: the same bytes after a kill, the same losses on another mesh."""

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
from tests.support.training import compile_once, sources

REPOSITORY = Path(__file__).parents[3]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def root(tmp_path_factory, request):
    compile_once(Path(request.config.cache.mkdir("compiled")))
    folder = tmp_path_factory.mktemp("pod")
    sources(folder)
    return folder


def start(root, name, fsdp, devices, port, count, index, *trouble):
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": str(devices)}
    command = [sys.executable, "-m", "tests.support.pod", str(root), name, *map(str, (fsdp, port, count, index))]
    return subprocess.Popen(
        [*command, *(str(int(part)) for part in trouble)],
        cwd=REPOSITORY,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def together(root, name, *trouble):
    """Two processes of four devices to their end; `trouble` is the first one's. Its output and both exit codes.

    One that ends badly takes the other with it, as the launcher has it: alone it would wait for its peer.
    """
    port = free_port()
    pair = [start(root, name, 4, 4, port, 2, 0, *trouble), start(root, name, 4, 4, port, 2, 1)]
    told: dict[int, tuple[str, str]] = {}

    def listen(index):
        told[index] = pair[index].communicate()
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
    assert set(codes) <= {0, 75, -signal.SIGKILL}, told
    return told[0][0], codes


def losses(root, name):
    return json.loads((root / name / "losses.json").read_text(encoding="utf-8"))


def weights(root, name):
    return (root / name / "out" / "weights.safetensors").read_bytes()


@pytest.fixture(scope="module")
def whole(root):
    """An undisturbed run of two processes."""
    assert together(root, "whole")[1] == (0, 0)
    assert sorted(map(int, losses(root, "whole"))) == list(range(1, 13))
    return root


def test_killed_they_end_with_the_same_bytes(whole):
    assert together(whole, "killed", 7, signal.SIGKILL)[1] == (-signal.SIGKILL, -signal.SIGKILL)
    assert together(whole, "killed")[1] == (0, 0)
    assert weights(whole, "killed") == weights(whole, "whole")
    assert min(map(int, losses(whole, "killed"))) == 5  # went on from the checkpoint of step 4


def test_told_to_stop_both_save_the_same_step(whole):
    out, codes = together(whole, "preempted", 5, signal.SIGTERM)
    assert codes == (75, 75)
    step = int(out.partition("saved at step ")[2].split()[0])
    assert 5 <= step <= 8
    assert together(whole, "preempted")[1] == (0, 0)
    assert weights(whole, "preempted") == weights(whole, "whole")


def test_another_number_of_processes_and_another_mesh_go_on_to_the_same_losses(whole):
    """From the two processes' checkpoint of step 8, one process of eight devices on a mesh 4 x 2."""
    shutil.copytree(whole / "whole" / "work", whole / "other" / "work")
    steps = whole / "other" / "work" / "checkpoints" / "steps"
    shutil.rmtree(steps / "12")
    alone = start(whole, "other", 2, 8, free_port(), 1, 0)
    _, err = alone.communicate(timeout=280)
    assert alone.returncode == 0, err
    found, expected = losses(whole, "other"), losses(whole, "whole")
    assert list(map(int, found)) == [9, 10, 11, 12]
    np.testing.assert_allclose([found[step] for step in found], [expected[step] for step in found], rtol=1e-5)
