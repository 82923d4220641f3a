"""Four steps of the tiny training on one device, and on 2 x 4 devices with micro-batches; prints the metrics as JSON.

The mesh uses `mixing = "fused"`, so that the operator runs on each device's rows separately, in its form for a CPU.

As a program, with JAX_NUM_CPU_DEVICES=8: `python -m tests.support.processes.sharded ROOT CHECKPOINTS`. The last two
steps of each run start from the checkpoint of the other.
"""

import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

from nautile.common.processes import relax_collector
from nautile.data.tokens.loader import Loader
from nautile.model.sharding import make_mesh, put_rows
from nautile.model.training.checkpoint import TrainCheckpoints
from nautile.model.training.step import BATCH, Program, TrainState
from tests.support.processes.training import MODEL, ROW, TOKENIZER, settings, sources

ROWS = 16


def steps(program: Program, loader: Loader, state: TrainState, numbers: range) -> tuple[TrainState, list[list[float]]]:
    """The state after the steps, and the loss, gradient norm and update norm of each."""
    measured = []
    for number in numbers:
        batch = loader.batch(number)
        state, metrics = program.step(state, put_rows({name: batch[name] for name in BATCH}, program.mesh))
        loss = np.asarray(metrics.source_loss_S).sum() / np.asarray(metrics.source_weight_S).sum()
        measured.append([float(loss), float(metrics.gradient_norm), float(metrics.update_norm)])
    return state, measured


def placement(tree: Any) -> dict[str, list[float]]:
    """For each array its size, and the share of it on the first device."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {
        jax.tree_util.keystr(path): [leaf.size, leaf.addressable_shards[0].data.size / leaf.size]
        for path, leaf in leaves
    }


def main(root: Path, folder: Path) -> None:
    config = settings(batch_rows=ROWS)
    loader = Loader(sources(root), config.phases, ROWS, 0, TOKENIZER)
    report: dict[str, Any] = {}
    fused = MODEL.model_copy(update={"mixing": "fused"})
    programs = {
        "single": Program(config, MODEL, make_mesh(1, jax.devices()[:1]), loader.steps, 2, ROW, 0),
        "mesh": Program(settings(batch_rows=ROWS, micro_rows=8), fused, make_mesh(4), loader.steps, 2, ROW, 0),
    }
    checkpoints = {name: TrainCheckpoints(folder / name, 1, {}) for name in programs}
    for name, program in programs.items():
        state, report[name] = steps(program, loader, program.fresh(), range(2))
        if name == "mesh":
            report["params"], report["opt_state"] = placement(state.params), placement(state.opt_state)
        checkpoints[name].save(2, state, {})
    for name, other in (("single", "mesh"), ("mesh", "single")):
        state, _ = checkpoints[other].restore(2, programs[name].state_shapes())
        report[name] += steps(programs[name], loader, state, range(2, 4))[1]
    sys.stdout.write(json.dumps(report))


if __name__ == "__main__":
    relax_collector()
    main(Path(sys.argv[1]), Path(sys.argv[2]))
