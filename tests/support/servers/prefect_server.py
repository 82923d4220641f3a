"""A Prefect server of the tests, which ends with the process that started it."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from nautile.common.processes import free_port
from nautile.flows.operate.prefect_server import healthy
from tests.support.servers.prefect_calls import LOGINS
from tests.support.stages.toy_cli import ROOT, environment

# Without the pages and the block types, which take a third of a start; the servers of `nautile up` have both.
_LEAN = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
    "PREFECT_UI_ENABLED": "0",
    "PREFECT_API_BLOCKS_REGISTER_ON_START": "false",
}


@contextmanager
def running_server(home: Path, login: str = "", settings: Mapping[str, str] = {}) -> Iterator[str]:
    """The address of the API, for the length of the block. Its files are in `home`; it wants `login` (user:password).

    The calls of `tests.support.servers.prefect_calls` send that login. `settings`: more variables of its environment.
    """
    port = free_port()
    url = f"http://127.0.0.1:{port}/api"
    more = dict(settings)
    if login:
        more["PREFECT_SERVER_API_AUTH_STRING"] = LOGINS[url] = login
    server = start_server(home, port, more)
    try:
        yield url
    finally:
        server.terminate()
        server.wait(120)


def start_server(home: Path, port: int, settings: Mapping[str, str] = {}) -> subprocess.Popen[bytes]:
    """Start a server at that port and wait until it answers. Its files are in `home`."""
    server = subprocess.Popen(
        [sys.executable, "-m", "nautile.flows.operate.prefect_server", str(port), str(os.getpid())],
        env=environment(home, **{"PREFECT_HOME": str(home), **_LEAN, **settings}),
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        while not healthy(f"http://127.0.0.1:{port}/api", 5.0):
            assert server.poll() is None
            time.sleep(0.1)
    except BaseException:
        server.kill()
        raise
    return server
