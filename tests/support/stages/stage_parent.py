"""A toy stage run in a process of its own, for tests that interrupt it.

`python -m tests.support.stages.stage_parent ROOT SECTION RUN_ID` prints `made {…}` or the exception. The other
functions are for the test's process.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nautile.tasks.engine.attempt import run_stage
from nautile.tasks.engine.stage import RunContext
from tests.support.stages.stage_sums import sums

ROOT = Path(__file__).resolve().parents[3]


def start(root: Path, section: dict[str, Any], run_id: str = "r1") -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.support.stages.stage_parent", str(root), json.dumps(section), run_id]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)


def wait_for(condition: Callable[[], Any], what: str = "", seconds: float = 300.0) -> Any:
    """The first true value of `condition`, which is asked for less often the longer it takes: it may be a request."""
    deadline, pause = time.monotonic() + seconds, 0.02
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what or 'it'}: not within {seconds:.0f} s"
        time.sleep(pause)
        pause = min(2 * pause, 0.3)
    return value


def reached(gate: Path) -> int:
    """Wait until the stage waits at its gate; the number of its process."""
    wait_for((gate / "reached").exists)
    return int((gate / "reached").read_text())


def is_alive(pid: int) -> bool:
    """True unless the process has ended (a zombie included)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def main(root: str, section: str, run_id: str) -> None:
    try:
        outputs = run_stage(sums, json.loads(section), {}, RunContext(run_id, root, label="sums"))
        sys.stdout.write(f"made {json.dumps(outputs)}\n")
    except BaseException as error:
        sys.stdout.write(f"{type(error).__name__}: {error}\n")


if __name__ == "__main__":
    main(*sys.argv[1:4])
