"""common/processes.py: a child ends with its parent, however that ends; free ports can be bound."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil

from common.processes import ExitCode, free_port

ROOT = Path(__file__).resolve().parents[2]
CHILD = "import sys, time; from common.processes import die_with_parent; die_with_parent(int(sys.argv[1])); "
PARENT = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1], str(os.getpid())], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
child.wait()
"""


def test_a_child_ends_when_its_parent_is_killed():
    child = CHILD + "print('ready', flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", PARENT, child], stdout=subprocess.PIPE, cwd=ROOT) as parent:
        process = psutil.Process(int(parent.stdout.readline()))
        os.kill(parent.pid, signal.SIGKILL)
        process.wait(timeout=120)
    assert not process.is_running()


def test_a_child_whose_parent_is_gone_already_ends_at_once():
    done = subprocess.run([sys.executable, "-c", CHILD + "sys.exit(0)", "1"], cwd=ROOT, timeout=120)
    assert done.returncode == ExitCode.FAILED


def test_a_free_port_can_be_bound():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", free_port()))
