"""A toy stage for tests: adds numbers one file at a time, misbehaving as its section says."""

import os
import subprocess
import sys
import time
from pathlib import Path

from configs.section import ConfigError, Retryable
from tasks.job import Job
from tasks.stage import stage


def _trip(job: Job, name: str) -> bool:
    """True the first `times` times this section's fault is met (counted in the scratch folder)."""
    fault = job.section.get("faults", {}).get(name)
    if fault is None:
        return False
    mark = job.scratch / f"tripped-{name}"
    count = len(mark.read_text()) if mark.exists() else 0
    if count >= fault:
        return False
    mark.write_text("x" * (count + 1))
    return True


@stage("sums", version=1, outputs=("numbers", "totals"), optional=("totals",))
def sums(job: Job) -> None:
    """Writes `count` files, one at a time, keeping those an earlier attempt has written."""
    if _trip(job, "config"):
        raise ConfigError("sums.count: three is a crowd")
    if _trip(job, "retry"):
        raise Retryable("http://127.0.0.1:9 does not answer")
    if _trip(job, "crash"):
        raise ZeroDivisionError("by zero")
    if _trip(job, "grandchild"):
        sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        (job.scratch / "grandchild").write_text(str(sleeper.pid))
    base = sum(int(path.read_text()) for folder in job.inputs.values() for path in folder.glob("*.txt"))
    out = job.output("numbers")
    made = 0
    for index in range(job.section["count"]):
        path = out / f"{index}.txt"
        if not path.exists():
            path.write_text(str(base + index))
            made += 1
        job.emit("metric", name="value", step=index, value=float(base + index))
        job.emit("sample", set="sums", index=index, text=f"number {index}")
        job.emit("progress", done=index + 1, total=job.section["count"], unit="files", note="adding")
        gate = job.section.get("gate")
        if gate and index == job.section["gate_at"]:
            (Path(gate) / "reached").write_text(str(os.getpid()))
            while not (Path(gate) / "open").exists():
                time.sleep(0.01)
    job.emit("call", endpoint="toy", model="toy", purpose="teacher", attempt=1, status="ok", tokens_in=3, tokens_out=4)
    if job.section.get("totals"):
        (job.output("totals") / "total.json").write_text(str(sum(int(p.read_text()) for p in out.glob("*.txt"))))
        job.describe("totals", made=made)
    job.describe("numbers", count=job.section["count"], made=made)
