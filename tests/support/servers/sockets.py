"""The network connections of a run's processes; see `tests/support/servers/watched/sitecustomize.py`."""

import ast
import os
import re
from pathlib import Path

from tests.support.stages.toy_cli import ROOT

LOOPBACK = ("127.0.0.1", "::1", "localhost", None)


def watch_sockets(log: Path) -> dict[str, str]:
    """Environment variables that make a process and its children log their connections in `log`."""
    path = os.pathsep.join([str(ROOT), str(Path(__file__).with_name("watched"))])
    return {"PYTHONPATH": path, "NAUTILE_SOCKETS": str(log)}


def socket_events(log: Path) -> list[tuple[str, object]]:
    """(kind, address) in the order they happened; for `start` the command line."""
    lines = re.findall(r"^(\w+) (.*) in \d+$", log.read_text(), flags=re.MULTILINE)
    return [(kind, ast.literal_eval(what)) for kind, what in lines]


def events_to_other_hosts(log: Path) -> list[tuple[str, object]]:
    """Connections to, and look-ups of, any host but this one. A socket of the file system is named by its path."""

    def host(kind: str, address: object) -> object:
        return address[0] if isinstance(address, tuple) else None if kind != "lookup" else address

    return [event for event in socket_events(log) if event[0] != "start" and host(*event) not in LOOPBACK]
