"""One of several processes that train together on CPU devices, as the hosts of a pod do.

As a program: `python -m tests.support.processes.pod ROOT NAME FSDP PORT COUNT INDEX [STEP SIGNAL]` trains 12 steps of 8
rows under ROOT/NAME (COUNT 1: by itself) and sends SIGNAL to itself once STEP steps are reported; the first process
writes what it reported to ROOT/NAME/losses.json.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import jax

from common.errors import Retryable
from common.processes import relax_collector
from configs.training import PretrainConfig
from model.compile_cache import keep_on_every_process
from tests.support.processes.training import run, settings


def pod_settings(fsdp: int, sample_every: int = 100) -> PretrainConfig:
    return settings(batch_rows=8, fsdp=fsdp, log_every=1, sample_every=sample_every)


def main(root: Path, name: str, fsdp: int, port: int, count: int, index: int, step: int, number: int) -> int:
    if count > 1:
        jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=count, process_id=index)
        keep_on_every_process()
    losses: dict[int, float] = {}

    def emit(kind: str, **fields: Any) -> None:
        if kind == "metric" and fields["name"] == "loss" and "source" not in fields:
            losses[fields["step"]] = fields["value"]
        if kind == "progress" and fields["done"] == step:
            os.kill(os.getpid(), number)

    try:
        run(root, pod_settings(fsdp), emit, name)
    except Retryable as error:
        sys.stdout.write(str(error))
        return 75
    finally:
        if index == 0:
            (root / name / "losses.json").write_text(json.dumps(losses), encoding="utf-8")
    return 0


if __name__ == "__main__":
    relax_collector()
    root, name, *numbers = sys.argv[1:]
    fsdp, port, count, index, step, number = [*map(int, numbers), 0, 0][:6]
    sys.exit(main(Path(root), name, fsdp, port, count, index, step, number))
