"""Pretraining beside its step: saving and resuming, and equal losses on several devices.

    python bench/training/pretraining.py [--repeats 5] [--json FILE]

Steps, saves and resumes are timed for a model of 25 M parameters on one of 8 devices of this CPU. 1, 2, 4 and 8 devices
share the same cores, so only their losses are compared, not their times. For the loader see bench/training/loader.py.
"""

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.measure import argument_parser, median_seconds, print_rows, write_results
from configs.base import OptimizerConfig
from configs.model import ModelConfig, TokenizerConfig
from configs.training import PhaseConfig, PretrainConfig
from data.tokenizer import tokenizer_for
from data.tokens.loader import Loader
from data.tokens.packing import ConcatPacker
from data.tokens.shards import ShardIndex, Split, write_index, write_shard
from model.nautile import parameter_counts
from model.sharding import make_mesh, put_rows
from model.training.checkpoint import TrainCheckpoints
from model.training.step import BATCH, Program

LENGTH, ROWS = 128, 8
MODEL = ModelConfig(vocabulary=8192, width=512, blocks=2, context=1024, compute_dtype="float32", remat="none")


def median(run: Callable[[], Any], repeats: int) -> float:
    """Median seconds of a call."""
    return median_seconds(lambda: jax.block_until_ready(run()), repeats)


def tokens(folder: Path, tokenizer: TokenizerConfig, rows: int, length: int) -> Path:
    """A tokens artifact of random documents, half a row long on average."""
    text_tokenizer, rng, entries = tokenizer_for(tokenizer), np.random.default_rng(0), []
    counts: dict[Split, int] = {"train": rows, "validation": 8}
    for split, count in counts.items():
        packer = ConcatPacker(length)
        for _ in range(2 * count):
            ids = rng.integers(0, text_tokenizer.end_of_text, rng.integers(8, length), dtype=np.uint32)
            packer.add(np.append(ids, np.uint32(text_tokenizer.end_of_text)))
        entries.append(write_shard(folder, 0, split, packer.finish(), text_tokenizer.vocabulary))
    write_index(folder, ShardIndex(tokenizer, text_tokenizer.fingerprint, length, "web", tuple(entries)))
    return folder


def time_saving(root: Path, repeats: int) -> dict[str, Any]:
    """Seconds of a step, of the stall and the whole of a save, and of a resume."""
    config, program, loader = _program(root, 1)
    state = program.fresh()
    batch = {name: loader.batch(0)[name] for name in BATCH}
    compiled = program.step.lower(state, program.batch_shapes()).compile()
    times = []
    # The first three steps warm up.
    for _ in range(3 + repeats):
        start = time.perf_counter()
        state, metrics = compiled(state, put_rows(batch, program.mesh))
        jax.block_until_ready(metrics)
        times.append(time.perf_counter() - start)
    step = statistics.median(times[3:])
    checkpoints = TrainCheckpoints(root / "checkpoints", config.keep, {})
    # A save blocks the loop only until `save` returns; `wait` returns once it is on disk.
    stall_seconds, save_seconds = [], []
    for number in range(1, repeats + 1):
        start = time.perf_counter()
        checkpoints.save(number, state, {})
        stall_seconds.append(time.perf_counter() - start)
        checkpoints.wait()
        save_seconds.append(time.perf_counter() - start)
    resume = median(lambda: checkpoints.restore(checkpoints.latest(), program.state_shapes())[0], repeats)
    checkpoints.close()
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    return {
        "parameters": sum(parameter_counts(MODEL).values()),
        "step_seconds": round(step, 3),
        "state_mib": round(size / 2**20),
        "save_keeps_the_loop_seconds": round(statistics.median(stall_seconds), 3),
        "save_until_on_disk_seconds": round(statistics.median(save_seconds), 3),
        "stall_share_at_one_save_a_1000_steps": round(statistics.median(stall_seconds) / (1000 * step), 6),
        "verify_and_restore_seconds": round(resume, 3),
    }


def losses_by_devices(root: Path) -> dict[str, Any]:
    """The loss of the third step on 1, 2, 4 and 8 devices, and the largest difference from one device."""
    losses = {}
    for count in (1, 2, 4, 8):
        _, program, loader = _program(root, count)
        state = program.fresh()
        for number in range(3):
            batch = loader.batch(number)
            state, metrics = program.step(state, put_rows({name: batch[name] for name in BATCH}, program.mesh))
        losses[count] = float(np.sum(metrics.source_loss_S) / np.sum(metrics.source_weight_S))
    # Sums over devices are rounded in another order, so the losses are close and not equal.
    worst = max(abs(loss / losses[1] - 1) for loss in losses.values())
    return {"losses": losses, "largest_relative_difference": worst}


def _program(root: Path, count: int) -> tuple[PretrainConfig, Program, Loader]:
    tokenizer = TokenizerConfig(ranks=8000)
    folder = root / "small"
    source = folder if folder.exists() else tokens(folder, tokenizer, 256, LENGTH)
    phase = PhaseConfig(name="one", tokens=ROWS * LENGTH * 20, mixture={"web": 1.0})
    config = PretrainConfig(phases=(phase,), batch_rows=ROWS, fsdp=count, optimizer=OptimizerConfig(warmup_steps=2))
    loader = Loader({"web": source}, config.phases, ROWS, 0, tokenizer)
    mesh = make_mesh(count, jax.devices()[:count])
    return config, Program(config, MODEL, mesh, loader.steps, 1, LENGTH, 0), loader


def main() -> None:
    arguments = argument_parser(__doc__, repeats=5).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        results = {"saving": time_saving(root, arguments.repeats), "devices": losses_by_devices(root)}
    print_rows(results)
    write_results(results, arguments.json)


if __name__ == "__main__":
    main()
