"""Capacity planning: memory and time of pretraining, by compiling the real training step for chips not present.

Memory is the compiler's figure for one chip. Operations are counted by formula (XLA counts the body of a scan once),
and time is estimated from them at an assumed utilisation.
"""

import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh

from nautile.configs.model import ModelConfig
from nautile.configs.training import PretrainConfig
from nautile.model.capacity.flops import training_flops
from nautile.model.capacity.topology import GIB, Topology, devices
from nautile.model.nautile import parameter_counts
from nautile.model.sharding import make_mesh
from nautile.model.training.step import Program

Notify = Callable[[str], None]
MAX_DOUBLINGS = 6  # the largest micro-batch to try is 64 times the configured one
_OVER = re.compile(r"Used ([\d.]+)([KMGT]) of")
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True)
class CompiledStep:
    """Bytes used by the training step on one chip, by kind, with micro-batches of `micro_rows` rows over all chips.

    refused: the compiler refused the program for lack of memory; then only `peak` is known, if it was reported.
    """

    micro_rows: int
    peak: int | None
    arguments: int | None = None
    temporaries: int | None = None
    code: int | None = None
    refused: bool = False
    seconds: float = 0.0

    def fits(self, limit: int | None) -> bool:
        return not self.refused and (limit is None or (self.peak or 0) <= limit)


def plan_training(
    config: PretrainConfig,
    model: ModelConfig,
    length: int,
    topology: Topology,
    mfu: float,
    largest: bool,
    notify: Notify,
) -> dict[str, Any]:
    """Memory, operations and time of pretraining on a topology, as JSON data (`nautile plan`).

    mfu: the utilisation to assume. largest: also search for the largest micro-batch that fits. notify: called with a
    line before each compilation. Raises ConfigError for a mesh or batch that does not divide.
    """
    mesh = make_mesh(config.fsdp, devices(topology))
    limit = topology.chip.memory if topology.chip else None
    micro = config.rows_at_once(mesh.size)
    tokens = sum(phase.tokens for phase in config.phases)
    steps = sum(math.ceil(phase.tokens / (config.batch_rows * length)) for phase in config.phases)

    def compile_rows(rows: int) -> CompiledStep:
        notify(f"compiling for {topology.name}, {rows // mesh.size} rows a chip at once")
        sizes = {"micro_rows": rows, "batch_rows": -(-config.batch_rows // rows) * rows}
        return compile_step(config.model_copy(update=sizes), model, mesh, steps, length)

    configured = compile_rows(micro)
    largest_step = _largest(mesh.size, configured, compile_rows, limit) if largest and limit else None
    # Tokens per second at the assumed share of the chips' peak FLOP/s.
    flops = training_flops(model, length)
    peak = topology.chip.peak if topology.chip else None
    rate = mfu * peak * topology.chips / flops if peak else None
    return {
        "topology": topology.name,
        "chips": topology.chips,
        "hosts": topology.hosts,
        "mesh": dict(mesh.shape),
        "parameters": sum(parameter_counts(model).values()),
        "batch_rows": config.batch_rows,
        "row_length": length,
        "steps": steps,
        "tokens": tokens,
        "memory_limit": limit,
        "asked": _as_json(configured, mesh.size, limit),
        "largest": None if largest_step is None else _as_json(largest_step, mesh.size, limit),
        "flops_per_token": flops,
        "mfu_assumed": mfu,
        "tokens_per_second": rate,
        "days": tokens / rate / 86_400 if rate else None,
        "advice": _advice(configured, largest_step, mesh, limit),
    }


def compile_step(config: PretrainConfig, model: ModelConfig, mesh: Mesh, steps: int, length: int) -> CompiledStep:
    """Compile the training step for the devices of `mesh`, without running it, and read its memory use."""
    sources = len({name for phase in config.phases for name in phase.mixture})
    program = Program(config, model, mesh, steps, sources, length, seed=0)
    rows = config.rows_at_once(mesh.size)
    started = time.perf_counter()
    try:
        executable = program.step.lower(program.state_shapes(), program.batch_shapes()).compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        used = _OVER.search(str(error))
        peak = int(float(used[1]) * _UNITS[used[2]]) if used else None
        return CompiledStep(rows, peak, refused=True, seconds=time.perf_counter() - started)
    memory = executable.memory_analysis()
    # The state is donated: its output reuses the memory of its input.
    fresh_output = memory.output_size_in_bytes - memory.alias_size_in_bytes
    peak = (
        memory.argument_size_in_bytes + fresh_output + memory.temp_size_in_bytes + memory.generated_code_size_in_bytes
    )
    return CompiledStep(
        rows,
        peak,
        memory.argument_size_in_bytes,
        memory.temp_size_in_bytes,
        memory.generated_code_size_in_bytes,
        seconds=time.perf_counter() - started,
    )


def _largest(
    chips: int, configured: CompiledStep, attempt: Callable[[int], CompiledStep], limit: int
) -> CompiledStep | None:
    """The largest micro-batch that fits: the configured one times a power of two; None if not even one row per chip.

    Memory is linear in the rows: two programs predict the largest number that fits, and a third verifies it.
    """
    # If the configured number does not fit, halve it until it does.
    if not configured.fits(limit):
        rows = configured.micro_rows // 2
        while rows and rows % chips == 0:
            candidate = attempt(rows)
            if candidate.fits(limit):
                return candidate
            rows //= 2
        return None
    best, rows = attempt(2 * configured.micro_rows), configured.micro_rows
    if not best.fits(limit):
        return configured
    # Bytes per row, and the largest power of two that should fit.
    # Measured between two programs, because a part of the memory does not grow with the rows.
    slope = ((best.peak or 0) - (configured.peak or 0)) / rows
    available = limit - (configured.peak or 0)
    power = MAX_DOUBLINGS if slope <= 0 else min(MAX_DOUBLINGS, int(math.log2(max(2.0, 1 + available / slope / rows))))
    for step in range(power, 1, -1):
        candidate = attempt(rows << step)
        if candidate.fits(limit):
            return candidate
    return best


def _as_json(step: CompiledStep, chips: int, limit: int | None) -> dict[str, Any]:
    return {
        "micro_rows": step.micro_rows,
        "rows_per_chip": step.micro_rows // chips,
        "fits": step.fits(limit),
        "peak": step.peak,
        "arguments": step.arguments,
        "temporaries": step.temporaries,
        "code": step.code,
        "compile_seconds": round(step.seconds, 1),
    }


def _advice(configured: CompiledStep, largest_step: CompiledStep | None, mesh: Mesh, limit: int | None) -> str:
    """One sentence for the operator: which setting to change, or that it fits."""
    if configured.fits(limit):
        return "it fits"
    needed = f"{configured.peak / GIB:.1f} GiB" if configured.peak else "more"
    problem = f"it does not fit: {needed} a chip, of {(limit or 0) / GIB:.1f}"
    if largest_step:
        return f"{problem}; set pretrain.micro_rows = {largest_step.micro_rows}, the most that fit"
    size = mesh.shape["fsdp"]
    wider = f"raise pretrain.fsdp above {size}, " if size < mesh.size else ""
    return f'{problem}, nor do fewer rows at once; {wider}set model.remat = "block", or take more chips'
