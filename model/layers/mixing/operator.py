"""The mixing operator of SCA: causal spectral accumulation (paper §2.2.4, steps 2 to 5), in several forms.

    S_t = e^-λ S_{t-1} + g_t k_t e^{iφ_t},    Z_t = e^-λ Z_{t-1} + g_t,    φ_t = softsign(η k_t) ⊙ θ
    o_t = Σ_m ω_m (S_t / Z_t)_m · conj(q_t)_m / √H

Written as a recurrence, the paper's decay exp(-λ d(t)) is relative: measuring it to any other boundary adds a common
factor, which cancels in S/Z. So nothing overflows, nothing is clipped, and the context length plays no part.

Forms: "reference" (Algorithm 1 with step 4 as a matrix product, quadratic in L), "chunked" (the default, linear, with
its own gradient), "fused" (Pallas kernels on TPU and GPU, chunked elsewhere); `mix_step` processes a single token. All
return the same values and gradients.

Padding (segment 0) is transparent: it adds nothing, decays nothing, resets nothing, and its output is 0.

Letters: B batch, L length, K memory heads, Q query heads, H head dim, M spectral samples; T and S are L as target
("to") and source ("from") of a weight.
"""

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from nautile.common.errors import ConfigError
from nautile.model.layers.mixing.chunked import (
    MixState,
    Operands,
    Timeline,
    chunked,
    divide,
    sine_cosine,
    softsign,
    timeline,
)

Form = Literal["reference", "chunked", "fused"]


def empty_state(batch: int, heads: int, head_dim: int, samples: int) -> MixState:
    """The state of an empty prefix."""
    zeros_BKHM = jnp.zeros((batch, heads, head_dim, samples), jnp.float32)
    return MixState(zeros_BKHM, zeros_BKHM, jnp.zeros((batch, heads), jnp.float32))


def mix(
    operands: Operands,
    segments_BL: Array | None = None,
    state: MixState | None = None,
    *,
    chunk: int = 32,
    form: Form = "chunked",
) -> tuple[Array, Array, MixState]:
    """Accumulate and read out whole rows (paper §2.2.4, steps 2 to 5): re and im [B, L, K, H], and the final state.

    segments_BL: int; 0 is padding; the state is reset where the segment changes. None: one segment a row.
    state: of the earlier part of each row's first segment. None: the empty prefix.
    chunk: positions per chunk in the chunked and fused forms; L need not be a multiple.

    Sums are float32 whatever the inputs; the readout has the dtype of the keys. Raises ConfigError where the shapes do
    not fit.
    """
    _check_shapes(operands)
    batch, length, heads, head_dim = operands.keys.shape
    samples = operands.grid_KHM.shape[-1]
    if chunk < 1:
        raise ConfigError(f"mixing: chunk must be at least 1, not {chunk}")
    if segments_BL is not None and segments_BL.shape != (batch, length):
        raise ConfigError(f"mixing: segments {segments_BL.shape} must be [batch, length] = {(batch, length)}")
    if state is None:
        state = empty_state(batch, heads, head_dim, samples)
    sums_shape = (batch, heads, head_dim, samples)
    shapes, expected = tuple(part.shape for part in state), (sums_shape, sums_shape, (batch, heads))
    if shapes != expected:
        raise ConfigError(f"mixing: the shapes of the state are {shapes} and must be {expected}")
    times = None if segments_BL is None else timeline(segments_BL)
    if form == "chunked":
        return chunked(operands, times, state, chunk=chunk)
    if form == "reference":
        return reference(operands, times, state)
    if form == "fused":
        # Imported here: Pallas is a fifth of the import time of a process, and only this form uses it.
        from nautile.model.layers.mixing.kernels.dispatch import fused

        return fused(operands, times, state, chunk=chunk)
    raise ConfigError(f'mixing: form {form!r} is not one of "reference", "chunked", "fused"')


def mix_step(operands: Operands, state: MixState) -> tuple[Array, Array, MixState]:
    """`mix` for a single token: operands without the axis L to re and im [B, K, H], and the next state."""
    keys_BKH1 = operands.keys.astype(jnp.float32)[..., None]
    squashed_BKH1 = softsign(operands.phase_scale_K[:, None, None] * keys_BKH1)
    sine, cosine = sine_cosine(squashed_BKH1 * (operands.grid_KHM / (2 * np.pi)))
    gates_BK = operands.gates.astype(jnp.float32)
    gated_BKH1 = gates_BK[..., None, None] * keys_BKH1
    retention_K = jnp.exp(-operands.decay_K.astype(jnp.float32))
    state = MixState(
        retention_K[:, None, None] * state.re_BKHM + gated_BKH1 * cosine,
        retention_K[:, None, None] * state.im_BKHM + gated_BKH1 * sine,
        retention_K * state.z_BK + gates_BK,
    )
    out_re_BKH, out_im_BKH = readout(state, operands.weights_KHM, operands.q_re, operands.q_im)
    return out_re_BKH.astype(operands.keys.dtype), out_im_BKH.astype(operands.keys.dtype), state


def readout(state: MixState, weights_KHM: Array, q_re_BQHM: Array, q_im_BQHM: Array) -> tuple[Array, Array]:
    """Step 5: the normalised Hermitian product with the queries, summed over M, any leading axes; 0 where Z is 0."""
    heads, head_dim, _ = weights_KHM.shape
    share = heads // q_re_BQHM.shape[-3]
    weights_KHM = weights_KHM * head_dim**-0.5
    q_re_BKHM = jnp.repeat(_wide(q_re_BQHM), share, axis=-3) * weights_KHM
    q_im_BKHM = jnp.repeat(_wide(q_im_BQHM), share, axis=-3) * weights_KHM
    re_BKHM = divide(state.re_BKHM, state.z_BK[..., None, None])
    im_BKHM = divide(state.im_BKHM, state.z_BK[..., None, None])
    out_re_BKH = jnp.sum(re_BKHM * q_re_BKHM + im_BKHM * q_im_BKHM, axis=-1)
    return out_re_BKH, jnp.sum(im_BKHM * q_re_BKHM - re_BKHM * q_im_BKHM, axis=-1)


def reference(operands: Operands, times: Timeline | None, state: MixState) -> tuple[Array, Array, MixState]:
    """Algorithm 1, steps 2 to 5, as in the paper; step 4 is the matrix product it gives for short rows.

    With float64 operands (under jax.enable_x64) it computes in float64: the other forms are tested against it.
    """
    batch, length, _, _ = operands.keys.shape
    if times is None:
        times = Timeline(jnp.ones((batch, length), bool), jnp.zeros((batch, length), bool))
    resets_BL = jnp.cumsum(times.starts_BL, axis=1)
    count_BL = jnp.cumsum(times.real_BL, axis=1)
    gates_BLK = jnp.where(times.real_BL[..., None], _wide(operands.gates), 0)

    # Step 2: the weight of source S in target T is the decay between them times the gate of S. `carry` is the weight of
    # the initial state in T: none after a reset.
    reach_BTS = (resets_BL[:, :, None] == resets_BL[:, None, :]) & jnp.tril(jnp.ones((length, length), bool))
    distance_BTS = jnp.where(reach_BTS, count_BL[:, :, None] - count_BL[:, None, :], 0)[:, None]
    alpha_BKTS = jnp.where(reach_BTS[:, None], jnp.exp(-_wide(operands.decay_K)[:, None, None] * distance_BTS), 0)
    alpha_BKTS = alpha_BKTS * jnp.swapaxes(gates_BLK, 1, 2)[:, :, None]
    carry_BKT = jnp.where((resets_BL == 0)[:, None], jnp.exp(-_wide(operands.decay_K)[:, None] * count_BL[:, None]), 0)

    # Step 3: the phase of each key on the grid.
    keys_BLKH1 = _wide(operands.keys)[..., None]
    phase_BLKHM = softsign(_wide(operands.phase_scale_K)[:, None, None] * keys_BLKH1) * _wide(operands.grid_KHM)

    # Step 4: the sums S and Z at every position.
    def sums(values_BLKHM: Array, before_BKHM: Array) -> Array:
        inside = jnp.einsum("bkts,bskhm->btkhm", alpha_BKTS, values_BLKHM, precision=jax.lax.Precision.HIGHEST)
        return inside + jnp.einsum("bkt,bkhm->btkhm", carry_BKT, before_BKHM)

    z_BLK = jnp.swapaxes(jnp.sum(alpha_BKTS, axis=-1) + carry_BKT * state.z_BK[..., None], 1, 2)
    states = MixState(
        sums(keys_BLKH1 * jnp.cos(phase_BLKHM), state.re_BKHM),
        sums(keys_BLKH1 * jnp.sin(phase_BLKHM), state.im_BKHM),
        z_BLK,
    )

    # Step 5: the readout, 0 at padding.
    out_re_BLKH, out_im_BLKH = (
        jnp.where(times.real_BL[..., None, None], part, 0).astype(operands.keys.dtype)
        for part in readout(states, _wide(operands.weights_KHM), operands.q_re, operands.q_im)
    )
    return out_re_BLKH, out_im_BLKH, jax.tree.map(lambda part: part[:, -1], states)


def _wide(array: Array) -> Array:
    """Cast to float32 unless it is wider."""
    return array.astype(jnp.promote_types(array.dtype, jnp.float32))


def _check_shapes(operands: Operands) -> None:
    """Raise ConfigError where the shapes of the operands do not fit each other."""
    keys, grid, q_re = operands.keys, operands.grid_KHM, operands.q_re
    if keys.ndim != 4 or keys.shape[1] < 1:
        raise ConfigError(f"mixing: keys {keys.shape} must be [batch, length >= 1, memory heads, head dim]")
    batch, length, heads, head_dim = keys.shape
    if grid.ndim != 3 or grid.shape[:2] != (heads, head_dim):
        raise ConfigError(f"mixing: grid {grid.shape} must be [{heads}, {head_dim}, M] for keys {keys.shape}")
    if q_re.ndim != 5 or not q_re.shape[2] or heads % q_re.shape[2]:
        raise ConfigError(
            f"mixing: queries {q_re.shape} must be [batch, length, query heads, head dim, M], and the {heads} memory "
            "heads a multiple of the query heads"
        )
    query_shape = (batch, length, q_re.shape[2], head_dim, grid.shape[2])
    expected = {
        "gates": (operands.gates, (batch, length, heads)),
        "decay": (operands.decay_K, (heads,)),
        "phase_scale": (operands.phase_scale_K, (heads,)),
        "weights": (operands.weights_KHM, grid.shape),
        "q_re": (q_re, query_shape),
        "q_im": (operands.q_im, query_shape),
    }
    for name, (array, shape) in expected.items():
        if array.shape != shape:
            raise ConfigError(f"mixing: {name} {array.shape} must be {shape} for keys {keys.shape}")
