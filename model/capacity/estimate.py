"""Memory, time and cost of pretraining by arithmetic alone, without JAX or a compiler, in milliseconds.

`model.capacity.planner` has the compiler's figures of the memory, which replace these where the compiler is installed.
Time is that of the formula's operations at an assumed utilisation in both.
"""

from dataclasses import dataclass

from nautile.common.errors import ConfigError
from nautile.configs.model import ModelConfig
from nautile.configs.training import PretrainConfig
from nautile.model.capacity.flops import training_flops
from nautile.model.capacity.topology import GPUS, Topology
from nautile.model.loss import LOSS_CHUNK
from nautile.model.training.micro_batches import check_rows, rows_at_once

# Bytes for each value of the layer whose gradient is computed: the value, its gradient and copies in float32. Fitted to
# what the compilers report of the published model (docs/tpu.md): within 25 % of them for 2 to 256 rows on a chip.
_TPU_BYTES, _GPU_BYTES = 6.5, 4


@dataclass(frozen=True)
class TrainingEstimate:
    """Bytes on one chip by kind, and the time and cost of the whole pretraining.

    state: float32 parameters and the optimizer's moments. gradients: also the embedding table in the compute type, and
    its gradient, which no chip has only a part of. days: None if the chip's peak is unknown. dollars: lowest and
    highest; None if no price is known either.
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
    dollars_per_chip_hour: tuple[float, float] | None
    dollars: tuple[float, float] | None


def estimate_training(
    config: PretrainConfig,
    model: ModelConfig,
    length: int,
    topology: Topology,
    mfu: float,
    dollars_per_chip_hour: float | None = None,
) -> TrainingEstimate:
    """Estimate pretraining in rows of `length` tokens; `mfu`: the utilisation to assume.

    dollars_per_chip_hour: None: the chip's usual prices. Raises `ConfigError` for a mesh or batch that does not divide.
    """
    chip, chips = topology.chip, topology.chips
    assert chip is not None, "this machine's own devices are compiled for"
    if chips % config.fsdp:
        raise ConfigError(f"pretrain.fsdp {config.fsdp} does not divide the {chips} devices of {topology.name}")
    check_rows(config, chips)
    rows = rows_at_once(config, chips) // chips
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
    # Time and cost.
    tokens, flops = sum(phase.tokens for phase in config.phases), training_flops(model, length)
    hours = tokens * flops / (mfu * chip.peak) / 3600 if chip.peak else None
    prices = chip.hourly if dollars_per_chip_hour is None else (dollars_per_chip_hour, dollars_per_chip_hour)
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
        dollars_per_chip_hour=prices,
        dollars=None if hours is None or prices is None else (hours * prices[0], hours * prices[1]),
    )


def parameters_by_formula(model: ModelConfig) -> dict[str, int]:
    """Learned parameters: the embedding, the matrices of all layers, and their other parameters."""
    width, heads, head_dim = model.width, model.memory_heads, model.head_dim
    expanded = model.readout_expand * head_dim
    grid = heads * head_dim * model.spectral_samples
    weights = grid * model.query_heads // heads if model.integration == "free" else grid
    kv_width = model.kv_heads * model.attention_head_dim
    matrices = {
        "S": width * (_projected(model) + 2 * head_dim * heads + expanded * heads) + heads * 4 * head_dim * expanded,
        "A": width * (2 * width + 2 * kv_width + 3 * model.feed_forward),
    }
    others = {
        "S": width + model.convolution * _projected(model) + grid + weights + 4 * heads + 2 * head_dim * heads,
        "A": 3 * width + 2 * model.feed_forward,
    }
    layers = {letter: model.blocks * model.pattern.count(letter) for letter in "SA"}
    return {
        "embedding": model.vocabulary * width,
        "matrices": sum(layers[letter] * matrices[letter] for letter in "SA"),
        "others": sum(layers[letter] * others[letter] for letter in "SA"),
    }


def _activation_bytes(model: ModelConfig, length: int, gpu: bool) -> int:
    """Bytes for each token of a row: what `remat` keeps of all layers, and what the backward pass of one needs."""
    width, inner = model.width, model.memory_heads * model.head_dim
    expanded = model.readout_expand * inner
    kv_width = model.kv_heads * model.attention_head_dim
    # Values of a layer: its input and the results of its operations.
    values = {
        "S": 3 * width + 3 * _projected(model) + 2 * inner * model.spectral_samples + 6 * inner + 3 * expanded,
        "A": 6 * width + 4 * kv_width + model.attention_heads * length // 2 + 4 * model.feed_forward,
    }
    products = {
        "S": _projected(model) + 2 * inner + width,
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


def _projected(model: ModelConfig) -> int:
    """Columns of the input projection of an SCA layer."""
    queries = model.query_heads * model.head_dim * model.spectral_samples
    return model.memory_heads * (model.head_dim + 1) + 2 * queries


def _width(model: ModelConfig) -> int:
    return 2 if model.compute_dtype == "bfloat16" else 4
