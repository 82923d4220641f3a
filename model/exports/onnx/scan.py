"""Check of an ONNX file before onnxruntime opens it, because an untrusted folder may hold any graph.

An exported graph has operators of a few kinds, none with a subgraph (so no loops), and its large arrays are in the
weight file next to it. The format is protobuf; the numbers below are the field numbers of onnx.proto.
"""

from collections.abc import Iterator
from pathlib import Path

from nautile.common.errors import ConfigError

LARGEST_GRAPH = 2**26  # bytes; the graphs of the published model have 0.3 MB
OPERATORS = {
    "Add", "BitShift", "BitwiseAnd", "Cast", "Clip", "Concat", "Cos", "Div", "Equal", "Exp", "Gather",
    "GatherBlockQuantized", "GatherND", "Gemm", "GreaterOrEqual", "GroupQueryAttention", "Identity", "MatMul",
    "MatMulNBits", "Max", "Mod", "Mul", "Neg", "Pad", "Pow", "Range", "Reciprocal", "ReduceMax", "ReduceMean",
    "ReduceSum", "Reshape", "Shape", "Sigmoid", "Sin", "SkipSimplifiedLayerNormalization", "Slice", "Softplus",
    "Softsign", "Split", "Sqrt", "Squeeze", "Sub", "Transpose", "Unsqueeze", "Where",
}  # fmt: skip
_DOMAINS = {"", "ai.onnx", "com.microsoft"}
_GRAPH, _TRAINING, _FUNCTION = 7, 20, 25  # of ModelProto
_NODE, _INITIALIZER, _SPARSE = 1, 5, 15  # of GraphProto
_OPERATOR, _ATTRIBUTE, _DOMAIN = 4, 5, 7  # of NodeProto
_PLAIN_ATTRIBUTE = {1, 2, 3, 4, 7, 8, 9, 13, 20}  # of AttributeProto: names, numbers and texts
_EXTERNAL = 13  # of TensorProto


def check_graph(path: Path, weights: str) -> None:
    """Raise ConfigError unless `path` has only the operators of an export, and external arrays only in `weights`."""
    size = path.stat().st_size
    if size > LARGEST_GRAPH:
        raise ConfigError(f"{path}: has {size:,} bytes, more than any exported graph; export the checkpoint again")
    try:
        _check_model(memoryview(path.read_bytes()), weights)
    except ValueError as error:
        raise ConfigError(f"{path}: is not a graph of an export ({error}); export the checkpoint again") from None


def _check_model(model: memoryview, weights: str) -> None:
    graphs = 0
    for field, value in _fields(model):
        if field in (_TRAINING, _FUNCTION):
            raise ValueError("it defines functions of its own")
        if field == _GRAPH:
            graphs += 1
            for inner, part in _fields(_message(value)):
                if inner == _NODE:
                    _check_node(_message(part))
                elif inner == _INITIALIZER:
                    _check_array(_message(part), weights)
                elif inner == _SPARSE:
                    raise ValueError("it has sparse arrays")
    if graphs != 1:
        raise ValueError(f"it has {graphs} graphs")


def _check_node(node: memoryview) -> None:
    for field, value in _fields(node):
        if field == _OPERATOR and (name := _text(value)) not in OPERATORS:
            raise ValueError(f"it has the operator {name[:40]!r}, which no export has")
        if field == _DOMAIN and (domain := _text(value)) not in _DOMAINS:
            raise ValueError(f"it has operators of {domain[:40]!r}")
        if field == _ATTRIBUTE and not {inner for inner, _ in _fields(_message(value))} <= _PLAIN_ATTRIBUTE:
            raise ValueError("an attribute is a graph or an array")


def _check_array(array: memoryview, weights: str) -> None:
    for field, value in _fields(array):
        if field != _EXTERNAL:
            continue
        entry = {inner: _text(text) for inner, text in _fields(_message(value))}
        if entry.get(1) == "location" and entry.get(2) != weights:
            raise ValueError(f"an array is in the file {entry.get(2, '')[:80]!r}, not in {weights}")


def _fields(message: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """The field numbers and values of a protobuf message. Raises ValueError if it is truncated or no message."""
    position = 0
    while position < len(message):
        key, position = _varint(message, position)
        kind = key & 7
        if kind == 0:
            value, position = _varint(message, position)
            yield key >> 3, value
            continue
        # Wire types: 0 varint, 1 fixed 64 bits, 2 length-delimited, 5 fixed 32 bits.
        if kind not in (1, 2, 5):
            raise ValueError("it is no protobuf message")
        size, position = _varint(message, position) if kind == 2 else (8 if kind == 1 else 4, position)
        if position + size > len(message):
            raise ValueError("it is cut off")
        yield key >> 3, message[position : position + size]
        position += size


def _varint(message: memoryview, position: int) -> tuple[int, int]:
    value = 0
    # Ten bytes of seven bits each hold any number of 64 bits.
    for shift in range(0, 70, 7):
        if position >= len(message):
            break
        byte = message[position]
        position += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, position
    raise ValueError("it is cut off")


def _message(value: int | memoryview) -> memoryview:
    if isinstance(value, int):
        raise ValueError("it is no protobuf message of a model")
    return value


def _text(value: int | memoryview) -> str:
    return bytes(_message(value)).decode("utf-8")
