"""Parts shared by all forms of the mixing operator: operands, state, timeline, the encoding and the division by Z.

XLA's own sine and cosine take 36 ns per element on CPU (scalar calls); `sine_cosine`, branch-free and vectorised, 0.6.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

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

    Polynomials give sin and cos of half the angle, which lies in [-π/2, π/2]; the double-angle formulas then need no
    distinction of quadrants.
    """
    fraction = turns - jnp.floor(turns + 0.5)
    square = fraction * fraction
    sine: Array | float = _SINE[-1]
    cosine: Array | float = _COSINE[-1]
    for s, c in zip(_SINE[-2::-1], _COSINE[-2::-1], strict=True):
        sine, cosine = sine * square + s, cosine * square + c
    sine = sine * fraction
    return 2 * sine * cosine, (cosine - sine) * (cosine + sine)
