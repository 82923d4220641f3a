"""Run one stage in several processes, one per host: `python -m nautile.tasks.engine.multihost REQUEST.json`.

It replaces `tasks.engine.child_main` as the child process: it launches that module on every host (locally, by the
template in `launch.command`, or through an actor of a Ray cluster), copies their output to the stage's log with the
number of the host before each line, and ends all of them when one fails.

A host that stops responding is detected by JAX, whose heartbeat then ends the others with SIGABRT, so the stage fails
and is retried. A host detects that this process has ended, for whatever reason, by the end of its standard input.

With a URL as the store, hosts need not share a disk: see `tasks.engine.remote_child`.
"""

import json
import logging
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nautile.common.errors import ConfigError, Retryable
from nautile.common.files import read_json, write_json
from nautile.common.processes import ExitCode, die_with_parent, free_port, module_command
from nautile.configs.operation import LaunchConfig
from nautile.store.layout import StagingFiles
from nautile.tasks.engine.child_process import STOP, host_environment
from nautile.tasks.engine.ray_cluster import RayHost, connected, print_line, start_actors
from nautile.tasks.engine.remote_child import open_remote, send_request, take_results, watch_progress

logger = logging.getLogger("nautile.tasks.engine.multihost")

POLL_S = 0.1
GRACE_S = 60.0  # for the other hosts to save, once a host has ended by `Retryable` (a preemption)
# How a remote shell reports a process that a signal ended, and (255) a lost connection.
_LOST = (128 + signal.SIGKILL, 128 + signal.SIGTERM, 255)


@dataclass
class HostProcess:
    """A process on this machine, or the local command (ssh, say) that runs it on another."""

    host: int
    process: subprocess.Popen[bytes]
    problem: str = ""

    def copy_output(self) -> None:
        for line in self.process.stdout or ():
            print_line(self.host, line)

    def poll(self) -> int | None:
        return self.process.poll()

    def answered_since(self, moment: float) -> bool:
        """True, because the exit code of a local process is known at once."""
        return True

    def stop(self) -> None:
        with suppress(OSError, ValueError):
            assert self.process.stdin
            self.process.stdin.write(STOP)
            self.process.stdin.flush()

    def end(self) -> None:
        """End it at once: on another host by closing its input, here by a signal."""
        with suppress(OSError):
            if self.process.stdin:
                self.process.stdin.close()
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


Host = HostProcess | RayHost


def main(arguments: list[str] | None = None) -> int:
    """Run the hosts' processes until they end. Returns the stage's exit code, as `tasks.engine.child_main`."""
    path = Path((sys.argv[1:] if arguments is None else arguments)[0])
    request = json.loads(path.read_text(encoding="utf-8"))
    die_with_parent(request["parent"])
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    hosts: list[Host] = []
    launch = LaunchConfig.model_validate(request["launch"])

    def stop_all(_number: int, _frame: object) -> None:
        for host in hosts:
            host.stop()

    signal.signal(signal.SIGTERM, stop_all)
    message: str | None
    store, ended = None, threading.Event()
    with ExitStack() as stack:
        try:
            # Without a shared disk the request, progress and results go through the store's remote.
            if "url" in request:
                store = open_remote(request["store"])
                send_request(store, request, read_json(StagingFiles(path.parent).execution) or {})
                threading.Thread(target=watch_progress, args=(store, request, ended), daemon=True).start()
            if launch.on_ray:
                stack.enter_context(connected(launch))
                hosts += start_actors(request, path)
            else:
                check_commit(request)
                for host in range(launch.processes):
                    hosts.append(_launch(request, path, host))
            # Wait for the hosts; then fetch the outputs or the error of hosts without a shared disk.
            code, message = wait_for_hosts(hosts, launch.silent_s)
            ended.set()
            if store:
                take_results(store, request, code)
        except ConfigError as error:
            code, message = ExitCode.BAD_INPUT, str(error)
        except Retryable as error:
            code, message = ExitCode.RETRY, str(error)
        finally:
            ended.set()
            for host_process in hosts:
                host_process.end()
    # Without a message a host has written error.json itself.
    if message:
        logger.error("%s", message)
        error_json = StagingFiles(Path(request["staging"])).error_path
        write_json(error_json, {"code": int(code), "type": "MultihostError", "message": message})
    return code


def check_commit(request: dict[str, Any]) -> None:
    """Raise `ConfigError` if the hosts are to check out this code's commit but it has uncommitted changes."""
    commit = request["commit"] or "unknown"
    if "{commit}" in request["launch"]["command"] and not re.fullmatch(r"[0-9a-f]{40}", commit):
        raise ConfigError(
            f"launch.command checks out {{commit}} on the hosts, but this code's commit is {commit}: commit and push "
            "the changes, so that every host runs the same code"
        )


def host_command(request: dict[str, Any], path: Path, host: int) -> list[str]:
    """The arguments of `launch.command` for one host, with its fields filled in. No local shell interprets them."""
    launch = request["launch"]
    settings = shlex.join(f"{name}={value}" for name, value in host_environment(launch, host).items())
    if "url" in request:
        module = shlex.join(["nautile.tasks.engine.remote_child", request["url"], request["key"]])
        settings += f" NAUTILE_STORE={shlex.quote(request['url'])}"
    else:
        module = f"nautile.tasks.engine.child_main {shlex.quote(str(path))}"
    member = f"{settings} .venv/bin/python -P -m {module}"
    commit = shlex.quote(request["commit"])
    fields = {"host": host, "processes": launch["processes"], "commit": commit, "member": member}
    return [word.format(**fields) for word in shlex.split(launch["command"])]


def _launch(request: dict[str, Any], path: Path, host: int) -> HostProcess:
    launch = request["launch"]
    environment = dict(os.environ)
    if launch["command"]:
        command = host_command(request, path, host)
    else:
        launch["coordinator"] = launch["coordinator"] or f"127.0.0.1:{free_port()}"
        environment |= host_environment(launch, host)
        # All on this machine, for tests or several accelerators of one host; they meet at a free port of loopback.
        command = module_command(request["child"], str(path))
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # Ctrl-C must not end a remote shell, which would leave the process on its host running
    )
    host_process = HostProcess(host, process)
    threading.Thread(target=host_process.copy_output, daemon=True).start()
    return host_process


def wait_for_hosts(hosts: Sequence[Host], silent_s: float) -> tuple[ExitCode, str | None]:
    """Wait until all hosts have succeeded, or one has failed.

    Returns the exit code of the stage and the error message, which is None if a host has written it to `error.json`.
    """
    deadline: float | None = None
    failed_at: float | None = None
    while True:
        # The order of these cases matters: success, a lost host, a fault of the input, a crash, anything else.
        codes = [host.poll() for host in hosts]
        if all(code == ExitCode.DONE for code in codes):
            return ExitCode.DONE, None
        for host in hosts:
            if host.problem:
                return ExitCode.RETRY, f"host {host.host} of {len(hosts)} is lost: {host.problem}"

        # When one host refuses its input or crashes, JAX ends others by a signal, so these codes take precedence.
        if ExitCode.BAD_INPUT in codes:
            return ExitCode.BAD_INPUT, None
        if ExitCode.FAILED in codes:
            # The cause may be another host that is lost, which may not be known yet: wait until all have answered.
            failed_at = failed_at or time.monotonic()
            if all(host.answered_since(failed_at) for host in hosts):
                return ExitCode.FAILED, None
            time.sleep(POLL_S)
            continue
        failures = [(host.host, code) for host, code in zip(hosts, codes, strict=True) if code]
        for number, code in failures:
            if code != ExitCode.RETRY:
                return _lost_host(number, len(hosts), code, silent_s)
        if failures:
            # All codes are RETRY: give the other hosts time to save.
            deadline = deadline or time.monotonic() + GRACE_S
            if None not in codes or time.monotonic() > deadline:
                return ExitCode.RETRY, None
        time.sleep(POLL_S)


def _lost_host(host: int, count: int, code: int, silent_s: float) -> tuple[ExitCode, str]:
    """The result for a host that was ended by a signal or with an unknown exit code: (exit code, message)."""
    # As `subprocess` reports a signal of a local process, and as a remote shell does.
    if code in (-signal.SIGABRT, 128 + signal.SIGABRT):
        return ExitCode.RETRY, (
            f"host {host} of {count} ended by SIGABRT, as JAX ends a host when another one does not start or sends no "
            f"heartbeat for {silent_s:g} s (launch.silent_s); the log names it"
        )
    if code < 0:
        return ExitCode.RETRY, f"host {host} of {count} ended by signal {-code}"
    exit_code = ExitCode.RETRY if code in _LOST else ExitCode.FAILED
    return exit_code, f"host {host} of {count} ended with exit code {code}"


if __name__ == "__main__":
    sys.exit(main())
