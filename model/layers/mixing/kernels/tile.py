"""One chunk of one memory head, as the TPU and GPU kernels compute it.

Every value is a tile [C, J], a column [C, 1] or a row [1, J]. The formulas, and the equation numbers in comments, are
those of `model.layers.mixing.chunked`. The devices differ only in how they repeat a tile [C, H] over M and sum a tile
over M: `SampleFolding` holds those two functions. Only operations that both Mosaic and Triton can lower are used here:
no slices of values, no reversals, no scatter.

Letters: C and S positions of the chunk ("to" and "from"), H head dim, J = H·M, 1 an axis of size one.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from nautile.model.layers.mixing.chunked import TINY, sine_cosine, softsign

TURN = 6.283185307179586  # 2π: `sine_cosine` takes turns


class SampleFolding(NamedTuple):
    """widen: [C, H] -> [C, J], each entry M times over; narrow: its transpose, the sum over M."""

    widen: Callable[[Array], Array]
    narrow: Callable[[Array], Array]


class HeadParameters(NamedTuple):
    """One head's parameters; `weights_1J` is ω/√H."""

    decay_11: Array
    phase_scale_11: Array
    grid_1J: Array
    weights_1J: Array


class TileInputs(NamedTuple):
    """One head's inputs in a chunk.

    `real` marks tokens (not padding); `count` and `resets` count tokens and resets from the chunk's start.
    """

    keys_CH: Array
    gates_C1: Array
    q_re_CJ: Array
    q_im_CJ: Array
    real_C1: Array
    count_C1: Array
    resets_C1: Array


class TileState(NamedTuple):
    """The head's sums, or their gradient."""

    re_1J: Array
    im_1J: Array
    z_11: Array


class TileGradient(NamedTuple):
    """Gradients of a chunk's inputs, and the chunk's part of the gradients of the head's parameters."""

    keys_CH: Array
    gates_C1: Array
    q_re_CJ: Array
    q_im_CJ: Array
    decay_11: Array
    phase_scale_11: Array
    grid_1J: Array
    weights_1J: Array


class _Sums(NamedTuple):
    """The chunk's encoding and sums. `divisor_C1` is Z, or infinity where there is no token so far."""

    keys_CJ: Array
    squashed_CJ: Array
    gates_C1: Array
    sine_CJ: Array
    cosine_CJ: Array
    re_CJ: Array
    im_CJ: Array
    z_C1: Array
    divisor_C1: Array
    weight_CS: Array
    carry_C1: Array


def forward(
    head: HeadParameters, block: TileInputs, state: TileState, fold: SampleFolding
) -> tuple[Array, Array, TileState]:
    """The readout, re and im [C, H], and the state after the chunk."""
    sums = _accumulate(head, block, state, fold)
    re_CJ, im_CJ = sums.re_CJ / sums.divisor_C1, sums.im_CJ / sums.divisor_C1
    q_re_CJ, q_im_CJ = block.q_re_CJ * head.weights_1J, block.q_im_CJ * head.weights_1J
    out_re_CH = fold.narrow(re_CJ * q_re_CJ + im_CJ * q_im_CJ)
    out_im_CH = fold.narrow(im_CJ * q_re_CJ - re_CJ * q_im_CJ)
    return out_re_CH, out_im_CH, TileState(_last(sums.re_CJ), _last(sums.im_CJ), _last(sums.z_C1))


def backward(
    head: HeadParameters,
    block: TileInputs,
    state: TileState,
    d_re_CH: Array,
    d_im_CH: Array,
    d_after: TileState,
    fold: SampleFolding,
) -> tuple[TileGradient, TileState]:
    """The gradient of one chunk and of the state before it.

    `d_re_CH`, `d_im_CH` and `d_after` are the cotangents of the results of `forward`.
    """
    sums = _accumulate(head, block, state, fold)
    # The readout and (1).
    d_re_CJ = fold.widen(d_re_CH) / sums.divisor_C1
    d_im_CJ = fold.widen(d_im_CH) / sums.divisor_C1
    dq_re_CJ = sums.re_CJ * d_re_CJ + sums.im_CJ * d_im_CJ
    dq_im_CJ = sums.im_CJ * d_re_CJ - sums.re_CJ * d_im_CJ
    match_CJ = block.q_re_CJ * dq_re_CJ + block.q_im_CJ * dq_im_CJ
    d_z_C1 = -_total(match_CJ * head.weights_1J, 1) / sums.divisor_C1

    # (2): G and GZ, from this chunk and, through its last position, from those after it.
    end_S1 = _column(_last(sums.weight_CS))
    sum_re_SJ = end_S1 * d_after.re_1J + _transposed_product(
        sums, head.weights_1J * (block.q_re_CJ * d_re_CJ - block.q_im_CJ * d_im_CJ)
    )
    sum_im_SJ = end_S1 * d_after.im_1J + _transposed_product(
        sums, head.weights_1J * (block.q_im_CJ * d_re_CJ + block.q_re_CJ * d_im_CJ)
    )
    sum_z_S1 = end_S1 * d_after.z_11 + _column(_total(sums.weight_CS * d_z_C1, 0))

    # (3) and (4): the encoding.
    direct_CH = fold.narrow(sums.cosine_CJ * sum_re_SJ + sums.sine_CJ * sum_im_SJ)
    turned_CJ = sums.cosine_CJ * sum_im_SJ - sums.sine_CJ * sum_re_SJ
    d_phase_CJ = sums.keys_CJ * sums.gates_C1 * turned_CJ
    keys_CH = block.keys_CH
    scaled_CH = head.phase_scale_11 * keys_CH
    d_scaled_CH = fold.narrow(d_phase_CJ * head.grid_1J) / ((1 + jnp.abs(scaled_CH)) * (1 + jnp.abs(scaled_CH)))
    d_gates_C1 = jnp.where(block.real_C1 > 0, sum_z_S1 + _total(keys_CH * direct_CH, 1), 0.0)
    # (5): the decay.
    decayed = _decayed_sums(block, sums, state)
    match_C1 = _total(sum_re_SJ * decayed.re_1J + sum_im_SJ * decayed.im_1J, 1) + sum_z_S1 * decayed.z_11
    gradient = TileGradient(
        sums.gates_C1 * direct_CH + head.phase_scale_11 * d_scaled_CH,
        d_gates_C1,
        dq_re_CJ * head.weights_1J,
        dq_im_CJ * head.weights_1J,
        -_total(match_C1, 0),
        _total(_total(keys_CH * d_scaled_CH, 0), 1),
        _total(sums.squashed_CJ * d_phase_CJ, 0),
        _total(match_CJ, 0),
    )
    # The gradient of the state before the chunk, through its first position.
    first_11 = _first(sums.carry_C1)
    before = TileState(first_11 * _first(sum_re_SJ), first_11 * _first(sum_im_SJ), first_11 * _first(sum_z_S1))
    return gradient, before


def _accumulate(head: HeadParameters, block: TileInputs, state: TileState, fold: SampleFolding) -> _Sums:
    """Steps 2 to 4: gate, encoding and sums of a chunk."""
    # Step 3: the encoding of the keys, repeated over M.
    gates_C1 = jnp.where(block.real_C1 > 0, block.gates_C1, 0.0)
    keys_CJ = fold.widen(block.keys_CH)
    squashed_CJ = softsign(head.phase_scale_11 * keys_CJ)
    sine_CJ, cosine_CJ = sine_cosine(squashed_CJ * (head.grid_1J * (1 / TURN)))
    # Step 4: sums inside the chunk, and the decayed state before it.
    weight_CS = _weights(head, block)
    carry_C1 = jnp.where(block.resets_C1 == 0, jnp.exp(-head.decay_11 * block.count_C1), 0.0)
    gated_CJ = keys_CJ * gates_C1
    re_CJ = _product(weight_CS, gated_CJ * cosine_CJ) + carry_C1 * state.re_1J
    im_CJ = _product(weight_CS, gated_CJ * sine_CJ) + carry_C1 * state.im_1J
    z_C1 = _total(weight_CS * _row(gates_C1), 1) + carry_C1 * state.z_11
    divisor_C1 = jnp.where((block.real_C1 > 0) & (z_C1 >= TINY), z_C1, jnp.inf)
    return _Sums(
        keys_CJ, squashed_CJ, gates_C1, sine_CJ, cosine_CJ, re_CJ, im_CJ, z_C1, divisor_C1, weight_CS, carry_C1
    )


def _weights(head: HeadParameters, block: TileInputs) -> Array:
    """Decay weights e^{-λ·distance} from S to C, zero across a reset and towards the past."""
    size = block.count_C1.shape[0]
    to_CS, from_CS = _iota(size, 0), _iota(size, 1)
    reach_CS = (block.resets_C1 == _row(block.resets_C1)) & (to_CS >= from_CS)
    steps_CS = jnp.where(reach_CS, block.count_C1 - _row(block.count_C1), 0.0)
    return jnp.where(reach_CS, jnp.exp(-head.decay_11 * steps_CS), 0.0)


def _decayed_sums(block: TileInputs, sums: _Sums, state: TileState) -> TileState:
    """e^{-λ} S_{t-1} and e^{-λ} Z_{t-1} at every position, [C, J] twice and [C, 1]; 0 at padding and resets."""
    size = block.count_C1.shape[0]
    to_CS, from_CS = _iota(size, 0), _iota(size, 1)
    decays_C1 = block.real_C1 > 0
    # A product with the first subdiagonal of the weights shifts the sums down by one position.
    weight_CS = jnp.where((to_CS == from_CS + 1) & decays_C1, sums.weight_CS, 0.0)
    first_C1 = jnp.where((jax.lax.broadcasted_iota(jnp.int32, (size, 1), 0) == 0) & decays_C1, sums.carry_C1, 0.0)
    return TileState(
        _product(weight_CS, sums.re_CJ) + first_C1 * state.re_1J,
        _product(weight_CS, sums.im_CJ) + first_C1 * state.im_1J,
        _total(weight_CS * _row(sums.z_C1), 1) + first_C1 * state.z_11,
    )


def _product(weight_CS: Array, values_SJ: Array) -> Array:
    return _dot(weight_CS, values_SJ, ((1,), (0,)))


def _transposed_product(sums: _Sums, values_CJ: Array) -> Array:
    return _dot(sums.weight_CS, values_CJ, ((0,), (0,)))


def _dot(left: Array, right: Array, contract: tuple[tuple[int, ...], tuple[int, ...]]) -> Array:
    return jax.lax.dot_general(
        left, right, (contract, ((), ())), precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )


def _iota(size: int, axis: int) -> Array:
    return jax.lax.broadcasted_iota(jnp.int32, (size, size), axis)


def _total(array: Array, axis: int) -> Array:
    return jnp.sum(array, axis=axis, keepdims=True)


def _row(column_C1: Array) -> Array:
    """Transpose [C, 1] to [1, C], through the diagonal of a tile [C, C]."""
    size = column_C1.shape[0]
    return _total(jnp.where(_iota(size, 0) == _iota(size, 1), column_C1, 0.0), 0)


def _column(row_1C: Array) -> Array:
    """Transpose [1, C] to [C, 1]."""
    size = row_1C.shape[1]
    return _total(jnp.where(_iota(size, 0) == _iota(size, 1), row_1C, 0.0), 1)


def _pick(tile: Array, index: int) -> Array:
    """A row of a tile, [1, J]: a masked sum, because values cannot be sliced."""
    rows = jax.lax.broadcasted_iota(jnp.int32, tile.shape, 0)
    return _total(jnp.where(rows == index, tile, 0.0), 0)


def _first(tile: Array) -> Array:
    return _pick(tile, 0)


def _last(tile: Array) -> Array:
    return _pick(tile, tile.shape[0] - 1)
