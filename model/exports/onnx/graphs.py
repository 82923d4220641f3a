"""The two graphs of a model: a prompt from the beginning, and one more token.

State, float32, the same in both and in this order (A SCA layers in all, T taps, C columns of the input projection, S
columns of the context; M and H in that order):

    sums_re, sums_im [A, B, K, M, H]    sums_z [A, B, K]    history [A, B, T-1, C]
    keys.N, values.N [B, G, S, H] for each block N; where a step's past has S columns, it writes into these

    prompt  tokens [B, L], lengths [B], wanted [B, P] -> logits [B, P, V], state with S = L rounded up to 32
    step    tokens [B, 1], positions [B], past state  -> logits [B, 1, V], state

Prompts are padded on the right with any id; `wanted` are the columns whose logits are computed. `positions` are those
of the tokens: how many came before. A model without SCA layers has no sums and no history.
"""

from collections.abc import Sequence

import numpy as np
import onnx

from configs.model import ModelConfig
from model.exports.onnx.graph import Graph, WeightFile
from model.exports.onnx.layers import CHUNK, ChunkValues, Layers, SCAValues
from model.layers.sca import projected
from model.nautile import sca_names

SUMS = ("sums_re", "sums_im", "sums_z", "history")


def state_shapes(config: ModelConfig, columns: int | str) -> dict[str, tuple[int | str, ...]]:
    """The name and shape of every part of the state; the batch is "B"."""
    heads, head_dim, layers = config.memory_heads, config.head_dim, config.blocks * config.sca_per_block
    sums = (layers, "B", heads, config.spectral_samples, head_dim)
    history = (layers, "B", config.convolution - 1, projected(config))
    shapes = dict(zip(SUMS, (sums, sums, (layers, "B", heads), history), strict=True)) if layers else {}
    cache = ("B", config.kv_heads, columns, config.attention_head_dim)
    return shapes | {f"{part}.{block}": cache for block in range(config.blocks) for part in ("keys", "values")}


def prompt_graph(weights: WeightFile, config: ModelConfig, accuracy: int) -> onnx.ModelProto:
    """The graph that reads whole prompts."""
    graph = Graph(weights)
    layers = Layers(graph, config, accuracy)
    tokens = graph.input("tokens", np.int64, ("B", "L"))
    lengths = graph.input("lengths", np.int64, ("B",))
    wanted = graph.input("wanted", np.int64, ("B", "P"))
    missing = graph.op("Mod", graph.op("Neg", graph.op("Shape", tokens, start=1)), graph.indices(CHUNK))
    # The result has the divisor's sign.
    tokens = graph.op("Pad", tokens, graph.op("Concat", graph.indices(0, 0, 0), missing, axis=0))
    columns = graph.op("Shape", tokens, start=1)
    last = graph.op("Sub", lengths, graph.indices(1))
    seen = (graph.op("Cast", last, to=onnx.TensorProto.INT32), graph.op("Cast", columns, to=onnx.TensorProto.INT32))
    chunks = _chunk_values(graph, config, columns, lengths)
    x = layers.embed(tokens)
    states: list[SCAValues] = []
    for block in range(config.blocks):
        for name in sca_names(config):
            x, state = layers.sca_prompt(x, f"block_{block}.{name}", chunks)
            states.append(state)
        into = (f"keys.{block}", f"values.{block}")
        x = layers.attention(x, f"block_{block}.attention", ("", ""), seen, into)
    rows = graph.op("GatherND", x, graph.op("Unsqueeze", wanted, graph.indices(-1)), batch_dims=1)
    layers.logits(rows, "logits")
    return _finished(graph, config, states, "prompt", "P", "S")


def step_graph(weights: WeightFile, config: ModelConfig, accuracy: int) -> onnx.ModelProto:
    """The graph that adds one token to every row."""
    graph = Graph(weights)
    layers = Layers(graph, config, accuracy)
    tokens = graph.input("tokens", np.int64, ("B", 1))
    positions = graph.input("positions", np.int64, ("B",))
    for name, shape in state_shapes(config, "S").items():
        graph.input(f"past.{name}", np.float32, shape)
    count = config.blocks * config.sca_per_block
    past = zip(*(graph.split(f"past.{name}", [1] * count, axis=0) for name in SUMS), strict=True) if count else ()
    past_states = iter([SCAValues(*parts) for parts in past])
    longest = graph.op("Add", graph.op("ReduceMax", positions, keepdims=1), graph.indices(1))
    seen = (
        graph.op("Cast", positions, to=onnx.TensorProto.INT32),
        graph.op("Cast", longest, to=onnx.TensorProto.INT32),
    )
    float_positions = graph.op("Unsqueeze", graph.op("Cast", positions, to=onnx.TensorProto.FLOAT), graph.indices(1))
    x = layers.embed(tokens)
    states: list[SCAValues] = []
    for block in range(config.blocks):
        for name in sca_names(config):
            x, state = layers.sca_step(x, f"block_{block}.{name}", next(past_states), float_positions)
            states.append(state)
        parts = (f"keys.{block}", f"values.{block}")
        before = (f"past.{parts[0]}", f"past.{parts[1]}")
        x = layers.attention(x, f"block_{block}.attention", before, seen, parts)
    layers.logits(x, "logits")
    return _finished(graph, config, states, "step", 1, "S")


def _chunk_values(graph: Graph, config: ModelConfig, columns: str, lengths: str) -> ChunkValues:
    zero, single = graph.constant(0, np.int64), graph.constant(1, np.int64)
    count = graph.op("Squeeze", columns)
    column_L = graph.op("Range", zero, count, single)
    reach = config.convolution - 1
    # Row b's inputs t = 0 … T-2 before its end are at columns lengths[b] + t of the inputs padded by T-1 on the left.
    recent = graph.op("Add", graph.op("Unsqueeze", lengths, graph.indices(1)), graph.indices(*range(reach)))
    last_BL = graph.op("Equal", column_L, graph.op("Unsqueeze", graph.op("Sub", lengths, single), graph.indices(1)))
    chunk_N = graph.op("Range", zero, graph.op("Div", count, graph.constant(CHUNK, np.int64)), single)
    to_N1, from_1N = (graph.op("Unsqueeze", chunk_N, graph.indices(axis)) for axis in (1, 0))
    distance_NN = graph.op("Sub", graph.op("Sub", to_N1, single), from_1N)
    before_NN = graph.op("GreaterOrEqual", distance_NN, zero)

    def wide(value: str) -> str:
        return graph.op("Cast", value, to=onnx.TensorProto.FLOAT)

    return ChunkValues(
        positions=graph.op("Unsqueeze", wide(column_L), graph.indices(0)),
        recent=graph.op("Unsqueeze", recent, graph.indices(-1)),
        last=graph.op("Unsqueeze", wide(last_BL), graph.indices(1, 2)),
        distance=wide(graph.op("Max", distance_NN, zero)),
        before=wide(before_NN),
    )


def _finished(
    graph: Graph, config: ModelConfig, states: Sequence[SCAValues], name: str, wanted: int | str, columns: str
) -> onnx.ModelProto:
    """Declare the outputs, after joining the states of all SCA layers."""
    graph.output("logits", ("B", wanted, config.vocabulary))
    for index, part in enumerate(SUMS if states else ()):
        graph.op("Concat", *(state[index] for state in states), into=part, axis=0)
    for part, shape in state_shapes(config, columns).items():
        graph.output(part, shape)
    return graph.model(name)
