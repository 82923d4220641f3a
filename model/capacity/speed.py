"""Estimates of training speed for several model settings, from one compiled block each; nothing is measured.

Each setting has two figures. The bound is a roofline: no program takes less time than its FLOPs at the chip's peak, or
its bytes at the bandwidth of the chip's memory. The estimate is the compiler's: the cycles that it expects of each
operation, at the chip's clock. Only the TPU compiler has one, and none for Pallas kernels, for which the least time of
their work by formula is added. Neither includes communication between chips, or the host.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

from nautile.common.errors import ConfigError
from nautile.configs.model import ModelConfig
from nautile.configs.training import PretrainConfig
from nautile.model.capacity.block import Setting, compiled_block, compiled_head
from nautile.model.capacity.compiled import ProgramCost, program_cost
from nautile.model.capacity.flops import Direction, kernel_work, training_flops
from nautile.model.capacity.topology import Chip, Topology
from nautile.model.layers.mixing.kernels import gpu, tpu
from nautile.model.nautile import parameter_counts
from nautile.model.training.micro_batches import check_rows, rows_at_once

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
    check_rows(config, topology.chips)
    rows = rows_at_once(config, topology.chips) // topology.chips
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
    # Tokens per second and utilisation of the whole topology, by each figure.
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
    # The roofline bound, and the compiler's cycles at the chip's clock.
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
    update = state / topology.chip.bandwidth * rows_at_once(config, topology.chips) / config.batch_rows
    parts = (times["forward"], times["backward"], times["head"])
    totals: list[float | None] = []
    for values in zip(*((part.bound, part.estimate) for part in parts), strict=True):
        forward, backward, head = values
        complete = None not in values
        totals.append(model.blocks * (forward + backward) + head + update if complete else None)
    bound, estimate = totals
    assert bound is not None  # only estimates may be missing
    return bound, estimate
