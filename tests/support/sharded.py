"""Four steps of the tiny training on one device, and on 2 x 4 devices with micro-batches; prints what was found.

The many have `mixing = "fused"`, so the operator runs on each device's rows by itself, in its form for that device.

As a program, with JAX_NUM_CPU_DEVICES=8: `python -m tests.support.sharded ROOT CHECKPOINTS`. The last two steps of each
start from what the other one saved.
"""

import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

from data.tokens.loader import Loader
from model.sharding import make_mesh, put_rows
from model.training.checkpoint import TrainCheckpoints
from model.training.step import BATCH, Program, TrainState
from tests.support.training import MODEL, ROW, TOKENIZER, settings, sources

ROWS = 16


def steps(program: Program, loader: Loader, state: TrainState, numbers: range) -> tuple[TrainState, list[list[float]]]:
    found = []
    for number in numbers:
        batch = loader.batch(number)
        state, metrics = program.step(state, put_rows({name: batch[name] for name in BATCH}, program.mesh))
        loss = np.asarray(metrics.source_loss_S).sum() / np.asarray(metrics.source_weight_S).sum()
        found.append([float(loss), float(metrics.gradient_norm), float(metrics.update_norm)])
    return state, found


def placed(tree: Any) -> dict[str, list[float]]:
    """Per array: numbers in all, and the share of them that lies on the first device."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {
        jax.tree_util.keystr(path): [leaf.size, leaf.addressable_shards[0].data.size / leaf.size]
        for path, leaf in leaves
    }


def main(root: Path, folder: Path) -> None:
    config = settings(batch_rows=ROWS)
    loader = Loader(sources(root), config.phases, ROWS, 0, TOKENIZER)
    told: dict[str, Any] = {}
    fused = MODEL.model_copy(update={"mixing": "fused"})
    programs = {
        "one": Program(config, MODEL, make_mesh(1, jax.devices()[:1]), loader.steps, 2, ROW, 0),
        "many": Program(settings(batch_rows=ROWS, micro_rows=8), fused, make_mesh(4), loader.steps, 2, ROW, 0),
    }
    kept = {name: TrainCheckpoints(folder / name, 1, {}) for name in programs}
    for name, program in programs.items():
        state, told[name] = steps(program, loader, program.fresh(), range(2))
        if name == "many":
            told["params"], told["opt_state"] = placed(state.params), placed(state.opt_state)
        kept[name].save(2, state, {})
    for name, other in (("one", "many"), ("many", "one")):
        state, _ = kept[other].restore(2, programs[name].state_shapes())
        told[name] += steps(programs[name], loader, state, range(2, 4))[1]
    sys.stdout.write(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
