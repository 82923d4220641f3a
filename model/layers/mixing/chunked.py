"""The chunked form of the mixing operator, linear in L, with its own gradient; first the parts that all forms share.

Inside a chunk of C positions the sums are a matrix product with the weights e^{-λ·distance}; the state is passed from
chunk to chunk. Saved for the backward pass: the inputs and the state before each chunk, nothing of size B·L·K·H·M. The
backward pass recomputes each chunk, from the last to the first, and passes the gradient of the state back:

    (1) ∂L/∂Z_t = -Re⟨∂L/∂S_t, S_t⟩ / Z_t               the readout does not change when S and Z are scaled together
    (2) G_s = Σ_{t >= s} e^{-λ(n_t - n_s)} ∂L/∂S_t        n counts the tokens of the chunk; GZ from ∂L/∂Z_t alike
    (3) ∂L/∂g_s = Re⟨G_s, k_s e^{iφ_s}⟩ + GZ_s
    (4) ∂L/∂φ_s = Re⟨G_s, i g_s k_s e^{iφ_s}⟩            and from there into keys, phase scale and grid
    (5) ∂L/∂λ = -Σ_s e^{-λ} (Re⟨G_s, S_{s-1}⟩ + GZ_s Z_{s-1})

H and M stay one contiguous axis J = H·M, so queries need no transpose. Keys are repeated over M and readouts summed
over M with strides, which takes a third of the time of XLA's transposes on CPU. The products have batch and heads as
leading axes.

Letters, in addition to those of `operator`: C and S positions in a chunk ("to" and "from"), J = H·M.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

TINY = float(np.finfo(np.float32).tiny)  # below it float32 loses digits, and most devices flush to 0
# Polynomial coefficients, in the square of the fraction of a turn: sin and cos of half the angle.
_SINE = (3.1415926535, -5.1677127646, 2.5501633179, -0.5992521865, 0.0820503500, -0.0070283037)
_COSINE = (0.9999999998, -4.9348021369, 4.0587091548, -1.3352119494, 0.2349370685, -0.0243959320)


class MixState(NamedTuple):
    """The state after a prefix: unnormalised float32 sums S and Z, decayed to its last token that is not padding."""

    re_BKHM: Array
    im_BKHM: Array
    z_BK: Array


class Operands(NamedTuple):
    """The differentiable inputs of the mixing operator, for whole rows or, without the axis L, for a single token."""

    keys: Array  # [B, L, K, H]
    gates: Array  # [B, L, K], the content gate softplus(γs+β) >= 0 with no decay applied
    decay_K: Array  # λ >= 0, per token
    phase_scale_K: Array  # η
    grid_KHM: Array  # θ
    weights_KHM: Array  # ω
    q_re: Array  # [B, L, Q, H, M]; query head q serves the K/Q memory heads from q·K/Q on
    q_im: Array  # [B, L, Q, H, M]

    def joined(self) -> "JoinedOperands":
        """The same operands with H and M joined in one axis."""
        return JoinedOperands(
            self.keys, self.gates, self.decay_K, self.phase_scale_K,
            join(self.grid_KHM), join(self.weights_KHM), join(self.q_re), join(self.q_im),
        )  # fmt: skip


class JoinedOperands(NamedTuple):
    """`Operands` of whole rows with H and M joined in J = H·M. Also holds their gradients."""

    keys_BLKH: Array
    gates_BLK: Array
    decay_K: Array
    phase_scale_K: Array
    grid_KJ: Array
    weights_KJ: Array
    q_re_BLQJ: Array
    q_im_BLQJ: Array


class JoinedState(NamedTuple):
    """`MixState` with H and M joined in J = H·M. Also holds its gradient."""

    re_BKJ: Array
    im_BKJ: Array
    z_BK: Array

    @classmethod
    def of(cls, state: MixState) -> "JoinedState":
        """`state` with H and M joined, in float32."""
        return cls(*(part.astype(jnp.float32) for part in (join(state.re_BKHM), join(state.im_BKHM), state.z_BK)))

    def split(self, samples: int) -> MixState:
        """The same state with H and M as two axes; `samples` is M."""
        full = (*self.re_BKJ.shape[:-1], -1, samples)
        return MixState(self.re_BKJ.reshape(full), self.im_BKJ.reshape(full), self.z_BK)


class Timeline(NamedTuple):
    """Which positions hold a token, and which tokens reset the sums. None stands for one unpadded segment a row."""

    real_BL: Array
    starts_BL: Array


def timeline(segments_BL: Array) -> Timeline:
    """The timeline of segments: a token whose segment differs from that of the token before it resets the sums."""
    real_BL = segments_BL != 0
    index_L = jnp.arange(segments_BL.shape[1], dtype=jnp.int32)
    # The last token up to each position, then the one before it (-1: none): padding between two tokens does not count.
    last_BL = jax.lax.cummax(jnp.where(real_BL, index_L, -1), axis=1)
    before_BL = jnp.pad(last_BL[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    previous_BL = jnp.take_along_axis(segments_BL, jnp.maximum(before_BL, 0), axis=1)
    return Timeline(real_BL, real_BL & (before_BL >= 0) & (previous_BL != segments_BL))


@jax.custom_jvp
def divide(sums: Array, z: Array) -> Array:
    """sums / z, and 0 where z is 0 (no token so far).

    A score of -60 makes a gate of 1e-26, whose 1/z² overflows; so the derivative divides by z twice.
    """
    nonzero = z >= TINY
    return jnp.where(nonzero, sums / jnp.where(nonzero, z, 1), 0)


@divide.defjvp
def _divide_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    sums, z = primals
    ratio = divide(sums, z)
    return ratio, divide(tangents[0] - ratio * tangents[1], z)


def join(array_HM: Array) -> Array:
    """Join the last two axes, H and M, into J."""
    return array_HM.reshape(*array_HM.shape[:-2], -1)


def softsign(x: Array) -> Array:
    return x / (1 + jnp.abs(x))


def sine_cosine(turns: Array) -> tuple[Array, Array]:
    """sin and cos of 2π·turns, float32, with an error of 3e-7 for phases of any size: whole turns are removed exactly.

    XLA's own take 36 ns per element on CPU (scalar calls), these, branch-free and vectorised, 0.6. Polynomials give sin
    and cos of half the angle, which lies in [-π/2, π/2]; the double-angle formulas then distinguish no quadrants.
    """
    fraction = turns - jnp.floor(turns + 0.5)
    square = fraction * fraction
    sine: Array | float = _SINE[-1]
    cosine: Array | float = _COSINE[-1]
    for s, c in zip(_SINE[-2::-1], _COSINE[-2::-1], strict=True):
        sine, cosine = sine * square + s, cosine * square + c
    sine = sine * fraction
    return 2 * sine * cosine, (cosine - sine) * (cosine + sine)


_EXACT = lax.Precision.HIGHEST


class _DecayWeights(NamedTuple):
    """Decay weights between the positions of a chunk; zero across a reset and towards the past."""

    real_BC: Array  # whether the position holds a token
    retention_BKC: Array  # factor of the preceding sums: e^-λ where a token continues a segment, else 0
    weight_BKCS: Array  # from position S to position C
    carry_BKC: Array  # from the state before the chunk to position C


class _Chunk(NamedTuple):
    """The encoding (step 3) and the sums (step 4) of a chunk, with keys repeated over M."""

    keys_BKCJ: Array
    scaled_BKCJ: Array  # η k
    squashed_BKCJ: Array  # softsign(η k)
    gates_BKC: Array
    sine_BKCJ: Array  # of φ
    cosine_BKCJ: Array
    re_BKCJ: Array  # S
    im_BKCJ: Array
    z_BKC: Array  # Z


def chunked(
    operands: Operands, times: Timeline | None, state: MixState, *, chunk: int
) -> tuple[Array, Array, MixState]:
    """`mix` in chunks of `chunk` positions. `times` is None for one unpadded segment; `mix` has checked the shapes."""
    out_re, out_im, sums = _mixed(min(chunk, operands.keys.shape[1]), operands.joined(), times, JoinedState.of(state))
    return out_re, out_im, sums.split(operands.grid_KHM.shape[-1])


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mixed(
    chunk: int, operands: JoinedOperands, times: Timeline | None, state: JoinedState
) -> tuple[Array, Array, JoinedState]:
    return _forward(chunk, operands, times, state)[0]


def _forward(chunk: int, operands: JoinedOperands, times: Timeline | None, state: JoinedState) -> tuple[tuple, tuple]:
    """Run the chunks in order; the last is shorter where `chunk` does not divide L, so nothing is padded or copied."""
    keys_BLKH = operands.keys_BLKH
    length = keys_BLKH.shape[1]
    full_chunks = length // chunk
    parameters = _float32_parameters(operands)
    root = keys_BLKH.shape[-1] ** -0.5  # 1/√H

    def body(start: Array | int, size: int, carry: tuple) -> tuple:
        befores, state, out_re, out_im = carry
        # Save the state before this chunk for the backward pass.
        befores = jax.tree.map(lambda all_N, part: lax.dynamic_update_index_in_dim(all_N, part, start // chunk, 0),
                               befores, state)  # fmt: skip
        decay = _decay_weights(size, parameters.decay_K, times, start, keys_BLKH.shape[0])
        block = _encode(start, size, operands, parameters, decay, state)
        # Step 5: the readout, S/Z times the conjugate queries, summed over M.
        q_re, q_im = _queries(start, size, operands)
        weights = root * parameters.weights_KJ[:, None]
        q_re, q_im, nonzero = q_re * weights, q_im * weights, _nonzero(decay, block)
        scale = jnp.where(nonzero, 1 / jnp.where(nonzero, block.z_BKC, 1), 0)[..., None]  # 1/Z
        re = _over_samples(block.re_BKCJ * q_re + block.im_BKCJ * q_im, keys_BLKH.shape[-1]) * scale
        im = _over_samples(block.im_BKCJ * q_re - block.re_BKCJ * q_im, keys_BLKH.shape[-1]) * scale
        state = JoinedState(block.re_BKCJ[:, :, -1], block.im_BKCJ[:, :, -1], block.z_BKC[:, :, -1])
        return befores, state, _put(out_re, re, start), _put(out_im, im, start)

    befores = jax.tree.map(lambda part: jnp.zeros((-(-length // chunk), *part.shape), jnp.float32), state)
    out_BLKH = jnp.zeros(keys_BLKH.shape, keys_BLKH.dtype)
    carry = (befores, state, out_BLKH, out_BLKH)
    carry = lax.fori_loop(0, full_chunks, lambda n, carry: body(n * chunk, chunk, carry), carry)
    if length % chunk:
        carry = body(full_chunks * chunk, length % chunk, carry)
    befores, state, out_re, out_im = carry
    return (out_re, out_im, state), (operands, times, befores)


def _backward(chunk: int, residuals: tuple, cotangents: tuple) -> tuple[JoinedOperands, None, JoinedState]:
    """Run the chunks from the last to the first, adding up the gradients of the parameters."""
    operands, times, befores = residuals
    d_re_BLKH, d_im_BLKH, d_state = cotangents
    length = operands.keys_BLKH.shape[1]
    full_chunks = length // chunk
    parameters = _float32_parameters(operands)
    cotangents = (d_re_BLKH, d_im_BLKH)

    def body(start: Array | int, size: int, carry: tuple) -> tuple:
        before = jax.tree.map(lambda all_N: lax.dynamic_index_in_dim(all_N, start // chunk, 0, False), befores)
        return _chunk_gradient(start, size, operands, parameters, times, before, cotangents, carry)

    # Gradients of the parameters accumulate in float32 (phase scale [K, H] until the end); those of the inputs are
    # written chunk by chunk, in the type of the input.
    gradient = JoinedOperands(
        jnp.zeros(operands.keys_BLKH.shape, operands.keys_BLKH.dtype),
        jnp.zeros(operands.gates_BLK.shape, operands.gates_BLK.dtype),
        jnp.zeros_like(parameters.decay_K), jnp.zeros((*operands.keys_BLKH.shape[2:],), jnp.float32),
        jnp.zeros_like(parameters.grid_KJ), jnp.zeros_like(parameters.weights_KJ),
        jnp.zeros(operands.q_re_BLQJ.shape, operands.q_re_BLQJ.dtype),
        jnp.zeros(operands.q_im_BLQJ.shape, operands.q_im_BLQJ.dtype),
    )  # fmt: skip
    carry = (gradient, d_state)
    if length % chunk:
        carry = body(full_chunks * chunk, length % chunk, carry)
    gradient, d_state = lax.fori_loop(
        0, full_chunks, lambda n, carry: body((full_chunks - 1 - n) * chunk, chunk, carry), carry
    )
    gradient = gradient._replace(phase_scale_K=jnp.sum(gradient.phase_scale_K, axis=-1))
    gradient = JoinedOperands(*(part.astype(operand.dtype) for part, operand in zip(gradient, operands, strict=True)))
    # JAX requires the cotangent type float0 for boolean inputs.
    no_gradient = jax.tree.map(lambda flags: np.zeros(flags.shape, jax.dtypes.float0), times)
    return gradient, no_gradient, d_state


def _chunk_gradient(
    start: Array | int,
    size: int,
    operands: JoinedOperands,
    parameters: JoinedOperands,
    times: Timeline | None,
    before: JoinedState,
    cotangents: tuple[Array, Array],
    carry: tuple[JoinedOperands, JoinedState],
) -> tuple[JoinedOperands, JoinedState]:
    """The gradient of one chunk, which starts from the state `before`.

    `carry` is the gradient summed over the later chunks, and the gradient of the state after this chunk. Returns both
    with this chunk added: the second is then that of the state before it. Numbers in parentheses are the equations of
    this file's header.
    """
    gradient, d_after = carry
    batch, _, _heads, head_dim = operands.keys_BLKH.shape
    decay = _decay_weights(size, parameters.decay_K, times, start, batch)
    block = _encode(start, size, operands, parameters, decay, before)
    q_re, q_im = _queries(start, size, operands)
    weights = parameters.weights_KJ[:, None] * head_dim**-0.5

    # Step 5, the readout: o_re = Σ ω (R·q_re + I·q_im) / Z and o_im = Σ ω (I·q_re - R·q_im) / Z, with S = R + iI.
    # Its gradient by the queries is dq·ω, and (1) gives d_z. A division, not a product with 1/Z: XLA recomputes a
    # product, with its repeat over M, at each use, and stores the result of a division.
    divisor = jnp.where(_nonzero(decay, block), block.z_BKC, jnp.inf)[..., None]
    d_re, d_im = (_repeat(_cut(part, start, size), parameters.grid_KJ.shape[-1]) / divisor for part in cotangents)
    dq_re = block.re_BKCJ * d_re + block.im_BKCJ * d_im
    dq_im = block.im_BKCJ * d_re - block.re_BKCJ * d_im
    match = q_re * dq_re + q_im * dq_im
    d_z = -jnp.sum(match * weights, axis=-1) / divisor[..., 0]

    # (2): G as sum_re + i·sum_im and GZ as sum_z. A position reaches the later ones of its chunk by the transpose of
    # the decay weights, and all chunks after it through the chunk's last position, whose state they continue.
    end = decay.weight_BKCS[:, :, -1]
    sum_re = (
        _transposed_product(decay, weights * (q_re * d_re - q_im * d_im)) + end[..., None] * d_after.re_BKJ[:, :, None]
    )
    sum_im = (
        _transposed_product(decay, weights * (q_im * d_re + q_re * d_im)) + end[..., None] * d_after.im_BKJ[:, :, None]
    )
    sum_z = jnp.sum(decay.weight_BKCS * d_z[..., None], axis=2) + end * d_after.z_BK[..., None]

    # Steps 2 and 3, the encoding g k e^{iφ} with φ = softsign(η k)·θ. `direct` is Re⟨G, e^{iφ}⟩: (3) for the gates,
    # and the keys' first term. (4) goes through softsign, whose derivative is 1/(1+|x|)², to the keys' second term.
    direct = _over_samples(block.cosine_BKCJ * sum_re + block.sine_BKCJ * sum_im, head_dim)
    gated = block.keys_BKCJ * block.gates_BKC[..., None]
    d_phase = gated * (block.cosine_BKCJ * sum_im - block.sine_BKCJ * sum_re)
    d_squashed = _over_samples(d_phase * parameters.grid_KJ[:, None], head_dim)
    samples = parameters.grid_KJ.shape[-1] // head_dim
    keys, scaled = block.keys_BKCJ[..., ::samples], block.scaled_BKCJ[..., ::samples]  # without the repeat over M
    d_scaled = d_squashed / jnp.square(1 + jnp.abs(scaled))
    d_gates = jnp.where(decay.real_BC[:, None], sum_z + jnp.sum(keys * direct, axis=-1), 0)
    d_keys = block.gates_BKC[..., None] * direct + parameters.phase_scale_K[:, None, None] * d_scaled

    # (5): G at each position times the decayed sums before it: those of the previous position or, at the chunk's first
    # position, the state. The two are summed separately, because XLA would copy both to concatenate them. The decay is
    # multiplied into the sums first: G alone may be as large as 1/Z.
    retention = decay.retention_BKC[:, :, 1:, None]
    match_sums = sum_re[:, :, 1:] * (retention * block.re_BKCJ[:, :, :-1])
    match_sums += sum_im[:, :, 1:] * (retention * block.im_BKCJ[:, :, :-1])
    match_z = sum_z[:, :, 1:] * (retention[..., 0] * block.z_BKC[:, :, :-1])
    first = decay.carry_BKC[:, :, 0]
    d_before = JoinedState(
        first[..., None] * sum_re[:, :, 0], first[..., None] * sum_im[:, :, 0], first * sum_z[:, :, 0]
    )
    match_state = jnp.sum(d_before.re_BKJ * before.re_BKJ + d_before.im_BKJ * before.im_BKJ, axis=-1)
    match_state = jnp.where(decay.real_BC[:, None, 0], match_state + d_before.z_BK * before.z_BK, 0)
    d_decay = jnp.sum(match_sums, axis=(0, 2, 3)) + jnp.sum(match_z, axis=(0, 2)) + jnp.sum(match_state, axis=0)

    gradient = JoinedOperands(
        _put(gradient.keys_BLKH, d_keys, start),
        _put(gradient.gates_BLK, d_gates, start),
        gradient.decay_K - d_decay,
        gradient.phase_scale_K + jnp.sum(keys * d_scaled, axis=(0, 2)),
        gradient.grid_KJ + jnp.sum(block.squashed_BKCJ * d_phase, axis=(0, 2)),
        gradient.weights_KJ + jnp.sum(match, axis=(0, 2)) * head_dim**-0.5,
        _put(gradient.q_re_BLQJ, _over_heads(dq_re * weights, operands), start),
        _put(gradient.q_im_BLQJ, _over_heads(dq_im * weights, operands), start),
    )
    return gradient, d_before


_mixed.defvjp(_forward, _backward)


def _encode(
    start: Array | int,
    size: int,
    operands: JoinedOperands,
    parameters: JoinedOperands,
    decay: _DecayWeights,
    state: JoinedState,
) -> _Chunk:
    """Steps 3 and 4 for one chunk after `state`."""
    keys = _repeat(_cut(operands.keys_BLKH, start, size), parameters.grid_KJ.shape[-1])
    gates = jnp.where(decay.real_BC[:, None], _cut(operands.gates_BLK, start, size), 0)
    scaled = parameters.phase_scale_K[:, None, None] * keys
    squashed = softsign(scaled)
    sine, cosine = sine_cosine(squashed * (parameters.grid_KJ / (2 * np.pi))[:, None])
    gated = keys * gates[..., None]
    carry = decay.carry_BKC[..., None]
    re = _product(decay, gated * cosine) + carry * state.re_BKJ[:, :, None]
    im = _product(decay, gated * sine) + carry * state.im_BKJ[:, :, None]
    z = jnp.sum(decay.weight_BKCS * gates[:, :, None], axis=-1) + decay.carry_BKC * state.z_BK[..., None]
    return _Chunk(keys, scaled, squashed, gates, sine, cosine, re, im, z)


def _decay_weights(size: int, decay_K: Array, times: Timeline | None, start: Array | int, batch: int) -> _DecayWeights:
    """The decay weights e^{-λ·distance} of a chunk. Distance counts tokens: padding does not decay the sums."""
    if times is None:
        real_BC = jnp.ones((batch, size), bool)
        starts_BC = ~real_BC
    else:
        real_BC, starts_BC = (lax.dynamic_slice_in_dim(flags, start, size, 1) for flags in times)
    # A position reaches a later one if no reset lies between them: both have counted the same resets.
    resets_BC = jnp.cumsum(starts_BC, axis=1, dtype=jnp.int32)
    count_BC = jnp.cumsum(real_BC, axis=1, dtype=jnp.int32)
    reach_BCS = (resets_BC[:, :, None] == resets_BC[:, None, :]) & jnp.tril(jnp.ones((size, size), bool))
    steps_BCS = jnp.where(reach_BCS, count_BC[:, :, None] - count_BC[:, None, :], 0)
    weight_BKCS = jnp.where(reach_BCS[:, None], jnp.exp(-decay_K[:, None, None] * steps_BCS[:, None]), 0)
    carry_BKC = jnp.where((resets_BC == 0)[:, None], jnp.exp(-decay_K[:, None] * count_BC[:, None]), 0)
    retention_BKC = jnp.where((real_BC & ~starts_BC)[:, None], jnp.exp(-decay_K[:, None]), 0)
    return _DecayWeights(real_BC, retention_BKC, weight_BKCS, carry_BKC)


def _product(decay: _DecayWeights, values_BKSJ: Array) -> Array:
    """Weighted sum over the earlier positions of the segment, for each position."""
    return jnp.einsum("bkcs,bksj->bkcj", decay.weight_BKCS, values_BKSJ, precision=_EXACT)


def _transposed_product(decay: _DecayWeights, values_BKCJ: Array) -> Array:
    """Weighted sum over the later positions of the segment, for each position: the transpose of `_product`."""
    return jnp.einsum("bkcs,bkcj->bksj", decay.weight_BKCS, values_BKCJ, precision=_EXACT)


def _nonzero(decay: _DecayWeights, block: _Chunk) -> Array:
    """Mask [B, K, C] of the positions where Z is not 0: padding and positions before the first token are excluded."""
    return decay.real_BC[:, None] & (block.z_BKC >= TINY)


def _float32_parameters(operands: JoinedOperands) -> JoinedOperands:
    """The operands with the parameters cast to float32; arrays with an axis L are cast chunk by chunk."""
    names = ("decay_K", "phase_scale_K", "grid_KJ", "weights_KJ")
    return operands._replace(**{name: getattr(operands, name).astype(jnp.float32) for name in names})


def _cut(array_BLK: Array, start: Array | int, size: int) -> Array:
    """Slice one chunk, [B, L, K, ...] to [B, K, C, ...] in float32."""
    return jnp.swapaxes(lax.dynamic_slice_in_dim(array_BLK, start, size, 1).astype(jnp.float32), 1, 2)


def _put(array_BLK: Array, chunk_BKC: Array, start: Array | int) -> Array:
    """Write one chunk [B, K, C, ...] into the whole array: the inverse of `_cut`."""
    return lax.dynamic_update_slice_in_dim(array_BLK, jnp.swapaxes(chunk_BKC, 1, 2).astype(array_BLK.dtype), start, 1)


def _repeat(array_H: Array, width: int) -> Array:
    """Repeat over M, [..., H] to [..., J]: each entry M times in a row."""
    wide_HM = jnp.broadcast_to(array_H[..., None], (*array_H.shape, width // array_H.shape[-1]))
    return wide_HM.reshape(*array_H.shape[:-1], width)


def _over_samples(array_J: Array, head_dim: int) -> Array:
    """Sum over M, [..., J] to [..., H]. Strided slices are 4 times as fast as XLA's reduction of an axis this short."""
    samples = array_J.shape[-1] // head_dim
    total = sum(array_J[..., m::samples] for m in range(samples))
    assert not isinstance(total, int)  # M is at least 1
    return total


def _queries(start: Array | int, size: int, operands: JoinedOperands) -> tuple[Array, Array]:
    """Queries of one chunk [B, K, C, J], repeated for the memory heads that share them."""
    share = operands.keys_BLKH.shape[2] // operands.q_re_BLQJ.shape[2]
    parts = (_cut(part, start, size) for part in (operands.q_re_BLQJ, operands.q_im_BLQJ))
    q_re, q_im = (part if share == 1 else jnp.repeat(part, share, axis=1) for part in parts)
    return q_re, q_im


def _over_heads(array_BKCJ: Array, operands: JoinedOperands) -> Array:
    """Sum [B, K, C, J] over the memory heads that share a query head: [B, Q, C, J]."""
    queries = operands.q_re_BLQJ.shape[2]
    batch, heads, size, width = array_BKCJ.shape
    if heads == queries:
        return array_BKCJ
    return jnp.sum(array_BKCJ.reshape(batch, queries, heads // queries, size, width), axis=2)
