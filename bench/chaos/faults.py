"""The faults: each a function of the running pipeline that does the harm and undoes what an operator would undo.

Every one returns what it hit, or None if there was nothing to hit. Randomness comes from the generator they are given.
"""

import json
import os
import random
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import psutil

HOUR_NS = 3600 * 10**9
_HOLD = """
import sys, time, duckdb
while True:
    try:
        connection = duckdb.connect(sys.argv[1])
        break
    except duckdb.IOException:
        time.sleep(0.01)
print("held", flush=True)
time.sleep(float(sys.argv[2]))
"""


class Scene(Protocol):
    """What a fault may touch."""

    store: Path
    clock: Path | None
    stop_s: float
    flow: subprocess.Popen[bytes]

    def alive(self) -> bool: ...
    def teacher(self) -> psutil.Process | None: ...
    def restart_teacher(self, after_s: float) -> None: ...


@dataclass(frozen=True)
class Fault:
    """Its name, what does it, and whether the disk must be a small one of ours for it."""

    name: str
    strike: Callable[[Scene, random.Random], str | None]
    own_disk: bool = False


def family(scene: Scene, part: str) -> list[psutil.Process]:
    """The flow's descendants by what they are: `stage`, `worker` or `server`."""
    collected = []
    with suppress(psutil.Error):
        for process in psutil.Process(scene.flow.pid).children(recursive=True):
            with suppress(psutil.Error):
                words = process.cmdline()
                if part == "server" and "flows.operate.prefect_server" in words:
                    collected.append(process)
                elif part in ("stage", "worker") and "tasks.engine.child_main" in words:
                    is_worker = len(words) > words.index("tasks.engine.child_main") + 2
                    if is_worker == (part == "worker"):
                        collected.append(process)
    return collected


def wait_for(scene: Scene, look: Callable[[], list[psutil.Process]], patience_s: float = 60.0) -> list[psutil.Process]:
    until = time.monotonic() + patience_s
    while scene.alive() and time.monotonic() < until:
        if result := look():
            return result
        time.sleep(0.05)
    return []


def kill_flow(scene: Scene, draw: random.Random) -> str | None:
    if not scene.alive():
        return None
    scene.flow.kill()
    scene.flow.wait()
    return f"process {scene.flow.pid}"


def _kill_part(part: str) -> Callable[[Scene, random.Random], str | None]:
    def strike(scene: Scene, draw: random.Random) -> str | None:
        result = wait_for(scene, lambda: family(scene, part))
        if not result:
            return None
        victim = draw.choice(result)
        with suppress(psutil.Error):
            named = " ".join(victim.cmdline()[-4:])
            victim.kill()
            return named.replace(str(scene.store), "STORE")[:80]
        return None

    return strike


def kill_teacher(scene: Scene, draw: random.Random) -> str | None:
    """Killed, and started again some seconds later, as whoever keeps it up would."""
    result = wait_for(scene, lambda: [item for item in [scene.teacher()] if item])
    if not result:
        return None
    result[0].kill()
    after = draw.uniform(2.0, 12.0)
    scene.restart_teacher(after)
    return f"process {result[0].pid}, back after {after:.0f} s"


def stop(scene: Scene, draw: random.Random) -> str | None:
    result = wait_for(scene, lambda: [*family(scene, "stage"), *family(scene, "worker")])
    if not result:
        return None
    victim = draw.choice(result)
    with suppress(psutil.Error):
        victim.suspend()
        time.sleep(scene.stop_s)
        victim.resume()
        return f"process {victim.pid} for {scene.stop_s:.0f} s"
    return None


def fill_disk(scene: Scene, draw: random.Random) -> str | None:
    """Takes every byte that is left, until the run has stopped or `stop_s` have passed."""
    return f"{fill(scene.store.parent / 'ballast', scene, scene.stop_s) >> 20} MB of ballast"


def fill(ballast: Path, scene: Scene, seconds: float) -> int:
    """Take every byte that is left of a disk, until the run has stopped or so many seconds have passed; how many."""
    until = time.monotonic() + seconds
    chunk = b"\0" * 2**20
    with ballast.open("wb", buffering=0) as file:
        while scene.alive() and time.monotonic() < until:
            try:
                file.write(chunk)
            except OSError:
                chunk = chunk[: max(1, len(chunk) // 2)]
                time.sleep(0.05)
    size = ballast.stat().st_size
    ballast.unlink()
    return size


def flip_byte(scene: Scene, draw: random.Random) -> str | None:
    """One bit of one byte of a payload file that is published. Half of the time the run is killed with it."""
    paths = [
        path
        for path in (scene.store / "artifacts").rglob("*")
        if path.is_file() and path.stat().st_size and "." not in path.relative_to(scene.store).parts[2]
    ]
    payload = [path for path in sorted(paths) if path.name != "manifest.json" and path.parts[-3:-2] != ("report",)]
    if not payload:
        return None
    victim = draw.choice(payload)
    with suppress(FileNotFoundError), victim.open("r+b") as file:
        at = draw.randrange(os.fstat(file.fileno()).st_size)
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ (1 << draw.randrange(8))]))
    if draw.random() < 0.5:
        kill_flow(scene, draw)
    return f"{victim.relative_to(scene.store / 'artifacts')} at {at}"


def tear_line(scene: Scene, draw: random.Random) -> str | None:
    """All is killed, and an event file ends as a power cut leaves it: in the middle of a line.

    Either half a line more than was written, or (of a stage that has not ended) the last one cut short; never the line
    of a call, which was on disk before anything was made of it.
    """
    files = [path for path in (scene.store / "events").glob("*.jsonl") if path.stat().st_size]
    if not files:
        return None
    kill_flow(scene, draw)
    time.sleep(0.5)
    unfinished = [
        path
        for path in files
        if any(path.name.find(execution) > 0 for execution in _executions(scene.store))
        and path.read_bytes()[-1:] == b"\n"
    ]
    if unfinished and draw.random() < 0.7:
        victim = max(unfinished, key=lambda path: path.stat().st_mtime)
        last = victim.read_bytes().splitlines(keepends=True)[-1]
        if json.loads(last)["kind"] != "call":
            cut = draw.randrange(1, len(last))
            os.truncate(victim, victim.stat().st_size - cut)
            return f"{victim.name[:28]}: {cut} bytes of its last line cut off ({json.loads(last)['kind']})"
    victim = max(files, key=lambda path: path.stat().st_mtime)
    line = {"id": "torn", "kind": "metric", "execution": "none", "time": 1, "fields": {"name": "loss", "step": 1}}
    with victim.open("ab") as file:
        file.write(json.dumps(line).encode()[: draw.randrange(1, 60)])
    return f"{victim.name[:28]}: half a line more"


def _executions(store: Path) -> list[str]:
    """The executions that have begun and not ended."""
    collected = []
    for path in (store / "staging").glob("*/execution.json"):
        with suppress(OSError, ValueError):
            collected.append(json.loads(path.read_text(encoding="utf-8"))["execution"])
    return collected


def lock_catalog(scene: Scene, draw: random.Random) -> str | None:
    if not scene.store.joinpath("catalog.duckdb").exists():
        return None
    seconds = draw.uniform(3.0, scene.stop_s)
    command = [sys.executable, "-c", _HOLD, str(scene.store / "catalog.duckdb"), str(seconds)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as holder:
        assert holder.stdout
        holder.stdout.readline()
        holder.wait()
    return f"held for {seconds:.0f} s"


def jump_clock(scene: Scene, draw: random.Random) -> str | None:
    """Forth or back, for all processes at once; half of the time the run is killed just then."""
    if scene.clock is None:
        return None
    hours = draw.choice([-24 * 30, -24, -1, 1, 24, 24 * 30])
    (before,) = struct.unpack("<q", scene.clock.read_bytes())
    with scene.clock.open("r+b") as file:
        file.write(struct.pack("<q", before + hours * HOUR_NS))
    killed = draw.random() < 0.5 and kill_flow(scene, draw)
    return f"{hours:+d} h{', killed with it' if killed else ''}"


FAULTS = (
    Fault("kill the flow", kill_flow),
    Fault("kill the stage", _kill_part("stage")),
    Fault("kill a worker", _kill_part("worker")),
    Fault("kill Prefect's server", _kill_part("server")),
    Fault("kill the teacher", kill_teacher),
    Fault("stop the stage", stop),
    Fault("full disk", fill_disk, own_disk=True),
    Fault("flipped byte", flip_byte),
    Fault("torn event line", tear_line),
    Fault("locked catalog", lock_catalog),
    Fault("clock jump", jump_clock),
)


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a session that we started, the children in sessions of their own with it."""
    with suppress(psutil.Error):
        for child in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.Error):
                child.kill()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
