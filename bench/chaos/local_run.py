"""The run of the local chaos test: machines that share an S3 server, and the progress of a run on one of them."""

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from bench.chaos.chaos_run import ChaosRun
from bench.chaos.faults import child_processes, kill_session
from bench.chaos.servers import BUCKET, CountingTeacher, MirrorServer
from common.files import read_json
from store.remote import record_remote

URL = f"s3://{BUCKET}/runs"
LABELS = (
    "held_out", "ingest:fineweb_edu", "ingest:exemplars", "ingest:synth", "index", "distill", "pretrain",
    "evaluate:pretrain", "align", "evaluate:align", "reason", "evaluate:reason", "self_distill",
    "evaluate:self_distill", "report",
)  # fmt: skip
TROUBLE = re.compile(
    r"fail|retry|again|wait|interrupt|damage|WARNING|stopped|gone|taken over|cannot|works on it|attempt "
)


@dataclass(frozen=True)
class ActiveStep:
    """A step in progress, as its staging folder shows it. `saved`: the step of the newest checkpoint, 0 without one."""

    label: str
    key: str
    execution: str
    phase: str
    done: float
    total: float
    saved: int
    is_finished: bool  # and about to be published

    @property
    def share(self) -> float:
        return self.done / self.total if self.total else 0.0


@dataclass(frozen=True)
class Progress:
    """Finished steps, the position of each active step (key -> phase and count), and the number of answers."""

    finished: set[str]
    reached: dict[str, tuple[str, float]]
    answered: int


@dataclass
class LocalChaosRun(ChaosRun):
    """One run over several machines, each with its own folder. `store`: the store of the current machine."""

    mirror: MirrorServer | None = None
    counting: CountingTeacher | None = None
    prompts: int = 0  # of the distillation
    others: list["subprocess.Popen[bytes]"] = field(default_factory=list)

    def at_machine(self, number: int) -> None:
        """Switch to a machine: every later command runs there."""
        machine = self.folder / f"machine-{number}"
        # Programs compiled by another machine are copied: compiling is not on trial, and takes minutes.
        known = [path for path in sorted(self.folder.glob("machine-*/store/compiled")) if path.parents[1] != machine]
        self.store, self.log = machine / "store", self.folder.parent.parent / f"machine-{number}.log"
        self.store.mkdir(parents=True, exist_ok=True)
        record_remote(self.store, URL)
        if known and not (self.store / "compiled").exists():
            shutil.copytree(known[0], self.store / "compiled")

    @property
    def machine(self) -> int:
        return int(self.store.parent.name.partition("-")[2])

    def stores(self) -> list[Path]:
        return sorted(path / "store" for path in self.folder.glob("machine-*"))

    def finished(self) -> set[str]:
        """The labels of the finished steps, from the output of all commands."""
        logs = "".join(log.read_text(errors="replace") for log in self.log.parent.glob("machine-*.log"))
        return set(re.findall(r"^([a-z_:]+): (?:done|reused)", logs, re.MULTILINE))

    def active_steps(self) -> list[ActiveStep]:
        """The steps in progress on this machine."""
        result = []
        for path in (self.store / "staging").glob("*/execution.json"):
            with suppress(OSError, ValueError, TypeError, KeyError):
                record = read_json(path) or {}
                live = read_json(path.with_name("live.json")) or {}
                steps = [int(p.name) for p in path.parent.glob("**/checkpoints/steps/*") if p.name.isdigit()]
                result.append(
                    ActiveStep(
                        (record["run"] or {}).get("label", ""),
                        path.parent.name,
                        record["execution"],
                        f"{live.get('phase')} {live.get('unit')}",
                        float(live.get("done") or 0),
                        float(live.get("total") or 0),
                        max(steps, default=0),
                        path.with_name("done.json").exists(),
                    )
                )
        return result

    def current_stage(self) -> str:
        return ", ".join(work.label for work in self.active_steps() if work.label) or "starting"

    def progress(self) -> Progress:
        """The progress of the run, to be compared later by `is_beyond`."""
        reached = {work.key: (work.phase, work.done) for work in self.active_steps()}
        return Progress(self.finished(), reached, self.answered)

    def is_beyond(self, progress: Progress) -> bool:
        if self.finished() - progress.finished:
            return True
        # Counts in staging may be those of before the kill; progress needs a process that makes it.
        if not (child_processes(self, "stage") or child_processes(self, "worker")):
            return False
        if self.answered > progress.answered + 2:  # two may have been on their way
            return True
        for work in self.active_steps():
            phase, done = progress.reached.get(work.key, ("", 0.0))
            if work.is_finished or work.done > (done if phase == work.phase else 0.0):
                return True
        return False

    @property
    def answered(self) -> int:
        """Requests that the teacher has answered: a distillation reports its own progress in large pieces only."""
        return self.counting.answered_ever if self.counting else 0

    def wait_until(self, condition: Callable[[], Any], seconds: float) -> bool:
        until = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > until:
                return False
            time.sleep(0.05)
        return True

    def second_run(self) -> "subprocess.Popen[bytes]":
        """Start the same command once more in the same store, with a separate output file."""
        # The second run takes the place of the first for the duration of `start`, and then gives it back.
        first, log = self.flow, self.log
        self.log = log.with_name(f"second-{log.name}")
        try:
            self.start()
            self.others.append(self.flow)
            return self.others[-1]
        finally:
            self.flow, self.log = first, log

    def interrupt(self, process: "subprocess.Popen[bytes]") -> int:
        """End a run by SIGTERM, as an operator does; returns its exit code."""
        process.send_signal(signal.SIGTERM)
        try:
            return process.wait(60)
        except subprocess.TimeoutExpired:
            kill_session(process)
            return -signal.SIGKILL

    def log_sizes(self) -> dict[Path, int]:
        """The logs of this machine, terminal output first, with their sizes in bytes."""
        logs = (self.log, self.store / "logs/nautile.log")
        return {log: log.stat().st_size if log.exists() else 0 for log in logs}

    def trouble_lines(self, since: dict[Path, int]) -> list[str]:
        """Lines about failures that were printed or logged since the logs had the sizes `since`."""
        lines = []
        for log in self.log_sizes():
            with suppress(FileNotFoundError):
                text = log.read_bytes()[since.get(log, 0) :].decode(errors="replace")
                lines += text.replace(str(self.store), "STORE").splitlines()
        return [line.strip() for line in lines if TROUBLE.search(line) and " INFO " not in line and line[0] != "$"]

    def failed_calls(self) -> Counter[str]:
        """Count of this machine's failed calls by status, read from the event files, which is fast."""
        statuses: Counter[str] = Counter()
        for path in (self.store / "events").glob("*.jsonl"):
            for line in path.read_bytes().splitlines():
                with suppress(ValueError, KeyError):
                    if b'"call"' in line and (status := json.loads(line)["fields"]["status"]) != "ok":
                        statuses[status] += 1
        return statuses

    def run_command(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a `nautile` command other than `run` on this machine."""
        environment = self.environment | {"NAUTILE_STORE": str(self.store)}
        command = [sys.executable, "-m", "flows.cli.main", *words]
        return subprocess.run(command, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL)

    def close(self) -> None:
        for process in [*self.others, *([self.flow] if self.flow else [])]:
            kill_session(process)


def process_tree(process: "subprocess.Popen[bytes]") -> list[psutil.Process]:
    """A process and all its descendants, while it lives."""
    with suppress(psutil.Error):
        first = psutil.Process(process.pid)
        return [first, *first.children(recursive=True)]
    return []
