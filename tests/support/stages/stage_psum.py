"""A toy stage for several JAX processes: they add up their ranks, and one may fail on the first try."""

import os
import signal
import sys
import time

import jax
import numpy as np
from jax.experimental import multihost_utils

from nautile.common.errors import ConfigError, Retryable
from nautile.common.events import silent
from nautile.tasks.engine.job import Job
from nautile.tasks.engine.stage import stage


@stage("psum", version=1, outputs=("numbers",), accelerator=True, multihost=True)
def psum(job: Job) -> None:
    """Section: `fault` "", "dies", "hangs", "crashes" or "refuses", of the process `host`; the first time only."""
    assert (job.emit is silent) == (job.process > 0)
    sys.stdout.write(f"process {jax.process_index()} of {jax.process_count()}\n")
    first = job.scratch / f"tried-{job.process}"
    if job.process == job.section["host"] and not first.exists():
        first.touch()
        _misbehave(job.section["fault"])
    everyone = multihost_utils.process_allgather(np.asarray([job.process + 1.0]))
    (job.output("numbers") / "sum.txt").write_text(str(float(everyone.sum())))
    job.describe("numbers", processes=jax.process_count())


@stage("visit", version=1, outputs=("numbers",), accelerator=True, multihost=True)
def visit(job: Job) -> None:
    """For hosts that share no disk: each reads the input, the first keeps a checkpoint. Stops once, as if preempted,
    where the file that VISIT_STOPS names is there."""
    assert not job.shared_disk
    value = float((job.inputs["x"] / "a.txt").read_text())
    steps = job.scratch / "checkpoints" / "steps"
    resumed = job.process == 0 and steps.exists()
    (steps / "1").mkdir(parents=True, exist_ok=True)
    (steps / "1" / "state").write_text(str(value))
    everyone = multihost_utils.process_allgather(np.asarray([value + job.process]))
    if os.path.exists(os.environ["VISIT_STOPS"]):
        raise Retryable(f"process {job.process} was asked to stop")
    (job.output("numbers") / "sum.txt").write_text(str(float(everyone.sum())))
    job.describe("numbers", resumed=resumed, folder=str(job.staging))
    job.emit("metric", name="visits", step=0, value=2.0)


def _misbehave(fault: str) -> None:
    if fault == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "hangs":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "crashes":
        raise RuntimeError("it failed here")
    if fault == "refuses":
        raise ConfigError("bad input there")
    if fault == "waits":
        while True:
            time.sleep(0.05)
