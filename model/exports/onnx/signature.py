"""The inputs and outputs of a model's two graphs: names, types and shapes.

The state is float32, the same in both graphs, in this order (A SCA layers in total,
T taps, C columns of the input projection, S columns of the context; M before H):

    sums [A, B, K, 1, 2, M, H], real and imaginary    sums_z [A, B, K, 1, 1, 1, 1]
    history.N [A, B, C] for N = 0 … T-2: the convolution's inputs, oldest first, each multiplied by its last tap
    keys.N, values.N [B, G, S, H] of Transformer layer N, counted over all blocks; if a step's past has S columns, the
    step writes into these

    prompt  tokens [B, L], lengths [B], logit_columns [B, P] -> logits [B, P, V], state with S = L rounded up to 32
    step    tokens [B, 1], positions [B], past state  -> logits [B, 1, V], state

For a checkpoint tuned with a head, the prompt graph also outputs hidden [B, S, D], the features of the head.

Prompts are padded on the right with any id. `logit_columns` are the columns whose logits to compute. `positions` are
the positions of the tokens: the number of tokens before. A model without SCA layers has no sums and no history, one
without Transformer layers no keys and values.
"""

from nautile.configs.model import ModelConfig

HIDDEN = "hidden"  # the output of the prompt graph for a head
SUMS = ("sums", "sums_z")  # with axes of size 1 that a step broadcasts
CHUNK = 32  # columns per chunk of a prompt
PAST = "past."  # prefix of the names of a step's state inputs

Shape = tuple[int | str, ...]  # a letter is a dimension of any size


def history_names(config: ModelConfig) -> list[str]:
    """Names of the state's earlier convolution inputs, oldest first."""
    return [f"history.{index}" for index in range(config.convolution - 1)] if "S" in config.pattern else []


def sca_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Names and shapes of the parts of the state of constant size."""
    heads, head_dim, layers = config.memory_heads, config.head_dim, config.blocks * config.pattern.count("S")
    if not layers:
        return {}
    axes = (layers, "B", heads, 1)
    sums = ((*axes, 2, config.spectral_samples, head_dim), (*axes, 1, 1, 1))
    shapes: dict[str, Shape] = dict(zip(SUMS, sums, strict=True))
    return shapes | {name: (layers, "B", config.projection_width) for name in history_names(config)}


def attention_layers(config: ModelConfig) -> int:
    return config.blocks * config.pattern.count("A")


def cache_names(index: int) -> tuple[str, str]:
    """Names of the keys and values of a Transformer layer, by its number among those of all blocks."""
    return f"keys.{index}", f"values.{index}"


def state_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Names and shapes of all parts of the state."""
    shapes = sca_shapes(config)
    cache = ("B", config.kv_heads, "S", config.attention_head_dim)
    return shapes | {name: cache for index in range(attention_layers(config)) for name in cache_names(index)}


def token_shapes(graph: str) -> dict[str, Shape]:
    """The int64 inputs of a graph: all inputs of "prompt", and those of "step" except its past state."""
    if graph == "prompt":
        return {"tokens": ("B", "L"), "lengths": ("B",), "logit_columns": ("B", "P")}
    return {"tokens": ("B", 1), "positions": ("B",)}


def logits_shape(config: ModelConfig, graph: str) -> Shape:
    return ("B", "P" if graph == "prompt" else 1, config.vocabulary)


def hidden_shape(config: ModelConfig) -> Shape:
    return ("B", "S", config.width)
