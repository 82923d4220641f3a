"""One run of the pipeline under faults: its store, the command that starts it, and its teacher."""

import json
import os
import re
import shlex
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from bench.chaos.compare import payloads, rows

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Teacher:
    """The teacher of the toy chain: a server process on a fixed port, which can be restarted."""

    port: int
    process: subprocess.Popen[bytes] | None = None
    timer: threading.Timer | None = None

    def start(self) -> None:
        command = [
            sys.executable,
            "-m",
            "tests.support.servers.fake_openai",
            json.dumps({"port": self.port, "delay_s": 0.05}),
        ]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen(command, **pipes, env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=ROOT)
        assert self.process.stdout
        # It prints its address once it listens; an empty line means that the process has ended.
        if not self.process.stdout.readline():
            raise SystemExit(f"the teacher does not start: is port {self.port} taken?")

    def restart_later(self, after_s: float) -> None:
        assert self.process
        self.process.wait()
        self.timer = threading.Timer(after_s, self.start)
        self.timer.start()

    def close(self) -> None:
        if self.timer:
            self.timer.join()
        if self.process:
            self.process.kill()
            self.process.wait()


@dataclass
class ChaosRun:
    """One run of the pipeline in one store, however often it is restarted, with what faults need to reach it.

    `clock`: the file with the offset of the wall clock, None without the library. `stop_s`: how long a stopped process
    stays suspended.
    """

    folder: Path
    config: str
    environment: dict[str, str]
    external: Teacher | None
    clock: Path | None
    stop_s: float
    module: str = "flows.cli.main"
    flow: Any = None
    log: Path = field(init=False)

    def __post_init__(self) -> None:
        self.store = self.folder / "store"
        self.log = self.folder.parent / f"{self.folder.name}.log"

    def alive(self) -> bool:
        return self.flow is not None and self.flow.poll() is None

    def teacher(self) -> psutil.Process | None:
        if self.external:
            process = self.external.process
            return psutil.Process(process.pid) if process and process.poll() is None else None
        with suppress(psutil.Error):
            for process in psutil.Process(self.flow.pid).children(recursive=True):
                # The embedded teacher is a grandchild: the flow starts the stage, the stage its teacher.
                if "data.endpoints.embedded" in process.cmdline():
                    return process
        return None

    def restart_teacher(self, after_s: float) -> None:
        if self.external:  # an embedded teacher is restarted by its stage
            self.external.restart_later(after_s)

    def start(self, *words: str) -> None:
        with self.log.open("ab") as output:
            # The command goes into the log first, so that `output` can find where the last one begins.
            output.write(f"$ nautile run {shlex.join(words or (self.config,))}\n".encode())
            self.flow = subprocess.Popen(
                [sys.executable, "-m", self.module, "run", *(words or (self.config,))],
                env=self.environment | {"NAUTILE_STORE": str(self.store)},
                cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip

    def output(self) -> str:
        """Output of the last command."""
        return self.log.read_text(encoding="utf-8", errors="replace").rpartition("$ nautile run ")[2]

    def nautile(self, *words: str) -> Any:
        """Run a read command; returns its JSON. Exit code 2 is accepted: `store verify` uses it for damage."""
        completed = subprocess.run(
            [sys.executable, "-m", self.module, *words, "--json"],
            env=self.environment | {"NAUTILE_STORE": str(self.store)}, cwd=ROOT, capture_output=True, text=True,
        )  # fmt: skip
        if completed.returncode not in (0, 2) or not completed.stdout:
            raise SystemExit(f"nautile {shlex.join(words)}: {completed.stderr}")
        return json.loads(completed.stdout)

    def query(self, sql: str) -> list[dict[str, Any]]:
        return self.nautile("sql", sql)

    def current_stage(self) -> str:
        """The stage that the terminal output named last."""
        labels = re.findall(r"^([a-z_:]+): (?:started|running|done)", self.output(), re.MULTILINE)
        return labels[-1] if labels else "starting"

    def snapshot(self) -> dict[str, Any]:
        return {"payloads": payloads(self.store), "rows": rows(self.query)}

    def tables(self) -> dict[str, list[str]]:
        names = ("artifacts", "inputs", "runs", "metrics", "calls", "samples")
        # One query for all tables, because each `nautile sql` is a process of a second.
        union = " UNION ALL ".join(
            f"SELECT '{name}' AS name, to_json(t)::VARCHAR AS row FROM {name} t" for name in names
        )
        by_name: dict[str, list[str]] = {name: [] for name in names}
        for row in self.query(union):
            by_name[row["name"]].append(row["row"])
        return {name: sorted(rows) for name, rows in by_name.items()}


def offered_command(text: str) -> list[str] | None:
    """Arguments of the `nautile run` command that a message offers to replace a damaged artifact."""
    match = re.search(r"Rebuild it with `nautile run ([^`]+)`", text)
    return shlex.split(match[1]) if match else None
