"""Weight-only quantisation in blocks of a row, in the layout of onnxruntime's `MatMulNBits`.

A block has one float32 scale: a weight is (level - zero point) · scale. At 8 bits the zero point is 128. At 4 bits each
block has its own, so that the 16 levels span its smallest to its largest weight. Several slightly smaller ranges are
tried, and the one with the least squared error is chosen; its scale is optimal for its levels: Σ w·q / Σ q², where q is
the level minus the zero point.
"""

from typing import NamedTuple

import numpy as np

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


def dequantise(matrix: Quantised, inputs: int) -> np.ndarray:
    """The float32 matrix [N, inputs] that a quantised matrix stands for."""
    levels_NbC, scales_Nb, zero_points = matrix
    rows, blocks = scales_Nb.shape
    zero_Nb1 = np.full((rows, blocks, 1), 128.0, np.float32)
    if zero_points is not None:
        levels_NbC = _unpack(levels_NbC)
        zero_Nb1 = _unpack(zero_points)[:, :blocks, None].astype(np.float32)
    weights_NbC = (levels_NbC.astype(np.float32) - zero_Nb1) * scales_Nb[..., None]
    return weights_NbC.reshape(rows, -1)[:, :inputs]


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


def _unpack(packed: np.ndarray) -> np.ndarray:
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)
