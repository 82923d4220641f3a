"""Will it fit, and how long will it take: the real training step, compiled for chips that need not be here.

Memory is what the compiler says of one chip. Operations are counted by our formula (XLA counts the body of a scan
once), and time is reckoned from them at a stated utilisation: it is an estimate, and is called so.
"""

import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh

from common.errors import ConfigError
from configs.model import ModelConfig
from configs.training import PretrainConfig
from model.capacity.flops import training_flops
from model.capacity.topology import GIB, Topology, devices
from model.nautile import parameter_counts
from model.sharding import make_mesh
from model.training.step import Program

Tell = Callable[[str], None]
MOST = 6  # the largest batch looked for is 64 times the one asked
_OVER = re.compile(r"Used ([\d.]+)([KMGT]) of")
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True)
class CompiledStep:
    """The step with `micro_rows` rows through the model at once (all chips together): bytes on one chip, by kind.

    A program that the compiler refused for want of memory has only its `peak`, if the compiler told it.
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
    config: PretrainConfig, model: ModelConfig, length: int, wanted: Topology, mfu: float, largest: bool, tell: Tell
) -> dict[str, Any]:
    """What `nautile plan` says of pretraining, as data. Raises ConfigError for a mesh or batch that does not divide."""
    mesh = make_mesh(config.fsdp, devices(wanted))
    limit = wanted.chip.memory if wanted.chip else None
    micro = config.micro_rows or config.batch_rows
    check_rows(config.batch_rows, micro, mesh.size)
    tokens = sum(phase.tokens for phase in config.phases)
    steps = sum(math.ceil(phase.tokens / (config.batch_rows * length)) for phase in config.phases)

    def attempt(rows: int) -> CompiledStep:
        tell(f"compiling for {wanted.name}, {rows // mesh.size} rows a chip at once")
        sizes = {"micro_rows": rows, "batch_rows": max(rows, config.batch_rows)}
        return compiled(config.model_copy(update=sizes), model, mesh, steps, length)

    asked = attempt(micro)
    most = _largest(mesh.size, asked, attempt, limit) if largest and limit else None
    flops = training_flops(model, length)
    peak = wanted.chip.peak if wanted.chip else None
    rate = mfu * peak * wanted.chips / flops if peak else None
    return {
        "topology": wanted.name,
        "chips": wanted.chips,
        "hosts": wanted.hosts,
        "mesh": dict(mesh.shape),
        "parameters": sum(parameter_counts(model).values()),
        "batch_rows": config.batch_rows,
        "row_length": length,
        "steps": steps,
        "tokens": tokens,
        "memory_limit": limit,
        "asked": _said(asked, mesh.size, limit),
        "largest": None if most is None else _said(most, mesh.size, limit),
        "flops_per_token": flops,
        "mfu_assumed": mfu,
        "tokens_per_second": rate,
        "days": tokens / rate / 86_400 if rate else None,
        "advice": _advice(asked, most, mesh, limit),
    }


def check_rows(batch_rows: int, micro: int, chips: int) -> None:
    """Raises ConfigError where rows do not divide."""
    if micro % chips:
        raise ConfigError(
            f"pretrain: {micro} rows at once (micro_rows, else batch_rows) do not divide among {chips} chips: make it "
            f"a multiple of {chips}"
        )
    if batch_rows % micro:
        raise ConfigError(f"pretrain.batch_rows {batch_rows} is not a multiple of pretrain.micro_rows {micro}")


def compiled(config: PretrainConfig, model: ModelConfig, mesh: Mesh, steps: int, length: int) -> CompiledStep:
    """The step of this config, compiled for the devices of `mesh`; nothing is run."""
    sources = len({name for phase in config.phases for name in phase.mixture})
    program = Program(config, model, mesh, steps, sources, length, seed=0)
    rows = config.micro_rows or config.batch_rows
    began = time.perf_counter()
    try:
        done = program.step.lower(program.state_shapes(), program.batch_shapes()).compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        used = _OVER.search(str(error))
        peak = int(float(used[1]) * _UNITS[used[2]]) if used else None
        return CompiledStep(rows, peak, refused=True, seconds=time.perf_counter() - began)
    memory = done.memory_analysis()
    # The state is donated: what comes out lies where it went in.
    extra = memory.output_size_in_bytes - memory.alias_size_in_bytes
    peak = memory.argument_size_in_bytes + extra + memory.temp_size_in_bytes + memory.generated_code_size_in_bytes
    return CompiledStep(
        rows,
        peak,
        memory.argument_size_in_bytes,
        memory.temp_size_in_bytes,
        memory.generated_code_size_in_bytes,
        seconds=time.perf_counter() - began,
    )


def _largest(
    chips: int, asked: CompiledStep, attempt: Callable[[int], CompiledStep], limit: int
) -> CompiledStep | None:
    """The most rows at once that fit, among those asked times or over powers of two; None if one row a chip does not.

    Memory grows in a straight line with the rows: two programs tell where it ends, and a third one that it is so.
    """
    if not asked.fits(limit):
        rows = asked.micro_rows // 2
        while rows and rows % chips == 0:
            tried = attempt(rows)
            if tried.fits(limit):
                return tried
            rows //= 2
        return None
    best, rows = attempt(2 * asked.micro_rows), asked.micro_rows
    if not best.fits(limit):
        return asked
    slope = ((best.peak or 0) - (asked.peak or 0)) / rows
    room = limit - (asked.peak or 0)
    power = MOST if slope <= 0 else min(MOST, int(math.log2(max(2.0, 1 + room / slope / rows))))
    for step in range(power, 1, -1):
        tried = attempt(rows << step)
        if tried.fits(limit):
            return tried
    return best


def _said(found: CompiledStep, chips: int, limit: int | None) -> dict[str, Any]:
    return {
        "micro_rows": found.micro_rows,
        "rows_per_chip": found.micro_rows // chips,
        "fits": found.fits(limit),
        "peak": found.peak,
        "arguments": found.arguments,
        "temporaries": found.temporaries,
        "code": found.code,
        "compile_seconds": round(found.seconds, 1),
    }


def _advice(asked: CompiledStep, most: CompiledStep | None, mesh: Mesh, limit: int | None) -> str:
    """One sentence: what to change, or that nothing needs to."""
    if asked.fits(limit):
        return "it fits"
    needed = f"{asked.peak / GIB:.1f} GiB" if asked.peak else "more"
    wall = f"it does not fit: {needed} a chip, of {(limit or 0) / GIB:.1f}"
    if most:
        return f"{wall}; set pretrain.micro_rows = {most.micro_rows}, the most that fit"
    size = mesh.shape["fsdp"]
    wider = f"raise pretrain.fsdp above {size}, " if size < mesh.size else ""
    return f'{wall}, nor do fewer rows at once; {wider}set model.remat = "block", or take more chips'
