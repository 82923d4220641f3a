"""A run, a sweep or a rehearsal in a process of its own, as a handle: progress, end, cancellation, the first error."""

import json
import os
import re
import signal
import subprocess
import tempfile
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from nautile.common.errors import ConfigError, Retryable
from nautile.common.processes import ExitCode, module_command
from nautile.configs.load import load
from nautile.flows.cli.runs import named_run, run_row, step_rows
from nautile.flows.dag import steps_of
from nautile.flows.run_state import RunState
from nautile.flows.sweep.arms import read_sweep, setting_words
from nautile.flows.sweep.report import report_of
from nautile.progress import progress_bar
from nautile.store.mirror import open_store

POLL_S = 0.2
SHOW_EVERY_S = 2.0


class RunFailed(RuntimeError):
    """A run ended by a crash, or was cancelled; the message has its first error and the command that goes on."""


class ProcessHandle(ABC):
    """A command of `nautile` in a process of its own, which ends with this one.

    Signals, environment, event loop and Prefect's settings of this process stay as they are. Its state is read from
    the store, so any process can look at it as well.
    """

    def __init__(
        self, name: str, words: Sequence[str | None], store: str | os.PathLike[str] | None, *, results: bool = False
    ) -> None:
        """`words`: of the command line. `results`: it prints JSON on standard output, which is no message."""
        self.name = name
        self._store = open_store(os.fspath(store) if store is not None else None)
        command = module_command("nautile.flows.cli.main", str(os.getpid()), *filter(None, words))
        # Files, since nobody reads a pipe until the end, and a full one would stop the process.
        self._output = tempfile.NamedTemporaryFile("w", prefix="nautile-")  # noqa: SIM115  for life
        self._results = tempfile.NamedTemporaryFile("w", prefix="nautile-")  # noqa: SIM115
        self._process: subprocess.Popen[bytes] | None = None
        begun = threading.Event()

        def work() -> None:
            # The kernel ends the process with the thread that started it, so that thread waits for it.
            try:
                process = self._process = subprocess.Popen(
                    command,
                    # A notebook's kernel names its own backend of matplotlib, which only draws below a cell.
                    env=os.environ | {"NAUTILE_STORE": self._store.location, "MPLBACKEND": "agg"},
                    stdin=subprocess.DEVNULL,
                    stdout=self._results if results else self._output,
                    stderr=self._output,
                    start_new_session=True,  # Ctrl-C in a notebook ends a cell, not the run
                )
            finally:
                begun.set()
            process.wait()

        threading.Thread(target=work, name=f"nautile {name}", daemon=True).start()
        begun.wait()
        if self._process is None:
            raise ConfigError(f"{command[0]} cannot be started")

    def __repr__(self) -> str:
        return f"<nautile {type(self).__name__.removesuffix('Handle').lower()} {self.name}: {self.state}>"

    @property
    def state(self) -> str:
        """running, done, failed, or interrupted."""
        match self._ended:
            case None:
                return "running"
            case ExitCode.DONE:
                return "done"
            case code:
                return "interrupted" if code < 0 or code == ExitCode.INTERRUPTED else "failed"

    @abstractmethod
    def progress(self) -> dict[str, Any]:
        """state, the steps that are done and all of them, and share (0 to 1); empty before it begins."""

    def output(self) -> str:
        """What the process has printed."""
        return _text_of(self._output.name)

    def wait(self, timeout_s: float | None = None, *, show: bool | None = None) -> Self:
        """Wait for the end. Ctrl-C ends the wait alone; `cancel` ends the process.

        `show`: a progress bar; None: in a terminal or a notebook. Raises `TimeoutError`; `ConfigError` and `Retryable`
        as the command exits with 2 and 75; `RunFailed` for any other end than a whole one.
        """
        until = None if timeout_s is None else time.monotonic() + timeout_s
        with progress_bar(self.name, show) as update:
            show_at = 0.0
            while self._ended is None:
                if until is not None and time.monotonic() > until:
                    raise TimeoutError(f"{self.name} has not ended within {timeout_s:g} s")
                time.sleep(POLL_S)
                if update and time.monotonic() > show_at and (row := self.progress()):
                    update(row["share"] or 0.0, f"{self.name}: {row['state']}")
                    show_at = time.monotonic() + SHOW_EVERY_S
        if self._ended == ExitCode.DONE:
            return self
        message = self.error or f"exit code {self._ended}"
        if self._ended == ExitCode.BAD_INPUT:
            raise ConfigError(message)
        if self._ended == ExitCode.RETRY:
            raise Retryable(message)
        raise RunFailed(f"{self.name}: {message}")

    @property
    def error(self) -> str | None:
        """The first error; None while there is none."""
        if self._ended in (None, ExitCode.DONE):
            return None
        lines = [line.strip() for line in self.output().splitlines() if line.strip()]
        if not (first := self._first_error()) and self.state in ("interrupted", "cancelled"):
            how = next((line for line in reversed(lines) if line.startswith("Continue with")), "The same call goes on")
            return f"it was {self.state}. {how}"
        return first or (lines[-1] if lines else None)

    def cancel(self) -> None:
        """End the process as Ctrl-C does, and wait for that. What is finished is kept; the same call goes on later."""
        assert self._process is not None
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        self._process.wait()

    def _first_error(self) -> str | None:
        """What is known of the error but the last line that was printed."""
        return None

    @property
    def _ended(self) -> int | None:
        """The exit code; None while the process lives."""
        assert self._process is not None
        return self._process.poll()


class RunHandle(ProcessHandle):
    """A run that `nautile.run` has started."""

    def __init__(
        self, config: str | os.PathLike[str], settings: Mapping[str, Any], start: str | None, until: str | None,
        only: str | None, force: bool, name: str | None, store: str | os.PathLike[str] | None,
    ) -> None:  # fmt: skip
        config, settings_as_words = os.fspath(config), setting_words(settings)
        load(config, settings_as_words)  # what is wrong with it is said here, and not by a process that has begun
        # By its name the run is found in the catalog: a run's id is Prefect's, and known only once it has begun.
        name = name or f"{Path(config).stem}-{uuid.uuid4().hex[:8]}"
        options = [("--from", start), ("--until", until), ("--only", only), ("--name", name)]
        options += [("--set", word) for word in settings_as_words]
        words = [word for option, value in options if value for word in (option, value)]
        super().__init__(name, ["run", config, *words, "--force" if force else None], store)

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

    def result(self, timeout_s: float | None = None) -> dict[str, str]:
        """The artifacts that the run made or reused: `label.kind` -> id. Waits, and raises, as `wait` does."""
        self.wait(timeout_s)
        return {
            f"{row['label']}.{artifact.partition('/')[0]}": artifact
            for row in self.steps()
            for artifact in row["artifacts"]
        }

    def _first_error(self) -> str | None:
        found = self._found()
        failed = next((row["error"] for row in (step_rows(found) if found else []) if row["error"]), None)
        return failed or (found.error if found else None)

    def _found(self) -> RunState | None:
        return named_run(self._store, self.name)


class SweepHandle(ProcessHandle):
    """A sweep that `nautile.sweep` has started."""

    def __init__(
        self, file: str | os.PathLike[str], parallel: int | None, many: bool, store: str | os.PathLike[str] | None
    ) -> None:
        opened = open_store(os.fspath(store) if store is not None else None)
        sweep = read_sweep(Path(file), opened, many)
        self._record = sweep.record()
        parallel_words = ["--parallel", str(parallel)] if parallel is not None else []
        super().__init__(
            sweep.name, ["sweep", os.fspath(file), *parallel_words, "--yes" if many else None], opened.location
        )

    def report(self) -> dict[str, Any]:
        """The report as of `nautile sweep --report --json`, of what is finished until now.

        `arms` has a row for each run, `metrics` for each benchmark the arms with intervals and their paired tests:
        `pandas.DataFrame(report["metrics"][0]["arms"])`.
        """
        return report_of(self._store, self._record)

    def progress(self) -> dict[str, Any]:
        """state, the steps that are done and all of them, and share (0 to 1); empty before it begins."""
        if not self._store.root.exists():
            return {}
        arms = self.report()["arms"]
        done, steps = (sum(arm[name] for arm in arms) for name in ("made", "steps"))
        return {"state": self.state, "done": done, "steps": steps, "share": done / steps if steps else None}

    def result(self, timeout_s: float | None = None) -> dict[str, Any]:
        """The report of the whole sweep. Waits, and raises, as `wait` does."""
        return self.wait(timeout_s).report()

    def _first_error(self) -> str | None:
        if not self._store.root.exists():
            return None
        failed = [arm for arm in self.report()["arms"] if arm["state"] == "failed"]
        return f"{failed[0]['arm']} failed in {failed[0]['error']}" if failed else None


class RehearsalHandle(ProcessHandle):
    """A rehearsal that `nautile.rehearse` has started."""

    def __init__(
        self, config: str | os.PathLike[str], settings: Mapping[str, Any], spend: float, full_model: bool,
        store: str | os.PathLike[str] | None,
    ) -> None:  # fmt: skip
        config, settings_as_words = os.fspath(config), setting_words(settings)
        if not 0 <= spend < float("inf"):
            raise ConfigError(f"spend {spend}: must be dollars, 0 for what is free")
        self._labels = {step.label for step in steps_of(load(config, settings_as_words))}
        words = [word for setting in settings_as_words for word in ("--set", setting)]
        words += ["--spend", str(spend), "--json", *(["--full-model"] if full_model else [])]
        super().__init__(Path(config).stem, ["rehearse", config, *words], store, results=True)

    def report(self) -> dict[str, Any] | None:
        """What was reached, the stages, faults and what the whole run would need, as of `nautile rehearse --json`.

        None before the end, and if it was interrupted.
        """
        text = "" if self._ended is None else _text_of(self._results.name)
        report: dict[str, Any] | None = json.loads(text) if text else None
        return report

    def progress(self) -> dict[str, Any]:
        """state, the stages that are done and all of them, and share (0 to 1)."""
        tried = self._labels & set(re.findall(r"^(\S+): ", self.output(), re.MULTILINE))
        share = len(tried) / len(self._labels)
        return {"state": self.state, "done": len(tried), "steps": len(self._labels), "share": share}

    def result(self, timeout_s: float | None = None) -> dict[str, Any]:
        """The report, if everything was reached. Waits, and raises the first fault as `wait` does; `report` has all."""
        self.wait(timeout_s)
        report = self.report()
        assert report is not None
        return report

    def _first_error(self) -> str | None:
        report = self.report()
        if report is None:
            return None
        rows = [row for row in report["stages"] if row["outcome"] != "done"]
        unreached = [f"{row['label']}: {row['error'] or row['outcome']}" for row in rows]
        return next(iter([*report["faults"], *unreached]), None)


def _text_of(path: str) -> str:
    # By its name: through the open file the position would move, at which the process writes.
    return Path(path).read_text(encoding="utf-8", errors="replace")
