"""The causal spectral accumulation of SCA (paper §2.2.4, steps 2 to 5): one contract, several forms.

    S_t = e^-λ S_{t-1} + g_t k_t e^{iφ_t},    Z_t = e^-λ Z_{t-1} + g_t,    φ_t = softsign(η k_t) ⊙ θ
    o_t = Σ_m ω_m (S_t / Z_t)_m · conj(q_t)_m / √H

Written as a recurrence, the paper's decay exp(-λ d(t)) is relative: the common factor that another boundary would bring
cancels in S/Z, so nothing overflows, nothing is clipped and the context length does not enter.

Forms: "reference" (Algorithm 1 with step 4 as a matrix product, quadratic in L), "chunked" (the default, linear, its
own gradient), "fused" (Pallas kernels on TPU and GPU, chunked elsewhere); `mix_step` takes one token. All give the same
values and gradients.

Padding (segment 0) is transparent: it adds nothing, decays nothing, resets nothing, and its output is 0.

Letters: B batch, L length, K memory heads, Q query heads, H head dim, M spectral samples; T and S stand for L as
"to" and "from".
"""

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from common.errors import ConfigError
from model.layers.mixing.chunked import chunked
from model.layers.mixing.kernels.dispatch import fused
from model.layers.mixing.parts import MixState, Timeline, divide, sine_cosine, softsign, timeline

__all__ = ["Form", "MixState", "empty_state", "mix", "mix_step", "reference"]

Form = Literal["reference", "chunked", "fused"]


def empty_state(batch: int, heads: int, head_dim: int, samples: int) -> MixState:
    """The state of an empty prefix."""
    zeros_BKHM = jnp.zeros((batch, heads, head_dim, samples), jnp.float32)
    return MixState(zeros_BKHM, zeros_BKHM, jnp.zeros((batch, heads), jnp.float32))


def mix(
    keys_BLKH: Array,
    gates_BLK: Array,
    decay_K: Array,
    phase_scale_K: Array,
    grid_KHM: Array,
    weights_KHM: Array,
    q_re_BLQHM: Array,
    q_im_BLQHM: Array,
    segments_BL: Array | None = None,
    state: MixState | None = None,
    *,
    chunk: int = 32,
    form: Form = "chunked",
) -> tuple[Array, Array, MixState]:
    """Accumulate and read out a whole row (paper §2.2.4 steps 2 to 5): readout [B, L, K, H] twice, and the final state.

    `gates_BLK` is the content gate softplus(γs+β) >= 0 with no decay applied; `decay_K` is λ >= 0 per token; query head
    q serves the K/Q memory heads from q·K/Q on; `weights_KHM` is ω, one per memory head. `segments_BL` (int; 0 is
    padding; None: one segment) resets the state where it changes. `state` continues an earlier part of the first
    segment of each row. Any L >= 1; `chunk` sets only the working size of the chunked and fused forms. Sums are float32
    whatever the inputs; the readout has the keys' dtype. Raises ConfigError where shapes do not fit.
    """
    arrays = (keys_BLKH, gates_BLK, decay_K, phase_scale_K, grid_KHM, weights_KHM, q_re_BLQHM, q_im_BLQHM)
    _check(*arrays)
    batch, length, heads, head_dim = keys_BLKH.shape
    if chunk < 1:
        raise ConfigError(f"mixing: chunk must be at least 1, not {chunk}")
    if segments_BL is not None and segments_BL.shape != (batch, length):
        raise ConfigError(f"mixing: segments {segments_BL.shape} must be [batch, length] = {(batch, length)}")
    if state is None:
        state = empty_state(batch, heads, head_dim, grid_KHM.shape[-1])
    _check_state(state, (batch, heads, head_dim, grid_KHM.shape[-1]))
    times = None if segments_BL is None else timeline(segments_BL)
    if form == "chunked":
        return chunked(*arrays, times, state, chunk=chunk)
    if form == "reference":
        return reference(*arrays, times, state)
    if form == "fused":
        return fused(*arrays, times, state, chunk=chunk)
    raise ConfigError(f'mixing: form {form!r} is not one of "reference", "chunked", "fused"')


def mix_step(
    keys_BKH: Array,
    gates_BK: Array,
    decay_K: Array,
    phase_scale_K: Array,
    grid_KHM: Array,
    weights_KHM: Array,
    q_re_BQHM: Array,
    q_im_BQHM: Array,
    state: MixState,
) -> tuple[Array, Array, MixState]:
    """One token of `mix`, with its arguments less the axis L: readout [B, K, H] twice, and the next state."""
    keys_BKH1 = keys_BKH.astype(jnp.float32)[..., None]
    sine, cosine = sine_cosine(softsign(phase_scale_K[:, None, None] * keys_BKH1) * (grid_KHM / (2 * np.pi)))
    gates_BK = gates_BK.astype(jnp.float32)
    gated_BKH1 = gates_BK[..., None, None] * keys_BKH1
    kept_K = jnp.exp(-decay_K.astype(jnp.float32))
    state = MixState(
        kept_K[:, None, None] * state.re_BKHM + gated_BKH1 * cosine,
        kept_K[:, None, None] * state.im_BKHM + gated_BKH1 * sine,
        kept_K * state.z_BK + gates_BK,
    )
    out_re_BKH, out_im_BKH = readout(state, weights_KHM, q_re_BQHM, q_im_BQHM)
    return out_re_BKH.astype(keys_BKH.dtype), out_im_BKH.astype(keys_BKH.dtype), state


def readout(state: MixState, weights_KHM: Array, q_re_BQHM: Array, q_im_BQHM: Array) -> tuple[Array, Array]:
    """Step 5: the normalised Hermitian match, summed over M; any leading axes. Z = 0 (nothing seen) reads as 0."""
    heads, head_dim, _ = weights_KHM.shape
    share = heads // q_re_BQHM.shape[-3]
    weights_KHM = weights_KHM * head_dim**-0.5
    q_re_BKHM = jnp.repeat(_wide(q_re_BQHM), share, axis=-3) * weights_KHM
    q_im_BKHM = jnp.repeat(_wide(q_im_BQHM), share, axis=-3) * weights_KHM
    re_BKHM = divide(state.re_BKHM, state.z_BK[..., None, None])
    im_BKHM = divide(state.im_BKHM, state.z_BK[..., None, None])
    out_re_BKH = jnp.sum(re_BKHM * q_re_BKHM + im_BKHM * q_im_BKHM, axis=-1)
    return out_re_BKH, jnp.sum(im_BKHM * q_re_BKHM - re_BKHM * q_im_BKHM, axis=-1)


def reference(
    keys_BLKH: Array,
    gates_BLK: Array,
    decay_K: Array,
    phase_scale_K: Array,
    grid_KHM: Array,
    weights_KHM: Array,
    q_re_BLQHM: Array,
    q_im_BLQHM: Array,
    times: Timeline | None,
    state: MixState,
) -> tuple[Array, Array, MixState]:
    """Algorithm 1, steps 2 to 5, as written; step 4 is the matrix product that the paper names for short rows.

    Given float64 (under jax.enable_x64) it computes in float64, which is what the other forms are measured against.
    """
    batch, length, _, _ = keys_BLKH.shape
    if times is None:
        times = Timeline(jnp.ones((batch, length), bool), jnp.zeros((batch, length), bool))
    resets_BL = jnp.cumsum(times.starts_BL, axis=1)
    count_BL = jnp.cumsum(times.real_BL, axis=1)
    gates_BLK = jnp.where(times.real_BL[..., None], _wide(gates_BLK), 0)

    # Step 2, with the decay between a source S and a target T; the state stands before the first position.
    reach_BTS = (resets_BL[:, :, None] == resets_BL[:, None, :]) & jnp.tril(jnp.ones((length, length), bool))
    distance_BTS = jnp.where(reach_BTS, count_BL[:, :, None] - count_BL[:, None, :], 0)[:, None]
    alpha_BKTS = jnp.where(reach_BTS[:, None], jnp.exp(-_wide(decay_K)[:, None, None] * distance_BTS), 0)
    alpha_BKTS = alpha_BKTS * jnp.swapaxes(gates_BLK, 1, 2)[:, :, None]
    carry_BKT = jnp.where((resets_BL == 0)[:, None], jnp.exp(-_wide(decay_K)[:, None] * count_BL[:, None]), 0)

    # Step 3.
    keys_BLKH1 = _wide(keys_BLKH)[..., None]
    phase_BLKHM = softsign(_wide(phase_scale_K)[:, None, None] * keys_BLKH1) * _wide(grid_KHM)

    # Step 4.
    def sums(values_BLKHM: Array, before_BKHM: Array) -> Array:
        inside = jnp.einsum("bkts,bskhm->btkhm", alpha_BKTS, values_BLKHM, precision=jax.lax.Precision.HIGHEST)
        return inside + jnp.einsum("bkt,bkhm->btkhm", carry_BKT, before_BKHM)

    z_BLK = jnp.swapaxes(jnp.sum(alpha_BKTS, axis=-1) + carry_BKT * state.z_BK[..., None], 1, 2)
    states = MixState(
        sums(keys_BLKH1 * jnp.cos(phase_BLKHM), state.re_BKHM),
        sums(keys_BLKH1 * jnp.sin(phase_BLKHM), state.im_BKHM),
        z_BLK,
    )

    # Step 5.
    out_re_BLKH, out_im_BLKH = (
        jnp.where(times.real_BL[..., None, None], part, 0).astype(keys_BLKH.dtype)
        for part in readout(states, _wide(weights_KHM), q_re_BLQHM, q_im_BLQHM)
    )
    return out_re_BLKH, out_im_BLKH, jax.tree.map(lambda part: part[:, -1], states)


def _wide(array: Array) -> Array:
    """At least float32."""
    return array.astype(jnp.promote_types(array.dtype, jnp.float32))


def _check(
    keys: Array, gates: Array, decay: Array, phase_scale: Array, grid: Array, weights: Array, q_re: Array, q_im: Array
) -> None:
    """Refuse shapes that do not fit, with the numbers."""
    if keys.ndim != 4 or keys.shape[1] < 1:
        raise ConfigError(f"mixing: keys {keys.shape} must be [batch, length >= 1, memory heads, head dim]")
    batch, length, heads, head_dim = keys.shape
    if grid.ndim != 3 or grid.shape[:2] != (heads, head_dim):
        raise ConfigError(f"mixing: grid {grid.shape} must be [{heads}, {head_dim}, M] beside keys {keys.shape}")
    if q_re.ndim != 5 or not q_re.shape[2] or heads % q_re.shape[2]:
        raise ConfigError(
            f"mixing: queries {q_re.shape} must be [batch, length, query heads, head dim, M], and the {heads} memory "
            "heads a multiple of the query heads"
        )
    query = (batch, length, q_re.shape[2], head_dim, grid.shape[2])
    expected = {
        "gates": (gates, (batch, length, heads)),
        "decay": (decay, (heads,)),
        "phase_scale": (phase_scale, (heads,)),
        "weights": (weights, (heads, head_dim, grid.shape[2])),
        "q_re": (q_re, query),
        "q_im": (q_im, query),
    }
    for name, (array, shape) in expected.items():
        if array.shape != shape:
            raise ConfigError(f"mixing: {name} {array.shape} must be {shape} beside keys {keys.shape}")


def _check_state(state: MixState, full: tuple[int, int, int, int]) -> None:
    shapes, wanted = tuple(part.shape for part in state), (full, full, full[:2])
    if shapes != wanted:
        raise ConfigError(f"mixing: the shapes of the state are {shapes} and must be {wanted}")
