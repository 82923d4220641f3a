"""What goes into the two graphs of a model and what comes out of them: names, types and shapes.

State, float32, the same in both and in this order (A SCA layers in all, T taps, C columns of the input projection, S
columns of the context; M and H in that order):

    sums [A, B, K, 1, 2, M, H], real and imaginary    sums_z [A, B, K, 1, 1, 1, 1]
    history.N [A, B, C] for N = 0 … T-2: the convolution's inputs, the oldest first, each times its last tap
    keys.N, values.N [B, G, S, H] for each block N; where a step's past has S columns, it writes into these

    prompt  tokens [B, L], lengths [B], wanted [B, P] -> logits [B, P, V], state with S = L rounded up to 32
    step    tokens [B, 1], positions [B], past state  -> logits [B, 1, V], state

The prompt graph of a checkpoint that was tuned with a head also gives hidden [B, S, D]: what the head is computed from.

Prompts are padded on the right with any id; `wanted` are the columns whose logits are computed. `positions` are those
of the tokens: how many came before. A model without SCA layers has no sums and no history.
"""

from configs.model import ModelConfig
from model.layers.sca import projection_width

HIDDEN = "hidden"  # the output of the prompt graph for a head
SUMS = ("sums", "sums_z")  # with axes over which a step broadcasts
CHUNK = 32  # columns that a prompt is computed in
PAST = "past."  # before the names of a step's inputs of state

Shape = tuple[int | str, ...]  # a letter stands for any size


def history_names(config: ModelConfig) -> list[str]:
    """The parts of the state that hold earlier inputs of the convolution, the oldest first."""
    return [f"history.{index}" for index in range(config.convolution - 1)] if config.sca_per_block else []


def sca_shapes(config: ModelConfig) -> dict[str, Shape]:
    """The name and shape of every part of the state that does not grow."""
    heads, head_dim, layers = config.memory_heads, config.head_dim, config.blocks * config.sca_per_block
    if not layers:
        return {}
    every = (layers, "B", heads, 1)
    sums = ((*every, 2, config.spectral_samples, head_dim), (*every, 1, 1, 1))
    shapes: dict[str, Shape] = dict(zip(SUMS, sums, strict=True))
    return shapes | {name: (layers, "B", projection_width(config)) for name in history_names(config)}


def state_shapes(config: ModelConfig) -> dict[str, Shape]:
    """The name and shape of every part of the state."""
    shapes = sca_shapes(config)
    cache = ("B", config.kv_heads, "S", config.attention_head_dim)
    return shapes | {f"{part}.{block}": cache for block in range(config.blocks) for part in ("keys", "values")}


def token_shapes(graph: str) -> dict[str, Shape]:
    """The inputs of int64: all of "prompt", and those of "step" that are not its past state."""
    if graph == "prompt":
        return {"tokens": ("B", "L"), "lengths": ("B",), "wanted": ("B", "P")}
    return {"tokens": ("B", 1), "positions": ("B",)}


def logits_shape(config: ModelConfig, graph: str) -> Shape:
    return ("B", "P" if graph == "prompt" else 1, config.vocabulary)


def hidden_shape(config: ModelConfig) -> Shape:
    return ("B", "S", config.width)
