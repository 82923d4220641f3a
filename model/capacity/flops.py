"""Floating-point operations by formula: of a training step, and of the mixing kernels.

XLA counts the body of a scan once, and a custom call (a kernel) not at all. A multiply-add counts as 2 and the backward
pass as twice the forward pass; recomputation by rematerialisation is not counted. These are the operations that the
model needs, so the utilisations of different settings are comparable.
"""

from typing import Literal, NamedTuple

from nautile.configs.model import ModelConfig

# Dense bfloat16 peaks of one chip, FLOP/s: docs.cloud.google.com/tpu/docs/v4, v5e, v5p and v6e; NVIDIA's data sheets of
# A100, H100 (SXM), H200 and RTX 4090 (summed in float32), without sparsity.
PEAK_FLOPS = {
    **{"v4": 275e12, "v5e": 197e12, "v5p": 459e12, "v6e": 918e12},
    **{"a100": 312e12, "h100": 989e12, "h200": 989e12, "rtx4090": 165.2e12},
}

# JAX's names of these chips, matched as prefixes in this order: the longer of two alike comes first.
_DEVICE_KINDS = {
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5": "v5p",
    "TPU v6 lite": "v6e",
    "NVIDIA A100": "a100",
    "NVIDIA H100": "h100",
    "NVIDIA H200": "h200",
    "NVIDIA GeForce RTX 4090": "rtx4090",
}

# FLOPs per element of the memory [K, H, M] and token: phase and encoding 6, both sums 4, normalisation 2, readout 8.
_MIXING = 20


def peak_of(device_kind: str) -> float | None:
    """The peak FLOP/s of a device by JAX's name for it; None if unknown."""
    return next((PEAK_FLOPS[chip] for kind, chip in _DEVICE_KINDS.items() if device_kind.startswith(kind)), None)


def forward_flops(config: ModelConfig, length: int) -> dict[str, float]:
    """FLOPs per token of the forward pass, by part of the model, in a row with one document of `length` tokens."""
    width, heads, head_dim = config.width, config.memory_heads, config.head_dim
    memory = heads * head_dim * config.spectral_samples
    projected = heads * (head_dim + 1) + 2 * config.query_heads * head_dim * config.spectral_samples
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
