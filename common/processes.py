"""Process utilities: exit codes, child processes, ending with the parent, priorities, memory limits, sockets."""

import ctypes
import errno
import gc
import ipaddress
import os
import random
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import copy_context
from enum import IntEnum
from pathlib import Path
from typing import TypeVar

from nautile.common.errors import ConfigError
from nautile.common.retry import Backoff, retry

T = TypeVar("T")
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_POLL_S = 0.5
_PROXIES = {"http_proxy", "https_proxy", "all_proxy", "no_proxy"}
# Below those of outgoing connections: 32768 on Linux, 49152 elsewhere.
_SERVER_PORTS: Sequence[int] = range(16_384, 32_768)
_PORT_IN_USE = Backoff(give_up_s=3.0, first_s=0.1, longest_s=0.5)
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
# Makes glibc request pages of 2 MB for large allocations, as numpy does. Reading gigabytes of weights into pages of 4
# KB spends a tenth to a fifth of the time on page faults.
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


class ExitCode(IntEnum):
    """Exit codes of all commands and child processes; a negative code is a signal, as in `subprocess`."""

    DONE = 0
    FAILED = 1  # a crash: an unexpected error
    BAD_INPUT = 2  # the operator must change something (`ConfigError`)
    RETRY = 75  # EX_TEMPFAIL of sysexits.h: the same command may succeed later (`Retryable`)
    INTERRUPTED = 130  # Ctrl-C or SIGTERM, as shells report SIGINT


def module_command(module: str, *arguments: str) -> list[str]:
    """The command line that runs `module` in a new interpreter, which does not import from its working directory.

    Without -P a folder named `store` or `data` there, with which any user may work, would hide the package of that
    name.
    """
    return [sys.executable, "-P", "-m", module, *arguments]


def script_command(file: str, *arguments: str) -> list[str]:
    """The command line that runs `file` in a new interpreter with the standard library alone, whatever is installed."""
    return [sys.executable, "-I", file, *arguments]


def begin_as_usual() -> None:
    """Give this process what programs rely on, however it was started: three open streams, and word of ended children.

    A service manager may have closed the streams, and whatever ignores SIGCHLD leaves that to the processes it starts.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            # Else the next file that is opened, as the catalog, has this number, and what libraries print goes into it.
            opened = os.open(os.devnull, os.O_RDWR)  # with the lowest free number, which is this one
            os.set_inheritable(opened, True)
        if getattr(sys, name) is None:
            stream = open(number, "w" if number else "r", encoding="utf-8", closefd=False)  # noqa: SIM115  for life
            setattr(sys, name, stream)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, the exit code of a child is lost


def run_async(work: Coroutine[None, None, T]) -> T:
    """`asyncio.run`, also where this thread has a running event loop, as in a notebook: then in a thread of its own."""
    import asyncio

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()


def die_with_parent(parent_pid: int) -> None:
    """End this process when process `parent_pid` ends, even if the parent is killed by SIGKILL.

    On Linux the kernel sends SIGKILL when the *thread* that started this process ends, so that thread must wait for
    this process. On other systems a thread polls, and kills the whole process group if this process leads one.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent_pid:  # the parent ended before the call
            os._exit(ExitCode.FAILED)
        return

    def watch() -> None:
        while os.getppid() == parent_pid:
            time.sleep(_POLL_S)
        # With our own children; a group that another process leads may contain the shell of a terminal.
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os._exit(ExitCode.FAILED)

    threading.Thread(target=watch, name="die-with-parent", daemon=True).start()


def restart_on_huge_pages() -> None:
    """Re-execute this process's command with `HUGE_PAGES` set; no effect if `GLIBC_TUNABLES` is set already.

    glibc reads the setting only when a process starts. Does nothing on other systems than Linux.
    """
    if sys.platform == "linux" and not HUGE_PAGES.keys() & os.environ.keys():
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | HUGE_PAGES)


def give_way(niceness: int) -> None:
    """Raise the niceness of this thread, and of threads and processes that it starts later, to at least `niceness`.

    `niceness`: 0 to 19; a higher current value is kept. On Linux a nice value belongs to a thread, so existing threads
    keep theirs; on other systems it belongs to the process.
    """
    with suppress(OSError):  # on a system without priorities
        own = os.getpriority(os.PRIO_PROCESS, 0)
        if niceness > own:
            os.setpriority(os.PRIO_PROCESS, 0, niceness)
        if os.getsid(0) == os.getpid():
            give_session_way(os.getpid())


def only_idle_time() -> None:
    """Run this thread, and threads that it starts later, only when the cores are idle (SCHED_IDLE).

    On other systems than Linux it gets the lowest priority.
    """
    give_way(19)
    with suppress(OSError):
        if sys.platform == "linux":
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def give_session_way(leader: int) -> None:
    """Set the niceness of the session that process `leader` leads to that of the process.

    If Linux schedules by sessions (`kernel.sched_autogroup_enabled`), a process's nice value only matters within its
    session, and the session has a value of its own. Otherwise this has no effect.
    """
    with suppress(OSError):
        niceness = os.getpriority(os.PRIO_PROCESS, leader)
        if niceness > 0:
            Path(f"/proc/{leader}/autogroup").write_text(str(niceness), encoding="ascii")


class _TimeIsUp(BaseException):
    """Raised into a block of `time_limit`; no `Exception`, which the code in it might catch."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `TimeoutError` if the block takes longer, for code that may hang; in the main thread alone.

    It interrupts Python, searches of `re` and waiting, but no other computation in C. In another thread there is no
    limit, because only the main thread receives signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        raise _TimeIsUp

    start, handler = time.monotonic(), signal.signal(signal.SIGALRM, stop)
    # Again every second: a bare `except` in the block may catch the first.
    delay, interval = signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except _TimeIsUp:
        raise TimeoutError(f"no result within {seconds:g} s") from None
    finally:
        signal.signal(signal.SIGALRM, handler)
        if delay:  # of a limit around this one
            signal.setitimer(signal.ITIMER_REAL, max(0.001, delay - (time.monotonic() - start)), interval)


@contextmanager
def thread_beside(name: str, work: Callable[..., None], *arguments: object) -> Iterator[None]:
    """Run `work(*arguments, stop)` in a thread during the block; then set the event `stop` and join the thread.

    The thread has a copy of the caller's context variables.
    """
    stop = threading.Event()
    thread = threading.Thread(target=copy_context().run, args=(work, *arguments, stop), name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@contextmanager
def bounded_memory(extra_bytes: int) -> Iterator[None]:
    """Limit this process to `extra_bytes` bytes of address space beyond its current use; further allocations fail.

    The limit applies to all threads. Only on Linux: on other systems it has no effect.
    """
    if sys.platform != "linux":
        yield
        return
    # The address space, because Linux ignores its limit of resident memory. `statm` gives it in pages, in its first
    # field.
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm", encoding="ascii") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    limits = [limit for limit in (used + extra_bytes, soft, hard) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min(limits), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the garbage collector while large packages are imported, then relax it (`relax_collector`).

    It would traverse their hundreds of thousands of objects again and again, which takes a fifth of the time to import
    JAX or Prefect, and as much of the time that JAX traces later.
    """
    gc.disable()
    try:
        yield
    finally:
        relax_collector()
        gc.enable()


def relax_collector() -> None:
    """Exclude all existing objects from garbage collection, and collect only after 10,000 new ones.

    Python's default of 700 suits small programs: with it the collector takes a tenth of the time that JAX traces.
    """
    gc.freeze()
    gc.set_threshold(10_000)


def loopback_direct(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables to add to `environment` so that no client asks a proxy for addresses of this machine.

    Prefect's server, embedded teachers and the dashboard are there. Empty if no proxy is set, or if none is used.
    """
    # Clients read either spelling of a name, and prefer different ones.
    values = {name.lower(): value for name, value in environment.items() if name.lower() in _PROXIES and value}
    if not values.keys() - {"no_proxy"}:
        return {}
    excepted = [host.strip() for host in values.get("no_proxy", "").split(",") if host.strip()]
    if "*" in excepted:
        return {}
    hosts = ",".join(dict.fromkeys([*excepted, *_LOOPBACK]))
    return {"NO_PROXY": hosts, "no_proxy": hosts}


def free_port(address: str = "127.0.0.1") -> int:
    """A TCP port of `address` on this machine that is free at this moment, and that no outgoing connection will take.

    The port that the system itself would choose is of the range from which it also gives one to each connection, so
    that it may be taken by the time a server listens there.
    """
    # From a random one on, so that two processes that ask at once get different ones.
    first = random.SystemRandom().randrange(len(_SERVER_PORTS))
    for port in (*_SERVER_PORTS[first:], *_SERVER_PORTS[:first]):
        with socket.socket() as probe:
            try:
                probe.bind((address, port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                return port
    raise OSError(errno.EADDRINUSE, f"all ports from {_SERVER_PORTS[0]} to {_SERVER_PORTS[-1]} are in use")


def machine_start() -> str:
    """The id of the last start of this machine; the machine's name where the system has no such id."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()


def pid_space() -> str:
    """The id of what gives this process its number: the last start of the machine and, in a container, its namespace.

    Numbers of processes mean the same only where it is the same.
    """
    try:
        return f"{machine_start()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return machine_start()


def is_loopback(host: str) -> bool:
    """Whether `host`, a name or an address, is a loopback address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name: any other one may resolve to another machine
        return host.lower() == "localhost"


def url_host(host: str) -> str:
    """`host` as a URL has it: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


def listen(host: str, port: int) -> socket.socket:
    """Open a listening socket that child processes may inherit. Raises `ConfigError` if the address cannot be used."""

    def bind() -> socket.socket:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family)
        try:
            # So that a restarted server need not wait for the connections of the last one to time out.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(1024)
        except BaseException:
            listener.close()
            raise
        return listener

    try:
        # A process that was killed has ended some moments before the system has closed its sockets.
        listener = retry(bind, _PORT_IN_USE, should_retry=lambda error: getattr(error, "errno", 0) == errno.EADDRINUSE)
    except (OSError, OverflowError, UnicodeError) as error:
        raise ConfigError(
            f"--host {host} --port {port}: cannot listen there ({error}); choose another address or port"
        ) from None
    listener.set_inheritable(True)
    return listener
