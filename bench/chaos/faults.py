"""Fault injectors: each damages the running pipeline, and then repairs what an operator would repair.

Each returns a description of its target, or None if there was no target. Random choices come from the parameter `rng`.
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
# DuckDB locks its file for one process. Another one that opens it for writing is what a forgotten shell of an operator
# looks like to a run.
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


class FaultTarget(Protocol):
    """The parts of a run that a fault may change."""

    store: Path
    clock: Path | None
    stop_s: float
    flow: subprocess.Popen[bytes]

    def alive(self) -> bool: ...
    def teacher(self) -> psutil.Process | None: ...
    def restart_teacher(self, after_s: float) -> None: ...


@dataclass(frozen=True)
class Fault:
    """A fault by name, its injector, and whether it needs the store on a small disk of its own."""

    name: str
    inject: Callable[[FaultTarget, random.Random], str | None]
    own_disk: bool = False


def child_processes(run: FaultTarget, part: str) -> list[psutil.Process]:
    """The descendants of the flow's process of one kind: `stage`, `worker` (a work item) or `server`."""
    collected = []
    with suppress(psutil.Error):
        for process in psutil.Process(run.flow.pid).children(recursive=True):
            with suppress(psutil.Error):
                words = process.cmdline()
                if part == "server" and "flows.operate.prefect_server" in words:
                    collected.append(process)
                elif part in ("stage", "worker") and "tasks.engine.child_main" in words:
                    # A work item's command line has its fan-out and its item behind the request; a stage's ends with
                    # the request.
                    is_worker = len(words) > words.index("tasks.engine.child_main") + 2
                    if is_worker == (part == "worker"):
                        collected.append(process)
    return collected


def wait_for(
    run: FaultTarget, look: Callable[[], list[psutil.Process]], patience_s: float = 60.0
) -> list[psutil.Process]:
    until = time.monotonic() + patience_s
    while run.alive() and time.monotonic() < until:
        if result := look():
            return result
        time.sleep(0.05)
    return []


def kill_flow(run: FaultTarget, rng: random.Random) -> str | None:
    if not run.alive():
        return None
    run.flow.kill()
    run.flow.wait()
    return f"process {run.flow.pid}"


def _kill_part(part: str) -> Callable[[FaultTarget, random.Random], str | None]:
    def inject(run: FaultTarget, rng: random.Random) -> str | None:
        result = wait_for(run, lambda: child_processes(run, part))
        if not result:
            return None
        victim = rng.choice(result)
        with suppress(psutil.Error):
            named = " ".join(victim.cmdline()[-4:])
            victim.kill()
            return named.replace(str(run.store), "STORE")[:80]
        return None

    return inject


def kill_teacher(run: FaultTarget, rng: random.Random) -> str | None:
    """Kill the teacher and restart it some seconds later, as a service manager would."""
    result = wait_for(run, lambda: [item for item in [run.teacher()] if item])
    if not result:
        return None
    result[0].kill()
    after = rng.uniform(2.0, 12.0)
    run.restart_teacher(after)
    return f"process {result[0].pid}, back after {after:.0f} s"


def suspend_process(run: FaultTarget, rng: random.Random) -> str | None:
    result = wait_for(run, lambda: [*child_processes(run, "stage"), *child_processes(run, "worker")])
    if not result:
        return None
    victim = rng.choice(result)
    with suppress(psutil.Error):
        # SIGSTOP: the process holds its locks and its connections and does nothing, as under a debugger or on a machine
        # that swaps.
        victim.suspend()
        time.sleep(run.stop_s)
        victim.resume()
        return f"process {victim.pid} for {run.stop_s:.0f} s"
    return None


def fill_disk(run: FaultTarget, rng: random.Random) -> str | None:
    """Fill the store's disk until the run has stopped or `stop_s` seconds have passed."""
    return f"{fill_up(run.store.parent / 'ballast', run, run.stop_s) >> 20} MB of ballast"


def fill_up(ballast: Path, run: FaultTarget, seconds: float) -> int:
    """Fill a disk with the file `ballast` until the run has stopped or `seconds` have passed; returns its bytes."""
    until = time.monotonic() + seconds
    chunk = b"\0" * 2**20
    with ballast.open("wb", buffering=0) as file:
        while run.alive() and time.monotonic() < until:
            try:
                file.write(chunk)
            except OSError:
                # Smaller and smaller, until not even a byte fits: what others free in the meantime is taken again.
                chunk = chunk[: max(1, len(chunk) // 2)]
                time.sleep(0.05)
    size = ballast.stat().st_size
    ballast.unlink()
    return size


def flip_byte(run: FaultTarget, rng: random.Random) -> str | None:
    """Flip one bit of a published payload file. Half of the time the run is killed as well."""
    paths = [
        path
        for path in (run.store / "artifacts").rglob("*")
        if path.is_file() and path.stat().st_size and "." not in path.relative_to(run.store).parts[2]
    ]
    # Manifests have a seal of their own, and a report is not compared byte by byte.
    payload = [path for path in sorted(paths) if path.name != "manifest.json" and path.parts[-3:-2] != ("report",)]
    if not payload:
        return None
    victim = rng.choice(payload)
    with suppress(FileNotFoundError), victim.open("r+b") as file:
        at = rng.randrange(os.fstat(file.fileno()).st_size)
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ (1 << rng.randrange(8))]))
    # A run that goes on has the file's digest in memory; only a new process reads the damage.
    if rng.random() < 0.5:
        kill_flow(run, rng)
    return f"{victim.relative_to(run.store / 'artifacts')} at {at}"


def tear_line(run: FaultTarget, rng: random.Random) -> str | None:
    """Kill the run and leave an event file as a power cut does: ending in the middle of a line.

    Either half a line is appended, or the last line of an unfinished stage is cut short. The line of a call is never
    cut, because it is on disk before anything uses its reply.
    """
    files = [path for path in (run.store / "events").glob("*.jsonl") if path.stat().st_size]
    if not files:
        return None
    kill_flow(run, rng)
    # The children of the flow end with it, but not in the same instant, and may still write.
    time.sleep(0.5)
    unfinished = [
        path
        for path in files
        if any(path.name.find(execution) > 0 for execution in _unfinished_executions(run.store))
        and path.read_bytes()[-1:] == b"\n"
    ]
    if unfinished and rng.random() < 0.7:
        victim = max(unfinished, key=lambda path: path.stat().st_mtime)
        last = victim.read_bytes().splitlines(keepends=True)[-1]
        if json.loads(last)["kind"] != "call":
            cut = rng.randrange(1, len(last))
            os.truncate(victim, victim.stat().st_size - cut)
            return f"{victim.name[:28]}: {cut} bytes of its last line cut off ({json.loads(last)['kind']})"
    victim = max(files, key=lambda path: path.stat().st_mtime)
    line = {"id": "torn", "kind": "metric", "execution": "none", "time": 1, "fields": {"name": "loss", "step": 1}}
    with victim.open("ab") as file:
        file.write(json.dumps(line).encode()[: rng.randrange(1, 60)])
    return f"{victim.name[:28]}: half a line more"


def _unfinished_executions(store: Path) -> list[str]:
    """The executions in the staging folders, which have not been published."""
    collected = []
    for path in (store / "staging").glob("*/execution.json"):
        with suppress(OSError, ValueError):
            collected.append(json.loads(path.read_text(encoding="utf-8"))["execution"])
    return collected


def lock_catalog(run: FaultTarget, rng: random.Random) -> str | None:
    if not run.store.joinpath("catalog.duckdb").exists():
        return None
    seconds = rng.uniform(3.0, run.stop_s)
    command = [sys.executable, "-c", _HOLD, str(run.store / "catalog.duckdb"), str(seconds)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as holder:
        assert holder.stdout
        holder.stdout.readline()
        holder.wait()
    return f"held for {seconds:.0f} s"


def jump_clock(run: FaultTarget, rng: random.Random) -> str | None:
    """Move the wall clock of all processes forward or back; half of the time the run is killed as well."""
    if run.clock is None:
        return None
    hours = rng.choice([-24 * 30, -24, -1, 1, 24, 24 * 30])
    # Added to what is there: several jumps of a round add up, as they would for a machine without a time server.
    (offset,) = struct.unpack("<q", run.clock.read_bytes())
    with run.clock.open("r+b") as file:
        file.write(struct.pack("<q", offset + hours * HOUR_NS))
    killed = rng.random() < 0.5 and kill_flow(run, rng)
    return f"{hours:+d} h{', killed with it' if killed else ''}"


FAULTS = (
    Fault("kill the flow", kill_flow),
    Fault("kill the stage", _kill_part("stage")),
    Fault("kill a worker", _kill_part("worker")),
    Fault("kill Prefect's server", _kill_part("server")),
    Fault("kill the teacher", kill_teacher),
    Fault("stop the stage", suspend_process),
    Fault("full disk", fill_disk, own_disk=True),
    Fault("flipped byte", flip_byte),
    Fault("torn event line", tear_line),
    Fault("locked catalog", lock_catalog),
    Fault("clock jump", jump_clock),
)


def kill_session(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that the bench started, with its session and the children that have sessions of their own."""
    with suppress(psutil.Error):
        for child in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.Error):
                child.kill()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
