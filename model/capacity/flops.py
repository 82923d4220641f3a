"""Floating-point operations of a training step, by formula: XLA counts the body of a scan once.

A multiply-add counts 2, the backward pass twice the forward pass, and what rematerialisation recomputes is not counted:
these are the operations that the model needs, so that utilisations of different settings can be compared.
"""

from configs.model import ModelConfig

# Dense bfloat16 peaks of one chip, FLOP/s, from the vendors' sheets.
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
