"""The causal spectral accumulation of SCA (paper §2.2.4, steps 2 to 5): one contract, several forms.

    S_t = e^-λ S_{t-1} + g_t k_t e^{iφ_t},    Z_t = e^-λ Z_{t-1} + g_t,    φ_t = softsign(η k_t) ⊙ θ
    o_t = Σ_m ω_m (S_t / Z_t)_m · conj(q_t)_m / √H

Written as a recurrence, the paper's decay exp(-λ d(t)) is relative: the common factor that another boundary would bring
cancels in S/Z, so nothing overflows, nothing is clipped and the context length does not enter.

Forms: "reference" (Algorithm 1 with step 4 as a matrix product, quadratic in L), "chunked" (the default, linear, its own
gradient), "fused" (Pallas kernels for TPU and GPU); `mix_step` takes one token. All give the same values and gradients.

Padding (segment 0) is transparent: it adds nothing, decays nothing, resets nothing, and its output is 0.

Letters: B batch, L length, K memory heads, Q query heads, H head dim, M spectral samples; T and S stand for L as
"to" and "from", C for positions inside a chunk.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from configs.section import ConfigError

Form = Literal["reference", "chunked", "fused"]
_EXACT = jax.lax.Precision.HIGHEST


class MixState(NamedTuple):
    """What a prefix leaves behind: unnormalised sums, float32, decayed to the last token that was not padding."""

    re_BKHM: Array
    im_BKHM: Array
    z_BK: Array


def empty_state(batch: int, heads: int, head_dim: int, samples: int) -> MixState:
    """The state of an empty prefix."""
    zeros_BKHM = jnp.zeros((batch, heads, head_dim, samples), jnp.float32)
    return MixState(zeros_BKHM, zeros_BKHM, jnp.zeros((batch, heads), jnp.float32))


class Timeline(NamedTuple):
    """Where each position stands: real or padding, how many real tokens up to it, how many resets up to it."""

    real_BL: Array
    count_BL: Array
    reset_BL: Array


def timeline(segments_BL: Array) -> Timeline:
    """A reset happens at a real token whose segment is not the one of the last real token before it in the row."""
    real_BL = segments_BL != 0
    index_L = jnp.arange(segments_BL.shape[1], dtype=jnp.int32)
    last_BL = jax.lax.cummax(jnp.where(real_BL, index_L, -1), axis=1)
    before_BL = jnp.pad(last_BL[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    previous_BL = jnp.take_along_axis(segments_BL, jnp.maximum(before_BL, 0), axis=1)
    starts_BL = real_BL & (before_BL >= 0) & (previous_BL != segments_BL)
    return Timeline(
        real_BL, jnp.cumsum(real_BL, axis=1, dtype=jnp.int32), jnp.cumsum(starts_BL, axis=1, dtype=jnp.int32)
    )


def encode(keys_BLKH: Array, phase_scale_K: Array, grid_KHM: Array) -> tuple[Array, Array]:
    """k e^{iφ} (step 3), before the gate: real and imaginary parts, float32 [B, L, K, H, M]."""
    keys_BLKH = keys_BLKH.astype(jnp.float32)
    scaled_BLKH = phase_scale_K[:, None] * keys_BLKH
    phase_BLKHM = (scaled_BLKH / (1 + jnp.abs(scaled_BLKH)))[..., None] * grid_KHM
    return keys_BLKH[..., None] * jnp.cos(phase_BLKHM), keys_BLKH[..., None] * jnp.sin(phase_BLKHM)


def readout(state: MixState, weights_KHM: Array, q_re_BQHM: Array, q_im_BQHM: Array) -> tuple[Array, Array]:
    """Step 5: the normalised Hermitian match, summed over M; any leading axes. Z = 0 (nothing seen) reads as 0."""
    heads, head_dim, _ = weights_KHM.shape
    share = heads // q_re_BQHM.shape[-3]
    q_re_BKHM = jnp.repeat(q_re_BQHM.astype(jnp.float32), share, axis=-3) * weights_KHM
    q_im_BKHM = jnp.repeat(q_im_BQHM.astype(jnp.float32), share, axis=-3) * weights_KHM
    seen_BK = state.z_BK > 0
    scale_BK = jnp.where(seen_BK, 1 / jnp.where(seen_BK, state.z_BK, 1), 0)[..., None, None]
    re_BKHM, im_BKHM = state.re_BKHM * scale_BK, state.im_BKHM * scale_BK
    root = head_dim**-0.5
    out_re_BKH = root * jnp.sum(re_BKHM * q_re_BKHM + im_BKHM * q_im_BKHM, axis=-1)
    out_im_BKH = root * jnp.sum(im_BKHM * q_re_BKHM - re_BKHM * q_im_BKHM, axis=-1)
    return out_re_BKH, out_im_BKH


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

    `gates_BLK` is the content gate softplus(γs+β) >= 0 with no decay applied; `decay_K` is λ >= 0 per token; query head q
    serves the K/Q memory heads from q·K/Q on; `weights_KHM` is ω, one per memory head. `segments_BL` (int; 0 is
    padding; None: one segment) resets the state where it changes. `state` continues an earlier part of the first
    segment of each row. Any L >= 1; `chunk` only sets the working size of the chunked form. Sums are float32 whatever
    the inputs; the readout has the keys' dtype. Raises ConfigError where shapes do not fit.
    """
    _check(keys_BLKH, gates_BLK, decay_K, phase_scale_K, grid_KHM, weights_KHM, q_re_BLQHM, q_im_BLQHM)
    batch, length, heads, head_dim = keys_BLKH.shape
    samples = grid_KHM.shape[-1]
    if segments_BL is None:
        segments_BL = jnp.ones((batch, length), jnp.int32)
    if segments_BL.shape != (batch, length):
        raise ConfigError(f"mixing: segments {segments_BL.shape} must be [batch, length] = {(batch, length)}")
    if state is None:
        state = empty_state(batch, heads, head_dim, samples)
    _check_state(state, batch, heads, head_dim, samples)
    arrays = (keys_BLKH, gates_BLK, decay_K, phase_scale_K, grid_KHM, weights_KHM, q_re_BLQHM, q_im_BLQHM)
    if form == "reference":
        return reference(*arrays, timeline(segments_BL), state)
    if form == "chunked":
        return chunked(*arrays, timeline(segments_BL), state, chunk=chunk)
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
    value_re_BKHM, value_im_BKHM = encode(keys_BKH, phase_scale_K, grid_KHM)
    gates_BK = gates_BK.astype(jnp.float32)
    kept_K = jnp.exp(-decay_K.astype(jnp.float32))
    state = MixState(
        kept_K[:, None, None] * state.re_BKHM + gates_BK[..., None, None] * value_re_BKHM,
        kept_K[:, None, None] * state.im_BKHM + gates_BK[..., None, None] * value_im_BKHM,
        kept_K * state.z_BK + gates_BK,
    )
    out_re_BKH, out_im_BKH = readout(state, weights_KHM, q_re_BQHM, q_im_BQHM)
    return out_re_BKH.astype(keys_BKH.dtype), out_im_BKH.astype(keys_BKH.dtype), state


def _windows(gates_BTK: Array, decay_K: Array, times: Timeline, state: MixState) -> tuple[Array, Array, MixState]:
    raise NotImplementedError


def _spread(gates_BLK: Array, decay_K: Array, times: Timeline, count_B: Array, reset_B: Array) -> tuple[Array, Array]:
    """Weights of every source in every target's sums [B, K, T, S], and of the state that came in [B, K, T]."""
    length = gates_BLK.shape[1]
    causal_TS = jnp.tril(jnp.ones((length, length), bool))
    same_BTS = (times.reset_BL[:, :, None] == times.reset_BL[:, None, :]) & causal_TS & times.real_BL[:, None, :]
    steps_BTS = jnp.where(same_BTS, times.count_BL[:, :, None] - times.count_BL[:, None, :], 0)
    decay_K = decay_K.astype(jnp.float32)[:, None, None]
    weights_BKTS = jnp.where(same_BTS[:, None], jnp.exp(-decay_K * steps_BTS[:, None]), 0)
    weights_BKTS = weights_BKTS * jnp.swapaxes(gates_BLK.astype(jnp.float32), 1, 2)[:, :, None, :]
    carried_BT = times.reset_BL == reset_B[:, None]
    carry_BKT = jnp.exp(-decay_K[..., 0] * (times.count_BL - count_B[:, None])[:, None])
    return weights_BKTS, jnp.where(carried_BT[:, None], carry_BKT, 0)


def _sums(weights_BKTS: Array, carry_BKT: Array, re_BSKHM: Array, im_BSKHM: Array, state: MixState) -> MixState:
    """Step 4 as a matrix product: the unnormalised sums at every target, [B, T, K, H, M] and [B, T, K]."""
    return MixState(
        jnp.einsum("bkts,bskhm->btkhm", weights_BKTS, re_BSKHM, precision=_EXACT)
        + jnp.einsum("bkt,bkhm->btkhm", carry_BKT, state.re_BKHM),
        jnp.einsum("bkts,bskhm->btkhm", weights_BKTS, im_BSKHM, precision=_EXACT)
        + jnp.einsum("bkt,bkhm->btkhm", carry_BKT, state.im_BKHM),
        jnp.swapaxes(jnp.sum(weights_BKTS, -1) + carry_BKT * state.z_BK[..., None], 1, 2),
    )


def reference(
    keys_BLKH: Array,
    gates_BLK: Array,
    decay_K: Array,
    phase_scale_K: Array,
    grid_KHM: Array,
    weights_KHM: Array,
    q_re_BLQHM: Array,
    q_im_BLQHM: Array,
    times: Timeline,
    state: MixState,
) -> tuple[Array, Array, MixState]:
    """Algorithm 1, steps 2 to 5, word for word; step 4 as the matrix product that the paper names for short rows."""
    value_re_BLKHM, value_im_BLKHM = encode(keys_BLKH, phase_scale_K, grid_KHM)
    zero_B = jnp.zeros(keys_BLKH.shape[0], jnp.int32)
    weights_BKTS, carry_BKT = _spread(gates_BLK, decay_K, times, zero_B, zero_B)
    sums = _sums(weights_BKTS, carry_BKT, value_re_BLKHM, value_im_BLKHM, state)
    out_re_BLKH, out_im_BLKH = readout(sums, weights_KHM, q_re_BLQHM, q_im_BLQHM)
    real_BL11 = times.real_BL[..., None, None]
    return (
        jnp.where(real_BL11, out_re_BLKH, 0).astype(keys_BLKH.dtype),
        jnp.where(real_BL11, out_im_BLKH, 0).astype(keys_BLKH.dtype),
        MixState(sums.re_BKHM[:, -1], sums.im_BKHM[:, -1], sums.z_BK[:, -1]),
    )


def chunked(
    keys_BLKH: Array,
    gates_BLK: Array,
    decay_K: Array,
    phase_scale_K: Array,
    grid_KHM: Array,
    weights_KHM: Array,
    q_re_BLQHM: Array,
    q_im_BLQHM: Array,
    times: Timeline,
    state: MixState,
    *,
    chunk: int,
) -> tuple[Array, Array, MixState]:
    """The same in chunks: quadratic inside a chunk only, the state handed from one chunk to the next."""
    length = keys_BLKH.shape[1]
    chunk = min(chunk, length)
    missing = -length % chunk

    def split(array_BL: Array) -> Array:
        array_BL = jnp.pad(array_BL, ((0, 0), (0, missing)) + ((0, 0),) * (array_BL.ndim - 2))
        array_BNC = array_BL.reshape(array_BL.shape[0], -1, chunk, *array_BL.shape[2:])
        return jnp.swapaxes(array_BNC, 0, 1)

    def join(array_NBC: Array) -> Array:
        array_BNC = jnp.swapaxes(array_NBC, 0, 1)
        return array_BNC.reshape(array_BNC.shape[0], -1, *array_BNC.shape[3:])[:, :length]

    times = Timeline(
        split(times.real_BL),
        split(jnp.pad(times.count_BL, ((0, 0), (0, missing)), mode="edge")),
        split(jnp.pad(times.reset_BL, ((0, 0), (0, missing)), mode="edge")),
    ) if missing == 0 else Timeline(
        split(times.real_BL),
        _split_edge(times.count_BL, chunk, missing),
        _split_edge(times.reset_BL, chunk, missing),
    )

    def body(carry, block):
        state, count_B, reset_B = carry
        keys, gates, q_re, q_im, times = block
        value_re, value_im = encode(keys, phase_scale_K, grid_KHM)
        weights_BKTS, carry_BKT = _spread(gates, decay_K, times, count_B, reset_B)
        sums = _sums(weights_BKTS, carry_BKT, value_re, value_im, state)
        out_re, out_im = readout(sums, weights_KHM, q_re, q_im)
        real = times.real_BL[..., None, None]
        state = MixState(sums.re_BKHM[:, -1], sums.im_BKHM[:, -1], sums.z_BK[:, -1])
        outs = tuple(jnp.where(real, out, 0).astype(keys.dtype) for out in (out_re, out_im))
        return (state, times.count_BL[:, -1], times.reset_BL[:, -1]), outs

    zero_B = jnp.zeros(keys_BLKH.shape[0], jnp.int32)
    (state, _, _), (out_re, out_im) = jax.lax.scan(
        jax.checkpoint(body),
        (state, zero_B, zero_B),
        (split(keys_BLKH), split(gates_BLK), split(q_re_BLQHM), split(q_im_BLQHM), times),
    )
    return join(out_re), join(out_im), state


def _split_edge(array_BL: Array, chunk: int, missing: int) -> Array:
    array_BL = jnp.pad(array_BL, ((0, 0), (0, missing)), mode="edge")
    return jnp.swapaxes(array_BL.reshape(array_BL.shape[0], -1, chunk), 0, 1)


def _check(keys, gates, decay, phase_scale, grid, weights, q_re, q_im) -> None:  # noqa: ANN001
    """Refuse shapes that do not fit, with the numbers."""
    if keys.ndim != 4 or keys.shape[1] < 1:
        raise ConfigError(f"mixing: keys {keys.shape} must be [batch, length >= 1, memory heads, head dim]")
    batch, length, heads, head_dim = keys.shape
    if grid.ndim != 3 or grid.shape[:2] != (heads, head_dim):
        raise ConfigError(f"mixing: grid {grid.shape} must be [memory heads, head dim, M] = [{heads}, {head_dim}, M]")
    samples = grid.shape[2]
    if q_re.ndim != 5 or heads % q_re.shape[2]:
        raise ConfigError(f"mixing: memory heads {heads} is not a multiple of the query heads of queries {q_re.shape}")
    query = (batch, length, q_re.shape[2], head_dim, samples)
    expected = {
        "gates": (gates, (batch, length, heads)),
        "decay": (decay, (heads,)),
        "phase_scale": (phase_scale, (heads,)),
        "weights": (weights, (heads, head_dim, samples)),
        "q_re": (q_re, query),
        "q_im": (q_im, query),
    }
    for name, (array, shape) in expected.items():
        if array.shape != shape:
            raise ConfigError(f"mixing: {name} {array.shape} must be {shape} beside keys {keys.shape}")


def _check_state(state: MixState, batch: int, heads: int, head_dim: int, samples: int) -> None:
    full = (batch, heads, head_dim, samples)
    if state.re_BKHM.shape != full or state.im_BKHM.shape != full or state.z_BK.shape != full[:2]:
        shapes = tuple(part.shape for part in state)
        raise ConfigError(f"mixing: state {shapes} must be {(full, full, full[:2])}")
