"""The SCA layer (paper §2.2.4, steps 1 to 6) around the mixing operator.

Columns of the input projection: keys K·H | scores K | re queries K'·H·M | im queries K'·H·M. (The author's checkpoints
interleave re and im; split, each is one contiguous slice. `model.weights.author_import` permutes them.)

The decay is relative unless `config.decay` is "window". Then the author's decay weights, measured to the end of the
context and clipped, are multiplied into the gates, and the operator applies no decay.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from nautile.configs.model import ModelConfig
from nautile.model.layers.common import (
    Params,
    barrier_on_cpu,
    causal_convolution,
    linear,
    matrix,
    normals,
    prepend_history,
    rms_norm,
)
from nautile.model.layers.mixing.chunked import MixState, Operands
from nautile.model.layers.mixing.operator import mix, mix_step
from nautile.model.sharding import ROWS, WHOLE, on_each_device

# The range of the grid, that of the initial decays over the heads, and the bounds of the author's decay weights.
THETA_LOW, THETA_HIGH = 0.001, 3.0
DECAY_LOW, DECAY_HIGH = 0.001, 0.1
WINDOW_FLOOR, WINDOW_CEILING = 1e-4, 5000.0


class SCA(nnx.Module):
    """The parameters of one layer. `depth`, the number of residual branches in the stack, scales the initial output."""

    def __init__(self, config: ModelConfig, depth: int, rngs: nnx.Rngs) -> None:
        width, heads, head_dim = config.width, config.memory_heads, config.head_dim
        samples, inner, taps = config.spectral_samples, config.projection_width, config.convolution
        expanded = config.readout_expand * head_dim
        normal = normals(
            rngs,
            {
                "in_proj": (width, inner),
                "conv": (taps, inner),
                "gate_proj": (width, 2 * head_dim * heads),
                "readout": (heads, 2 * head_dim, 2 * expanded),
                "out_proj": (expanded * heads, width),
            },
        )
        self.norm = nnx.Param(jnp.ones(width))
        self.in_proj = matrix(normal["in_proj"])
        # Gain √2 over the taps, for the SiLU that follows.
        self.conv = nnx.Param(normal["conv"] * (2 / taps) ** 0.5)
        # The grid starts geometric: over the samples of each head or, with a single sample, over the heads.
        grid = np.geomspace(THETA_LOW, THETA_HIGH, samples) if samples > 1 else np.geomspace(0.01, 2.9, heads)
        grid_KHM = grid.reshape(1, 1, samples) if samples > 1 else grid.reshape(heads, 1, 1)
        theta_KHM = jnp.asarray(np.broadcast_to(_theta_inverse(grid_KHM), (heads, head_dim, samples)), jnp.float32)
        integration_KHM = jnp.zeros((heads, head_dim, samples))
        # Free parameters start at the values that the others have at the start.
        self.theta = nnx.Param(_ordered(theta_KHM) if config.grid == "free" else theta_KHM)
        free = config.integration == "free"
        self.integration = nnx.Param(_normalised(integration_KHM)[: config.query_heads] if free else integration_KHM)
        # The inverse of softplus, which `spectrum` applies.
        decays_K = np.geomspace(DECAY_LOW, DECAY_HIGH, heads)
        self.decay = nnx.Param(jnp.asarray(np.log(np.expm1(decays_K)), jnp.float32))
        self.score_scale = nnx.Param(jnp.ones(heads))
        self.score_bias = nnx.Param(jnp.zeros(heads))
        self.phase_scale = nnx.Param(jnp.ones(heads))
        self.gate_proj = matrix(normal["gate_proj"])
        self.gated_norm = nnx.Param(jnp.ones(2 * head_dim * heads))
        self.readout = matrix(normal["readout"])
        self.out_proj = matrix(normal["out_proj"], scale=depth**-0.5)


class SCAState(NamedTuple):
    """The decoding state of one layer: the sums, and the last T-1 inputs of the convolution (zero before the start)."""

    mix: MixState
    history_BTC: Array


class Spectrum(NamedTuple):
    """Decay λ, grid θ and integration weights ω, float32, computed from the raw parameters by `spectrum`."""

    decay_K: Array
    grid_KHM: Array
    weights_KHM: Array


def spectrum(params: Params, config: ModelConfig) -> Spectrum:
    """λ by softplus; θ and ω in the forms that `config.grid` and `config.integration` name.

    Free, θ [K, H, M] and ω [K', H, M] are the parameters themselves (paper §2.2.3, Algorithm 1). ω is then by query
    head: memory heads that share a query share it.
    """
    theta_KHM, raw_weights = params["theta"].astype(jnp.float32), params["integration"].astype(jnp.float32)
    grid_KHM = theta_KHM if config.grid == "free" else _ordered(theta_KHM)
    if config.integration == "free":
        weights_KHM = jnp.repeat(raw_weights, config.memory_heads // config.query_heads, axis=-3)
    else:
        weights_KHM = _normalised(raw_weights)
    if config.grid == "fixed":
        grid_KHM = jax.lax.stop_gradient(grid_KHM)
    if config.integration == "fixed":
        weights_KHM = jax.lax.stop_gradient(weights_KHM)
    return Spectrum(jax.nn.softplus(params["decay"].astype(jnp.float32)), grid_KHM, weights_KHM)


def _ordered(raw_KHM: Array) -> Array:
    """θ in [0.001, 3], increasing over M by cumulative softplus (M = 1: sigmoid)."""
    if raw_KHM.shape[-1] == 1:
        fraction_KHM = jax.nn.sigmoid(raw_KHM)
    else:
        # Each increment is positive, so the grid stays in order whatever is learnt.
        cumulative_KHM = jnp.cumsum(jax.nn.softplus(raw_KHM) + 1e-4, axis=-1)
        fraction_KHM = cumulative_KHM / cumulative_KHM[..., -1:]
    return THETA_LOW + fraction_KHM * (THETA_HIGH - THETA_LOW)


def _normalised(raw_KHM: Array) -> Array:
    """ω > 0 with a sum of 1 over M."""
    weights_KHM = jnp.exp(raw_KHM)
    return weights_KHM / (jnp.sum(weights_KHM, axis=-1, keepdims=True) + 1e-6)


def sca(
    params: Params,
    config: ModelConfig,
    x_BLD: Array,
    segments_BL: Array,
    positions_BL: Array,
    initial: SCAState | None = None,
    operator: Callable[..., Any] = mix,
) -> tuple[Array, SCAState]:
    """Run the layer over whole rows: [B, L, D] to [B, L, D], and the state after each row's last document.

    `operator`: what takes the place of `mix`, for studies of the layer.

    `initial` is the state that the first document of each row continues; None: empty. For the returned state to be
    right, rows must be padded on the left without `initial`, and on the right with it.
    """
    # Step 1: norm, input projection, causal convolution and SiLU.
    normed_BLD = rms_norm(x_BLD, params["norm"], config.sca_norm_epsilon)
    inputs_BLC = linear(normed_BLD, params["in_proj"])
    history_BTC = None if initial is None else initial.history_BTC
    branches_BLC = jax.nn.silu(causal_convolution(inputs_BLC, params["conv"], segments_BL, history_BTC))
    # Steps 2 to 5. XLA cannot partition a kernel, so each device runs it on its own rows.
    mixing: Callable[..., Any] = partial(operator, chunk=config.chunk, form=config.mixing)
    if config.mixing == "fused":
        specs = Operands._make((ROWS, ROWS, WHOLE, WHOLE, WHOLE, WHOLE, ROWS, ROWS))
        mixing = on_each_device(mixing, (specs, ROWS, ROWS))
    operands = _operands(params, config, spectrum(params, config), branches_BLC, positions_BL)
    re_BLKH, im_BLKH, mix_state = mixing(operands, segments_BL, None if initial is None else initial.mix)
    # The convolution's last inputs; zero where they do not belong to the row's last document.
    reach, length = config.convolution - 1, x_BLD.shape[1]
    padded_BLC, owners_BL = prepend_history(inputs_BLC, segments_BL, history_BTC, reach)
    if initial is None:
        recent_BTC, owners_BT = padded_BLC[:, length:], owners_BL[:, length:]
    else:
        # Columns in `padded_BLC`, whose first `reach` are the history: those that end at the last token of each row.
        last_BT = jnp.sum(segments_BL != 0, axis=1)[:, None] + jnp.arange(reach)
        recent_BTC = jnp.take_along_axis(padded_BLC, last_BT[..., None], axis=1)
        owners_BT = jnp.take_along_axis(owners_BL, last_BT, axis=1)
    after_BTC = jnp.where((owners_BT == owners_BT[:, -1:])[..., None], recent_BTC, 0)
    return x_BLD + _fuse(params, config, normed_BLD, re_BLKH, im_BLKH), SCAState(mix_state, after_BTC)


def sca_step(
    params: Params, config: ModelConfig, spectral: Spectrum, x_BD: Array, positions_B: Array, state: SCAState
) -> tuple[Array, SCAState]:
    """`sca` for a single token: [B, D] to [B, D], and the next state. `spectral`: from `spectrum`, computed once."""
    normed_BD = rms_norm(x_BD, params["norm"], config.sca_norm_epsilon)
    inputs_BC = linear(normed_BD, params["in_proj"])
    taps_TC = params["conv"].astype(inputs_BC.dtype)
    # The loop over taps is one pass over the columns; a sum over an axis took a quarter of the step on CPU.
    summed_BC = inputs_BC * taps_TC[-1]
    for tap in range(taps_TC.shape[0] - 1):
        summed_BC += state.history_BTC[:, tap] * taps_TC[tap]
    branches_BC = jax.nn.silu(summed_BC)
    history_BTC = jnp.concatenate([state.history_BTC[:, 1:], inputs_BC[:, None]], axis=1)
    re_BKH, im_BKH, mix_state = mix_step(_operands(params, config, spectral, branches_BC, positions_B), state.mix)
    return x_BD + _fuse(params, config, normed_BD, re_BKH, im_BKH), SCAState(mix_state, history_BTC)


def _operands(params: Params, config: ModelConfig, spectral: Spectrum, branches: Array, positions: Array) -> Operands:
    """Split the columns [..., C] into keys, scores and queries; apply the content gate softplus(γs+β) of step 2."""
    heads, head_dim = config.memory_heads, config.head_dim
    query_shape = (config.query_heads, head_dim, config.spectral_samples)
    query_width = math.prod(query_shape)
    keys, scores, q_re, q_im = jnp.split(
        branches, [heads * head_dim, heads * (head_dim + 1), heads * (head_dim + 1) + query_width], axis=-1
    )
    gates = jax.nn.softplus(params["score_scale"] * scores.astype(jnp.float32) + params["score_bias"])
    decay_K = spectral.decay_K
    if config.decay == "window":
        # The distance to the last position of the context.
        distance = jnp.maximum(config.context - 1 - positions, 0).astype(jnp.float32)[..., None]
        # The floor on the gates keeps Z at 1e-4 or more from the first token on, as the author's floor on Z does.
        gates = jnp.clip(gates * jnp.exp(-decay_K * distance), WINDOW_FLOOR, WINDOW_CEILING)
        decay_K = jnp.zeros_like(decay_K)
    keys = keys.reshape(*branches.shape[:-1], heads, head_dim)
    q_re, q_im = (part.reshape(*branches.shape[:-1], *query_shape) for part in (q_re, q_im))
    return Operands(keys, gates, decay_K, params["phase_scale"], spectral.grid_KHM, spectral.weights_KHM, q_re, q_im)


def _fuse(params: Params, config: ModelConfig, normed: Array, re: Array, im: Array) -> Array:
    """Step 6: gated RMS norm over all heads at once, SwiGLU per head (sigmoid gate), output projection."""
    lead, dtype = normed.shape[:-1], normed.dtype
    heads, head_dim = config.memory_heads, config.head_dim
    # The norm runs over all heads at once, real and imaginary parts side by side: F = K·2H.
    complex_F = jnp.concatenate([re, im], axis=-1).reshape(*lead, -1).astype(jnp.float32)
    gate_F = linear(normed, params["gate_proj"]).astype(jnp.float32)
    fused = rms_norm(complex_F * jax.nn.silu(gate_F), params["gated_norm"], config.norm_epsilon).astype(dtype)
    # The heads stay the leading axis, as the product of each head leaves them, until the gates are applied.
    read = jnp.einsum("...kf,kfn->k...n", fused.reshape(*lead, heads, 2 * head_dim), params["readout"].astype(dtype))
    value, gate = jnp.split(read, 2, axis=-1)
    gated = jnp.moveaxis(barrier_on_cpu(value * jax.nn.sigmoid(gate)), 0, -2)
    return linear(gated.reshape(*lead, -1), params["out_proj"])


def _theta_inverse(theta: np.ndarray) -> np.ndarray:
    """Raw parameters whose `_ordered` is near the grid θ: softplus increments over M, or exactly θ: logits for M = 1.

    The increments are θ itself, not its differences, so for M = 2 the grid starts at 0.0022 and not at 0.001.
    """
    if theta.shape[-1] == 1:
        fraction = (theta - THETA_LOW) / (THETA_HIGH - THETA_LOW)
        return np.log(fraction) - np.log1p(-fraction)
    return np.log(np.expm1(theta) + 1e-4)
