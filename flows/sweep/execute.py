"""Run the arms of a sweep: each as `nautile run` in a process of its own, several at a time, on one Prefect server.

What is done is in the store, and nothing else remembers how far a sweep came: the same command goes on. Runs that need
the same step wait for each other at its key, and `[resources]` holds for all of them together.
"""

import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from common.processes import ExitCode
from common.text import duration, visible
from flows.operate import prefect_server
from flows.operate.concurrency import SHARED
from flows.operate.services import join_server
from flows.run import terminable
from flows.sweep.arms import Sweep, SweepRun
from store.artifacts import Store
from tasks.engine.staging import failure_in_sweep

_REUSED = re.compile(r"^\S+: reused\b")
Say = Callable[[str], None]  # prints a line


def run_sweep(sweep: Sweep, store: Store, parallel: int | None, say: Say) -> int:
    """Run the arms that are not done, at most `parallel` at a time; the exit code.

    That of a run where several failed: the lowest, for a crash is the graver news. Raises `ConfigError` if the server
    that PREFECT_API_URL names does not answer.
    """
    waiting = [run for run in sweep.runs if run.left(store)]
    if done := len(sweep.runs) - len(waiting):
        say(f"{done} of {len(sweep.runs)} runs are in the store already")
    if not waiting:
        return ExitCode.DONE
    prefect_server.configure_prefect(store)
    if server := join_server(store):
        say(f"runs on the server of `nautile up`: {server.removesuffix('/api')}")
    elif "PREFECT_API_URL" not in os.environ:
        say("starting the embedded Prefect server (about 20 s the first time, less after)")
    again = f"nautile sweep {shlex.quote(str(sweep.file))}"
    # More at a time than there are slots would only wait.
    at_a_time = parallel or sum(waiting[0].config.resources.limits().values())
    workers = _Workers(sweep, store, say)
    try:
        with terminable(), prefect_server.prefect_api(), ThreadPoolExecutor(at_a_time) as threads:
            try:
                codes = list(threads.map(workers.run, waiting))
            except BaseException:
                workers.stop()
                raise
    except (KeyboardInterrupt, SystemExit):
        say("stopped; its runs are ended and what was finished is kept.")
        say(f"Continue with: {again}")
        return ExitCode.INTERRUPTED
    if any(codes):
        ended = [run for run, code in zip(waiting, codes, strict=True) if code]
        failed = [run.title for run in ended if run.run_name not in workers.blocked]
        blocked = [run.title for run in ended if run.run_name in workers.blocked]
        say(f"{len(failed)} of {len(sweep.runs)} runs failed: {'; '.join(failed)}")
        if blocked:
            say(f"{len(blocked)} more need what failed there, which was not tried again: {'; '.join(blocked)}")
        say(f"What they finished is kept. Continue with: {again}")
    return min((code if code > 0 else ExitCode.FAILED for code in codes if code), default=ExitCode.DONE)


@dataclass
class _Workers:
    """The processes of the runs. The thread that starts one waits for it: the kernel ends it with that thread."""

    sweep: Sweep
    store: Store
    say: Say
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    blocked: set[str] = field(default_factory=set)  # names of runs that ended at what had failed in another
    stopped: threading.Event = field(default_factory=threading.Event)
    processes: dict[str, subprocess.Popen[str]] = field(default_factory=dict)

    def run(self, run: SweepRun) -> int:
        """Run one arm to its end and print what it says; its exit code, or minus the signal that ended it."""
        if self.stopped.is_set():
            return ExitCode.INTERRUPTED
        begun, reused = time.monotonic(), 0
        self._say(run, "started")
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
            process = subprocess.Popen(
                command(self.sweep, run),
                env={**os.environ, SHARED: self.id},
                text=True,
                errors="replace",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,  # Ctrl-C reaches it through `stop` alone
            )
            self.processes[run.run_name] = process
            if self.stopped.is_set():
                process.terminate()
            assert process.stdout is not None
            for line in process.stdout:
                if not line.strip():
                    break  # its closing table follows, which the report has
                if _REUSED.match(line.rstrip()):
                    reused += 1
                else:
                    self._say(run, line.rstrip())
            process.stdout.read()
            code = process.wait()
            del self.processes[run.run_name]
            errors.seek(0)
            messages = errors.read().splitlines()
        took = f"after {duration(time.monotonic() - begun)}, {reused} of {len(run.prepared.steps)} steps reused"
        if self.stopped.is_set():
            return ExitCode.INTERRUPTED
        if code and (failed := self._failed_elsewhere(run)):
            self.blocked.add(run.run_name)
            messages = [f"not made: {failed}"]
        for line in messages:
            self._say(run, line)
        self._say(run, f"done {took}" if not code else f"failed with exit code {code} {took}")
        return code

    def _failed_elsewhere(self, run: SweepRun) -> str:
        """The steps at which a run ended because they had failed in another; empty if it failed at one itself."""
        titles = {other.run_name: other.title for other in self.sweep.runs}
        failures = []
        for step in run.left(self.store):
            if failure := failure_in_sweep(self.store, step.key, self.id):
                if failure["config"] == run.run_name:
                    return ""
                failures.append(f"{step.label} failed for {titles.get(failure['config'], failure['run'][:8])}")
        return "; ".join(failures)

    def stop(self) -> None:
        """End all runs, as Ctrl-C ends one, and start no others."""
        self.stopped.set()
        for process in list(self.processes.values()):
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)

    def _say(self, run: SweepRun, text: str) -> None:
        if not self.stopped.is_set():
            self.say(f"[{run.title}] {visible(text)}")


def command(sweep: Sweep, run: SweepRun) -> Sequence[str]:
    """The command line of a run's process."""
    settings = [word for setting in (*run.settings, f"name={run.run_name}") for word in ("--set", setting)]
    until = ["--until", sweep.section.until] if sweep.section.until else []
    return [sys.executable, "-m", "flows.sweep.child", str(os.getpid()), "run", sweep.base, *settings, *until]
