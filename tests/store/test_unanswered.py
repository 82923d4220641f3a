"""A remote that accepts connections and never answers."""

import os
import signal
import socket
import subprocess
import sys
import threading

import pytest

from nautile.store import lease as leases
from nautile.store.lease import Lease
from tests.support.samples.stage_store import key_of
from tests.support.servers.object_store import CREDENTIALS
from tests.support.stages.stage_crowd import ROOT

CODE = """
from nautile.store.mirror import open_store
store = open_store("s3://bucket/run")
{request}
"""
REQUESTS = ["store.refresh()", "store.remote.map(lambda name: store.remote.read(name, 10), list('abcdefghijkl'))"]


@pytest.mark.slow
@pytest.mark.parametrize("request_", REQUESTS, ids=["one", "many"])
def test_ctrl_c_ends_a_command_that_waits_for_it(tmp_path, request_):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        environment = os.environ | CREDENTIALS | {"AWS_ENDPOINT_URL": url, "NAUTILE_STORE_CACHE": str(tmp_path)}
        command = [sys.executable, "-c", CODE.format(request=request_)]
        process = subprocess.Popen(command, env=environment, cwd=ROOT, stderr=subprocess.PIPE, text=True)
        connection, _ = listener.accept()
        process.send_signal(signal.SIGINT)
        try:
            # Less than the time after which a request is given up.
            _, errors = process.communicate(timeout=20)
        finally:
            process.kill()
            connection.close()
    assert "KeyboardInterrupt" in errors


@pytest.mark.slow
def test_the_end_of_a_step_does_not_wait_for_a_lease_that_cannot_be_given_back(machine, monkeypatch, caplog):
    a = machine("a")
    lease = Lease(a.remote, a.root, key_of("x"))
    assert lease.try_acquire()
    answered = threading.Event()
    monkeypatch.setattr(a.remote, "write", lambda *_: answered.wait())
    monkeypatch.setattr(leases, "RELEASE_S", 0.05)
    lease.release()
    assert "does not answer" in caplog.text
    answered.set()
