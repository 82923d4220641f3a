"""Arithmetic without a compiler: operations of a training step and of the mixing kernels, and memory, time and cost.

XLA counts the body of a scan once, and a custom call (a kernel) not at all. A multiply-add counts as 2 and the backward
pass as twice the forward pass; recomputation by rematerialisation is not counted. These are the operations that the
model needs, so the utilisations of different settings are comparable. `model.capacity.compiled` has the compiler's
figures of the memory, which replace these where the compiler is installed.
"""

import math
from collections import Counter
from dataclasses import dataclass
from typing import Literal, NamedTuple

from nautile.common.errors import ConfigError
from nautile.configs.model import LOSS_CHUNK, ModelConfig
from nautile.configs.training import PretrainConfig
from nautile.model.capacity.topology import GPUS, Topology
from nautile.model.weights.author_shapes import author_shapes

# FLOPs per element of the memory [K, H, M] and token: phase and encoding 6, both sums 4, normalisation 2, readout 8.
_MIXING = 20


def forward_flops(config: ModelConfig, length: int) -> dict[str, float]:
    """FLOPs per token of the forward pass, by part of the model, in a row with one document of `length` tokens."""
    width, heads, head_dim = config.width, config.memory_heads, config.head_dim
    memory = heads * head_dim * config.spectral_samples
    projected = config.projection_width
    gated = 2 * head_dim * heads
    expanded = config.readout_expand * head_dim * heads
    readout = heads * 2 * head_dim * 2 * config.readout_expand * head_dim
    # Of one token: input and gate projections, the convolution's taps, the readout of each head, the output projection.
    sca = 2 * (width * (projected + gated) + config.convolution * projected + readout + expanded * width)
    kv_width = config.kv_heads * config.attention_head_dim
    # Queries and output are as wide as the stream; keys and values are narrower.
    products = 2 * width * (2 * width + 2 * kv_width)
    attended = 2 * 2 * width * (length + 1) / 2  # scores and values against half of the row, on average
    layers, transformers = (config.blocks * config.pattern.count(letter) for letter in "SA")
    return {
        "sca": float(layers * sca),
        "mixing": float(layers * _MIXING * memory),
        "attention": float(transformers * (products + attended)),
        "feed_forward": float(transformers * 2 * 3 * width * config.feed_forward),
        "head": float(2 * width * config.vocabulary),
    }


def training_flops(config: ModelConfig, length: int) -> float:
    """FLOPs per token of a training step: three times the forward pass."""
    return 3 * sum(forward_flops(config, length).values())


Direction = Literal["forward", "backward"]


class KernelWork(NamedTuple):
    """The work of one mixing kernel: FLOPs of its float32 products, elementwise operations, bytes in memory."""

    products: float
    elementwise: float
    bytes: float


# Number of products of weights [C, C] with a tile [C, J], and of a tile with the matrix [H, J] that repeats or sums
# over M.
_TILE_PRODUCTS = {"forward": (2, 3), "backward": (6, 5)}
# Elementwise operations per element of [C, J] and of [C, C], as XLA counts them in `mixing.kernels.tile`.
_TILE_ELEMENTWISE = {"forward": (59, 18), "backward": (103, 38)}


def kernel_work(config: ModelConfig, chunk: int, tokens: int, direction: Direction, least_side: int = 1) -> KernelWork:
    """The work of one mixing kernel, with chunks of `chunk` positions, over `tokens` tokens of one SCA layer.

    least_side: a matrix unit multiplies blocks of this side, so a shorter contracted axis counts as this long.
    """
    heads, head_dim = config.memory_heads, config.head_dim
    joined = head_dim * config.spectral_samples
    weighted, folded = _TILE_PRODUCTS[direction]
    inside, folding = 2 * max(chunk, least_side) * joined, 2 * max(head_dim, least_side) * joined
    per_joined, per_pair = _TILE_ELEMENTWISE[direction]
    width = 2 if config.compute_dtype == "bfloat16" else 4
    # Read or written once, in the compute type: keys and queries, readouts or their gradients, and in the backward pass
    # the gradients of keys and queries; in float32: gates, the row's timeline, and the state before each chunk.
    arrays = head_dim + 2 * joined + 2 * head_dim + (head_dim + 2 * joined if direction == "backward" else 0)
    gates = 2 if direction == "backward" else 1
    bytes_per_token = heads * (width * arrays + 4 * (gates + (2 * joined + 1) / chunk)) + 4 * 3
    return KernelWork(
        float(tokens * heads * (weighted * inside + folded * folding)),
        float(tokens * heads * (per_joined * joined + per_pair * chunk)),
        float(tokens * bytes_per_token),
    )


# Bytes for each value of the layer whose gradient is computed: the value, its gradient and copies in float32. Fitted to
# what the compilers report of the published model (docs/tpu.md): within 25 % of them for 2 to 256 rows on a chip.
_TPU_BYTES, _GPU_BYTES = 6.5, 4


@dataclass(frozen=True)
class TrainingEstimate:
    """Bytes on one chip by kind, and the time and cost of the whole pretraining.

    state: float32 parameters and the optimizer's moments. gradients: also the embedding table in the compute type, and
    its gradient, which no chip has only a part of. days: None if the chip's peak is unknown. dollars: None if no price
    is known either.
    """

    topology: str
    chips: int
    parameters: int
    rows_per_chip: int
    state: int
    gradients: int
    activations: int
    memory: int
    memory_limit: int
    fits: bool
    tokens: int
    flops_per_token: float
    mfu_assumed: float
    days: float | None
    chip_hours: float | None
    dollars_per_chip_hour: float | None
    dollars: float | None


def estimate_training(
    config: PretrainConfig,
    model: ModelConfig,
    length: int,
    topology: Topology,
    mfu: float,
    dollars_per_chip_hour: float | None = None,
) -> TrainingEstimate:
    """Estimate pretraining in rows of `length` tokens; `mfu`: the utilisation to assume.

    dollars_per_chip_hour: None: the chip's list price. Raises `ConfigError` for a mesh or batch that does not divide.
    """
    chip, chips = topology.chip, topology.chips
    assert chip is not None, "this machine's own devices are compiled for"
    if chips % config.fsdp:
        raise ConfigError(f"pretrain.fsdp {config.fsdp} does not divide the {chips} devices of {topology.name}")
    rows = config.rows_at_once(chips) // chips
    counts = parameters_by_formula(model)
    table = model.padded_vocabulary * model.width
    stored, matrices = sum(counts.values()) - counts["embedding"] + table, counts["matrices"]
    # Muon has one moment for the matrices of the blocks, AdamW has two.
    moments = 2 * stored - (matrices if config.optimizer.name == "muon" else 0)
    state = 4 * (stored + moments) // config.fsdp
    sums = 2 if rows * chips < config.batch_rows else 1  # of micro-batches, beside the gradient of the present one
    gradients = 4 * sums * stored // config.fsdp + (4 + _width(model)) * table
    activations = rows * length * _activation_bytes(model, length, chip.name in GPUS)
    memory = state + gradients + activations
    tokens, flops = sum(phase.tokens for phase in config.phases), training_flops(model, length)
    hours = tokens * flops / (mfu * chip.peak) / 3600 if chip.peak else None
    price = chip.price if dollars_per_chip_hour is None else dollars_per_chip_hour
    return TrainingEstimate(
        topology=topology.name,
        chips=chips,
        parameters=sum(counts.values()),
        rows_per_chip=rows,
        state=state,
        gradients=gradients,
        activations=activations,
        memory=memory,
        memory_limit=chip.memory,
        fits=memory <= chip.memory,
        tokens=tokens,
        flops_per_token=flops,
        mfu_assumed=mfu,
        days=None if hours is None else hours / chips / 24,
        chip_hours=hours,
        dollars_per_chip_hour=price,
        dollars=None if hours is None or price is None else hours * price,
    )


# Of the author's names, those that the model has another name for.
_PARTS = {
    "attn.conv_weight": "conv", "attn.decay_slopes": "decay", "attn.W_readout": "readout", "attn.theta_raw": "theta",
    "attn.theta_d_raw": "theta", "attn.w_int": "integration", "attn.w_int_raw": "integration",
}  # fmt: skip


def parameter_counts(model: ModelConfig) -> dict[str, int]:
    """Learned parameters by part; rows that only pad the vocabulary are not counted. The sum is the model's size.

    All layers of a kind count as one part: "sca.in_proj". By arithmetic, without JAX, which takes a second to import.
    """
    counts: Counter[str] = Counter()
    kinds = {"S": "sca", "A": "attention"}
    for name, shape in author_shapes(model):
        if name == "embedding.weight":  # it has a row for padding
            continue
        _, index, tensor = name.split(".", 2)
        part = _PARTS.get(tensor) or tensor.removeprefix("attn.").removesuffix(".weight").removesuffix(".scale")
        kind = kinds[model.pattern[int(index) % len(model.pattern)]]
        counts[f"{kind}.{part.replace('.bias', '_bias')}"] += math.prod(shape)
    return {"embedding": model.vocabulary * model.width, **dict(sorted(counts.items()))}


def state_bytes(model: ModelConfig) -> dict[str, int]:
    """Bytes of one sequence's decoding state (paper §2.2.5: O(1) for SCA), by arithmetic.

    `sca_sums` and `convolution_history` are totals, `kv_per_token` is for each token.
    """
    item = 2 if model.compute_dtype == "bfloat16" else 4
    layers = {letter: model.blocks * model.pattern.count(letter) for letter in "SA"}
    sums = 4 * model.memory_heads * (2 * model.head_dim * model.spectral_samples + 1)
    return {
        "sca_sums": layers["S"] * sums,
        "convolution_history": layers["S"] * item * (model.convolution - 1) * model.projection_width,
        "kv_per_token": layers["A"] * item * 2 * model.kv_heads * model.attention_head_dim,
    }


def parameters_by_formula(model: ModelConfig) -> dict[str, int]:
    """Learned parameters: the embedding, the matrices of all layers, and their other parameters."""
    counts = {"embedding": model.vocabulary * model.width, "matrices": 0, "others": 0}
    for name, shape in author_shapes(model):
        if name != "embedding.weight":  # it has a row for padding
            is_matrix = len(shape) > 1 and name.endswith((".weight", ".W_readout"))
            counts["matrices" if is_matrix else "others"] += math.prod(shape)
    return counts


def _activation_bytes(model: ModelConfig, length: int, gpu: bool) -> int:
    """Bytes for each token of a row: what `remat` keeps of all layers, and what the backward pass of one needs."""
    width, inner = model.width, model.memory_heads * model.head_dim
    expanded = model.readout_expand * inner
    kv_width = model.kv_heads * model.attention_head_dim
    # Values of a layer: its input and the results of its operations.
    values = {
        "S": 3 * width + 3 * model.projection_width + 2 * inner * model.spectral_samples + 6 * inner + 3 * expanded,
        "A": 6 * width + 4 * kv_width + model.attention_heads * length // 2 + 4 * model.feed_forward,
    }
    products = {
        "S": model.projection_width + 2 * inner + width,
        "A": 3 * width + 2 * kv_width + 2 * model.feed_forward,
    }
    layers = {letter: model.blocks * model.pattern.count(letter) for letter in "SA"}
    kept = {
        "none": sum(layers[letter] * values[letter] for letter in "SA"),
        "dots": sum(layers[letter] * (products[letter] + width) for letter in "SA"),
        "layer": sum(layers.values()) * width,
        "block": (model.blocks + len(model.pattern)) * width,
    }[model.remat]
    largest = max(values[letter] for letter in set(model.pattern))
    # The logits are gone before the backward pass of the layers.
    logits = min(LOSS_CHUNK, length) * model.padded_vocabulary * (4 + _width(model)) // length
    return _width(model) * kept + round(max((_GPU_BYTES if gpu else _TPU_BYTES) * largest, logits))


def _width(model: ModelConfig) -> int:
    return 2 if model.compute_dtype == "bfloat16" else 4
