"""The command line over the stand-in stages, as a process of its own: `python -m tests.support.toy_cli run …`."""

import os
import subprocess
import sys
from pathlib import Path

from tests.support.toy_stages import toy_stage

ROOT = Path(__file__).resolve().parents[2]


def environment(store: Path, **more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("NAUTILE_", "PREFECT_"))}
    # The one home of all test runs' Prefect files: its database is migrated once, which takes half a minute.
    return kept | {"NAUTILE_STORE": str(store), "PYTHONPATH": str(ROOT), "COLUMNS": "200"} | more


def nautile(*arguments: str, store: Path, cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """Run it to its end."""
    command = [sys.executable, "-m", "tests.support.toy_cli", *arguments]
    return subprocess.run(
        command, env=environment(store, **more), cwd=cwd, text=True, capture_output=True, timeout=240, check=False
    )


def start(*arguments: str, store: Path, cwd: Path, **more: str) -> subprocess.Popen[str]:
    """Start it in a session of its own."""
    command = [sys.executable, "-m", "tests.support.toy_cli", *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, env=environment(store, **more), cwd=cwd, text=True, stdout=pipe, stderr=pipe, start_new_session=True
    )


if __name__ == "__main__":
    from flows import cli, plan

    plan.stage_named = toy_stage
    cli.main()
