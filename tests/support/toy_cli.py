"""The command line over the stand-in stages, as a process of its own: `python -m tests.support.toy_cli run …`."""

import os
import subprocess
import sys
from pathlib import Path

from tests.support.toy_stages import toy_stage

ROOT = Path(__file__).resolve().parents[2]


def environment(store: Path, **more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("NAUTILE_", "PREFECT_"))}
    return kept | {"NAUTILE_STORE": str(store), "PYTHONPATH": str(ROOT), "COLUMNS": "200"} | more


def start(*arguments: str, store: Path, cwd: Path, **more: str) -> subprocess.Popen[str]:
    """Start it, in a session of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.support.toy_cli", *arguments],
        env=environment(store, **more),
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


if __name__ == "__main__":
    from flows import dag as plan
    from flows.cli import main as cli

    plan.stage_named = toy_stage
    cli.script()
