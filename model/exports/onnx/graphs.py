"""The two graphs of a model: a prompt from the beginning, and one more token (`signature` has inputs and outputs)."""

import numpy as np
import onnx

from configs.model import ModelConfig
from model.exports.onnx.graph import Graph, WeightFile
from model.exports.onnx.layers import ChunkValues, Layers, SCAStepValues, SCAValues
from model.exports.onnx.signature import (
    CHUNK,
    HIDDEN,
    PAST,
    SUMS,
    hidden_shape,
    logits_shape,
    state_shapes,
    token_shapes,
)
from model.nautile import sca_names


def prompt_graph(weights: WeightFile, config: ModelConfig, accuracy: int, with_hidden: bool = False) -> onnx.ModelProto:
    """The graph that reads whole prompts. `with_hidden`: it also gives the residual stream after the last block."""
    graph = Graph(weights)
    layers = Layers(graph, config, accuracy)
    tokens, lengths, wanted = (graph.input(name, np.int64, shape) for name, shape in token_shapes("prompt").items())
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
    if with_hidden:
        graph.output(HIDDEN, hidden_shape(config))
        graph.op("Identity", x, into=HIDDEN)
    for index, part in enumerate(SUMS if states else ()):
        graph.op("Concat", *(state[index] for state in states), into=part, axis=0)
    return _finished(graph, config, "prompt")


def step_graph(weights: WeightFile, config: ModelConfig, accuracy: int) -> onnx.ModelProto:
    """The graph that adds one token to every row."""
    graph = Graph(weights)
    layers = Layers(graph, config, accuracy)
    tokens, positions = (graph.input(name, np.int64, shape) for name, shape in token_shapes("step").items())
    for name, shape in state_shapes(config).items():
        graph.input(PAST + name, np.float32, shape)
    count = config.blocks * config.sca_per_block
    past_states = iter(_step_states(graph, count) if count else ())
    longest = graph.op("Add", graph.op("ReduceMax", positions, keepdims=1), graph.indices(1))
    seen = (
        graph.op("Cast", positions, to=onnx.TensorProto.INT32),
        graph.op("Cast", longest, to=onnx.TensorProto.INT32),
    )
    float_positions = graph.op("Unsqueeze", graph.op("Cast", positions, to=onnx.TensorProto.FLOAT), graph.indices(1))
    x = layers.embed(tokens)
    states: list[SCAStepValues] = []
    for block in range(config.blocks):
        for name in sca_names(config):
            x, state = layers.sca_step(x, f"block_{block}.{name}", next(past_states), float_positions)
            states.append(state)
        parts = (f"keys.{block}", f"values.{block}")
        before = (PAST + parts[0], PAST + parts[1])
        x = layers.attention(x, f"block_{block}.attention", before, seen, parts)
    layers.logits(x, "logits")
    if states:
        sums = graph.op("Concat", *(state.sums for state in states), axis=0)
        for part, name in zip(graph.split(sums, [1, 1], axis=3), SUMS[:2], strict=True):
            graph.op("Squeeze", part, graph.indices(3), into=name)
        graph.op("Concat", *(state.z for state in states), into=SUMS[2], axis=0)
        graph.op("Concat", *(state.history for state in states), into=SUMS[3], axis=0)
    return _finished(graph, config, "step")


def _step_states(graph: Graph, count: int) -> list[SCAStepValues]:
    """The past state of each SCA layer, its sums' real and imaginary parts side by side."""
    past_re, past_im, past_z, past_history = (PAST + name for name in SUMS)
    sums = graph.op("Concat", *(graph.op("Unsqueeze", part, graph.indices(3)) for part in (past_re, past_im)), axis=3)
    parts = (graph.split(value, [1] * count, axis=0) for value in (sums, past_z, past_history))
    return [SCAStepValues(*values) for values in zip(*parts, strict=True)]


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


def _finished(graph: Graph, config: ModelConfig, name: str) -> onnx.ModelProto:
    """Declare the outputs."""
    graph.output("logits", logits_shape(config, name))
    for part, shape in state_shapes(config).items():
        graph.output(part, shape)
    return graph.model(name)
