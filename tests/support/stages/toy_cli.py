"""The command line over the stand-in stages, as a process of its own."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nautile.common.processes import module_command
from tests.support.stages.toy_dag import TOY_DAG

ROOT = Path(__file__).resolve().parents[3]


def environment(store: Path, **more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("NAUTILE_", "PREFECT_"))}
    return kept | {"NAUTILE_STORE": str(store), "PYTHONPATH": str(ROOT), "COLUMNS": "200"} | more


@contextmanager
def environment_of_operator(store: Path, **more: str) -> Iterator[None]:
    """Give this very process that environment for the length of the block; what is set in it goes with it."""
    before = dict(os.environ)
    try:
        os.environ.clear()
        os.environ.update(environment(store, **more))
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def start(*arguments: str, store: Path, cwd: Path, **more: str) -> subprocess.Popen[str]:
    """Start it, in a session of its own."""
    return subprocess.Popen(
        module_command("nautile.flows.cli.main", *arguments),  # as the console script: without the working directory
        env=environment(store, **TOY_DAG | more),
        cwd=cwd,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def nautile(*arguments: str, store: Path, cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """Run it to its end."""
    process = start(*arguments, store=store, cwd=cwd, **more)
    try:
        out, err = process.communicate(timeout=240)
    finally:
        process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)
