"""Processes: a child that ends with its parent, where a server listens, and the exit codes of every command."""

import ctypes
import gc
import ipaddress
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from enum import IntEnum
from pathlib import Path

from common.errors import ConfigError

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_POLL_S = 0.5
# glibc then asks for pages of 2 MB for large arrays, as numpy does for its own. Of the time to read gigabytes of
# weights in pages of 4 KB a tenth to a fifth goes into finding the pages.
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


class ExitCode(IntEnum):
    """How a process of this project ended. A negative code is the signal that ended it, as `subprocess` has it."""

    DONE = 0
    FAILED = 1  # a crash: an error that nobody expected
    BAD_INPUT = 2  # the operator has something to change (`ConfigError`)
    RETRY = 75  # EX_TEMPFAIL of sysexits.h: the same command may succeed later (`Retryable`)
    INTERRUPTED = 130  # Ctrl-C or SIGTERM, as shells report SIGINT


def die_with_parent(parent_pid: int) -> None:
    """End this process when process `parent_pid` ends, even if that was killed by SIGKILL.

    On Linux the kernel sends SIGKILL when the *thread* that started this process ends, so that thread must be the one
    that waits for it. The parent may have died before the call, so that is checked after it. Elsewhere a thread polls,
    and kills the whole process group if this process leads one.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent_pid:
            os._exit(ExitCode.FAILED)
        return

    def watch() -> None:
        while os.getppid() == parent_pid:
            time.sleep(_POLL_S)
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os._exit(ExitCode.FAILED)

    threading.Thread(target=watch, name="die-with-parent", daemon=True).start()


def restart_on_huge_pages() -> None:
    """Begin this process's command again, as the same process, on large pages; no effect where `GLIBC_TUNABLES` is set.

    glibc reads the setting only as a process begins. Elsewhere than on Linux nothing is done.
    """
    if sys.platform == "linux" and not HUGE_PAGES.keys() & os.environ.keys():
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | HUGE_PAGES)


def give_way(niceness: int) -> None:
    """Let others go before this thread, and before the threads and processes that it starts from now on.

    To `niceness` (0..19) at least: that of a user who began this with more stays. On Linux a nice value is a thread's,
    so threads that are there already keep theirs; elsewhere it is the whole process's.
    """
    with suppress(OSError):  # a system without priorities runs everything alike
        own = os.getpriority(os.PRIO_PROCESS, 0)
        if niceness > own:
            os.setpriority(os.PRIO_PROCESS, 0, niceness)
        if os.getsid(0) == os.getpid():
            give_session_way(os.getpid())


def only_idle_time() -> None:
    """Let this thread, and those that it starts from now on, have only the time that nothing else wants of the cores.

    Elsewhere than on Linux this is the least priority there is.
    """
    give_way(19)
    with suppress(OSError):
        if sys.platform == "linux":
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def give_session_way(leader: int) -> None:
    """Give the session that process `leader` leads the priority of that process.

    Where Linux schedules by sessions (`kernel.sched_autogroup_enabled`) a nice value counts only among the processes
    of one session, and the session has a value of its own. Elsewhere this changes nothing.
    """
    with suppress(OSError):
        niceness = os.getpriority(os.PRIO_PROCESS, leader)
        if niceness > 0:
            Path(f"/proc/{leader}/autogroup").write_text(str(niceness), encoding="ascii")


@contextmanager
def thread_beside(name: str, work: Callable[..., None], *arguments: object) -> Iterator[None]:
    """Run `work(*arguments, stop)` in a thread beside the block, at whose end `stop` is set and it is waited for."""
    stop = threading.Event()
    thread = threading.Thread(target=work, args=(*arguments, stop), name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@contextmanager
def bounded_memory(more: int) -> Iterator[None]:
    """Let this process take `more` bytes of address space than now and not more; further allocations fail.

    For all its threads, so use it before they work. Only on Linux: elsewhere it changes nothing.
    """
    if sys.platform != "linux":
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm", encoding="ascii") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    limits = [limit for limit in (used + more, soft, hard) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min(limits), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the garbage collector while large packages are imported, and have it look less often ever after.

    It would look at their hundreds of thousands of objects again and again, which is a fifth of the import of JAX or
    Prefect, and as much of whatever JAX traces later.
    """
    gc.disable()
    try:
        yield
    finally:
        relax_collector()
        gc.enable()


def relax_collector() -> None:
    """Keep the garbage collector from all objects that there are, and let 10,000 new ones gather before it looks.

    Python's default of 700 is for small programs: with it, a tenth of the time that JAX takes to trace is the
    collector's.
    """
    gc.freeze()
    gc.set_threshold(10_000)


def free_port(address: str = "127.0.0.1") -> int:
    """A TCP port of this machine's `address` that nothing listens on at this moment."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def is_loopback(host: str) -> bool:
    """Whether `host`, a name or an address, is this machine's alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name: any but this may be another machine's
        return host.lower() == "localhost"


def listen(host: str, port: int) -> socket.socket:
    """A socket that already listens, which child processes may inherit. Raises `ConfigError` for a wrong address."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"--host {host} --port {port}: cannot listen there ({error}); choose another address or port"
        ) from None
    listener.set_inheritable(True)
    return listener
