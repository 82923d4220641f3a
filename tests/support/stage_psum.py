"""A toy stage for several JAX processes: they add up their ranks, and one may fail on the first try."""

import os
import signal
import sys
import time

import jax
import numpy as np
from jax.experimental import multihost_utils

from common.errors import ConfigError
from common.events import silent
from tasks.engine.job import Job
from tasks.engine.stage import stage


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
