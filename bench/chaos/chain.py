"""The scene of a chaos run: one store, the command that runs the pipeline in it, and its teacher."""

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
    """The teacher of the toy chain, always at one port, kept up."""

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
        if not self.process.stdout.readline():
            raise SystemExit(f"the teacher does not start: is port {self.port} taken?")

    def again(self, after_s: float) -> None:
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
class Round:
    """One store, one run of the pipeline in it however often it is begun, and the scene of the faults."""

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
                if "data.endpoints.embedded" in process.cmdline():
                    return process
        return None

    def restart_teacher(self, after_s: float) -> None:
        if self.external:  # the embedded one is its stage's own to start again
            self.external.again(after_s)

    def start(self, *words: str) -> None:
        with self.log.open("ab") as output:
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
        """A read command's answer; verification that finds damage is an answer too."""
        done = subprocess.run(
            [sys.executable, "-m", self.module, *words, "--json"],
            env=self.environment | {"NAUTILE_STORE": str(self.store)}, cwd=ROOT, capture_output=True, text=True,
        )  # fmt: skip
        if done.returncode not in (0, 2) or not done.stdout:
            raise SystemExit(f"nautile {shlex.join(words)}: {done.stderr}")
        return json.loads(done.stdout)

    def query(self, sql: str) -> list[dict[str, Any]]:
        return self.nautile("sql", sql)

    def at(self) -> str:
        """The stage that the display told of last."""
        labels = re.findall(r"^([a-z_:]+): (?:started|running|done)", self.output(), re.MULTILINE)
        return labels[-1] if labels else "starting"

    def everything(self) -> dict[str, Any]:
        return {"payloads": payloads(self.store), "rows": rows(self.query)}

    def tables(self) -> dict[str, list[str]]:
        names = ("artifacts", "inputs", "runs", "metrics", "calls", "samples")
        every = " UNION ALL ".join(
            f"SELECT '{name}' AS name, to_json(t)::VARCHAR AS row FROM {name} t" for name in names
        )
        by_name: dict[str, list[str]] = {name: [] for name in names}
        for row in self.query(every):
            by_name[row["name"]].append(row["row"])
        return {name: sorted(rows) for name, rows in by_name.items()}


def offered(text: str) -> list[str] | None:
    """The words of the command that a message offers against a damaged artifact, without `nautile run`."""
    match = re.search(r"Rebuild it with `nautile run ([^`]+)`", text)
    return shlex.split(match[1]) if match else None
