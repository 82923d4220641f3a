"""Several processes that do one stage together: `python -m tasks.engine.multihost REQUEST.json`, in place of
`tasks.engine.child_main`.

Started here or each on a host of its own, by the template in `launch.command`. What they print goes to the stage's log
with the host's number before it. Every process tells by a beat that it lives; one that dies or falls silent ends the
others, and the stage is retried. The members hear of it when this process ends, however that happens: their standard
input does.
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
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from common.files import write_json
from common.processes import ExitCode, die_with_parent, free_port
from tasks.engine.child_main import BEAT, STOP

logger = logging.getLogger("tasks.engine.multihost")

POLL_S = 0.1
GRACE_S = 60.0  # for the others to save, once one has ended as it was asked to
_BY_SIGNAL = (128 + signal.SIGKILL, 128 + signal.SIGTERM, 255)  # as a remote shell tells a lost process or connection


@dataclass
class Member:
    """One of the processes, or the command that started it on its host."""

    host: int
    process: subprocess.Popen[bytes]
    heard: float = field(default_factory=time.monotonic)

    def listen(self) -> None:
        """Pass on what it prints, and note when it was last heard."""
        for line in self.process.stdout or ():
            self.heard = time.monotonic()
            if text := line.removesuffix(BEAT):  # a beat may fall into the middle of a line
                sys.stdout.buffer.write(f"[host {self.host}] ".encode() + text.rstrip(b"\n") + b"\n")
                sys.stdout.buffer.flush()

    def tell(self, line: bytes) -> None:
        with suppress(OSError, ValueError):
            assert self.process.stdin
            self.process.stdin.write(line)
            self.process.stdin.flush()

    def end(self) -> None:
        """Its input ends, which a member on another host sees; what runs here is ended by the kernel."""
        with suppress(OSError):
            if self.process.stdin:
                self.process.stdin.close()
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def main(arguments: list[str] | None = None) -> int:
    """Run the members to their end; the exit code is the stage's, as `tasks.engine.child_main` has it."""
    path = Path((sys.argv[1:] if arguments is None else arguments)[0])
    request = json.loads(path.read_text(encoding="utf-8"))
    die_with_parent(request["parent"])
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    members: list[Member] = []
    signal.signal(signal.SIGTERM, lambda _number, _frame: [member.tell(STOP) for member in members])
    try:
        check_commit(request)
        for host in range(request["launch"]["processes"]):
            members.append(_start(request, path, host))
        code, why = _watch(members, request["launch"]["silent_s"])
    except ConfigError as error:
        code, why = ExitCode.BAD_INPUT, str(error)
    finally:
        for member in members:
            member.end()
    if why:
        logger.error("%s", why)
        write_json(Path(request["staging"]) / "error.json", {"code": code, "type": "Group", "message": why})
    return code


def check_commit(request: dict[str, Any]) -> None:
    """Raises ConfigError where the hosts are to take this checkout's commit, and it is not all committed."""
    commit = request["commit"] or "unknown"
    if "{commit}" in request["launch"]["command"] and not re.fullmatch(r"[0-9a-f]{40}", commit):
        raise ConfigError(
            f"launch.command takes {{commit}} to the hosts, and this code's is {commit}: commit (and push) what is "
            "changed, so that every host runs the same"
        )


def member_environment(launch: dict[str, Any], host: int) -> dict[str, str]:
    """What tells a process which of how many it is. Without a coordinator, JAX asks the TPU slice."""
    settings = {"NAUTILE_PROCESSES": str(launch["processes"]), "NAUTILE_PROCESS": str(host)}
    return settings | ({"NAUTILE_COORDINATOR": launch["coordinator"]} if launch["coordinator"] else {})


def command_for(request: dict[str, Any], path: Path, host: int) -> list[str]:
    """The template, filled in for one host; each word of it is one argument, and no shell of ours reads it."""
    launch = request["launch"]
    settings = shlex.join(f"{name}={value}" for name, value in member_environment(launch, host).items())
    member = f"{settings} .venv/bin/python -P -m tasks.engine.child_main {shlex.quote(str(path))}"
    commit = shlex.quote(request["commit"])
    known = {"host": host, "processes": launch["processes"], "commit": commit, "member": member}
    return [word.format(**known) for word in shlex.split(launch["command"])]


def _start(request: dict[str, Any], path: Path, host: int) -> Member:
    launch = request["launch"]
    environment = dict(os.environ)
    if launch["command"]:
        command = command_for(request, path, host)
    else:
        launch["coordinator"] = launch["coordinator"] or f"127.0.0.1:{free_port()}"
        environment |= member_environment(launch, host)
        command = [sys.executable, "-P", "-m", "tasks.engine.child_main", str(path)]
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # a signal to this process must not reach a command that only carries our words
    )
    member = Member(host, process)
    threading.Thread(target=member.listen, daemon=True).start()
    return member


def _watch(members: list[Member], silent_s: float) -> tuple[int, str | None]:
    """Until all have ended well, or one has not: the exit code, and what is to be said if no member said it."""
    until: float | None = None
    while True:
        codes = [member.process.poll() for member in members]
        if all(code == ExitCode.DONE for code in codes):
            return ExitCode.DONE, None
        for member, code in zip(members, codes, strict=True):
            if code is None and time.monotonic() - member.heard > silent_s:
                return (
                    ExitCode.RETRY,
                    f"host {member.host} of {len(members)} said nothing for {silent_s:.0f} s; the others ended",
                )
        ended = [(member, code) for member, code in zip(members, codes, strict=True) if code]
        for told in (ExitCode.BAD_INPUT, ExitCode.FAILED):  # who refuses its input brings the others down with it
            if told in codes:
                return told, None
        for member, code in ended:
            if code != ExitCode.RETRY:
                how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
                by_signal = code < 0 or code in _BY_SIGNAL
                verdict = ExitCode.RETRY if by_signal else ExitCode.FAILED
                return verdict, f"host {member.host} of {len(members)} ended {how}"
        if ended:
            until = until or time.monotonic() + GRACE_S
            if None not in codes or time.monotonic() > until:
                return ExitCode.RETRY, None
        time.sleep(POLL_S)


if __name__ == "__main__":
    sys.exit(main())
