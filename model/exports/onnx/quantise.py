"""Weight-only quantisation in blocks of 32, in the layout of onnxruntime's `MatMulNBits`.

A block has one float32 scale and no offset: a weight is (q - 2^(bits-1)) · scale. At 4 bits the scale is signed, so
that its largest weight takes the 16th level; where that lowers the squared error, the scale is then a little smaller.
"""

import numpy as np

BLOCK = 32
SHRINKS = (1.0, 0.94, 0.88, 0.82)  # of a 4-bit scale; the best is taken for each block
_ROWS = 4096  # that are quantised at once, to bound the memory


def quantise(weight_NI: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Levels, uint8 [N, blocks, 32·bits/8], and scales, float32 [N, blocks], of a matrix with the inputs last.

    Two levels of 4 bits share a byte, the first in its lower half. The last block is padded with zeros.
    """
    parts = [_quantise_rows(weight_NI[row : row + _ROWS], bits) for row in range(0, len(weight_NI), _ROWS)]
    return np.concatenate([levels for levels, _ in parts]), np.concatenate([scales for _, scales in parts])


def dequantise(levels_NbC: np.ndarray, scales_Nb: np.ndarray, bits: int, inputs: int) -> np.ndarray:
    """The matrix [N, inputs] that a runtime computes with."""
    if bits == 4:
        levels_NbC = np.stack([levels_NbC & 15, levels_NbC >> 4], axis=-1).reshape(*levels_NbC.shape[:2], BLOCK)
    wide = (levels_NbC.astype(np.float32) - 2 ** (bits - 1)) * scales_Nb[..., None]
    return wide.reshape(len(wide), -1)[:, :inputs]


def _quantise_rows(weight_NI: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    rows, inputs = weight_NI.shape
    middle = 2 ** (bits - 1)
    blocks_NbC = np.pad(weight_NI.astype(np.float32), ((0, 0), (0, -inputs % BLOCK))).reshape(rows, -1, BLOCK)
    largest_Nb1 = np.take_along_axis(blocks_NbC, np.abs(blocks_NbC).argmax(-1)[..., None], axis=-1)
    if bits == 8:
        levels, scales_Nb1 = _rounded(blocks_NbC, np.abs(largest_Nb1) / (middle - 1), middle)
        return levels, scales_Nb1[..., 0]
    best_levels, best_Nb1 = _rounded(blocks_NbC, largest_Nb1 / -middle, middle)
    least_Nb1 = _squared_error(blocks_NbC, best_levels, best_Nb1, middle)
    for shrink in SHRINKS[1:]:
        levels, scales_Nb1 = _rounded(blocks_NbC, shrink * largest_Nb1 / -middle, middle)
        error_Nb1 = _squared_error(blocks_NbC, levels, scales_Nb1, middle)
        better_Nb1 = error_Nb1 < least_Nb1
        best_levels = np.where(better_Nb1, levels, best_levels)
        best_Nb1, least_Nb1 = np.where(better_Nb1, scales_Nb1, best_Nb1), np.minimum(error_Nb1, least_Nb1)
    pairs = best_levels.reshape(rows, -1, BLOCK // 2, 2)
    return pairs[..., 0] | (pairs[..., 1] << 4), best_Nb1[..., 0]


def _rounded(blocks_NbC: np.ndarray, scales_Nb1: np.ndarray, middle: int) -> tuple[np.ndarray, np.ndarray]:
    inverse_Nb1 = np.divide(1, scales_Nb1, out=np.zeros_like(scales_Nb1), where=scales_Nb1 != 0)
    return np.clip(np.rint(blocks_NbC * inverse_Nb1) + middle, 0, 2 * middle - 1).astype(np.uint8), scales_Nb1


def _squared_error(blocks_NbC: np.ndarray, levels: np.ndarray, scales_Nb1: np.ndarray, middle: int) -> np.ndarray:
    difference = (levels.astype(np.float32) - middle) * scales_Nb1 - blocks_NbC
    return np.einsum("nbc,nbc->nb", difference, difference)[..., None]
