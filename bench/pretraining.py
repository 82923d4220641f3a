"""Around the training step: the loader against what a step needs, saving and resuming, and devices as correctness.

    python bench/pretraining.py [--repeats 5] [--json FILE]

The loader reads rows of 1,024 tokens (cl100k ids) as one of the paper's 8 hosts would, whose slice takes 188 rows/s a
host at 1.54 M tokens/s (a reckoning: `nautile plan`, 40 % utilisation). Steps, saves and resumes are of a model of
25 M parameters on one of 8 devices of this CPU. 1, 2, 4 and 8 of them share the same cores, so their times mean
nothing: what is shown is that their losses agree.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")

import jax
import numpy as np

from configs.base import OptimizerConfig
from configs.model import ModelConfig, TokenizerConfig
from configs.training import PhaseConfig, PretrainConfig
from data.tokenizer import tokenizer_for
from data.tokens.loader import Loader
from data.tokens.packing import ConcatPacker
from data.tokens.shards import ShardIndex, write_index, write_shard
from model.nautile import parameter_counts
from model.sharding import make_mesh, put_rows
from model.training.checkpoint import TrainCheckpoints
from model.training.step import BATCH, Program

HOSTS, NEEDED = 8, 1.54e6 / 1024 / 8
LENGTH, ROWS = 128, 8
MODEL = ModelConfig(vocabulary=8192, width=512, blocks=2, context=1024, compute_dtype="float32", remat="none")


def median(run: Callable[[], Any], repeats: int) -> float:
    """Median seconds of a call."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def tokens(folder: Path, tokenizer: TokenizerConfig, rows: int, length: int) -> Path:
    """A tokens artifact of random documents, half a row long on average."""
    chosen, rng, entries = tokenizer_for(tokenizer), np.random.default_rng(0), []
    for split, count in (("train", rows), ("validation", 8)):
        packer = ConcatPacker(length)
        for _ in range(2 * count):
            ids = rng.integers(0, chosen.end_of_text, rng.integers(8, length), dtype=np.uint32)
            packer.add(np.append(ids, np.uint32(chosen.end_of_text)))
        entries.append(write_shard(folder, 0, split, packer.finish(), chosen.vocabulary))
    write_index(folder, ShardIndex(tokenizer, chosen.fingerprint, length, "web", tuple(entries)))
    return folder


def loading(root: Path, repeats: int) -> dict[str, Any]:
    """Rows a second of one host's loader, and how many times what the paper's slice would take from it."""
    tokenizer = TokenizerConfig()
    sources = {name: tokens(root / name, tokenizer, 2048, 1024) for name in ("synth", "distilled")}
    phase = PhaseConfig(name="two", tokens=512 * 1024 * 50, mixture={"synth": 0.98, "distilled": 0.02})
    loader = Loader(sources, [phase], 512, 0, tokenizer, host=3, hosts=HOSTS)
    rate = 512 / HOSTS / median(lambda: loader.batch(7)["tokens"], 4 * repeats)
    return {"rows_per_second": round(rate), "needed_on_a_v4_host": round(NEEDED), "times": round(rate / NEEDED, 1)}


def stepping(root: Path, repeats: int) -> dict[str, Any]:
    """What a save keeps the loop from doing, and what a resume costs."""
    config, program, loader = _program(root, 1)
    state = program.fresh()
    batch = {name: loader.batch(0)[name] for name in BATCH}
    compiled = program.step.lower(state, program.batch_shapes()).compile()
    times = []
    for _ in range(3 + repeats):
        start = time.perf_counter()
        state, metrics = compiled(state, put_rows(batch, program.mesh))
        jax.block_until_ready(metrics)
        times.append(time.perf_counter() - start)
    step = statistics.median(times[3:])
    kept = TrainCheckpoints(root / "checkpoints", config.keep, {})
    stalls, wholes = [], []
    for number in range(1, repeats + 1):
        start = time.perf_counter()
        kept.save(number, state, {})
        stalls.append(time.perf_counter() - start)
        kept.wait()
        wholes.append(time.perf_counter() - start)
    resume = median(lambda: kept.restore(kept.latest(), program.state_shapes())[0], repeats)
    kept.close()
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    return {
        "parameters": sum(parameter_counts(MODEL).values()),
        "step_seconds": round(step, 3),
        "state_mib": round(size / 2**20),
        "save_keeps_the_loop_seconds": round(statistics.median(stalls), 3),
        "save_until_on_disk_seconds": round(statistics.median(wholes), 3),
        "stall_share_at_one_save_a_1000_steps": round(statistics.median(stalls) / (1000 * step), 6),
        "verify_and_restore_seconds": round(resume, 3),
    }


def devices(root: Path) -> dict[str, Any]:
    """The loss of the third step on 1, 2, 4 and 8 devices, and the largest difference from one device."""
    losses = {}
    for count in (1, 2, 4, 8):
        _, program, loader = _program(root, count)
        state = program.fresh()
        for number in range(3):
            batch = loader.batch(number)
            state, metrics = program.step(state, put_rows({name: batch[name] for name in BATCH}, program.mesh))
        losses[count] = float(np.sum(metrics.source_loss_S) / np.sum(metrics.source_weight_S))
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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        results = {"loader": loading(root, options.repeats), "saving": stepping(root, options.repeats)}
        results["devices"] = devices(root)
    for name, result in results.items():
        print(f"{name}\n   {result}")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
