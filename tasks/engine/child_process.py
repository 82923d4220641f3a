"""Start, watch and end a stage's child process, from its parent.

A child runs in its own session and ends with its parent in all three ways that a parent can stop:

- An exception or Ctrl-C unwinds through `finally`, which ends the child's process group.
- A flow that stops while a stage runs in another thread sets the event that `cancelling` guards.
- After a SIGKILL of the parent the kernel ends the child (`common.processes.die_with_parent`).
"""

import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nautile
from nautile.common.errors import ConfigError, Retryable
from nautile.common.processes import HUGE_PAGES, ExitCode, give_session_way, loopback_direct, module_command
from nautile.configs.plugins import PLUGINS, check_plug_ins, refuse_others
from nautile.store.layout import ChildFiles
from nautile.store.manifest import code_commit, host
from nautile.tasks.engine.errors import NotInstalled, NotWritable, StageCancelled, StageCrash

logger = logging.getLogger(__name__)

TERMINATE_GRACE_S = 5.0
TICK_S = 0.3
LEAST_FREE = 2**16  # bytes; with fewer a disk counts as full
LINGER_S = 30.0  # time that a process may take to exit after its work is complete
STOP = b"stop\n"  # on standard input of a host's process: save and exit
_POLL_S = 0.05
_MAXRSS_UNIT = 1 if sys.platform == "darwin" else 1024
_PARENT_OF_PACKAGE = str(Path(nautile.__file__).resolve().parents[1])

# XLA on CPU allocates and frees its temporaries at each step. With these settings malloc keeps that memory, on huge
# pages, instead of mapping it again: an `exp` of 33 MB takes 3 ms instead of 22, a local training step a third less.
ALLOCATOR = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 36),
    "MALLOC_TOP_PAD_": str(1 << 28),
    **HUGE_PAGES,
}

# A process may have several runs at once. Threads of a run have its context, and so its event; a stage that runs
# outside a flow has none.
_cancelled: ContextVar[threading.Event | None] = ContextVar("cancelled", default=None)


@contextmanager
def cancelling() -> Iterator[None]:
    """Context of a flow's body: an exception that leaves it (Ctrl-C, a cancelled run) ends stages in other threads too.

    Without it Prefect's thread pool would wait for them: nothing interrupts a thread that waits for its child.
    """
    event = threading.Event()
    token = _cancelled.set(event)
    try:
        yield
    except BaseException:
        event.set()
        raise
    finally:
        _cancelled.reset(token)


def pause(seconds: float) -> None:
    """Sleep; raise `StageCancelled` as soon as this thread's run is cancelled."""
    cancelled = _cancelled.get()
    if cancelled is None:
        time.sleep(seconds)
    elif cancelled.wait(seconds):
        raise StageCancelled("the run was cancelled")


@dataclass(frozen=True)
class Exit:
    """How a child ended: its exit code, or minus the number of the signal, and its peak memory in bytes."""

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
    """Run one of the project's modules in a new interpreter until it ends. Its output is appended to `log`.

    `tick` is called about every 0.3 s. Once `finished()` is true the work is complete: a process that has not exited
    30 s later is ended and counts as exit code 0. Before any exception leaves this function (also one of `tick`), the
    child's process group is ended: SIGTERM, 5 s, SIGKILL.
    """
    environment = child_environment(store)
    if not accelerator:
        environment["JAX_PLATFORMS"] = "cpu"  # only stages that declare it may use the accelerator
    with log.open("ab") as output:
        child = subprocess.Popen(
            module_command(module, *arguments),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            # A session of its own: Ctrl-C in the terminal reaches the parent alone, which then ends the child in order.
            start_new_session=True,
        )
    give_session_way(child.pid)
    # Wait for the child; whatever ends this loop early ends the child as well.
    try:
        next_tick = time.monotonic() + TICK_S
        # The exit is looked for twenty times a second, so that a short stage ends at once; `tick` reads files, and less
        # often.
        finished_at: float | None = None
        while not (exit_status := _reap(child)):
            if time.monotonic() >= next_tick:
                tick()
                next_tick = time.monotonic() + TICK_S
                if finished():
                    finished_at = finished_at or time.monotonic()
                    if time.monotonic() - finished_at > LINGER_S:
                        logger.warning("process %d has finished its work but does not exit: ending it", child.pid)
                        return Exit(ExitCode.DONE, _end(child).peak_bytes)
            pause(_POLL_S)
        return exit_status
    finally:
        if child.returncode is None:  # not reaped: an exception ended the loop
            _end(child)


def child_environment(store: str) -> dict[str, str]:
    """The environment of a process that runs one of the project's modules."""
    environment = ALLOCATOR | os.environ  # the user's own settings of the allocator take precedence
    environment |= {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", "NAUTILE_STORE": store}
    environment |= loopback_direct(environment)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [_PARENT_OF_PACKAGE, environment.get("PYTHONPATH")]))
    return environment


def host_environment(launch: dict[str, Any], host: int) -> dict[str, str]:
    """The environment variables that give a process its rank, and plug-ins that are no packages.

    Without a coordinator, JAX asks the TPU slice.
    """
    settings = {"NAUTILE_PROCESSES": str(launch["processes"]), "NAUTILE_PROCESS": str(host)}
    settings |= {PLUGINS: os.environ[PLUGINS]} if PLUGINS in os.environ else {}
    return settings | ({"NAUTILE_COORDINATOR": launch["coordinator"]} if launch["coordinator"] else {})


def check_same_commit(request: dict[str, Any]) -> None:
    """Raise `ConfigError` on a host with another commit, because output must not depend on the host."""
    # On the run's own host the code may be edited while it runs, so it is not checked there.
    if request["host"] != host() and request["commit"] != code_commit():
        raise ConfigError(
            f"host {host()} has commit {code_commit() or 'unknown'} of this code, but the run's host {request['host']} "
            f"has {request['commit'] or 'unknown'}: install the same commit on every host of the cluster"
        )


def check_same_plug_ins(request: dict[str, Any]) -> None:
    """Raise `NotInstalled` in a process that has not the plug-ins of the run, from the same sources.

    Also on the run's own host: another source than the one in a step's key must not do its work.
    """
    try:
        check_plug_ins()
        refuse_others(request["plug_ins"], f"host {host()}")
    except ConfigError as error:
        raise NotInstalled(str(error)) from None


def _reap(child: subprocess.Popen[bytes]) -> Exit | None:
    """Return the exit if the child has ended, after killing the rest of its process group; else None."""
    # Not `Popen.poll`: only wait4 also reports the memory that the child used.
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
            if exit_status := _reap(child):
                return exit_status
            time.sleep(_POLL_S)
    finally:
        # Also reached by a second Ctrl-C during the loop above, which then kills the child at once.
        if child.returncode is None:
            _signal_group(child.pid, signal.SIGKILL)
    while not (exit_status := _reap(child)):
        time.sleep(0.01)
    return exit_status


def _signal_group(group: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, number)


def raise_for_exit(exit_status: Exit, files: ChildFiles) -> None:
    """Raise the exception that an exit code stands for; return if it means success."""
    if exit_status.code == ExitCode.DONE:
        return
    error = files.error()
    # The exit code says of which kind the error is, `error.json` has its message. Without the file the child died
    # before it could write it, which is a crash whatever the code is.
    if error and exit_status.code == ExitCode.BAD_INPUT:
        kinds = {kind.__name__: kind for kind in (NotWritable, NotInstalled)}
        raise kinds.get(error["type"], ConfigError)(error["message"])
    if error and exit_status.code == ExitCode.RETRY:
        raise Retryable(error["message"])
    if not error and exit_status.code == ExitCode.BAD_INPUT and shutil.disk_usage(files.folder).free < LEAST_FREE:
        # On a full disk the child cannot write its message either.
        raise NotWritable(f"{files.folder} cannot be written (no space is left): free some and run again")
    raise crash_of(exit_status, files)


def crash_of(exit_status: Exit, files: ChildFiles) -> StageCrash:
    """The exception for a child that ended without reporting a `ConfigError` or `Retryable`."""
    code = exit_status.code
    reason = f"its process ended with exit code {code}"
    if code < 0:
        reason = f"its process was ended by signal {-code}"
    if code == -signal.SIGKILL:
        reason += " (SIGKILL: out of memory?)"
    if error := files.error():
        reason += f": {error['message']}"
    return StageCrash(reason, log=files.log, log_tail=files.log_tail(), signal_number=max(0, -code))


def append_log(log: Path, target: Path, heading: str) -> None:
    """Move the content of `log` to the end of `target`, under a heading."""
    try:
        content = log.read_bytes()
    except FileNotFoundError:
        return
    if content:
        with target.open("ab") as file:
            file.write(f"--- {heading}\n".encode() + content)
    log.unlink(missing_ok=True)
