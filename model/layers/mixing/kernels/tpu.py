"""The mixing kernels for TPU (Mosaic): grid [batch, groups of heads, chunks], the chunks in order, the state in VMEM.

A grid step computes one chunk of P heads, where P·H lanes fill whole registers (P = 2 for H = 64). In the backward pass
the index maps count the chunks down. Values are repeated over M and summed over M by products with a matrix of zeros
and ones, exact at the highest precision: strides across lanes are slow on a TPU.

Letters, in addition to those of `tile`: N chunks, G groups of heads, P heads in a group.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from nautile.model.layers.mixing.chunked import JoinedOperands, JoinedState
from nautile.model.layers.mixing.kernels.tile import (
    HeadParameters,
    SampleFolding,
    TileInputs,
    TileState,
    backward,
    forward,
)

LANES = 128


class _Layout(NamedTuple):
    """The grid, and the block spec of each kind of array; `chunk_of` maps the n-th step to its chunk."""

    batch: int
    length: int
    heads: int
    head_dim: int
    joined: int
    group: int
    chunk: int
    chunk_of: Callable[[Any], Any]

    @property
    def groups(self) -> int:
        return self.heads // self.group

    @property
    def chunks(self) -> int:
        return self.length // self.chunk

    def along(self, width: int) -> pl.BlockSpec:
        """[B, L, K·width]"""
        return pl.BlockSpec((None, self.chunk, self.group * width), lambda b, g, n: (b, self.chunk_of(n), g))

    def columns(self) -> pl.BlockSpec:
        """[B, G, L, P]"""
        return pl.BlockSpec((None, None, self.chunk, self.group), lambda b, g, n: (b, g, self.chunk_of(n), 0))

    def times(self) -> pl.BlockSpec:
        """[B, L, 3]"""
        return pl.BlockSpec((None, self.chunk, 3), lambda b, g, n: (b, self.chunk_of(n), 0))

    def row(self) -> pl.BlockSpec:
        """[1, K·J]"""
        return pl.BlockSpec((1, self.group * self.joined), lambda b, g, n: (0, g))

    def scalars(self) -> pl.BlockSpec:
        """[G, 2, P]: decay and phase scale"""
        return pl.BlockSpec((None, 2, self.group), lambda b, g, n: (g, 0, 0))

    def row_each(self) -> pl.BlockSpec:
        """[B, 1, K·J]"""
        return pl.BlockSpec((None, 1, self.group * self.joined), lambda b, g, n: (b, 0, g))

    def scalars_each(self, rows: int) -> pl.BlockSpec:
        """[B, G, rows, P]"""
        return pl.BlockSpec((None, None, rows, self.group), lambda b, g, n: (b, g, 0, 0))

    def sums(self) -> list[pl.BlockSpec]:
        return [self.row_each(), self.row_each(), self.scalars_each(1)]

    def befores(self) -> list[pl.BlockSpec]:
        """[B, N, 1, K·J] twice and [B, G, N, 1, P]"""
        wide = pl.BlockSpec((None, None, 1, self.group * self.joined), lambda b, g, n: (b, self.chunk_of(n), 0, g))
        return [
            wide, wide,
            pl.BlockSpec((None, None, None, 1, self.group), lambda b, g, n: (b, g, self.chunk_of(n), 0, 0)),
        ]  # fmt: skip

    def inputs(self) -> list[pl.BlockSpec]:
        """In the order of `_arrange`."""
        queries = self.along(self.joined)
        return [
            self.along(self.head_dim), self.columns(), queries, queries, self.times(), self.scalars(), self.row(),
            self.row(),
        ]  # fmt: skip

    def call(self, kernel: Callable, in_specs: list, outs: list[tuple], interpret: bool) -> Callable:
        """The Pallas call of a kernel; `outs` holds (block spec, shape, dtype) for each output."""
        return pl.pallas_call(
            kernel,
            grid=(self.batch, self.groups, self.chunks),
            in_specs=in_specs,
            out_specs=[spec for spec, _, _ in outs],
            out_shape=[jax.ShapeDtypeStruct(shape, dtype) for _, shape, dtype in outs],
            compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
            interpret=interpret,
        )


def chunk_for(chunk: int) -> int:
    """Round the chunk size down to whole bfloat16 registers, which have 16 rows."""
    return max(16, chunk // 16 * 16)


def run_forward(
    operands: JoinedOperands, times_BL3: Array, state: JoinedState, chunk: int, interpret: bool
) -> tuple[Array, Array, JoinedState, JoinedState]:
    """The readout, re and im [B, L, K, H], the last state, and the states before each chunk (see `befores`)."""
    layout = _layout(operands, chunk, lambda n: n)
    keys = operands.keys_BLKH
    batch, length, heads, head_dim = keys.shape
    out = (layout.along(head_dim), (batch, length, heads * head_dim), keys.dtype)
    arranged = _sums_in(layout, state)
    shapes = [part.shape for part in arranged]
    lasts = [(spec, shape, jnp.float32) for spec, shape in zip(layout.sums(), shapes, strict=True)]
    wide, narrow = (
        (batch, layout.chunks, 1, heads * layout.joined),
        (batch, layout.groups, layout.chunks, 1, layout.group),
    )
    befores = [(spec, shape, jnp.float32) for spec, shape in zip(layout.befores(), (wide, wide, narrow), strict=True)]
    call = layout.call(
        partial(_forward_kernel, layout), layout.inputs() + layout.sums(), [out, out, *lasts, *befores], interpret
    )
    out_re, out_im, *states = call(*_arrange(layout, operands, times_BL3), *arranged)
    return (
        out_re.reshape(keys.shape),
        out_im.reshape(keys.shape),
        _sums_out(layout, states[:3]),
        JoinedState(*states[3:]),
    )


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
    chunks = operands.keys_BLKH.shape[1] // chunk
    # The grid runs forwards: counted down, its first step is the last chunk of the row.
    layout = _layout(operands, chunk, lambda n: chunks - 1 - n)
    keys, queries = operands.keys_BLKH, operands.q_re_BLQJ
    batch, length, heads, head_dim = keys.shape
    flat = (batch, length, heads * head_dim)
    arranged = _sums_in(layout, d_last)
    wide = (batch, length, heads * layout.joined)
    row = (layout.row_each(), (batch, 1, heads * layout.joined), jnp.float32)
    outs = [
        (layout.along(head_dim), flat, keys.dtype),
        (layout.columns(), (batch, layout.groups, length, layout.group), operands.gates_BLK.dtype),
        (layout.along(layout.joined), wide, queries.dtype),
        (layout.along(layout.joined), wide, queries.dtype),
        (layout.scalars_each(2), (batch, layout.groups, 2, layout.group), jnp.float32),
        row, row,
        *((spec, part.shape, jnp.float32) for spec, part in zip(layout.sums(), arranged, strict=True)),
    ]  # fmt: skip
    in_specs = layout.inputs() + layout.befores() + [layout.along(head_dim)] * 2 + layout.sums()
    call = layout.call(partial(_backward_kernel, layout), in_specs, outs, interpret)
    d_keys, d_gates, dq_re, dq_im, d_scalars, d_grid, d_weights, *d_state = call(
        *_arrange(layout, operands, times_BL3), *befores, d_re.reshape(flat), d_im.reshape(flat), *arranged
    )
    # Summed over the rows of the batch here: blocks of one output cannot be shared by rows that run in parallel.
    decay_GP, phase_scale_GP = jnp.moveaxis(jnp.sum(d_scalars, axis=0), 1, 0)
    gradient = JoinedOperands(
        d_keys.reshape(keys.shape),
        jnp.swapaxes(d_gates, 1, 2).reshape(batch, length, heads),
        decay_GP.reshape(heads),
        phase_scale_GP.reshape(heads),
        jnp.sum(d_grid, axis=0).reshape(heads, -1),
        jnp.sum(d_weights, axis=0).reshape(heads, -1),
        dq_re.reshape(queries.shape),
        dq_im.reshape(queries.shape),
    )
    return gradient, _sums_out(layout, d_state)


def _forward_kernel(layout: _Layout, *refs: Any) -> None:
    # In the order of `run_forward`: 8 inputs of `_arrange`, initial state, then outputs.
    inputs, state, (out_re, out_im), last, befores = refs[:8], refs[8:11], refs[11:13], refs[13:16], refs[16:]
    _copy_initial_state(state, last)
    for p in range(layout.group):
        before = _load_sums(layout, last, p)
        _store_sums(layout, befores, p, before)
        head, block = _head_at(layout, inputs, p)
        re_CH, im_CH, after = forward(head, block, before, _folding(layout))
        out_re[:, _span(p, layout.head_dim)] = re_CH.astype(out_re.dtype)
        out_im[:, _span(p, layout.head_dim)] = im_CH.astype(out_im.dtype)
        _store_sums(layout, last, p, after)


def _backward_kernel(layout: _Layout, *refs: Any) -> None:
    # In the order of `run_backward`: 8 inputs of `_arrange`, saved states, cotangents, then outputs.
    inputs, befores, cotangents, d_last, outs = refs[:8], refs[8:11], refs[11:13], refs[13:16], refs[16:]
    d_keys, d_gates, dq_re, dq_im, d_scalars, d_grid, d_weights, *d_state = outs
    _copy_initial_state(d_last, d_state)

    # Gradients of the parameters add up over the chunks of a row.
    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        for ref in (d_scalars, d_grid, d_weights):
            ref[...] = jnp.zeros(ref.shape, ref.dtype)

    for p in range(layout.group):
        head, block = _head_at(layout, inputs, p)
        narrow, wide = _span(p, layout.head_dim), _span(p, layout.joined)
        d_re, d_im = (ref[:, narrow].astype(jnp.float32) for ref in cotangents)
        gradient, d_before = backward(
            head, block, _load_sums(layout, befores, p), d_re, d_im, _load_sums(layout, d_state, p), _folding(layout)
        )
        d_keys[:, narrow] = gradient.keys_CH.astype(d_keys.dtype)
        d_gates[:, p : p + 1] = gradient.gates_C1.astype(d_gates.dtype)
        dq_re[:, wide] = gradient.q_re_CJ.astype(dq_re.dtype)
        dq_im[:, wide] = gradient.q_im_CJ.astype(dq_im.dtype)
        d_scalars[0:1, p : p + 1] += gradient.decay_11
        d_scalars[1:2, p : p + 1] += gradient.phase_scale_11
        d_grid[:, wide] += gradient.grid_1J
        d_weights[:, wide] += gradient.weights_1J
        _store_sums(layout, d_state, p, d_before)


def _layout(operands: JoinedOperands, chunk: int, chunk_of: Callable[[Any], Any]) -> _Layout:
    batch, length, heads, head_dim = operands.keys_BLKH.shape
    joined = operands.grid_KJ.shape[-1]
    # The smallest group of heads whose lanes fill whole registers, else all heads.
    fitting = [p for p in range(1, heads) if heads % p == 0 and not (p * head_dim % LANES or p * joined % LANES)]
    return _Layout(batch, length, heads, head_dim, joined, fitting[0] if fitting else heads, chunk, chunk_of)


def _arrange(layout: _Layout, operands: JoinedOperands, times_BL3: Array) -> list[Array]:
    batch, length = layout.batch, layout.length
    gates_BGLP = jnp.swapaxes(operands.gates_BLK.reshape(batch, length, layout.groups, layout.group), 1, 2)
    scalars = jnp.stack([operands.decay_K, operands.phase_scale_K]).reshape(2, layout.groups, layout.group)
    return [
        operands.keys_BLKH.reshape(batch, length, -1), gates_BGLP,
        operands.q_re_BLQJ.reshape(batch, length, -1), operands.q_im_BLQJ.reshape(batch, length, -1),
        times_BL3, jnp.swapaxes(scalars, 0, 1), operands.grid_KJ.reshape(1, -1), operands.weights_KJ.reshape(1, -1),
    ]  # fmt: skip


def _sums_in(layout: _Layout, sums: JoinedState) -> list[Array]:
    batch = layout.batch
    return [
        sums.re_BKJ.reshape(batch, 1, -1), sums.im_BKJ.reshape(batch, 1, -1),
        sums.z_BK.reshape(batch, layout.groups, 1, layout.group),
    ]  # fmt: skip


def _sums_out(layout: _Layout, parts: list[Array]) -> JoinedState:
    full = (layout.batch, layout.heads, layout.joined)
    return JoinedState(parts[0].reshape(full), parts[1].reshape(full), parts[2].reshape(full[:2]))


def _head_at(layout: _Layout, inputs: tuple, p: int) -> tuple[HeadParameters, TileInputs]:
    keys, gates, q_re, q_im, times, scalars, grid, weights = inputs
    narrow, wide, column = _span(p, layout.head_dim), _span(p, layout.joined), slice(p, p + 1)
    head = HeadParameters(scalars[0:1, column], scalars[1:2, column], grid[:, wide], weights[:, wide])
    parts = (keys[:, narrow], gates[:, column], q_re[:, wide], q_im[:, wide], *(times[:, i : i + 1] for i in range(3)))
    return head, TileInputs(*(part.astype(jnp.float32) for part in parts))


def _copy_initial_state(start: Sequence[Any], carried: Sequence[Any]) -> None:
    """At the first step of a row, copy the initial state into the output block, which stays in VMEM for all steps."""

    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        for ref, own in zip(start, carried, strict=True):
            own[...] = ref[...]


def _load_sums(layout: _Layout, refs: Sequence[Any], p: int) -> TileState:
    wide = _span(p, layout.joined)
    return TileState(refs[0][:, wide], refs[1][:, wide], refs[2][:, p : p + 1])


def _store_sums(layout: _Layout, refs: Sequence[Any], p: int, state: TileState) -> None:
    wide = _span(p, layout.joined)
    refs[0][:, wide], refs[1][:, wide], refs[2][:, p : p + 1] = state


def _span(p: int, width: int) -> slice:
    return slice(p * width, (p + 1) * width)


def _folding(layout: _Layout) -> SampleFolding:
    samples = layout.joined // layout.head_dim
    if samples == 1:
        return SampleFolding(lambda tile_CH: tile_CH, lambda tile_CJ: tile_CJ)
    shape = (layout.head_dim, layout.joined)
    start_HJ = jax.lax.broadcasted_iota(jnp.int32, shape, 0) * samples
    column_HJ = jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    ones_HJ = jnp.where((column_HJ >= start_HJ) & (column_HJ < start_HJ + samples), 1.0, 0.0)

    def product(tile: Array, axis: int) -> Array:
        return jax.lax.dot_general(
            tile, ones_HJ, (((1,), (axis,)), ((), ())),
            precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32,
        )  # fmt: skip

    return SampleFolding(lambda tile_CH: product(tile_CH, 0), lambda tile_CJ: product(tile_CJ, 1))
