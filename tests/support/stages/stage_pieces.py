"""A toy stage with two fan-outs for tests: `cut` writes pieces, `double` doubles them, the stage joins them.

Items can be given faults. Every run of an item appends the number of its process to `scratch/runs/<item>`.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from nautile.common.errors import ConfigError, Retryable
from nautile.common.files import write_text
from nautile.configs.base import Section
from nautile.tasks.engine.fanout import FanOut, finished_items, skipped_items
from nautile.tasks.engine.job import Job
from nautile.tasks.engine.stage import stage


class Pieces(Section):
    count: int
    faults: dict[str, dict[str, int]] = {}  # item -> fault -> how many of its runs meet it
    skippable: float = 0.0
    gate: str = ""  # a folder: an item named in `gated` writes a file there, and waits for `open`
    gated: tuple[str, ...] = ()
    names: tuple[str, ...] = ()  # in place of piece-0, piece-1, …


def section(count: int = 3, **fields: Any) -> dict[str, Any]:
    return {"seeds": {"data": 5}, "pieces": {"count": count, **fields}}


def list_pieces(job: Job) -> list[str]:
    part = job.part("pieces", Pieces)
    _count(job.scratch / "runs" / "list")
    return list(part.names) or [f"piece-{index}" for index in range(part.count)]


def cut(job: Job, item: str) -> None:
    """Five rows for each piece, one after the other."""
    part = job.part("pieces", Pieces)
    run = _count(job.scratch / "runs" / item)
    job.emit("progress", done=2, total=4, unit="rows")
    if item in part.gated:
        _wait_at(Path(part.gate), item)
    for fault, times in part.faults.get(item, {}).items():
        if run <= times:
            _misbehave(fault, item)
    number = int(item.rpartition("-")[2])
    if number % 2 == 0:
        sys.stdout.write(f"printed by {item}\n")
    _write(job.scratch / "cut" / item, "".join(f"{number}.{row}\n" for row in range(5)))
    job.emit("metric", name="rows", step=0, value=5)
    job.emit("progress", done=4, total=4, unit="rows")


def double(job: Job, item: str) -> None:
    _count(job.scratch / "runs" / f"double-{item}")
    _write(job.scratch / "double" / item, (job.scratch / "cut" / item).read_text() * 2)


@stage(
    "pieces",
    version=1,
    outputs=("numbers",),
    fan_outs=(
        FanOut("cut", list_pieces, cut, skippable=lambda job: job.part("pieces", Pieces).skippable),
        FanOut("double", lambda job: finished_items(job, "cut"), double, noun="pieces"),
    ),
)
def pieces(job: Job) -> None:
    """Join what the items wrote."""
    text = "".join((job.scratch / "double" / item).read_text() for item in finished_items(job, "double"))
    (job.output("numbers") / "all.txt").write_text(text)
    job.emit("metric", name="joined", step=0, value=len(finished_items(job, "double")))
    times = {path.name: len(path.read_text().split()) for path in (job.scratch / "runs").iterdir()}
    job.describe("numbers", skipped=skipped_items(job, "cut"), runs=times)


PARENT = """
import json, sys
from nautile.configs.schema import LaunchConfig
from nautile.tasks.engine.attempt import run_stage
from nautile.tasks.engine.stage import RunContext
from tests.support.stages.stage_pieces import pieces
launch = LaunchConfig(workers=int(sys.argv[3]))
try:
    context = RunContext("r1", sys.argv[1], launch=launch)
    print("made", json.dumps(run_stage(pieces, json.loads(sys.argv[2]), {}, context)))
except BaseException as error:
    print(type(error).__name__, error)
"""


def start(root: Path, section: dict[str, Any], workers: int, before: str = "") -> subprocess.Popen[str]:
    """The stage in a process of its own, without Prefect. `before`: code that it runs first."""
    command = [sys.executable, "-c", before + PARENT, str(root), json.dumps(section), str(workers)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).resolve().parents[3])


def joined(count: int, without: tuple[int, ...] = ()) -> str:
    """What the stage writes for `count` pieces."""
    kept = [number for number in range(count) if number not in without]
    return "".join("".join(f"{number}.{row}\n" for row in range(5)) * 2 for number in kept)


def runs(root: Path) -> dict[str, list[int]]:
    """Item -> the processes that ran it, in the staging folder of the only key there."""
    (folder,) = (root / "staging").glob("*/scratch/runs")
    return {path.name: [int(line) for line in path.read_text().split()] for path in folder.iterdir()}


def _count(path: Path) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(f"{os.getpid()}\n")
    return len(path.read_text().split())


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, text)


def _wait_at(gate: Path, item: str) -> None:
    (gate / f".{item}").write_text(f"{os.getpid()} {os.getppid()}")
    (gate / f".{item}").rename(gate / item)
    while not (gate / "open").exists():
        time.sleep(0.01)


def _misbehave(fault: str, item: str) -> None:
    if fault == "bad":
        raise ConfigError(f"{item}: not a text")
    if fault == "retry":
        raise Retryable("http://127.0.0.1:9 does not answer")
    if fault == "crash":
        raise ZeroDivisionError("by zero")
    if fault == "full":
        raise OSError(28, "No space left on device", None)
    os.kill(os.getpid(), signal.SIGKILL)
