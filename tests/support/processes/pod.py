"""One of several processes that train together on CPU devices, as the hosts of a pod do.

As a program: `python -m tests.support.processes.pod ROOT FSDP PORT COUNT INDEX RUN...` (COUNT 1: by itself). Each RUN
is NAME or NAME:STEP:SIGNAL: 12 steps of 8 rows under ROOT/NAME, and SIGNAL sent to itself once STEP steps are reported.
It prints a line of JSON for each run that ended: its losses by step (those of the first process), and why it stopped.
The facts of a run that was not stopped are in ROOT/NAME/facts.json.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import jax

from nautile.common.errors import Retryable
from nautile.common.processes import relax_collector
from nautile.configs.training import PretrainConfig
from nautile.model.compile_cache import keep_on_every_process
from nautile.model.training import loop
from tests.support.processes.training import run, settings, shared_programs


def pod_settings(fsdp: int, sample_every: int = 100) -> PretrainConfig:
    return settings(batch_rows=8, fsdp=fsdp, log_every=1, sample_every=sample_every)


def train(root: Path, fsdp: int, name: str, step: int = 0, number: int = 0) -> None:
    losses: dict[int, float] = {}
    stopped = None

    def emit(kind: str, **fields: Any) -> None:
        if kind == "metric" and fields["name"] == "loss" and "source" not in fields:
            losses[fields["step"]] = fields["value"]
        if kind == "progress" and fields["done"] == step:
            os.kill(os.getpid(), number)

    try:
        facts = run(root, pod_settings(fsdp), emit, name)
        if jax.process_index() == 0:
            (root / name / "facts.json").write_text(json.dumps(facts), encoding="utf-8")
    except Retryable as error:
        stopped = str(error)
    sys.stdout.write(json.dumps({"losses": losses, "stopped": stopped}) + "\n")
    sys.stdout.flush()


def main(root: Path, fsdp: int, port: int, count: int, index: int, runs: list[str]) -> None:
    if count > 1:
        jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=count, process_id=index)
        keep_on_every_process()
    loop.Program = shared_programs()
    for each in runs:
        name, *kill_at = each.split(":")
        train(root, fsdp, name, *map(int, kill_at))


if __name__ == "__main__":
    relax_collector()
    numbers = list(map(int, sys.argv[2:6]))
    main(Path(sys.argv[1]), *numbers, sys.argv[6:])
