"""Floating-point operations by formula: of a training step (XLA counts the body of a scan once), and of the mixing
kernels (XLA counts nothing of a custom call).

A multiply-add counts 2, the backward pass twice the forward pass, and what rematerialisation recomputes is not counted:
these are the operations that the model needs, so that utilisations of different settings can be compared.
"""

from typing import Literal, NamedTuple

from configs.model import ModelConfig

# Dense bfloat16 peaks of one chip, FLOP/s: docs.cloud.google.com/tpu/docs/v4, v5e, v5p and v6e; NVIDIA's data sheets of
# A100, H100 (SXM) and H200, without sparsity.
PEAK_FLOPS = {"v4": 275e12, "v5e": 197e12, "v5p": 459e12, "v6e": 918e12, "a100": 312e12, "h100": 989e12, "h200": 989e12}

# JAX's names of these chips; where two begin alike, the longer is first.
_DEVICE_KINDS = {
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5": "v5p",
    "TPU v6 lite": "v6e",
    "NVIDIA A100": "a100",
    "NVIDIA H100": "h100",
    "NVIDIA H200": "h200",
}

# Per element of the memory [K, H, M] and token: phase and encoding 6, the two running sums 4, normalising 2, readout 8.
_MIXING = 20


def peak_of(device_kind: str) -> float | None:
    """The peak of a device by JAX's name for it; None if it is not listed."""
    return next((PEAK_FLOPS[chip] for kind, chip in _DEVICE_KINDS.items() if device_kind.startswith(kind)), None)


def forward_flops(config: ModelConfig, length: int) -> dict[str, float]:
    """FLOPs of the forward pass per token of a row of `length` tokens in one document, by part of the model."""
    width, heads, head_dim = config.width, config.memory_heads, config.head_dim
    memory = heads * head_dim * config.spectral_samples
    projected = heads * (head_dim + 1) + 2 * config.query_heads * head_dim * config.spectral_samples
    gated = 2 * head_dim * heads
    expanded = config.readout_expand * head_dim * heads
    readout = heads * 2 * head_dim * 2 * config.readout_expand * head_dim
    sca = 2 * (width * (projected + gated) + config.convolution * projected + readout + expanded * width)
    shared = config.kv_heads * config.attention_head_dim
    products = 2 * width * (2 * width + 2 * shared)
    seen = 2 * 2 * width * (length + 1) / 2  # scores and values against half of the row, on average
    layers = config.blocks * config.sca_per_block
    return {
        "sca": float(layers * sca),
        "mixing": float(layers * _MIXING * memory),
        "attention": config.blocks * (products + seen),
        "feed_forward": float(config.blocks * 2 * 3 * width * config.feed_forward),
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


# Products of a chunk [C, C] with [C, J], and of a tile with the matrix [H, J] that repeats it over M or sums it.
_TILE_PRODUCTS = {"forward": (2, 3), "backward": (6, 5)}
# Elementwise operations for each element of [C, J] and of [C, C], as XLA counts them in `mixing.kernels.tile`.
_TILE_ELEMENTWISE = {"forward": (59, 18), "backward": (103, 38)}


def kernel_work(config: ModelConfig, chunk: int, tokens: int, direction: Direction, least_side: int = 1) -> KernelWork:
    """Work of a "forward" or "backward" mixing kernel in chunks of `chunk` over `tokens` tokens of one SCA layer.

    least_side: a matrix unit multiplies blocks of that side, so shorter sides of what is summed over count as much.
    """
    heads, head_dim = config.memory_heads, config.head_dim
    joined = head_dim * config.spectral_samples
    weighted, folded = _TILE_PRODUCTS[direction]
    inside, folding = 2 * max(chunk, least_side) * joined, 2 * max(head_dim, least_side) * joined
    per_joined, per_pair = _TILE_ELEMENTWISE[direction]
    width = 2 if config.compute_dtype == "bfloat16" else 4
    # Read or written once: keys and queries; readouts, or their gradients beside those of the inputs; and in float32
    # gates, the row's times, and the state before each chunk.
    arrays = head_dim + 2 * joined + 2 * head_dim + (head_dim + 2 * joined if direction == "backward" else 0)
    gates = 2 if direction == "backward" else 1
    moved = heads * (width * arrays + 4 * (gates + (2 * joined + 1) / chunk)) + 4 * 3
    return KernelWork(
        float(tokens * heads * (weighted * inside + folded * folding)),
        float(tokens * heads * (per_joined * joined + per_pair * chunk)),
        float(tokens * moved),
    )
