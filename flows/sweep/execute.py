"""Run the arms of a sweep, each as `nautile run` in its own process, several in parallel, on one Prefect server.

The only record of progress is the store, so the same command resumes a sweep. Runs that need the same step wait for the
lock of its key, and `[resources]` limits all of them together.
"""

import os
import re
import signal
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from nautile.common.commands import shell_command
from nautile.common.processes import ExitCode, module_command
from nautile.common.text import duration, visible
from nautile.flows.operate import prefect_server
from nautile.flows.operate.concurrency import SHARED
from nautile.flows.operate.services import join_server
from nautile.flows.run import terminable
from nautile.flows.sweep.arms import MOST_ARMS, Sweep, SweepRun
from nautile.store.artifacts import Store
from nautile.tasks.engine.attempt_log import failure_in_sweep

_REUSED = re.compile(r"^\S+: reused\b")
PrintLine = Callable[[str], None]


def run_sweep(sweep: Sweep, store: Store, parallel: int | None, print_line: PrintLine) -> int:
    """Run the unfinished runs, at most `parallel` at a time; returns the exit code.

    If several runs fail, it is the lowest of their exit codes, so that a crash is not hidden by a wrong setting. Raises
    `ConfigError` if the server of PREFECT_API_URL does not answer.
    """
    waiting = [run for run in sweep.runs if run.left(store)]
    if done := len(sweep.runs) - len(waiting):
        print_line(f"{done} of {len(sweep.runs)} runs are in the store already")
    if not waiting:
        return ExitCode.DONE
    prefect_server.configure_prefect(store)
    if server := join_server(store):
        print_line(f"runs on the server of `nautile up`: {server.removesuffix('/api')}")
    elif "PREFECT_API_URL" not in os.environ:
        print_line("starting the embedded Prefect server (about 20 s the first time, less after)")
    options = [*(("--parallel", parallel) if parallel else ())]
    options += ["--yes"] if len(sweep.runs) > MOST_ARMS else []  # without it the command would be refused
    resume_command = shell_command("nautile", "sweep", sweep.file, *options)
    # By default as many as there are slots: more would only wait.
    max_parallel = parallel or sum(waiting[0].config.resources.limits().values())
    workers = _Workers(sweep, store, print_line)
    try:
        # One server for all runs: twenty embedded servers would need more memory than the runs.
        with terminable(), prefect_server.prefect_api(), ThreadPoolExecutor(max_parallel) as threads:
            try:
                codes = list(threads.map(workers.run, waiting))
            except BaseException:
                # The executor waits for its threads when the block is left, so the processes must be ended before.
                workers.stop()
                raise
    except (KeyboardInterrupt, SystemExit):
        print_line("stopped; all runs have ended, finished work is kept.")
        print_line(f"Continue with: {resume_command}")
        return ExitCode.INTERRUPTED
    if any(codes):
        ended = [run for run, code in zip(waiting, codes, strict=True) if code]
        failed = [run.title for run in ended if run.run_name not in workers.blocked]
        blocked = [run.title for run in ended if run.run_name in workers.blocked]
        print_line(f"{len(failed)} of {len(sweep.runs)} runs failed: {'; '.join(failed)}")
        if blocked:
            print_line(f"{len(blocked)} more need steps that failed there and were not retried: {'; '.join(blocked)}")
        print_line(f"Finished work is kept. Continue with: {resume_command}")
    return min((code if code > 0 else ExitCode.FAILED for code in codes if code), default=ExitCode.DONE)


@dataclass
class _Workers:
    """The processes of the runs.

    The thread that starts a process waits for it, because the kernel ends a process with the thread that started it.
    """

    sweep: Sweep
    store: Store
    print_line: PrintLine
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    blocked: set[str] = field(default_factory=set)  # names of runs that need a step which failed in another run
    stopped: threading.Event = field(default_factory=threading.Event)
    processes: dict[str, subprocess.Popen[str]] = field(default_factory=dict)

    def run(self, run: SweepRun) -> int:
        """Run one arm to its end and print its output; returns its exit code, or minus the signal that ended it."""
        if self.stopped.is_set():
            return ExitCode.INTERRUPTED
        begun, reused = time.monotonic(), 0
        self._print(run, "started")
        # Standard error goes to a file: nobody reads it before the end, and a full pipe would stop the run.
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
            process = subprocess.Popen(
                command(self.sweep, run),
                env={**os.environ, SHARED: self.id},
                text=True,
                errors="replace",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,  # Ctrl-C reaches it only through `stop`
            )
            # Known to `stop` first, then the second look: whichever comes first, the process is ended.
            self.processes[run.run_name] = process
            if self.stopped.is_set():
                process.terminate()
            assert process.stdout is not None
            for line in process.stdout:
                if not line.strip():
                    break  # the closing table follows, whose content is in the report
                if _REUSED.match(line.rstrip()):
                    reused += 1
                else:
                    self._print(run, line.rstrip())
            # The rest is read and dropped, or the run would block on a full pipe.
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
            self._print(run, line)
        self._print(run, f"done {took}" if not code else f"failed with exit code {code} {took}")
        return code

    def _failed_elsewhere(self, run: SweepRun) -> str:
        """The steps that a run needs and that failed in other runs; empty if the run itself failed at a step."""
        titles = {other.run_name: other.title for other in self.sweep.runs}
        failures = []
        for step in run.left(self.store):
            if failure := failure_in_sweep(self.store, step.key, self.id):
                if failure["config"] == run.run_name:
                    return ""
                failures.append(f"{step.label} failed for {titles.get(failure['config'], failure['run'][:8])}")
        return "; ".join(failures)

    def stop(self) -> None:
        """End all runs like Ctrl-C, and start no more."""
        self.stopped.set()
        for process in list(self.processes.values()):
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)

    def _print(self, run: SweepRun, text: str) -> None:
        if not self.stopped.is_set():
            self.print_line(f"[{run.title}] {visible(text)}")


def command(sweep: Sweep, run: SweepRun) -> Sequence[str]:
    """The command line of a run's process, which ends with this one, also by SIGKILL."""
    settings = [word for setting in (*run.settings, f"name={run.run_name}") for word in ("--set", setting)]
    # An arm with an evaluation of its own ends there, as it was checked: it may lack the last step of the others.
    last = run.after or sweep.section.until
    until = ["--until", last] if last else []
    return module_command("nautile.flows.cli.main", str(os.getpid()), "run", sweep.base, *settings, *until)
