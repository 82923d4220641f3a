"""Capacity planning by compiling for chips that need not be present: memory of the training step, speed of settings.

`plan_training` compiles the real training step. Memory is the compiler's figure for one chip. Operations are counted by
formula (XLA counts the body of a scan once), and time is estimated from them at an assumed utilisation.

`compare` estimates the speed of several model settings from one compiled block each; nothing is measured. Each setting
has two figures. The bound is a roofline: no program takes less time than its FLOPs at the chip's peak, or its bytes at
the bandwidth of the chip's memory. The estimate is the compiler's: the cycles that it expects of each operation, at the
chip's clock. Only the TPU compiler has one, and none for Pallas kernels, for which the least time of their work by
formula is added. Neither includes communication between chips, or the host.

One block alone is two programs, as in the scan over the blocks: the forward pass, which writes the residuals that the
backward pass needs besides its inputs, and the backward pass, which recomputes everything else. Results are cached on
disk. XLA's analysis counts the body of a loop once, whatever its length, and the operations of a custom call (a Pallas
kernel) not at all. Here each body is analysed separately and multiplied by its iterations, and kernels are counted.
"""

import gzip
import json
import math
import re
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, SingleDeviceSharding
from jaxlib import _hlo, _jax  # type: ignore[attr-defined]  # jaxlib has no stubs of `_hlo`

from nautile.common.errors import ConfigError
from nautile.common.files import parse_json, sha256_of, write_atomically
from nautile.configs.base import fingerprint
from nautile.configs.model import LOSS_CHUNK, ModelConfig
from nautile.configs.training import PretrainConfig
from nautile.model.capacity.flops import Direction, kernel_work, parameter_counts, training_flops
from nautile.model.capacity.topology import GIB, Chip, Topology, compiler_of, devices
from nautile.model.layers.common import compute_dtype
from nautile.model.layers.mixing.kernels import gpu, tpu
from nautile.model.loss import weighted_loss
from nautile.model.nautile import run_blocks, shapes
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


_BUILD = 2  # version of the cache: increase it when the programs below change
_MODEL = Path(__file__).parents[1]


class Setting(NamedTuple):
    """The fields of a model that change its speed but not its results."""

    mixing: Literal["chunked", "fused", "reference"]
    chunk: int
    remat: Literal["none", "block", "layer", "dots"]

    def __str__(self) -> str:
        return f"{self.mixing}/{self.chunk}/{self.remat}"

    @classmethod
    def of(cls, model: ModelConfig) -> "Setting":
        return cls(model.mixing, model.chunk, model.remat)


def compiled_block(
    model: ModelConfig, rows: int, length: int, topology: Topology, folder: Path, notify: Callable[[str], object]
) -> dict[str, Any]:
    """Compile one block for `rows` rows on one chip, or read the result from the cache in `folder`.

    Returns {"forward": program, "backward": program}. A program has its optimised `text`, `temporaries` in bytes, XLA's
    `analysis` and the `seconds` of its compilation; the forward pass also has the block's `residual_bytes`. A program
    that does not fit has a message `refused` instead of its text. Raises ConfigError without a compiler.
    """
    single = model.model_copy(update={"blocks": 1})
    identity = _identity(single, rows, length, topology)
    programs = {name: _read_cached(folder, {**identity, "part": name}) for name in ("forward", "backward")}
    # Both programs come from one tracing, which is left out if neither has to be compiled.
    if None in programs.values():
        traced = _trace_block(single, rows, length, topology)
        for name, function, arguments in (
            ("forward", traced.forward, traced.arguments),
            ("backward", traced.backward, (traced.arguments, traced.residuals, traced.arguments[1])),
        ):
            if programs[name] is None:
                notify(f"compiling for {topology.name}: {Setting.of(single)}, the {name} pass of one block")
                more = {"residual_bytes": traced.residual_bytes} if name == "forward" else {}
                programs[name] = _write_cached(folder, {**identity, "part": name}, _compile(function, arguments) | more)
    return programs


def compiled_head(
    model: ModelConfig, rows: int, length: int, topology: Topology, folder: Path, notify: Callable[[str], object]
) -> dict[str, Any]:
    """Compile embedding, head and loss with their gradients, as `compiled_block` does."""
    # The settings of the blocks do not matter here, so one cached program serves all of them.
    plain = model.model_copy(update={"mixing": "chunked", "chunk": 32, "remat": "block", "blocks": 1})
    identity = {**_identity(plain, rows, length, topology), "part": "head", "loss_chunk": LOSS_CHUNK}
    program = _read_cached(folder, identity)
    if program is None:
        notify(f"compiling for {topology.name}: embedding, head and loss")
        program = _write_cached(folder, identity, _compile_head(plain, rows, length, topology))
    return program


def _identity(model: ModelConfig, rows: int, length: int, topology: Topology) -> dict[str, Any]:
    """The cache key: everything that determines a compilation."""
    assert topology.chip is not None  # checked by `compare`
    package, target = compiler_of(topology.chip)
    sources = [*sorted((_MODEL / "layers").rglob("*.py")), _MODEL / "nautile.py", _MODEL / "loss.py"]
    return {
        "build": _BUILD,
        "target": target,
        "model": model.model_dump(mode="json"),
        "rows": rows,
        "length": length,
        "versions": {name: version(name) for name in ("jax", "jaxlib", package)},
        "sources": [sha256_of(path) for path in sources],
    }


def _path(folder: Path, identity: dict[str, Any]) -> Path:
    return folder / f"{fingerprint(identity)[:32]}.json.gz"


def _read_cached(folder: Path, identity: dict[str, Any]) -> dict[str, Any] | None:
    """The cached result of a compilation; None if there is none or its file is damaged."""
    try:
        return parse_json(gzip.decompress(_path(folder, identity).read_bytes()))
    except (OSError, EOFError):
        return None


def _write_cached(folder: Path, identity: dict[str, Any], program: dict[str, Any]) -> dict[str, Any]:
    write_atomically(_path(folder, identity), gzip.compress(json.dumps(program).encode(), mtime=0))
    return program


class _TracedBlock(NamedTuple):
    """The two functions of a block and their argument shapes; `residuals` is written by the first for the second."""

    forward: Callable[..., Any]
    backward: Callable[..., Any]
    arguments: tuple[Any, ...]
    residuals: list[Any]
    residual_bytes: int


def _trace_block(model: ModelConfig, rows: int, length: int, topology: Topology) -> _TracedBlock:
    """Split a block and its gradient into a forward and a backward function."""
    place = _placing(topology)
    blocks = place(shapes(model)["blocks"])
    x_BLD = place(jax.ShapeDtypeStruct((rows, length, model.width), compute_dtype(model)))
    times_BL = place(jax.ShapeDtypeStruct((rows, length), jnp.int32))
    arguments = (blocks, x_BLD, times_BL, times_BL)

    def both(blocks: Any, x_BLD: Any, segments_BL: Any, positions_BL: Any) -> tuple[Any, Any]:
        def run(blocks: Any, x_BLD: Any) -> Any:
            return run_blocks(blocks, model, x_BLD, segments_BL, positions_BL)[0]

        return jax.vjp(run, blocks, x_BLD)

    # The backward pass needs a list of arrays. Some are unchanged inputs of the block (`sources` has their index), the
    # others are written by the forward pass (`sources` has None).
    traced, kinds = jax.make_jaxpr(both, return_shape=True)(*arguments)
    leaves, pull_tree = jax.tree.flatten(kinds[1])
    inputs = {id(variable): index for index, variable in enumerate(traced.jaxpr.invars)}
    sources = [inputs.get(id(variable)) for variable in traced.jaxpr.outvars[-len(leaves) :]]
    written = [index for index, source in enumerate(sources) if source is None]

    def forward(*arguments: Any) -> tuple[Any, list[Any]]:
        y_BLD, pull = both(*arguments)
        leaves = jax.tree.leaves(pull)
        return y_BLD, [leaves[index] for index in written]

    def backward(arguments: Any, residuals: list[Any], d_out_BLD: Any) -> Any:
        inputs, written_arrays = jax.tree.leaves(arguments), iter(residuals)
        leaves = [next(written_arrays) if index is None else inputs[index] for index in sources]
        return jax.tree.unflatten(pull_tree, leaves)(d_out_BLD)

    residuals = place([leaves[index] for index in written])  # includes the block's input, which the scan stacks
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in residuals)
    return _TracedBlock(forward, backward, arguments, residuals, size)


def _compile_head(model: ModelConfig, rows: int, length: int, topology: Topology) -> dict[str, Any]:
    place = _placing(topology)
    kinds = shapes(model)
    # A model without blocks, whose forward pass is the embedding.
    no_blocks = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((0, *leaf.shape[1:]), leaf.dtype), kinds["blocks"])
    params = place({**kinds, "blocks": no_blocks})
    integers = place(jax.ShapeDtypeStruct((rows, length), jnp.int32))
    batch = dict.fromkeys(("tokens", "targets", "segments", "positions"), integers)
    batch["weights"] = place(jax.ShapeDtypeStruct((rows, length), jnp.float32))

    def gradient(params: Any, batch: Any) -> Any:
        return jax.value_and_grad(lambda params: weighted_loss(params, model, batch).loss)(params)

    return _compile(gradient, (params, batch))


def _placing(topology: Topology) -> Callable[[Any], Any]:
    """A function that places every shape of a tree on the first chip of a topology."""
    chip = SingleDeviceSharding(devices(topology)[0])
    return lambda tree: jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=chip), tree)


def _compile(function: Callable[..., Any], arguments: tuple[Any, ...]) -> dict[str, Any]:
    started = time.perf_counter()
    try:
        executable = jax.jit(function).lower(*arguments).compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return {"refused": str(error).splitlines()[0], "seconds": time.perf_counter() - started}
    analysis, memory = executable.cost_analysis() or {}, executable.memory_analysis()
    if memory is None:
        raise RuntimeError("the compiler does not tell how much memory the program needs")
    return {
        "text": executable.as_text(),
        "temporaries": memory.temp_size_in_bytes,
        "analysis": {name: float(value) for name, value in analysis.items() if "{" not in name},
        "seconds": time.perf_counter() - started,
    }


_COMPUTATION = re.compile(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_LOOP = re.compile(r" while\(.*?condition=%?([\w.\-]+), body=%?([\w.\-]+)")
_CALL = re.compile(r" call\(.*?to_apply=%?([\w.\-]+)")
_TRIP_COUNT = re.compile(r'known_trip_count"?:\{"n":"(\d+)"')
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
# JAX counts its loops from 0 in steps of 1: their condition is a comparison with the number of iterations.
_BOUND = re.compile(r"ROOT .* compare\(.*?%?([\w.\-]+)\), direction=LT")
_CONSTANT = re.compile(r"%?([\w.\-]+) = s32\[\]\S* constant\((\d+)\)")
_KERNEL = re.compile(r'custom_call_target="(?:tpu_custom_call|__gpu\$xla\.gpu\.triton)"')


class ProgramCost(NamedTuple):
    """Sums over a program, with loops multiplied by their iterations.

    flops, bytes: of XLA's analysis, without kernels; bytes of the operands and results of every operation, in any kind
    of memory. cycles: None if the compiler estimates none. kernels: number of calls of Pallas kernels. unknown_loops:
    loops whose number of iterations is not in the text, counted once.
    """

    flops: float
    bytes: float
    cycles: float | None
    kernels: float
    unknown_loops: int


def program_cost(text: str) -> ProgramCost:
    """The cost of an optimised program, from `compiled.as_text()`."""
    program = _Program(text)
    cost = program.total(program.entry)
    return cost if _CYCLES.search(text) else cost._replace(cycles=None)


class _Program:
    """The computations of a program by name, each with its lines."""

    def __init__(self, text: str) -> None:
        self.lines = text.splitlines()
        self.computations: dict[str, list[str]] = defaultdict(list)
        self.entry = current = ""
        for line in self.lines:
            if start := _COMPUTATION.match(line):
                current = start[1]
                self.entry = current if line.startswith("ENTRY ") else self.entry
            elif line.startswith("}"):
                current = ""
            elif current:
                self.computations[current].append(line)

    @cached_property
    def client(self) -> object:
        return jax.local_devices(backend="cpu")[0].client

    def total(self, name: str) -> ProgramCost:
        """The cost of a computation, with each loop counted for all its iterations."""
        # XLA's figures count each loop body once: add the remaining iterations.
        once = self.once(name)
        flops, bytes_, cycles, kernels, unknown = *once, 0.0, 0.0, 0
        for line in self._lines_with_calls(name):
            cycles += int(estimate[1]) if (estimate := _CYCLES.search(line)) else 0
            kernels += bool(_KERNEL.search(line))
            if not (loop := _LOOP.search(line)):
                continue
            iterations = self._iterations(line, loop[1])
            unknown += iterations is None
            iterations = 1 if iterations is None else iterations
            body, counted = self.total(loop[2]), self.once(loop[2])
            flops += iterations * body.flops - counted[0]
            bytes_ += iterations * body.bytes - counted[1]
            cycles += iterations * (body.cycles or 0.0)
            kernels += iterations * body.kernels
            unknown += body.unknown_loops
        return ProgramCost(flops, bytes_, cycles, kernels, unknown)

    def once(self, name: str) -> tuple[float, float]:
        """XLA's FLOPs and bytes of a computation, with each loop counted once.

        Analyses the program's text with this computation as its entry.
        """
        lines = ["HloModule part", *self.lines[1:]]
        for index, line in enumerate(lines):
            if start := _COMPUTATION.match(line):
                lines[index] = ("ENTRY " if start[1] == name else "") + line.removeprefix("ENTRY ")
        module = _hlo.hlo_module_from_text("\n".join(lines))
        costs = _jax.hlo_module_cost_analysis(self.client, module)
        return max(0.0, costs.get("flops", 0.0)), max(0.0, costs.get("bytes accessed", 0.0))

    def _lines_with_calls(self, name: str) -> list[str]:
        """The lines of a computation and of those that it calls."""
        lines = list(self.computations[name])
        for line in self.computations[name]:
            if called := _CALL.search(line):
                lines += self._lines_with_calls(called[1])
        return lines

    def _iterations(self, line: str, condition: str) -> int | None:
        """The number of iterations of a loop, from its annotation or its condition; None if the text has neither."""
        if annotation := _TRIP_COUNT.search(line):
            return int(annotation[1])
        lines = self.computations[condition]
        bound = next((match[1] for match in map(_BOUND.search, lines) if match), None)
        constants = {match[1]: match[2] for match in map(_CONSTANT.search, lines) if match}
        return int(constants[bound]) if bound in constants else None


CHUNKS = (32, 128)
# A float32 product at the highest precision is six bfloat16 ones on a TPU.
_EXACT_PASSES = 6
# AdamW reads and writes parameters and two moments and reads gradients, all float32.
_UPDATE_BYTES = 4 * 7


class Seconds(NamedTuple):
    """Seconds of a program: the roofline bound; the compiler's estimate, if any; the kernels' part of the estimate."""

    bound: float
    estimate: float | None
    kernels: float


def parse_setting(text: str) -> Setting:
    """Parse mixing/chunk/remat, as in fused/32/block. Raises ConfigError."""
    parts = text.split("/")
    names = {name: get_args(ModelConfig.model_fields[name].annotation) for name in ("mixing", "remat")}
    valid = len(parts) == 3 and parts[1].isdecimal() and int(parts[1]) > 0
    for name, part in zip(names, parts[::2], strict=False):
        valid = valid and part in names[name]
    if not valid:
        raise ConfigError(
            f"setting {text!r}: name mixing, chunk and remat, as fused/32/block; mixing is one of "
            f"{', '.join(names['mixing'])}, remat one of {', '.join(names['remat'])}"
        )
    return Setting(parts[0], int(parts[1]), parts[2])  # type: ignore[arg-type]


def compare(
    config: PretrainConfig,
    model: ModelConfig,
    length: int,
    topology: Topology,
    settings: Sequence[Setting],
    folder: Path,
    notify: Callable[[str], object],
) -> dict[str, Any]:
    """Compile one block per setting, and the head once; return their costs and estimated tokens/s as JSON data.

    settings: if empty, all forms and chunk sizes with the configured `remat`, then the best of them with the other
    values of `remat`. folder: cache of compilations. Raises ConfigError for chips without a known name or compiler.
    """
    if topology.chip is None:
        raise ConfigError(f"topology {topology.name!r}: settings are compared for chips by name, as v4:2x4x4 or h100:8")
    rows = config.rows_at_once(topology.chips) // topology.chips
    head = compiled_head(model, rows, length, topology, folder, notify)

    def row_of(setting: Setting) -> dict[str, Any]:
        variant = model.model_copy(update=setting._asdict())
        block = compiled_block(variant, rows, length, topology, folder, notify)
        return _setting_row(setting, block, head, variant, config, rows, length, topology)

    if settings:
        results = {setting: row_of(setting) for setting in settings}
    else:
        configured = Setting.of(model)
        first = dict.fromkeys(
            [configured, *(Setting(form, chunk, configured.remat) for form in ("chunked", "fused") for chunk in CHUNKS)]
        )
        results = {setting: row_of(setting) for setting in first}
        best = max(results, key=lambda setting: _rank(results[setting]))
        others = [best._replace(remat=remat) for remat in get_args(ModelConfig.model_fields["remat"].annotation)]
        results |= {setting: row_of(setting) for setting in others if setting not in results}
    ranked = sorted(results.values(), key=_rank, reverse=True)
    return {
        "topology": topology.name,
        "chips": topology.chips,
        "rows_per_chip": rows,
        "row_length": length,
        "peak": topology.chip.peak,
        "bandwidth": topology.chip.bandwidth,
        "configured": str(Setting.of(model)),
        "settings": ranked,
    }


def _rank(row: dict[str, Any]) -> float:
    """Tokens/s by the compiler's estimate, else by the bound; 0 if the setting does not fit."""
    return row.get("tokens_per_second_estimate") or row.get("tokens_per_second_bound") or 0.0


def _setting_row(
    setting: Setting,
    block: dict[str, Any],
    head: dict[str, Any],
    model: ModelConfig,
    config: PretrainConfig,
    rows: int,
    length: int,
    topology: Topology,
) -> dict[str, Any]:
    """The costs of one setting, and the estimated speed of the whole model."""
    tokens = rows * length
    parts = {"forward": block["forward"], "backward": block["backward"], "head": head}
    refused = {name: part["refused"] for name, part in parts.items() if "refused" in part}
    seconds = sum(part["seconds"] for part in parts.values())
    row: dict[str, Any] = {"setting": str(setting), **setting._asdict(), "compile_seconds": seconds}
    if refused:
        return {**row, "refused": "; ".join(f"{name}: {text}" for name, text in refused.items())}
    costs = {name: program_cost(part["text"]) for name, part in parts.items()}
    kernels: dict[str, dict[Direction, float]] = {
        "forward": {"forward": costs["forward"].kernels},
        "backward": {
            # A backward pass has one kernel for each SCA layer; any more are forward kernels that it runs again.
            "forward": max(0.0, costs["backward"].kernels - model.pattern.count("S")),
            "backward": min(costs["backward"].kernels, model.pattern.count("S")),
        },
        "head": {},
    }
    chip = topology.chip
    assert chip is not None  # checked by `compare`
    work = {name: add_kernels(costs[name], kernels[name], model, tokens, chip) for name in parts}
    step = whole_step({name: times for name, (_, times) in work.items()}, model, config, topology)
    programs = {
        name: {
            "flops": cost.flops,
            "bytes": cost.bytes,
            "cycles": cost.cycles,
            "kernels_counted": cost.kernels,
            "unknown_loops": cost.unknown_loops,
            "temporaries": parts[name]["temporaries"],
            **times._asdict(),
        }
        for name, (cost, times) in work.items()
    }
    rates = {}
    for name, seconds in zip(("bound", "estimate"), step, strict=True):
        rate = None if seconds is None else tokens * topology.chips / seconds
        rates[f"tokens_per_second_{name}"] = rate
        peak = chip.peak * topology.chips if chip.peak else None
        rates[f"mfu_{name}"] = rate * training_flops(model, length) / peak if rate and peak else None
    residual_bytes = block["forward"]["residual_bytes"] * model.blocks
    return {
        **row,
        "programs": programs,
        "kept_by_all_blocks": residual_bytes,
        "step_seconds": step[1] or step[0],
        **rates,
    }


def add_kernels(
    cost: ProgramCost, kernels: Mapping[Direction, float], model: ModelConfig, tokens: int, chip: Chip
) -> tuple[ProgramCost, Seconds]:
    """Add the work of `kernels` (counts by direction) to a program's cost, by formula; return its time as well."""
    chunk = min(model.chunk, model.context)
    chunk = tpu.chunk_for(chunk) if chip.core else gpu.CHUNK
    products = elementwise = kernel_bytes = seconds = 0.0
    for direction, count in kernels.items():
        work = kernel_work(model, chunk, tokens, direction)
        products, elementwise = products + count * work.products, elementwise + count * work.elementwise
        kernel_bytes += count * work.bytes
        seconds += count * kernel_seconds(model, chunk, tokens, direction, chip)
    cost = cost._replace(flops=cost.flops + products + elementwise, bytes=cost.bytes + kernel_bytes)
    bound = max(cost.flops / chip.peak if chip.peak else 0.0, cost.bytes / chip.bandwidth)
    estimate = cost.cycles / chip.core.clock + seconds if cost.cycles is not None and chip.core else None
    return cost, Seconds(bound, estimate, seconds)


def kernel_seconds(model: ModelConfig, chunk: int, tokens: int, direction: Direction, chip: Chip) -> float:
    """The least seconds of one mixing kernel: the largest of matrix products, elementwise operations and bytes.

    Only for TPUs; 0 for other chips, for which nothing is estimated. The overhead of grid steps is not included.
    """
    if chip.core is None or chip.peak is None:
        return 0.0
    work = kernel_work(model, chunk, tokens, direction, chip.core.matrix_side)
    vector = work.elementwise / (chip.core.lanes * chip.core.clock)
    return max(_EXACT_PASSES * work.products / chip.peak, vector, work.bytes / chip.bandwidth)


def whole_step(
    times: Mapping[str, Seconds], model: ModelConfig, config: PretrainConfig, topology: Topology
) -> tuple[float, float | None]:
    """Seconds of a micro-batch, by the bound and by the estimate.

    Sums all blocks forward and backward, embedding, head and loss, and the micro-batch's share of the update: the time
    to move one chip's part of parameters, gradients and moments.
    """
    state = _UPDATE_BYTES * sum(parameter_counts(model).values()) / config.fsdp
    assert topology.chip is not None  # checked by `compare`
    update = state / topology.chip.bandwidth * config.rows_at_once(topology.chips) / config.batch_rows
    parts = (times["forward"], times["backward"], times["head"])
    totals: list[float | None] = []
    for values in zip(*((part.bound, part.estimate) for part in parts), strict=True):
        forward, backward, head = values
        complete = None not in values
        totals.append(model.blocks * (forward + backward) + head + update if complete else None)
    bound, estimate = totals
    assert bound is not None  # only estimates may be missing
    return bound, estimate
