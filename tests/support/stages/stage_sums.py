"""A toy stage for tests: writes numbers one file at a time, with the faults of its section."""

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nautile.common.errors import ConfigError, Retryable
from nautile.configs.base import Section
from nautile.tasks.engine.job import Job
from nautile.tasks.engine.stage import Stage, stage


class Sums(Section):
    count: int
    totals: bool = False
    faults: dict[str, int] = {}  # name -> how many attempts meet it
    checkpoints: bool = False  # one after each number
    digest: str = ""  # noted as that of the first file
    gate: str = ""  # a folder: the stage writes `reached` there before number `gate_at`, and waits for `open`
    gate_at: int = 0


def section(count: int = 3, **fields: Any) -> dict[str, Any]:
    return {"seeds": {"data": 5}, "sums": {"count": count, **fields}}


@stage("sums", version=1, outputs=("numbers", "totals"), optional=("totals",))
def sums(job: Job) -> None:
    """Write `count` files, keeping those of an earlier attempt."""
    part = job.part("sums", Sums)
    _misbehave(job, part)
    base = sum(int(path.read_text()) for folder in job.inputs.values() for path in folder.glob("*.txt"))
    out = job.output("numbers")
    written = 0
    for index in range(part.count):
        if part.gate and index == part.gate_at:
            _wait_at(Path(part.gate))
        path = out / f"{index}.txt"
        if not path.exists():
            path.write_text(str(base + index))
            written += 1
        if part.checkpoints:
            step = job.scratch / "checkpoints" / "steps" / str(index)
            step.mkdir(parents=True, exist_ok=True)
            (step / "state").write_text("")
        job.emit("metric", name="value", step=index, value=float(base + index))
        job.emit("sample", set="sums", index=index, text=f"number {index}")
        job.emit("progress", done=index + 1, total=part.count, unit="files", note="adding")
    job.emit("call", endpoint="toy", model="toy", purpose="teacher", attempt=1, status="ok", tokens_in=3, tokens_out=4)
    _meet(job, part, {"late": lambda: _raise(Retryable("the Hub does not answer"))})
    if part.totals:
        (job.output("totals") / "total.txt").write_text(str(sum(int(p.read_text()) for p in out.glob("*.txt"))))
        job.describe("totals", seed=job.seed("data"))
    if part.digest:
        job.add_digests("numbers", {"0.txt": part.digest})
    made = {"platforms": os.environ.get("JAX_PLATFORMS"), "store": os.environ["NAUTILE_STORE"]}
    job.describe("numbers", written=written, niceness=os.nice(0), **made)


def _wait_at(gate: Path) -> None:
    (gate / "pid").write_text(str(os.getpid()))
    (gate / "pid").rename(gate / "reached")
    while not (gate / "open").exists():
        time.sleep(0.01)


def _misbehave(job: Job, part: Sums) -> None:
    faults: dict[str, Callable[[], object]] = {
        "config": lambda: _raise(ConfigError("sums.count: three is a crowd")),
        "retry": lambda: _raise(Retryable("http://127.0.0.1:9 does not answer")),
        "crash": lambda: _raise(ZeroDivisionError("by zero")),
        "full": lambda: _raise(OSError(errno.ENOSPC, "No space left on device", str(job.scratch / "big.bin"))),
        "full_replies": lambda: _raise(OSError(errno.ENOSPC, "No space left on device", f"{job.replies}/m/a.jsonl")),
        "unreadable": lambda: _raise(OSError(errno.EACCES, "Permission denied", "/root/private.txt")),
        "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "exit": lambda: os._exit(0),
        "unknown": lambda: (job.output("surprise") / "a.txt").write_text("a"),
        "link": lambda: (job.output("numbers") / "link").symlink_to("/etc/passwd"),
        "grandchild": lambda: _grandchild(job),
        "deaf": lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN),
        "lingers": lambda: threading.Thread(target=time.sleep, args=(600,)).start(),
    }
    _meet(job, part, faults)


def _meet(job: Job, part: Sums, faults: dict[str, Callable[[], object]]) -> None:
    for name, act in faults.items():
        mark = job.scratch / f"met-{name}"
        met = len(mark.read_text()) if mark.exists() else 0
        if met < part.faults.get(name, 0):
            mark.write_text("x" * (met + 1))
            act()


def _raise(error: Exception) -> None:
    raise error


def _grandchild(job: Job) -> None:
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (job.scratch / "grandchild").write_text(str(sleeper.pid))


@stage("reader", version=1, outputs=("numbers",), on_demand={"tokens": "shards/"})
def reader(job: Job) -> None:
    """Read the files of the input through `Job.remote_files`."""
    assert job.remote_files
    folder = job.inputs["x"]
    count = int((folder / "index").read_text())
    descriptors = [job.remote_files.open(folder / "shards" / str(number)) for number in range(count)]
    text = b"".join(os.read(descriptor, 10) for descriptor in descriptors)
    (job.output("numbers") / "read.txt").write_bytes(text)


@stage("nothing", version=1, outputs=("numbers",))
def nothing(job: Job) -> None:
    """Write no output."""


def local_stage() -> Stage:
    """A stage that no other process can import."""

    @stage("hidden", version=1, outputs=("numbers",))
    def hidden(job: Job) -> None:
        """Never runs."""

    return hidden
