"""Servers that the pool starts itself, as child processes on loopback that end with this process.

A program is a module whose `main` calls `child_arguments` and, once it is ready, `announce`. Each process listens on a
free port of 127.0.0.1 and writes the line {"url": ...} to standard output. Its standard error is shown if it does not
start.

A command is any server that speaks OpenAI's protocol, such as `vllm serve`. It is told a free port, and is ready when
it answers there. What it prints goes to the log of the stage.
"""

import argparse
import json
import logging
import os
import pkgutil
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPException
from typing import IO
from urllib.error import HTTPError
from urllib.request import ProxyHandler, build_opener

from nautile.common.processes import die_with_parent, free_port, module_command, script_command
from nautile.configs.endpoint import EndpointConfig
from nautile.configs.vendors import VENDORS
from nautile.data.endpoints import run_command

logger = logging.getLogger(__name__)
START_S = 120.0  # 1 s on an idle machine
LOG_LINES = 20  # last lines of the log in the message about a process that did not start
POLL_S, ANSWER_S = 0.2, 5.0  # between two looks at whether a command serves, and how long each may take


class OwnServerError(RuntimeError):
    """A process did not start. Unlike an outage of a remote endpoint, this does not pass by waiting."""


@dataclass(frozen=True)
class ServerProgram:
    """A program that serves an endpoint of an own kind. `model`: the only one that it serves.

    `arguments()`: arguments of `python -m`, the module first; raises `ConfigError` if something is not installed.
    `replicated`: a process answers one request at a time, so one is started per connection; else there is one.
    `stand_in`: what results of it are labelled with.
    """

    model: str
    arguments: Callable[[], list[str]]
    replicated: bool
    stand_in: str


@dataclass(frozen=True)
class ServerCommand:
    """A command that serves an endpoint: its words, with `{port}`, and the seconds until it must answer."""

    model: str
    words: tuple[str, ...]
    start_s: float

    @classmethod
    def of(cls, config: EndpointConfig) -> "ServerCommand":
        return cls(config.model, config.command, config.start_s)

    def faults(self) -> list[str]:
        """Why it cannot be started here, as far as that is known without starting it."""
        program = self.words[0]
        return [] if shutil.which(program) else [f"`command`: there is no program {program!r} on this machine"]


# The endpoint kind "checker": a program that grades arithmetic in place of an LLM judge, with the judge's protocol. The
# program itself uses the graders of `evals`, which this package may not import, so it is known by its name alone.
# The version number of its rules (`rl.checker`). A change of rules needs a new one, or cached replies are stale.
CHECKER_MODEL = "arithmetic-checker-1"
CHECKER = ServerProgram(
    CHECKER_MODEL,
    lambda: ["nautile.rl.checker"],
    replicated=False,
    stand_in=f"{CHECKER_MODEL} (it checks arithmetic, the answer and its form, and reads nothing else), in place of an "
    "LLM judge",
)


def program_of(kind: str) -> ServerProgram:
    program: ServerProgram = pkgutil.resolve_name(VENDORS[kind].program)
    return program


def stand_in_of(kind: str, model: str) -> str:
    """What the text of an endpoint that stands in for a teacher is labelled with."""
    return program_of(kind).stand_in if VENDORS[kind].program else f"{model}, in place of a teacher"


class OwnServer:
    """The processes of a program. They end with `close`, the thread that called `spawn`, or this process."""

    def __init__(self, program: ServerProgram | ServerCommand, connections: int = 1) -> None:
        self._replicas: Sequence[_Process]
        if isinstance(program, ServerCommand):
            self._start_s, self._replicas = program.start_s, [_Command(program)]
        else:
            count = connections if program.replicated else 1
            self._start_s, self._replicas = START_S, [_Replica(program) for _ in range(count)]

    def spawn(self) -> None:
        """Start the processes that are not running; returns at once. They end with the thread that calls this."""
        for replica in self._replicas:
            replica.spawn()

    def wait(self) -> list[str]:
        """Base URLs of the processes, ending in /v1, once all of them serve. Raises `OwnServerError`."""
        until = time.monotonic() + self._start_s
        return [replica.wait(until) for replica in self._replicas]

    @property
    def alive(self) -> bool:
        return all(replica.alive for replica in self._replicas)

    def close(self) -> None:
        for replica in self._replicas:
            replica.close()

    def __enter__(self) -> "OwnServer":
        self.spawn()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class _Process(ABC):
    """A process that serves, once it is started."""

    process: subprocess.Popen[bytes] | None = None

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def spawn(self) -> None:
        """Start it, unless it runs."""
        if not self.alive:
            self.close()
            self._start()

    @abstractmethod
    def _start(self) -> None: ...

    @abstractmethod
    def wait(self, until: float) -> str:
        """The base URL, once it serves. Raises `OwnServerError` at `until` (monotonic), or if it ends before."""

    @abstractmethod
    def close(self) -> None: ...


class _Replica(_Process):
    """A process of a `ServerProgram`."""

    def __init__(self, program: ServerProgram) -> None:
        self._program = program
        self._log: IO[bytes] | None = None
        self._url: str | None = None

    def _start(self) -> None:
        arguments = self._program.arguments()
        # A file and not a pipe: nobody reads the log while the server runs, and a full pipe would stop it.
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed with the process
        command = module_command(*arguments, "--parent", str(os.getpid()))
        # The child must find this package in the same place as this process, whatever the working folder is.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self._log, env=environment)

    def wait(self, until: float) -> str:
        # From the line that the process writes.
        assert self.process is not None, "spawn comes first"
        assert self.process.stdout is not None
        line = b""
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while self._url is None:
                if not selector.select(max(0.0, until - time.monotonic())):
                    raise self._error(f"within {START_S:g} s")
                chunk = os.read(self.process.stdout.fileno(), 4096)
                line += chunk
                if not chunk:
                    raise self._error(f"(exit code {self.process.wait()})")
                if b"\n" in line:
                    self._url = json.loads(line)["url"]
        return self._url

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            assert self.process.stdout is not None
            self.process.stdout.close()
        if self._log is not None:
            self._log.close()
        self.process = self._log = self._url = None

    def _error(self, reason: str) -> OwnServerError:
        assert self._log is not None
        self._log.seek(0)
        lines = self._log.read().decode("utf-8", "replace").strip().splitlines()
        return _not_started(self._program.model, reason, lines)


def _not_started(model: str, reason: str, lines: list[str]) -> OwnServerError:
    log = "\n".join(["its log ends:", *lines[-LOG_LINES:]]) if lines else "its log is empty"
    return OwnServerError(f"the server of {model} did not start {reason}; {log}")


class _Command(_Process):
    """The process of a `ServerCommand`, under `run_command`, with a thread that reads what it prints."""

    def __init__(self, command: ServerCommand) -> None:
        self._command = command
        self._url = ""
        self._lines: deque[str] = deque(maxlen=LOG_LINES)
        self._reader: threading.Thread | None = None

    def _start(self) -> None:
        port = free_port()
        self._url = f"http://127.0.0.1:{port}/v1"
        words = [word.replace("{port}", str(port)) for word in self._command.words]
        logger.info("starting the server of %s: %s", self._command.model, " ".join(words))
        # The command may be of another environment, so that its imports must not come from this one.
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self.process = subprocess.Popen(
            script_command(run_command.__file__, *words),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        self._lines.clear()
        self._reader = threading.Thread(target=self._read, args=(self.process.stdout,), daemon=True)
        self._reader.start()

    def _read(self, output: IO[bytes]) -> None:
        with suppress(ValueError):  # closed
            for line in output:
                self._lines.append(line.decode("utf-8", "replace").rstrip())
                logger.info("%s: %s", self._command.model, self._lines[-1])

    def wait(self, until: float) -> str:
        process, reader, opener = self.process, self._reader, build_opener(ProxyHandler({}))
        assert process is not None, "spawn comes first"
        assert reader is not None
        while process.poll() is None:
            if time.monotonic() > until:
                raise self._error(f"within {self._command.start_s:g} s (`start_s`)")
            try:
                with opener.open(f"{self._url}/models", timeout=ANSWER_S):
                    return self._url
            except HTTPError as error:
                # It may ask for a key or not list its models; llama.cpp answers 503 while it loads.
                if error.code < 500:
                    return self._url
            except (OSError, HTTPException):
                pass
            time.sleep(POLL_S)
        reader.join(run_command.GRACE_S)  # its last words; a process of another session may hold the pipe open
        raise self._error(f"(exit code {process.returncode})")

    def close(self) -> None:
        """End the command with all that it has started."""
        if (process := self.process) is None:
            return
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            process.wait(2 * run_command.GRACE_S)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what a command that has ended has left
        process.wait()
        if self._reader is not None:
            self._reader.join(run_command.GRACE_S)
        process.stdout.close()
        self.process = None

    def _error(self, reason: str) -> OwnServerError:
        return _not_started(self._command.model, reason, list(self._lines))


def child_arguments(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse a program's arguments. From then on the process ends with its --parent and ignores Ctrl-C."""
    parser.add_argument("--parent", type=int, default=None, help="end when this process does")
    arguments = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C, and ends this process
    if arguments.parent is not None:
        die_with_parent(arguments.parent)
    return arguments


def announce(url: str) -> None:
    """Report the base URL to the parent process, which waits for it."""
    sys.stdout.write(json.dumps({"url": url}) + "\n")
    sys.stdout.flush()
