"""A run of the pipeline in a process of its own, as a handle: progress, end, cancellation, the first error."""

import os
import signal
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.progress import Progress

from nautile.common.errors import ConfigError, Retryable
from nautile.common.processes import ExitCode, module_command
from nautile.configs.load import load
from nautile.flows.cli.runs import named_run, run_row, step_rows
from nautile.flows.render import CleanConsole
from nautile.flows.run_state import RunState
from nautile.flows.sweep.arms import toml_value
from nautile.store.mirror import open_store

POLL_S = 0.2
SHOW_EVERY_S = 2.0


class RunFailed(RuntimeError):
    """A run ended by a crash, or was cancelled; the message has its first error and the command that goes on."""


class RunHandle:
    """A run that `nautile.run` has started. Its state is read from the store, so any process can look at it as well.

    The process ends with this one. Signals, environment and Prefect's settings of this process stay as they are.
    """

    def __init__(
        self, config: str | os.PathLike[str], settings: Mapping[str, Any], start: str | None, until: str | None,
        only: str | None, force: bool, name: str | None, store: str | os.PathLike[str] | None,
    ) -> None:  # fmt: skip
        config = os.fspath(config)
        words = [f"{field}={toml_value(value)}" for field, value in settings.items()]
        load(config, words)  # what is wrong with it is said here, and not by a process that has begun
        self._store = open_store(os.fspath(store) if store is not None else None)
        # By its name the run is found in the catalog: a run's id is Prefect's, and known only once it has begun.
        self.name = name or f"{Path(config).stem}-{uuid.uuid4().hex[:8]}"
        options = [("--from", start), ("--until", until), ("--only", only), ("--name", self.name)]
        command = module_command(
            "nautile.flows.cli.main", str(os.getpid()), "run", config,
            *(word for setting in words for word in ("--set", setting)),
            *(word for option, value in options if value for word in (option, value)),
            *(["--force"] if force else []),
        )  # fmt: skip
        self._output = tempfile.NamedTemporaryFile("w", prefix="nautile-run-")  # noqa: SIM115  for life
        self._process: subprocess.Popen[bytes] | None = None
        begun = threading.Event()

        def work() -> None:
            # The kernel ends the process with the thread that started it, so that thread waits for it.
            try:
                process = self._process = subprocess.Popen(
                    command,
                    env=os.environ | {"NAUTILE_STORE": self._store.location},
                    stdin=subprocess.DEVNULL,
                    stdout=self._output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # Ctrl-C in a notebook ends a cell, not the run
                )
            finally:
                begun.set()
            process.wait()

        threading.Thread(target=work, name=f"run {self.name}", daemon=True).start()
        begun.wait()
        if self._process is None:
            raise ConfigError(f"{command[0]} cannot be started")

    def __repr__(self) -> str:
        return f"<nautile run {self.name}: {self.state}>"

    @property
    def state(self) -> str:
        """starting, running, waiting (for an approval), done, failed, cancelled or interrupted."""
        found = self._found()
        if found is not None and (found.state != "running" or self._ended is None):
            return found.state
        return "starting" if self._ended is None else "done" if self._ended == ExitCode.DONE else "failed"

    @property
    def id(self) -> str | None:
        """The run's id in the store; None before it has begun."""
        found = self._found()
        return found.run if found else None

    def progress(self) -> dict[str, Any]:
        """The run as in `nautile runs --json`: state, share (0 to 1), seconds_left, score; empty before it begins."""
        found = self._found()
        return run_row(found) if found else {}

    def steps(self) -> list[dict[str, Any]]:
        """Its steps as in `nautile status RUN --json`."""
        found = self._found()
        return step_rows(found) if found else []

    def output(self) -> str:
        """What the process has printed."""
        # By its name: through the open file the position would move, at which the process writes.
        return Path(self._output.name).read_text(encoding="utf-8", errors="replace")

    def wait(self, timeout_s: float | None = None, *, show: bool | None = None) -> "RunHandle":
        """Wait for the end. Ctrl-C ends the wait alone; `cancel` ends the run.

        `show`: a progress bar; None: in a terminal or a notebook. Raises `TimeoutError`; `ConfigError` and `Retryable`
        as the command exits with 2 and 75; `RunFailed` for any other end than a whole one.
        """
        until = None if timeout_s is None else time.monotonic() + timeout_s
        console = CleanConsole(stderr=True, markup=False)
        shown = (console.is_terminal or console.is_jupyter) if show is None else show
        with Progress(console=console, disable=not shown) as bar:
            task, show_at = bar.add_task(self.name, total=1.0), 0.0
            while self._ended is None:
                if until is not None and time.monotonic() > until:
                    raise TimeoutError(f"run {self.name} has not ended within {timeout_s:g} s")
                time.sleep(POLL_S)
                if shown and time.monotonic() > show_at and (row := self.progress()):
                    bar.update(task, completed=row["share"], description=f"{self.name}: {row['state']}")
                    show_at = time.monotonic() + SHOW_EVERY_S
        if self._ended == ExitCode.DONE:
            return self
        message = self.error or f"exit code {self._ended}"
        if self._ended == ExitCode.BAD_INPUT:
            raise ConfigError(message)
        if self._ended == ExitCode.RETRY:
            raise Retryable(message)
        raise RunFailed(f"run {self.name}: {message}")

    def result(self, timeout_s: float | None = None) -> dict[str, str]:
        """The artifacts that the run made or reused: `label.kind` -> id. Waits, and raises, as `wait` does."""
        self.wait(timeout_s)
        return {
            f"{row['label']}.{artifact.partition('/')[0]}": artifact
            for row in self.steps()
            for artifact in row["artifacts"]
        }

    @property
    def error(self) -> str | None:
        """The first error of the run; None while there is none."""
        if self._ended in (None, ExitCode.DONE):
            return None
        found = self._found()
        failed = next((row["error"] for row in (step_rows(found) if found else []) if row["error"]), None)
        lines = [line for line in self.output().splitlines() if line.strip()]
        return failed or (found.error if found else None) or (lines[-1].strip() if lines else None)

    def cancel(self) -> None:
        """End the run as Ctrl-C does, and wait for that. What is finished is kept; the same run goes on later."""
        assert self._process is not None
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        self._process.wait()

    @property
    def _ended(self) -> int | None:
        """The exit code; None while the process lives."""
        assert self._process is not None
        return self._process.poll()

    def _found(self) -> RunState | None:
        return named_run(self._store, self.name)
