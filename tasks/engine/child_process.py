"""A stage's process seen from its parent: started in a session of its own, and never left behind.

Three ways to lose the parent, three answers: an exception or Ctrl-C unwinds through `finally`, which ends the child's
whole process group; a flow that gives up while a stage works in another thread calls `cancel_all`; and after a
kill -9 the kernel ends the child (PR_SET_PDEATHSIG, set by the child itself in `tasks.engine.child_main`).
"""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from common.errors import ConfigError, Retryable
from common.files import read_json
from common.processes import ExitCode
from tasks.engine.errors import NotWritable, StageCancelled, StageCrash

logger = logging.getLogger(__name__)

TERMINATE_GRACE_S = 5.0
TICK_S = 0.3
_POLL_S = 0.05
LINGER_S = 30.0
_MAXRSS_UNIT = 1 if sys.platform == "darwin" else 1024

_cancelled = threading.Event()


@dataclass(frozen=True)
class Exit:
    """How a child ended: its exit code, or minus the signal, and the most memory it held, in bytes."""

    code: int
    peak_bytes: int


@contextmanager
def cancelling() -> Iterator[None]:
    """Around a flow's body: if an exception (Ctrl-C, a cancelled run) leaves it, stages in other threads end too.

    Without it a Prefect thread pool waits for them to finish, for nothing reaches a thread that waits for its child.
    """
    _cancelled.clear()
    try:
        yield
    except BaseException:
        _cancelled.set()
        raise


def cancel_all() -> None:
    """End every child of this process now; its stages raise `StageCancelled`."""
    _cancelled.set()


def pause(seconds: float) -> None:
    """Sleep, but raise `StageCancelled` as soon as this process has been told to cancel."""
    if _cancelled.wait(seconds):
        raise StageCancelled("the run was cancelled")


def run_child(
    command: Sequence[str],
    *,
    log: Path,
    environment: Mapping[str, str],
    tick: Callable[[], object],
    finished: Callable[[], bool] = lambda: False,
) -> Exit:
    """Run `command` to its end, calling `tick` about every 0.3 s. Its output is appended to `log`.

    `finished` says that the work is complete: a process that still hangs at its exit 30 s later is ended, and counts
    as exit code 0. Whatever is raised here (or by `tick`) ends the child's process group first: SIGTERM, 5 s, SIGKILL.
    """
    with log.open("ab") as output:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            start_new_session=True,
        )
    try:
        return _watch(child, tick, finished)
    finally:
        if child.returncode is None:
            _end(child)


def _watch(child: subprocess.Popen[bytes], tick: Callable[[], object], finished: Callable[[], bool]) -> Exit:
    next_tick = time.monotonic() + TICK_S
    done_since: float | None = None
    while True:
        if ended := _reap(child):
            return ended
        if time.monotonic() >= next_tick:
            tick()
            next_tick = time.monotonic() + TICK_S
            if finished():
                done_since = done_since or time.monotonic()
                if time.monotonic() - done_since > LINGER_S:
                    logger.warning("process %d finished its work and does not exit: ended", child.pid)
                    return Exit(0, _end(child).peak_bytes)
        pause(_POLL_S)


def _reap(child: subprocess.Popen[bytes]) -> Exit | None:
    """The exit if the child has ended; what it left in its process group goes with it."""
    found, status, usage = os.wait4(child.pid, os.WNOHANG)
    if not found:
        return None
    _signal(child.pid, signal.SIGKILL)
    child.returncode = os.waitstatus_to_exitcode(status)
    return Exit(child.returncode, usage.ru_maxrss * _MAXRSS_UNIT)


def _end(child: subprocess.Popen[bytes]) -> Exit:
    """SIGTERM to the group, a few seconds for its `finally` blocks, then SIGKILL."""
    _signal(child.pid, signal.SIGTERM)
    deadline = time.monotonic() + TERMINATE_GRACE_S
    try:
        while time.monotonic() < deadline:
            if ended := _reap(child):
                return ended
            time.sleep(_POLL_S)
    finally:
        # Also on a second Ctrl-C in the loop above: the child goes at once.
        if child.returncode is None:
            _signal(child.pid, signal.SIGKILL)
    while not (ended := _reap(child)):
        time.sleep(0.01)
    return ended


def _signal(group: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, number)


# XLA on CPU takes and gives back its temporaries at each step. Kept by the allocator, on huge pages, they are not
# mapped anew each time: 22 ms to 3 ms for an `exp` of 33 MB, and a local training step takes two thirds of the time.
ALLOCATOR = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 36),
    "MALLOC_TOP_PAD_": str(1 << 28),
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}


@dataclass(frozen=True)
class ChildFiles:
    """Where one child leaves its traces: log.txt, live.json, error.json."""

    folder: Path

    @property
    def log(self) -> Path:
        return self.folder / "log.txt"

    @property
    def live(self) -> Path:
        return self.folder / "live.json"

    def error(self) -> str | None:
        """What the child said of its failure, if it could say anything."""
        error = read_json(self.folder / "error.json")
        return error["message"] if isinstance(error, dict) else None

    def of_the_store(self) -> bool:
        """Whether that failure was of the disk, not of what was worked on."""
        error = read_json(self.folder / "error.json")
        return isinstance(error, dict) and error["type"] == NotWritable.__name__

    def forget(self) -> None:
        """Take away what the attempt before said."""
        for name in ("error.json", "live.json"):
            (self.folder / name).unlink(missing_ok=True)

    def tail(self, lines: int = 15) -> str:
        """The last lines of the log, for a message."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, file.seek(0, 2) - 8192))
                return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])
        except OSError:
            return ""


def command(module: str, *arguments: str) -> list[str]:
    """-P: a folder named `data` or `model` where the command was typed must not be taken for one of ours."""
    return [sys.executable, "-P", "-m", module, *arguments]


def environment(store: str, *, accelerator: bool) -> dict[str, str]:
    """This process's environment with what a child needs to find the code and the store."""
    settings = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", "NAUTILE_STORE": store}
    here = str(Path(__file__).resolve().parents[2])
    settings["PYTHONPATH"] = os.pathsep.join(filter(None, [here, settings.get("PYTHONPATH")]))
    if not accelerator:
        settings["JAX_PLATFORMS"] = "cpu"  # the accelerator is for the stages that ask for it
    for name, value in ALLOCATOR.items():
        settings.setdefault(name, value)
    return settings


def raise_for_exit(ended: Exit, traces: ChildFiles, who: str) -> None:
    """Raise what the exit code means, if not success. `who` begins the message of a crash."""
    if ended.code == ExitCode.DONE:
        return
    said = traces.error()
    if ended.code == ExitCode.BAD_INPUT and said:
        raise ConfigError(said)
    if ended.code == ExitCode.RETRY and said:
        raise Retryable(said)
    raise crash(ended, traces, who)


def crash(ended: Exit, traces: ChildFiles, who: str) -> StageCrash:
    """The end of a child that gave no verdict of its own."""
    how = f"was ended by signal {-ended.code}" if ended.code < 0 else f"ended with exit code {ended.code}"
    if ended.code == -9:
        how += " (SIGKILL: out of memory?)"
    said = traces.error()
    return StageCrash(
        f"{who}: its process {how}{': ' + said if said else ''}. "
        f"The log is {traces.log}; its last lines:\n{traces.tail()}"
    )


def merged(log: Path, into: Path, heading: str) -> None:
    """Move what stands in `log` to the end of `into`, under a heading."""
    try:
        text = log.read_bytes()
    except FileNotFoundError:
        return
    if text:
        with into.open("ab") as file:
            file.write(f"--- {heading}\n".encode() + text)
    log.unlink(missing_ok=True)
