"""Loads the two graphs of an export into onnxruntime, after checking that they are those of the model.

Digests show that a folder is unchanged, not who wrote it. So the graphs are scanned before loading (`scan`), compared
with the configuration, and run for one token in limited memory: a graph could allocate any amount.
"""

import os
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnxruntime

from nautile.common.errors import ConfigError
from nautile.common.processes import bounded_memory
from nautile.common.text import first_line
from nautile.configs.model import ModelConfig
from nautile.model.exports.onnx.folder import PROMPT, STEP, WEIGHTS
from nautile.model.exports.onnx.scan import check_graph
from nautile.model.exports.onnx.signature import (
    CHUNK,
    HIDDEN,
    PAST,
    Shape,
    attention_layers,
    hidden_shape,
    logits_shape,
    sca_shapes,
    state_shapes,
    token_shapes,
)

FREE_BYTES, THREAD_BYTES = 2**30, 2**27  # memory allowed for loading, besides the weights: in total, and per core
_SILENT = 4  # log level: onnxruntime raises its errors, and would also log them


class Sessions(NamedTuple):
    """Sessions of the two graphs; see `model.exports.onnx.signature` for inputs and outputs."""

    prompt: onnxruntime.InferenceSession
    step: onnxruntime.InferenceSession


def load_sessions(folder: Path, config: ModelConfig, threads: int) -> Sessions:
    """Load the graphs of the export in `folder`.

    threads: of onnxruntime; 0: one per core. Raises ConfigError if the graphs do not fit the configuration.
    """
    for name in (PROMPT, STEP):
        check_graph(folder / name, WEIGHTS)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = _SILENT
    # Each session holds its own packed copy of the weights.
    limit = 4 * (folder / WEIGHTS).stat().st_size + FREE_BYTES + (os.cpu_count() or 1) * THREAD_BYTES
    try:
        with bounded_memory(limit):
            sessions = Sessions(
                *(onnxruntime.InferenceSession(
                    folder / name, options, providers=["CPUExecutionProvider"], enable_fallback=0
                ) for name in (PROMPT, STEP))
            )  # fmt: skip
            for name, session in sessions._asdict().items():
                _check_signature(session, config, name)
                _check_token(session, config, name)
    except Exception as error:  # onnxruntime's own errors have no common type
        cause = "not enough memory" if isinstance(error, MemoryError) else first_line(error)
        raise ConfigError(f"{folder}: onnxruntime cannot run it ({cause}); export the checkpoint again") from None
    return sessions


def _check_signature(session: onnxruntime.InferenceSession, config: ModelConfig, graph: str) -> None:
    """Raise ValueError unless names, types and shapes are those of this model."""
    graph_inputs, graph_outputs = session.get_inputs(), session.get_outputs()
    has_hidden = graph == "prompt" and any(output.name == HIDDEN for output in graph_outputs)
    # Checked first, because a configuration may name any number of blocks.
    if len(graph_outputs) != 1 + has_hidden + 2 * attention_layers(config) + len(sca_shapes(config)):
        raise ValueError(f"the {graph} graph has {len(graph_outputs)} outputs, not those of {config.blocks} blocks")
    state = state_shapes(config)
    inputs = {name: ("tensor(int64)", shape) for name, shape in token_shapes(graph).items()}
    if graph == "step":
        inputs |= {PAST + name: ("tensor(float)", shape) for name, shape in state.items()}
    outputs = {
        name: ("tensor(float)", shape) for name, shape in {"logits": logits_shape(config, graph), **state}.items()
    }
    if has_hidden:
        outputs[HIDDEN] = ("tensor(float)", hidden_shape(config))
    for kind, values, expected in (("input", graph_inputs, inputs), ("output", graph_outputs, outputs)):
        actual = {value.name: (value.type, tuple(value.shape)) for value in values}
        for name in sorted(expected.keys() | actual.keys()):
            if expected.get(name) != actual.get(name):
                raise ValueError(
                    f"{kind} {name[:40]!r} of the {graph} graph is {_describe(actual.get(name))}, and the model in "
                    f"config.json has {_describe(expected.get(name))}"
                )


def _check_token(session: onnxruntime.InferenceSession, config: ModelConfig, graph: str) -> None:
    """Run a graph for the last token of a context; raise ValueError if an output lacks the declared shape."""
    sizes = {"B": 1, "L": 1, "P": 1, "S": CHUNK if graph == "prompt" else config.context}
    feeds: dict[str, np.ndarray] = {}
    for value in session.get_inputs():
        dtype = np.int64 if value.type == "tensor(int64)" else np.float32
        feeds[value.name] = np.zeros(_concrete_shape(value.shape, sizes), dtype)
    # One token: of a prompt the first, and of a step the last of the context, whose state has all columns.
    if graph == "prompt":
        feeds["lengths"] += 1
    else:
        feeds["positions"] += config.context - 1
    outputs = session.get_outputs()
    for value, array in zip(outputs, session.run([value.name for value in outputs], feeds), strict=True):
        if array.shape != _concrete_shape(value.shape, sizes):
            raise ValueError(
                f"output {value.name[:40]!r} of the {graph} graph has the shape {array.shape}, not {value.shape}"
            )


def _concrete_shape(shape: Shape, sizes: dict[str, int]) -> tuple[int, ...]:
    return tuple(sizes[size] if isinstance(size, str) else size for size in shape)


def _describe(value: tuple[str, Shape] | None) -> str:
    return "none" if value is None else f"{value[0]} {list(value[1])}"
