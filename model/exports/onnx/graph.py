"""Builders of ONNX graphs: operators appended in order, small constants inside, weights in a separate file.

The two graphs of a model share their weights: `WeightFile` writes each array once, and both refer to it by its offset.

Weights alone are quantised, in blocks of a row, in the layout of onnxruntime's `MatMulNBits`. A block has one float32
scale: a weight is (level - zero point) · scale. At 8 bits the zero point is 128. At 4 bits each block has its own, so
that the 16 levels span its smallest to its largest weight. Several slightly smaller ranges are tried, and the one with
the least squared error is chosen; its scale is optimal for its levels: Σ w·q / Σ q², where q is the level minus the
zero point.
"""

from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

LEAST_BLOCK = 16  # the smallest block of onnxruntime; the others are larger powers of two
SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8)  # factors of the range that are tried for each 4-bit block
_ROWS = 4096  # rows quantised at a time, to bound the memory


class Quantised(NamedTuple):
    """A matrix of N outputs in b blocks of C inputs: levels uint8 [N, b, C·bits/8], scales float32 [N, b].

    zero_points: only at 4 bits, uint8 [N, b/2 rounded up]. Two 4-bit numbers share a byte, the first in its low half.
    """

    levels: np.ndarray
    scales: np.ndarray
    zero_points: np.ndarray | None


def quantise(weight_NI: np.ndarray, bits: int, block: int) -> Quantised:
    """Quantise a matrix [outputs, inputs] to 8 or 4 bits in blocks of `block` inputs, the last padded with zeros."""
    quantise_blocks = _eight_bits if bits == 8 else _four_bits
    parts = []
    for row in range(0, len(weight_NI), _ROWS):
        rows_NI = weight_NI[row : row + _ROWS].astype(np.float32)
        blocks_NbC = np.pad(rows_NI, ((0, 0), (0, -rows_NI.shape[1] % block))).reshape(len(rows_NI), -1, block)
        parts.append(quantise_blocks(blocks_NbC))
    levels, scales, zero_points = zip(*parts, strict=True)
    return Quantised(np.concatenate(levels), np.concatenate(scales), None if bits == 8 else np.concatenate(zero_points))


def _eight_bits(blocks_NbC: np.ndarray) -> Quantised:
    """Symmetric quantisation: the largest magnitude of a block becomes level 128 ± 127."""
    scales_Nb1 = np.abs(blocks_NbC).max(-1, keepdims=True) / np.float32(127)
    levels = np.rint(blocks_NbC * _inverse(scales_Nb1)) + 128
    return Quantised(levels.astype(np.uint8), scales_Nb1[..., 0], None)


def _four_bits(blocks_NbC: np.ndarray) -> Quantised:
    """Asymmetric quantisation with the best of several ranges per block (see the file's header)."""
    # The range includes 0, so that a weight of 0 stays 0, as in padding.
    least_Nb1 = np.minimum(blocks_NbC.min(-1, keepdims=True), 0)
    step_Nb1 = (np.maximum(blocks_NbC.max(-1, keepdims=True), 0) - least_Nb1) / np.float32(15)
    zero_Nb1 = np.rint(-least_Nb1 * _inverse(step_Nb1))
    best, scales_Nb, most_Nb = np.zeros_like(blocks_NbC), np.zeros(blocks_NbC.shape[:2], np.float32), 0.0
    for shrink in SHRINKS:
        levels = np.clip(np.rint(blocks_NbC * _inverse(step_Nb1 * np.float32(shrink))) + zero_Nb1, 0, 15) - zero_Nb1
        product_Nb = np.einsum("nbc,nbc->nb", blocks_NbC, levels)
        scale_Nb = product_Nb * _inverse(np.einsum("nbc,nbc->nb", levels, levels))
        explained_Nb = product_Nb * scale_Nb  # Σ w² minus the squared error
        better_Nb = explained_Nb > most_Nb
        best = np.where(better_Nb[..., None], levels, best)
        scales_Nb, most_Nb = np.where(better_Nb, scale_Nb, scales_Nb), np.maximum(explained_Nb, most_Nb)
    zero_points = zero_Nb1[..., 0].astype(np.uint8)
    padded = np.pad(zero_points, ((0, 0), (0, zero_points.shape[1] % 2)))
    return Quantised(_pack((best + zero_Nb1).astype(np.uint8)), scales_Nb, _pack(padded))


def _inverse(array: np.ndarray) -> np.ndarray:
    """1 / array, but 0 where array is 0."""
    return np.divide(1, array, out=np.zeros_like(array), where=array != 0)


def _pack(levels: np.ndarray) -> np.ndarray:
    """Pack pairs of 4-bit numbers along the last axis into bytes."""
    pairs = levels.reshape(*levels.shape[:-1], -1, 2)
    return pairs[..., 0] | (pairs[..., 1] << 4)


PAGE = 4096  # arrays start at a page, so that a runtime can map them into memory
OPSET, CONTRIB = 20, "com.microsoft"
INLINE = 1024  # bytes; smaller arrays are stored in the graph


class Stored(NamedTuple):
    """How a quantised matrix is stored."""

    outputs: int
    inputs: int
    bits: int
    block: int  # inputs that share a scale


class WeightFile:
    """The arrays of a model in one file, each at the start of a page. Use it as a context manager.

    bits: 32, or 8 or 4 bits per number of a matrix. A quantised matrix is stored as `NAME.levels`, `NAME.scales` and,
    at 4 bits, `NAME.zero_points`, computed by `quantise(weight_NI, bits, block)`.
    """

    def __init__(self, path: Path, bits: int, quantise: Callable[[np.ndarray, int, int], Quantised] = quantise) -> None:
        self.name, self.bits = path.name, bits
        self._path, self._quantise = path, quantise
        self._tensors: dict[str, TensorProto] = {}
        self.matrices: dict[str, Stored] = {}

    def __enter__(self) -> Self:
        self._file = self._path.open("wb")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()

    def add(self, name: str, array: np.ndarray) -> None:
        """Write an array under a new name."""
        if array.nbytes < INLINE:
            self._tensors[name] = numpy_helper.from_array(array, name)
            return
        self._file.write(bytes(-self._file.tell() % PAGE))
        tensor = TensorProto(name=name, dims=array.shape, data_location=TensorProto.EXTERNAL)
        tensor.data_type = helper.np_dtype_to_tensor_dtype(array.dtype)
        for key, value in (("location", self.name), ("offset", self._file.tell()), ("length", array.nbytes)):
            tensor.external_data.add(key=key, value=str(value))
        self._file.write(np.ascontiguousarray(array).data)
        self._tensors[name] = tensor

    def add_matrix(self, name: str, weight_IO: np.ndarray, bits: int, block: int) -> None:
        """Write a matrix for `Layers.linear`, with `bits` per number in blocks of at most `block` inputs."""
        if bits == 32:
            self.add(name, weight_IO)
            return
        inputs, outputs = weight_IO.shape
        block = min(block, max(LEAST_BLOCK, 1 << (inputs - 1).bit_length()))
        self.matrices[name] = Stored(outputs, inputs, bits, block)
        for part, array in self._quantise(weight_IO.T, bits, block)._asdict().items():
            if array is not None:
                self.add(f"{name}.{part}", array)

    def tensor(self, name: str) -> TensorProto:
        """The tensor by which a graph refers to an array of the file."""
        return self._tensors[name]

    def add_view(self, name: str, of: str, shape: tuple[int, ...]) -> None:
        """Add another name for an array of the file, with another shape."""
        tensor = TensorProto()
        tensor.CopyFrom(self._tensors[of])
        tensor.name = name
        tensor.dims[:] = shape
        self._tensors[name] = tensor


class Graph:
    """A graph under construction. Operators run in the order in which they are appended; values are names."""

    def __init__(self, weights: WeightFile) -> None:
        self.weights = weights
        self._nodes: list[onnx.NodeProto] = []
        self._initializers: dict[str, TensorProto] = {}
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []
        self._constants: dict[tuple, str] = {}

    def input(self, name: str, dtype: Any, shape: tuple[int | str, ...]) -> str:
        """Declare an input; a dimension given by a name has any size."""
        self._inputs.append(
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), shape)
        )
        return name

    def output(self, name: str, shape: tuple[int | str, ...]) -> str:
        """Declare a float32 output; some operator must write a value of this name."""
        self._outputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))
        return name

    def op(self, kind: str, *inputs: str, domain: str = "", into: str | None = None, **attributes: Any) -> str:
        """Append an operator with one output, and return that output's name."""
        return self.ops(kind, *inputs, into=(into or self._new_name(kind),), domain=domain, **attributes)[0]

    def ops(
        self, kind: str, *inputs: str, into: tuple[str, ...] = (), count: int = 0, domain: str = "", **attributes: Any
    ) -> tuple[str, ...]:
        """Append an operator with several outputs, named by `into`, or `count` new names; return them."""
        names = into or tuple(f"{self._new_name(kind)}.{index}" for index in range(count))
        self._nodes.append(helper.make_node(kind, inputs, names, domain=domain, **attributes))
        return names

    def constant(self, value: Any, dtype: Any = np.float32) -> str:
        """A small constant; equal constants are stored once."""
        array = np.asarray(value, dtype)
        key = (array.shape, array.dtype.str, array.tobytes())
        if key not in self._constants:
            name = f"constant.{len(self._constants)}"
            self._constants[key] = name
            self._initializers[name] = numpy_helper.from_array(array, name)
        return self._constants[key]

    def indices(self, *values: int) -> str:
        """A constant vector of int64: a shape, axes, or the bounds of a slice."""
        return self.constant(values, np.int64)

    def weight(self, name: str) -> str:
        """Refer to an array of the weight file."""
        self._initializers.setdefault(name, self.weights.tensor(name))
        return name

    def reshape(self, value: str, *shape: int) -> str:
        """Reshape: 0 keeps a dimension, -1 is inferred."""
        return self.op("Reshape", value, self.indices(*shape))

    def cut(self, value: str, start: int, stop: int, axis: int) -> str:
        """Slice one axis from `start` to `stop`."""
        return self.op("Slice", value, self.indices(start), self.indices(stop), self.indices(axis))

    def split(self, value: str, sizes: list[int], axis: int = -1) -> tuple[str, ...]:
        return self.ops("Split", value, self.indices(*sizes), count=len(sizes), axis=axis)

    def silu(self, value: str) -> str:
        return self.op("Mul", value, self.op("Sigmoid", value))

    def model(self, name: str) -> onnx.ModelProto:
        """Build the ONNX model from the graph."""
        graph = helper.make_graph(self._nodes, name, self._inputs, self._outputs, list(self._initializers.values()))
        imports = [helper.make_opsetid("", OPSET), helper.make_opsetid(CONTRIB, 1)]
        return helper.make_model(graph, opset_imports=imports, ir_version=9, producer_name="nautile")

    def _new_name(self, kind: str) -> str:
        return f"{kind.lower()}.{len(self._nodes)}"
