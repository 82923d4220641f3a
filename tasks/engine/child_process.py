"""A stage's child process, seen from its parent: start it in a session of its own, watch it, and never leave it behind.

A child ends with its parent in all three ways that a parent can stop: an exception or Ctrl-C unwinds through `finally`,
which ends the child's process group; a flow that stops while a stage works in another thread sets the flag that
`cancelling` guards; and after a SIGKILL of the parent the kernel ends the child (`common.processes.die_with_parent`).
"""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import ConfigError, Retryable
from common.files import read_json
from common.processes import HUGE_PAGES, ExitCode, give_session_way
from tasks.engine.errors import NotWritable, StageCancelled, StageCrash

logger = logging.getLogger(__name__)

TERMINATE_GRACE_S = 5.0
TICK_S = 0.3
LINGER_S = 30.0  # that a process whose work is complete may take to exit
_POLL_S = 0.05
_MAXRSS_UNIT = 1 if sys.platform == "darwin" else 1024
_REPOSITORY = Path(__file__).resolve().parents[2]

# XLA on CPU allocates and frees its temporaries at each step. Kept by the allocator, on huge pages, they are not
# mapped again each time: 22 ms to 3 ms for an `exp` of 33 MB, and a local training step takes two thirds of the time.
ALLOCATOR = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 36),
    "MALLOC_TOP_PAD_": str(1 << 28),
    **HUGE_PAGES,
}

_cancelled = threading.Event()


@contextmanager
def cancelling() -> Iterator[None]:
    """Around a flow's body: an exception that leaves it (Ctrl-C, a cancelled run) also ends stages in other threads.

    Without it a Prefect thread pool would wait for them, because nothing interrupts a thread that waits for its child.
    """
    _cancelled.clear()
    try:
        yield
    except BaseException:
        _cancelled.set()
        raise


def pause(seconds: float) -> None:
    """Sleep, but raise `StageCancelled` as soon as this process is cancelled."""
    if _cancelled.wait(seconds):
        raise StageCancelled("the run was cancelled")


@dataclass(frozen=True)
class ChildFiles:
    """The files that one child writes for its parent: log.txt, live.json (progress), error.json."""

    folder: Path

    @property
    def log(self) -> Path:
        return self.folder / "log.txt"

    @property
    def live(self) -> Path:
        return self.folder / "live.json"

    def error(self) -> dict[str, Any] | None:
        """`type`, `message` and `code` of the error that ended the child, if it could still write them."""
        error = read_json(self.folder / "error.json")
        return error if isinstance(error, dict) else None

    def clear(self) -> None:
        """Remove the error and progress of an earlier attempt."""
        for name in ("error.json", "live.json"):
            (self.folder / name).unlink(missing_ok=True)

    def log_tail(self) -> str:
        """The last fifteen lines of the log, for a message."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, file.seek(0, 2) - 8192))
                return "\n".join(file.read().decode(errors="replace").splitlines()[-15:])
        except OSError:
            return ""


@dataclass(frozen=True)
class Exit:
    """How a child ended: its exit code, or minus the signal, and its largest memory use in bytes."""

    code: int
    peak_bytes: int


def run_child(
    module: str,
    *arguments: str,
    log: Path,
    store: str,
    tick: Callable[[], object],
    accelerator: bool = False,
    finished: Callable[[], bool] = lambda: False,
) -> Exit:
    """Run a module of ours in a new interpreter to its end, calling `tick` about every 0.3 s. Appends its output to
    `log`.

    Once `finished()` is true the work is complete: a process that has not exited 30 s later is ended, with exit code 0.
    Whatever is raised here (or by `tick`) ends the child's process group first: SIGTERM, 5 s, SIGKILL.
    """
    environment = child_environment(store)
    if not accelerator:
        environment["JAX_PLATFORMS"] = "cpu"  # the accelerator is for the stages that declare it
    with log.open("ab") as output:
        child = subprocess.Popen(
            # -P: a folder named `data` or `model` in the working directory must not be imported in place of ours.
            [sys.executable, "-P", "-m", module, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    give_session_way(child.pid)
    try:
        next_tick = time.monotonic() + TICK_S
        finished_at: float | None = None
        while not (ended := _reap(child)):
            if time.monotonic() >= next_tick:
                tick()
                next_tick = time.monotonic() + TICK_S
                if finished():
                    finished_at = finished_at or time.monotonic()
                    if time.monotonic() - finished_at > LINGER_S:
                        logger.warning("process %d has finished its work and does not exit: it is ended", child.pid)
                        return Exit(ExitCode.DONE, _end(child).peak_bytes)
            pause(_POLL_S)
        return ended
    finally:
        if child.returncode is None:
            _end(child)


def child_environment(store: str) -> dict[str, str]:
    """The environment of a process that runs a module of ours."""
    environment = ALLOCATOR | os.environ
    environment |= {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", "NAUTILE_STORE": store}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_REPOSITORY), environment.get("PYTHONPATH")]))
    return environment


def _reap(child: subprocess.Popen[bytes]) -> Exit | None:
    """The exit if the child has ended; then the rest of its process group is killed."""
    # Not `Popen.poll`: only wait4 also tells the memory that the child used.
    pid, status, usage = os.wait4(child.pid, os.WNOHANG)
    if not pid:
        return None
    _signal_group(child.pid, signal.SIGKILL)
    child.returncode = os.waitstatus_to_exitcode(status)
    return Exit(child.returncode, usage.ru_maxrss * _MAXRSS_UNIT)


def _end(child: subprocess.Popen[bytes]) -> Exit:
    """SIGTERM to the process group, a few seconds for its `finally` blocks, then SIGKILL."""
    _signal_group(child.pid, signal.SIGTERM)
    deadline = time.monotonic() + TERMINATE_GRACE_S
    try:
        while time.monotonic() < deadline:
            if ended := _reap(child):
                return ended
            time.sleep(_POLL_S)
    finally:
        # Also after a second Ctrl-C in the loop above: the child goes at once.
        if child.returncode is None:
            _signal_group(child.pid, signal.SIGKILL)
    while not (ended := _reap(child)):
        time.sleep(0.01)
    return ended


def _signal_group(group: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, number)


def raise_for_exit(ended: Exit, files: ChildFiles) -> None:
    """Raise the exception that an exit code stands for; return if it is success."""
    if ended.code == ExitCode.DONE:
        return
    error = files.error()
    if error and ended.code == ExitCode.BAD_INPUT:
        raise (NotWritable if error["type"] == NotWritable.__name__ else ConfigError)(error["message"])
    if error and ended.code == ExitCode.RETRY:
        raise Retryable(error["message"])
    raise crash_of(ended, files)


def crash_of(ended: Exit, files: ChildFiles) -> StageCrash:
    """The exception for a child that ended without reporting a `ConfigError` or `Retryable`."""
    reason = f"its process ended with exit code {ended.code}"
    if ended.code < 0:
        reason = f"its process was ended by signal {-ended.code}"
    if ended.code == -signal.SIGKILL:
        reason += " (SIGKILL: out of memory?)"
    if error := files.error():
        reason += f": {error['message']}"
    return StageCrash(reason, log=files.log, log_tail=files.log_tail(), signal_number=max(0, -ended.code))


def append_log(log: Path, into: Path, heading: str) -> None:
    """Move the content of `log` to the end of `into`, under a heading."""
    try:
        content = log.read_bytes()
    except FileNotFoundError:
        return
    if content:
        with into.open("ab") as file:
            file.write(f"--- {heading}\n".encode() + content)
    log.unlink(missing_ok=True)
