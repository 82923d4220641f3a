"""The fused form of the mixing operator: Pallas kernels on TPU and GPU, the chunked form on any other device.

One custom gradient covers the kernels of both devices. As in the chunked form it saves the inputs and the state before
each chunk. Rows are padded to whole chunks, and the operator ignores padding; queries that several memory heads share
are repeated. XLA does not partition a kernel: on several devices, call it in `jax.shard_map`.
"""

from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array

from nautile.model.layers.mixing.chunked import JoinedOperands, JoinedState, MixState, Operands, Timeline, chunked
from nautile.model.layers.mixing.kernels import gpu, tpu

Device = Literal["tpu", "gpu"]
_KERNELS = {"tpu": tpu, "gpu": gpu}


def fused(operands: Operands, times: Timeline | None, state: MixState, *, chunk: int) -> tuple[Array, Array, MixState]:
    """`mix` with the kernels of the device that the program is compiled for. `mix` has checked the shapes."""
    # On GPU the chunk is fixed: see `gpu`.
    branches = {"tpu": partial(run, "tpu", chunk=chunk)}
    if gpu.fits(*operands.grid_KHM.shape[1:]):
        branches["cuda"] = partial(run, "gpu", chunk=gpu.CHUNK)
    return jax.lax.platform_dependent(operands, times, state, default=partial(chunked, chunk=chunk), **branches)


def run(
    device: Device,
    operands: Operands,
    times: Timeline | None,
    state: MixState,
    *,
    chunk: int,
    interpret: bool = False,
) -> tuple[Array, Array, MixState]:
    """Run the kernels of one kind of device; `interpret` runs them as plain JAX on any device, for tests."""
    batch, length, heads, head_dim = operands.keys.shape
    chunk = tpu.chunk_for(min(chunk, length)) if device == "tpu" else chunk
    missing = -length % chunk
    share = heads // operands.q_re.shape[2]
    joined = operands.joined()

    def pad(array_BL: Array) -> Array:
        return jnp.pad(array_BL, [(0, 0), (0, missing)] + [(0, 0)] * (array_BL.ndim - 2)) if missing else array_BL

    def repeat_heads(queries_BLQJ: Array) -> Array:
        return jnp.repeat(queries_BLQJ, share, axis=2) if share > 1 else queries_BLQJ

    # As the kernels expect them: whole chunks, float32 parameters, ω/√H, and a query for every memory head.
    prepared = JoinedOperands(
        pad(joined.keys_BLKH),
        pad(joined.gates_BLK),
        joined.decay_K.astype(jnp.float32),
        joined.phase_scale_K.astype(jnp.float32),
        joined.grid_KJ.astype(jnp.float32),
        joined.weights_KJ.astype(jnp.float32) * head_dim**-0.5,
        pad(repeat_heads(joined.q_re_BLQJ)),
        pad(repeat_heads(joined.q_im_BLQJ)),
    )
    times_BL3 = _columns(times, batch, length, missing, chunk)
    out_re, out_im, sums = _fused(device, chunk, interpret, prepared, times_BL3, JoinedState.of(state))
    # Padding leaves the state unchanged, so only the readout is cut.
    return out_re[:, :length], out_im[:, :length], sums.split(operands.grid_KHM.shape[-1])


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _fused(
    device: Device, chunk: int, interpret: bool, operands: JoinedOperands, times_BL3: Array, state: JoinedState
) -> tuple[Array, Array, JoinedState]:
    return _forward(device, chunk, interpret, operands, times_BL3, state)[0]


def _forward(
    device: Device, chunk: int, interpret: bool, operands: JoinedOperands, times_BL3: Array, state: JoinedState
) -> tuple[tuple, tuple]:
    out_re, out_im, last, befores = _KERNELS[device].run_forward(operands, times_BL3, state, chunk, interpret)
    return (out_re, out_im, last), (operands, times_BL3, befores)


def _backward(
    device: Device, chunk: int, interpret: bool, residuals: tuple, cotangents: tuple
) -> tuple[JoinedOperands, Array, JoinedState]:
    operands, times_BL3, befores = residuals
    gradient, d_state = _KERNELS[device].run_backward(operands, times_BL3, befores, *cotangents, chunk, interpret)
    # The timeline is float32 only for the kernels; it has no gradient.
    return gradient, jnp.zeros_like(times_BL3), d_state


_fused.defvjp(_forward, _backward)


def _columns(times: Timeline | None, batch: int, length: int, missing: int, chunk: int) -> Array:
    """[B, L, 3] float32: whether a position holds a token, and the tokens and resets of its chunk up to it."""
    if times is None:
        times = Timeline(jnp.ones((batch, length), bool), jnp.zeros((batch, length), bool))
    flags_BL2 = jnp.pad(jnp.stack(times, axis=-1).astype(jnp.float32), ((0, 0), (0, missing), (0, 0)))
    counts_BL2 = jnp.cumsum(flags_BL2.reshape(batch, -1, chunk, 2), axis=2).reshape(flags_BL2.shape)
    return jnp.concatenate([flags_BL2[..., :1], counts_BL2], axis=-1)
