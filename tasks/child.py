"""A stage's process seen from its parent: started in a session of its own, and never left behind.

Three ways to lose the parent, three answers: an exception or Ctrl-C unwinds through `finally`, which ends the child's
whole process group; a flow that gives up while a stage works in another thread calls `cancel_all`; and after a
kill -9 the kernel ends the child (PR_SET_PDEATHSIG, set by the child itself in `tasks.launch`).
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

from tasks.stage import StageCancelled

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
