"""With whom the processes of a run speak; see `tests/support/watched/sitecustomize.py`."""

import ast
import os
import re
from pathlib import Path

from tests.support.toy_cli import ROOT

LOOPBACK = ("127.0.0.1", "::1", "localhost", None)


def watched(log: Path) -> dict[str, str]:
    """Environment variables that have a process and its children write into `log`."""
    places = os.pathsep.join([str(ROOT), str(Path(__file__).with_name("watched"))])
    return {"PYTHONPATH": places, "NAUTILE_SOCKETS": str(log)}


def heard(log: Path) -> list[tuple[str, object]]:
    """(kind, address) in the order of happening; of `start` the command line."""
    lines = re.findall(r"^(\w+) (.*) in \d+$", log.read_text(), flags=re.MULTILINE)
    return [(kind, ast.literal_eval(what)) for kind, what in lines]


def abroad(log: Path) -> list[tuple[str, object]]:
    """What went to, or asked for, any host but this one. A socket of the file system is named by its path."""

    def host(kind: str, address: object) -> object:
        return address[0] if isinstance(address, tuple) else None if kind != "lookup" else address

    return [one for one in heard(log) if one[0] != "start" and host(*one) not in LOOPBACK]
