"""The mixing kernels for GPU (Triton): a program for each batch row and head, with the state in registers.

Each program runs through the chunks of its row in order. Triton requires tile sizes that are powers of two, and
products of at least 16 rows: see `fits`. Chunks have 16 positions and a program 8 warps: a backward step holds about 15
tiles [C, J] in registers, and with 4 warps the compiler (sm_90a) spills 700 bytes per thread.

Letters as in `tile`, and N chunks.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from nautile.model.layers.mixing.chunked import JoinedOperands, JoinedState
from nautile.model.layers.mixing.kernels.tile import (
    HeadParameters,
    SampleFolding,
    TileInputs,
    TileState,
    backward,
    forward,
)

CHUNK = 16

# Kinds of arrays: the block that program (b, k) gets (None: its row or head; -1: the whole axis), and where it starts.
_ALONG = ((None, -1, None, -1), lambda b, k: (b, 0, k, 0))  # [B, L, K, ...]
_COLUMN = ((None, -1, None), lambda b, k: (b, 0, k))  # [B, L, K]
_TIMES = ((None, -1, -1), lambda b, k: (b, 0, 0))  # [B, L, 3]
_ROW = ((1, -1), lambda b, k: (k, 0))  # [K, ...]
_EACH = ((None, 1, -1), lambda b, k: (b, k, 0))  # [B, K, ...]
_BEFORE = ((None, None, -1, -1), lambda b, k: (b, k, 0, 0))  # [B, K, N, ...]


def fits(head_dim: int, samples: int) -> bool:
    """Whether Triton supports these sizes: H·M must be a power of two, and H at least 16."""
    joined = head_dim * samples
    return head_dim >= 16 and joined & (joined - 1) == 0


def run_forward(
    operands: JoinedOperands, times_BL3: Array, state: JoinedState, chunk: int, interpret: bool
) -> tuple[Array, Array, JoinedState, JoinedState]:
    """The readout, re and im [B, L, K, H], the last state, and the states before each chunk [B, K, N, ...]."""
    keys = operands.keys_BLKH
    batch, length, heads, _ = keys.shape
    joined = operands.grid_KJ.shape[-1]
    chunks = length // chunk
    outs: list[tuple] = [(_ALONG, keys.shape, keys.dtype)] * 2
    outs += [(_EACH, (batch, heads, width), jnp.float32) for width in (joined, joined, 1)]
    outs += [(_BEFORE, (batch, heads, chunks, width), jnp.float32) for width in (joined, joined, 1)]
    inputs = [*_arrange(operands, times_BL3), *_sums_in(state)]
    out_re, out_im, re, im, z, *befores = _call(partial(_forward_kernel, chunk, chunks), inputs, outs, interpret)
    return out_re, out_im, JoinedState(re, im, z[..., 0]), JoinedState(*befores)


def run_backward(
    operands: JoinedOperands,
    times_BL3: Array,
    befores: JoinedState,
    d_re: Array,
    d_im: Array,
    d_last: JoinedState,
    chunk: int,
    interpret: bool,
) -> tuple[JoinedOperands, JoinedState]:
    """Gradients of the operands and of the initial state. `befores`: as returned by `run_forward`."""
    batch, length, heads, _ = operands.keys_BLKH.shape
    joined = operands.grid_KJ.shape[-1]
    # Gradients of the parameters are written per row, and summed over rows below.
    outs = [
        (kind, array.shape, array.dtype)
        for kind, array in zip(
            (_ALONG, _COLUMN, _ALONG, _ALONG),
            (operands.keys_BLKH, operands.gates_BLK, operands.q_re_BLQJ, operands.q_im_BLQJ),
            strict=True,
        )
    ]
    outs += [(_EACH, (batch, heads, width), jnp.float32) for width in (1, 1, joined, joined, joined, joined, 1)]
    inputs = [*_arrange(operands, times_BL3), *((_BEFORE, part) for part in befores)]
    inputs += [(_ALONG, d_re), (_ALONG, d_im), *_sums_in(d_last)]
    # The last three are the gradient of the initial state, which has the same shapes as the state.
    d_keys, d_gates, dq_re, dq_im, d_decay, d_scale, d_grid, d_weights, re, im, z = _call(
        partial(_backward_kernel, chunk, length // chunk), inputs, outs, interpret
    )
    gradient = JoinedOperands(
        d_keys, d_gates, jnp.sum(d_decay, axis=(0, 2)), jnp.sum(d_scale, axis=(0, 2)),
        jnp.sum(d_grid, axis=0), jnp.sum(d_weights, axis=0), dq_re, dq_im,
    )  # fmt: skip
    return gradient, JoinedState(re, im, z[..., 0])


def _forward_kernel(chunk: int, chunks: int, *refs: Any) -> None:
    # In the order of `run_forward`: 8 inputs of `_arrange`, initial state, then outputs.
    inputs, state, (out_re, out_im), last, befores = refs[:8], refs[8:11], refs[11:13], refs[13:16], refs[16:]
    head = _head(inputs)
    fold = _folding(inputs)

    def step(n: Array, carry: TileState) -> TileState:
        # Save the state before the chunk, for the backward pass.
        for ref, part in zip(befores, carry, strict=True):
            ref[pl.ds(n, 1), :] = part
        span = pl.ds(n * chunk, chunk)
        re_CH, im_CH, after = forward(head, _block(inputs, span), carry, fold)
        out_re[span, :] = re_CH.astype(out_re.dtype)
        out_im[span, :] = im_CH.astype(out_im.dtype)
        return after

    # The state is the carry of the loop, so it stays in registers between chunks.
    carry = jax.lax.fori_loop(0, chunks, step, TileState(*(ref[...] for ref in state)))
    for ref, part in zip(last, carry, strict=True):
        ref[...] = part


def _backward_kernel(chunk: int, chunks: int, *refs: Any) -> None:
    # In the order of `run_backward`: 8 inputs of `_arrange`, saved states, cotangents, then outputs.
    inputs, befores, cotangents, d_last, outs = refs[:8], refs[8:11], refs[11:13], refs[13:16], refs[16:]
    d_keys, d_gates, dq_re, dq_im, d_decay, d_scale, d_grid, d_weights, *d_state = outs
    head = _head(inputs)
    fold = _folding(inputs)

    def step(i: Array, carry: tuple) -> tuple:
        d_after, *totals = carry
        n = chunks - 1 - i  # from the last chunk to the first
        span = pl.ds(n * chunk, chunk)
        d_re, d_im = (ref[span, :].astype(jnp.float32) for ref in cotangents)
        before = TileState(*(ref[pl.ds(n, 1), :] for ref in befores))
        gradient, d_before = backward(head, _block(inputs, span), before, d_re, d_im, d_after, fold)
        d_keys[span, :] = gradient.keys_CH.astype(d_keys.dtype)
        d_gates[span] = jnp.sum(gradient.gates_C1, axis=1).astype(d_gates.dtype)
        dq_re[span, :] = gradient.q_re_CJ.astype(dq_re.dtype)
        dq_im[span, :] = gradient.q_im_CJ.astype(dq_im.dtype)
        parts = (gradient.decay_11, gradient.phase_scale_11, gradient.grid_1J, gradient.weights_1J)
        return d_before, *(total + part for total, part in zip(totals, parts, strict=True))

    # Running totals of the gradients of decay, phase scale, grid and weights.
    scalar, row = jnp.zeros((1, 1), jnp.float32), jnp.zeros((1, d_grid.shape[-1]), jnp.float32)
    start = (TileState(*(ref[...] for ref in d_last)), scalar, scalar, row, row)
    carry, *totals = jax.lax.fori_loop(0, chunks, step, start)
    for ref, part in zip((d_decay, d_scale, d_grid, d_weights, *d_state), (*totals, *carry), strict=True):
        ref[...] = part


def _call(kernel: Callable, inputs: list[tuple], outs: list[tuple], interpret: bool) -> list[Array]:
    """Call a kernel on the grid (rows, heads). `inputs`: (kind, array); `outs`: (kind, shape, dtype)."""
    arrays = [array for _, array in inputs]
    batch, _, heads, _ = arrays[0].shape
    call = pl.pallas_call(
        kernel,
        grid=(batch, heads),
        in_specs=[_spec(kind, array.shape) for kind, array in inputs],
        out_specs=[_spec(kind, shape) for kind, shape, _ in outs],
        out_shape=[jax.ShapeDtypeStruct(shape, dtype) for _, shape, dtype in outs],
        compiler_params=plgpu.CompilerParams(num_warps=8, num_stages=1),
        interpret=interpret,
    )
    return call(*arrays)


def _spec(kind: tuple[tuple, Callable], shape: tuple[int, ...]) -> pl.BlockSpec:
    block, start = kind
    return pl.BlockSpec(tuple(size if part == -1 else part for part, size in zip(block, shape, strict=True)), start)


def _arrange(operands: JoinedOperands, times_BL3: Array) -> list[tuple]:
    scalars_K2 = jnp.stack([operands.decay_K, operands.phase_scale_K], axis=1)
    return [
        (_ALONG, operands.keys_BLKH), (_COLUMN, operands.gates_BLK), (_ALONG, operands.q_re_BLQJ),
        (_ALONG, operands.q_im_BLQJ), (_TIMES, times_BL3), (_ROW, scalars_K2), (_ROW, operands.grid_KJ),
        (_ROW, operands.weights_KJ),
    ]  # fmt: skip


def _sums_in(sums: JoinedState) -> list[tuple]:
    return [(_EACH, sums.re_BKJ), (_EACH, sums.im_BKJ), (_EACH, sums.z_BK[..., None])]


def _head(inputs: tuple) -> HeadParameters:
    scalars, grid, weights = inputs[5:]
    return HeadParameters(scalars[:, 0:1], scalars[:, 1:2], grid[...], weights[...])


def _block(inputs: tuple, span: Any) -> TileInputs:
    keys, gates, q_re, q_im, times = inputs[:5]
    columns = (gates[span][:, None], q_re[span, :], q_im[span, :], *(times[span, i][:, None] for i in range(3)))
    return TileInputs(*(part.astype(jnp.float32) for part in (keys[span, :], *columns)))


def _folding(inputs: tuple) -> SampleFolding:
    head_dim, joined = inputs[0].shape[-1], inputs[2].shape[-1]
    if joined == head_dim:
        return SampleFolding(lambda tile_CH: tile_CH, lambda tile_CJ: tile_CJ)
    samples = joined // head_dim

    def widen(tile_CH: Array) -> Array:
        rows = tile_CH.shape[0]
        return jnp.broadcast_to(tile_CH[:, :, None], (rows, head_dim, samples)).reshape(rows, joined)

    def narrow(tile_CJ: Array) -> Array:
        return jnp.sum(tile_CJ.reshape(tile_CJ.shape[0], head_dim, samples), axis=-1)

    return SampleFolding(widen, narrow)
