"""Saving beside a pretraining step: seconds of a step, of the stall, and of a whole save.

    python bench/training/pretraining.py [--repeats 5] [--json FILE]

For a model of 25 M parameters on one CPU device. For the loader see bench/training/loader.py.
"""

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import jax

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.measure import argument_parser, print_rows, write_results
from bench.training.loader import TOKENIZER, artifact
from nautile.configs.base import OptimizerConfig
from nautile.configs.model import ModelConfig
from nautile.configs.training import PhaseConfig, PretrainConfig
from nautile.data.tokens.loader import Loader
from nautile.model.capacity.flops import parameter_counts
from nautile.model.sharding import make_mesh, put_rows
from nautile.model.training.checkpoint import TrainCheckpoints
from nautile.model.training.step import BATCH, Program

LENGTH, ROWS = 128, 8
MODEL = ModelConfig(vocabulary=8192, width=512, blocks=2, context=1024, compute_dtype="float32", remat="none")


def time_saving(root: Path, repeats: int) -> dict[str, Any]:
    phase = PhaseConfig(name="one", tokens=ROWS * LENGTH * 20, mixture={"web": 1.0})
    config = PretrainConfig(phases=(phase,), batch_rows=ROWS, optimizer=OptimizerConfig(warmup_steps=2))
    loader = Loader({"web": artifact(root / "tokens", 1, 256, LENGTH)}, config.phases, ROWS, 0, TOKENIZER)
    program = Program(config, MODEL, make_mesh(1), loader.steps, 1, LENGTH, 0)
    state, batch = program.fresh(), {name: loader.batch(0)[name] for name in BATCH}
    step = program.step.lower(state, program.batch_shapes()).compile()

    def seconds(work: Callable[[], Any]) -> float:
        start = time.perf_counter()
        jax.block_until_ready(work())
        return time.perf_counter() - start

    def train() -> Any:
        nonlocal state
        state, metrics = step(state, put_rows(batch, program.mesh))
        return metrics

    # The first three steps warm up.
    step_seconds = median([seconds(train) for _ in range(3 + repeats)][3:])
    checkpoints = TrainCheckpoints(root / "checkpoints", config.keep, {})
    # A save blocks the loop only until `save` returns; `wait` returns once it is on disk.
    stalls, waits = [], []
    for number in range(1, repeats + 1):
        stalls.append(seconds(lambda number=number: checkpoints.save(number, state, {})))
        waits.append(seconds(checkpoints.wait))
    checkpoints.close()
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    return {
        "parameters": sum(parameter_counts(MODEL).values()),
        "step_seconds": round(step_seconds, 3),
        "state_mib": round(size / 2**20),
        "save_keeps_the_loop_seconds": round(median(stalls), 3),
        "save_until_on_disk_seconds": round(median(map(sum, zip(stalls, waits, strict=True))), 3),
        "stall_share_at_one_save_a_1000_steps": round(median(stalls) / (1000 * step_seconds), 6),
    }


def main() -> None:
    arguments = argument_parser(__doc__, repeats=5).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = {"saving": time_saving(Path(folder), arguments.repeats)}
    print_rows(results)
    write_results(results, arguments.json)


if __name__ == "__main__":
    main()
