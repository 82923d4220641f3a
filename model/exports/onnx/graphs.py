"""The two ONNX graphs of a model: one reads prompts, one a further token. `signature` lists inputs and outputs."""

import numpy as np
import onnx

from nautile.configs.model import ModelConfig
from nautile.model.exports.onnx.graph import Graph, WeightFile
from nautile.model.exports.onnx.layers import ChunkValues, Layers, SCAValues, StepValues, Stream
from nautile.model.exports.onnx.signature import (
    CHUNK,
    HIDDEN,
    PAST,
    SUMS,
    cache_names,
    hidden_shape,
    history_names,
    logits_shape,
    sca_shapes,
    state_shapes,
    token_shapes,
)


def prompt_graph(weights: WeightFile, config: ModelConfig, accuracy: int, with_hidden: bool = False) -> onnx.ModelProto:
    """The graph that reads whole prompts. `with_hidden`: also output the residual stream after the last block."""
    graph = Graph(weights)
    layers = Layers(graph, config, accuracy)
    tokens, lengths, logit_columns = (
        graph.input(name, np.int64, shape) for name, shape in token_shapes("prompt").items()
    )
    # Pad the columns to whole chunks: -L mod CHUNK columns are missing (the result of Mod has the divisor's sign).
    missing = graph.op("Mod", graph.op("Neg", graph.op("Shape", tokens, start=1)), graph.indices(CHUNK))
    tokens = graph.op("Pad", tokens, graph.op("Concat", graph.indices(0, 0, 0), missing, axis=0))
    columns = graph.op("Shape", tokens, start=1)
    last = graph.op("Sub", lengths, graph.indices(1))
    attended = (graph.op("Cast", last, to=onnx.TensorProto.INT32), graph.op("Cast", columns, to=onnx.TensorProto.INT32))
    chunks = _chunk_values(graph, config, columns, lengths)
    # The layers, then the logits of the given columns, then the states of all SCA layers as one array each.
    stream = Stream(layers.embed(tokens))
    states: list[SCAValues] = []
    for index, (letter, name) in enumerate(_layers(config)):
        if letter == "S":
            stream, state = layers.sca_prompt(stream, name, chunks)
            states.append(state)
        else:
            stream = layers.attention(stream, name, ("", ""), attended, cache_names(index - len(states)))
    x = graph.op("Add", *stream)
    rows = graph.op("GatherND", x, graph.op("Unsqueeze", logit_columns, graph.indices(-1)), batch_dims=1)
    layers.logits(rows, "logits")
    if with_hidden:
        graph.output(HIDDEN, hidden_shape(config))
        graph.op("Identity", x, into=HIDDEN)
    parts = [(state.sums, state.z, *state.history) for state in states]
    for index, name in enumerate(sca_shapes(config)):
        graph.op("Concat", *(part[index] for part in parts), into=name, axis=0)
    return _build(graph, config, "prompt")


def step_graph(weights: WeightFile, config: ModelConfig, accuracy: int) -> onnx.ModelProto:
    """The graph that reads one more token of every row."""
    graph = Graph(weights)
    layers = Layers(graph, config, accuracy)
    tokens, positions = (graph.input(name, np.int64, shape) for name, shape in token_shapes("step").items())
    for name, shape in state_shapes(config).items():
        graph.input(PAST + name, np.float32, shape)
    names = [name for letter, name in _layers(config) if letter == "S"]
    history = history_names(config)
    past_history = [PAST + name for name in history]
    past = layers.step_past(names, [PAST + name for name in SUMS], past_history) if names else []
    # The attention operator takes each row's position and the number of columns.
    longest = graph.op("Add", graph.op("ReduceMax", positions, keepdims=1), graph.indices(1))
    attended = (
        graph.op("Cast", positions, to=onnx.TensorProto.INT32),
        graph.op("Cast", longest, to=onnx.TensorProto.INT32),
    )
    float_positions = graph.op("Unsqueeze", graph.op("Cast", positions, to=onnx.TensorProto.FLOAT), graph.indices(1))
    stream = Stream(layers.embed(tokens))
    states: list[StepValues] = []
    for index, (letter, name) in enumerate(_layers(config)):
        if letter == "S":
            stream, state = layers.sca_step(stream, name, past[len(states)], float_positions)
            states.append(state)
        else:
            keys, values = cache_names(index - len(states))
            stream = layers.attention(stream, name, (PAST + keys, PAST + values), attended, (keys, values))
    layers.logits(graph.op("Add", *stream), "logits")
    if states:
        layers.step_state(states, history, past_history)
    return _build(graph, config, "step")


def _layers(config: ModelConfig) -> list[tuple[str, str]]:
    """The letter of each layer of all blocks, and the prefix of its weights' names, in order."""
    return [(letter, f"block_{block}.{name}") for block in range(config.blocks) for letter, name in config.layers]


def _chunk_values(graph: Graph, config: ModelConfig, columns: str, lengths: str) -> ChunkValues:
    """The values that depend only on the number of columns and the prompts' lengths."""
    zero, single = graph.constant(0, np.int64), graph.constant(1, np.int64)
    count = graph.op("Squeeze", columns)
    column_L = graph.op("Range", zero, count, single)
    reach = config.convolution - 1
    # Row b's inputs t = 0 … T-2 before its end are at columns lengths[b] + t of the inputs padded by T-1 on the left.
    recent = graph.op("Add", graph.op("Unsqueeze", lengths, graph.indices(1)), graph.indices(*range(reach)))
    last_BL = graph.op("Equal", column_L, graph.op("Unsqueeze", graph.op("Sub", lengths, single), graph.indices(1)))
    # Distances between chunks, for the decay of a chunk's sums in the later ones.
    chunk_N = graph.op("Range", zero, graph.op("Div", count, graph.constant(CHUNK, np.int64)), single)
    to_N1, from_1N = (graph.op("Unsqueeze", chunk_N, graph.indices(axis)) for axis in (1, 0))
    distance_NN = graph.op("Sub", graph.op("Sub", to_N1, single), from_1N)
    before_NN = graph.op("GreaterOrEqual", distance_NN, zero)

    def to_float(value: str) -> str:
        return graph.op("Cast", value, to=onnx.TensorProto.FLOAT)

    return ChunkValues(
        positions=graph.op("Unsqueeze", to_float(column_L), graph.indices(0)),
        recent=graph.op("Unsqueeze", recent, graph.indices(-1)),
        last=graph.op("Unsqueeze", to_float(last_BL), graph.indices(1, 2)),
        distance=to_float(graph.op("Max", distance_NN, zero)),
        before=to_float(before_NN),
    )


def _build(graph: Graph, config: ModelConfig, name: str) -> onnx.ModelProto:
    """Declare the outputs and build the model."""
    graph.output("logits", logits_shape(config, name))
    for part, shape in state_shapes(config).items():
        graph.output(part, shape)
    return graph.model(name)
