"""Parts shared by the layers: RMS norm, RoPE, the causal depthwise convolution, and the initial values of matrices.

Norms, angles and softmax are float32 whatever the compute type. Parameters are float32 masters, cast to the compute
type where they are used, so that bfloat16 runs keep no second copy.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from nautile.configs.model import ModelConfig
from nautile.model.layers.mixing.chunked import sine_cosine

Params = dict[str, Any]
MASKED = -1e30  # a logit or score; not -inf, whose product with a probability of 0 would be NaN


def compute_dtype(config: ModelConfig) -> jnp.dtype:
    """The type of activations and matrix products."""
    return jnp.dtype(config.compute_dtype)


def normals(rngs: nnx.Rngs, shapes: dict[str, tuple[int, ...]]) -> dict[str, Array]:
    """Standard normal arrays, split from a single draw: each draw takes 0.3 s to compile on CPU, whatever its size."""
    sizes = [math.prod(shape) for shape in shapes.values()]
    parts = jnp.split(jax.random.normal(rngs.params(), (sum(sizes),)), np.cumsum(sizes)[:-1])
    return {name: part.reshape(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}


def matrix(normal: Array, scale: float = 1.0) -> nnx.Param:
    """A matrix with standard deviation scale/√fan_in from a standard normal array; fan_in is the last axis but one."""
    return nnx.Param(normal * (scale * normal.shape[-2] ** -0.5))


class Transposed(NamedTuple):
    """A weight stored [out, in], which products with few rows read faster on CPU. For decoding: it has no gradient."""

    weight_OI: Array


def linear(x: Array, weight_IO: Array | Transposed) -> Array:
    """x · W in the type of x."""
    if isinstance(weight_IO, Transposed):
        weight_OI = weight_IO.weight_OI.astype(x.dtype)
        return jax.lax.dot_general(x, weight_OI, (((x.ndim - 1,), (1,)), ((), ())))
    return _product(x, weight_IO.astype(x.dtype))


@jax.custom_vjp
def _product(x: Array, weight_IO: Array) -> Array:
    """x · W, whose weight gradient is a product with the narrower operand first.

    XLA on CPU transposes the first operand of that product and recomputes, in the transposed order, the elementwise
    operations that produced it. Autodiff puts the wider operand first; its copies took a quarter of a training step.
    """
    return x @ weight_IO


def _product_forward(x: Array, weight_IO: Array) -> tuple[Array, tuple[Array, Array]]:
    return x @ weight_IO, (x, weight_IO)


def _product_backward(residuals: tuple[Array, Array], d_out: Array) -> tuple[Array, Array]:
    x, weight_IO = residuals
    # The narrower operand comes first in either order: see `_product`.
    if weight_IO.shape[0] <= weight_IO.shape[1]:
        d_weight_IO = jnp.einsum("...i,...o->io", x, d_out)
    else:
        d_weight_IO = jnp.einsum("...o,...i->oi", d_out, x).T
    return jnp.einsum("...o,io->...i", d_out, weight_IO), d_weight_IO


_product.defvjp(_product_forward, _product_backward)


def barrier_on_cpu(x: Array) -> Array:
    """x, behind an optimization barrier on CPU, so that XLA does not fuse it into the transpose that reads it.

    Fused, it is computed one number at a time: 29 ns per element of the readout, and 4 with the barrier.
    """
    return jax.lax.platform_dependent(x, cpu=jax.lax.optimization_barrier, default=lambda x: x)


def rms_norm(x: Array, scale_D: Array | None, epsilon: float) -> Array:
    """x / rms(x), times a learned scale if there is one; computed in float32, returned in the type of x."""
    wide = x.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + epsilon)
    return (normed if scale_D is None else normed * scale_D).astype(x.dtype)


def rope_angles(positions: Array, head_dim: int, base: float) -> tuple[Array, Array]:
    """Cosine and sine of the RoPE angles, float32 [..., head_dim / 2] each, for positions counted within a document."""
    # Frequencies in turns, not radians: `sine_cosine` removes whole turns exactly.
    turns = base ** (-np.arange(head_dim // 2) / (head_dim // 2)) / (2 * np.pi)
    sine, cosine = sine_cosine(positions[..., None].astype(jnp.float32) * turns.astype(np.float32))
    return cosine, sine


def rotate(x: Array, angles: tuple[Array, Array]) -> Array:
    """RoPE on [..., heads, head_dim]; the first half of a head pairs with its second half, as in the author's code."""
    cos, sin = (part[..., None, :] for part in angles)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def causal_convolution(x_BLC: Array, taps_TC: Array, segments_BL: Array, history_BTC: Array | None = None) -> Array:
    """Causal depthwise convolution over the last T inputs (paper §2.2.4, step 1); the last tap is the current input.

    Inputs of another segment count as zero: nothing leaks between packed documents. `history_BTC` holds the T-1 inputs
    before the row, which belong to its first segment; None: zeros.
    """
    taps_TC = taps_TC.astype(x_BLC.dtype)
    reach, length = taps_TC.shape[0] - 1, x_BLC.shape[1]
    padded_BLC, owners_BL = prepend_history(x_BLC, segments_BL, history_BTC, reach)
    # The current input, then the earlier ones from the oldest.
    out_BLC = x_BLC * taps_TC[reach]
    for tap in range(reach):
        same_BL1 = (owners_BL[:, tap : tap + length] == segments_BL)[..., None]
        out_BLC = out_BLC + jnp.where(same_BL1, padded_BLC[:, tap : tap + length], 0) * taps_TC[tap]
    return out_BLC


def prepend_history(x_BLC: Array, segments_BL: Array, history_BTC: Array | None, reach: int) -> tuple[Array, Array]:
    """Rows and their segments, each with `reach` columns in front: `history_BTC`, or zeros of segment 0 for None."""
    if history_BTC is None:
        return jnp.pad(x_BLC, ((0, 0), (reach, 0), (0, 0))), jnp.pad(segments_BL, ((0, 0), (reach, 0)))
    # The history belongs to the row's first segment: a reset inside the row hides it from later documents.
    owners_BT = jnp.repeat(segments_BL[:, :1], reach, axis=1)
    return jnp.concatenate([history_BTC, x_BLC], axis=1), jnp.concatenate([owners_BT, segments_BL], axis=1)


def parameters_of(module: nnx.Module) -> Params:
    """The parameters of a module as a nested plain dict of arrays."""
    return nnx.to_pure_dict(nnx.state(module, nnx.Param))
