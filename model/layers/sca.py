"""The SCA layer (paper §2.2.4, steps 1 to 6) around the mixing operator.

Columns of the input projection, in our order: keys K·H | scores K | re queries K'·H·M | im queries K'·H·M. (The author
interleaves re and im; split, each is one contiguous slice. The importer permutes.)

The decay is relative unless `config.decay` is "window": then the author's weights, measured to the end of the context
and clipped, go in as gates and the operator decays nothing.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from configs.model import ModelConfig
from model.layers.common import Params, apart_on_cpu, causal_convolution, linear, matrix, normals, preceded, rms_norm
from model.layers.mixing.operator import mix, mix_step
from model.layers.mixing.parts import MixState, Operands
from model.sharding import ROWS, WHOLE, on_each_device

THETA_LOW, THETA_HIGH = 0.001, 3.0
DECAY_LOW, DECAY_HIGH = 0.001, 0.1
WINDOW_FLOOR, WINDOW_CEILING = 1e-4, 5000.0


class SCA(nnx.Module):
    """The parameters of one layer. `depth` is the number of residual branches in the stack: it scales the output."""

    def __init__(self, config: ModelConfig, depth: int, rngs: nnx.Rngs) -> None:
        width, heads, head_dim = config.width, config.memory_heads, config.head_dim
        samples, inner, taps = config.spectral_samples, projected(config), config.convolution
        expanded = config.readout_expand * head_dim
        drawn = normals(
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
        self.in_proj = matrix(drawn["in_proj"])
        # Gain √2 over the taps, for the SiLU that follows.
        self.conv = nnx.Param(drawn["conv"] * (2 / taps) ** 0.5)
        start = np.geomspace(THETA_LOW, THETA_HIGH, samples) if samples > 1 else np.geomspace(0.01, 2.9, heads)
        start_KHM = start.reshape(1, 1, samples) if samples > 1 else start.reshape(heads, 1, 1)
        theta_KHM = jnp.asarray(np.broadcast_to(_theta_inverse(start_KHM), (heads, head_dim, samples)), jnp.float32)
        self.theta = nnx.Param(theta_KHM)
        self.integration = nnx.Param(jnp.zeros((heads, head_dim, samples)))
        decays_K = np.geomspace(DECAY_LOW, DECAY_HIGH, heads)
        self.decay = nnx.Param(jnp.asarray(np.log(np.expm1(decays_K)), jnp.float32))
        self.score_scale = nnx.Param(jnp.ones(heads))
        self.score_bias = nnx.Param(jnp.zeros(heads))
        self.phase_scale = nnx.Param(jnp.ones(heads))
        self.gate_proj = matrix(drawn["gate_proj"])
        self.gated_norm = nnx.Param(jnp.ones(2 * head_dim * heads))
        self.readout = matrix(drawn["readout"])
        self.out_proj = matrix(drawn["out_proj"], scale=depth**-0.5)


class SCAState(NamedTuple):
    """The decoding state of one layer: the sums, and the convolution's last T-1 inputs (zero before the start)."""

    mix: MixState
    history_BTC: Array


class Spectrum(NamedTuple):
    """λ, θ and ω, float32, as `spectrum` computes them from the raw parameters."""

    decay_K: Array
    grid_KHM: Array
    weights_KHM: Array


def projected(config: ModelConfig) -> int:
    """Columns of the input projection: keys, scores and both parts of the queries; 5,136 in the paper."""
    queries = config.query_heads * config.head_dim * config.spectral_samples
    return config.memory_heads * (config.head_dim + 1) + 2 * queries


def spectrum(params: Params) -> Spectrum:
    """λ by softplus; θ in [0.001, 3], rising over M by cumulative softplus (M = 1: by sigmoid); ω sums to 1 over M."""
    raw_KHM = params["theta"].astype(jnp.float32)
    if raw_KHM.shape[-1] == 1:
        share_KHM = jax.nn.sigmoid(raw_KHM)
    else:
        reached_KHM = jnp.cumsum(jax.nn.softplus(raw_KHM) + 1e-4, axis=-1)
        share_KHM = reached_KHM / reached_KHM[..., -1:]
    grid_KHM = THETA_LOW + share_KHM * (THETA_HIGH - THETA_LOW)
    weights_KHM = jnp.exp(params["integration"].astype(jnp.float32))
    weights_KHM = weights_KHM / (jnp.sum(weights_KHM, axis=-1, keepdims=True) + 1e-6)
    return Spectrum(jax.nn.softplus(params["decay"].astype(jnp.float32)), grid_KHM, weights_KHM)


def sca(
    params: Params,
    config: ModelConfig,
    x_BLD: Array,
    segments_BL: Array,
    positions_BL: Array,
    before: SCAState | None = None,
) -> tuple[Array, SCAState]:
    """One residual layer over whole rows: [B, L, D] to [B, L, D], and the state to continue from.

    It is the state of each row's last document. `before` is the state that the first document of each row continues.
    Rows to be continued are padded on the left where they begin a document, and on the right where they continue it.
    """
    normed_BLD = rms_norm(x_BLD, params["norm"], config.sca_norm_epsilon)
    inputs_BLC = linear(normed_BLD, params["in_proj"])
    history_BTC = None if before is None else before.history_BTC
    branches_BLC = jax.nn.silu(causal_convolution(inputs_BLC, params["conv"], segments_BL, history_BTC))
    mixing = partial(mix, chunk=config.chunk, form=config.mixing)
    if config.mixing == "fused":
        mixing = on_each_device(mixing, (Operands(ROWS, ROWS, WHOLE, WHOLE, WHOLE, WHOLE, ROWS, ROWS), ROWS, ROWS))
    operands = _operands(params, config, spectrum(params), branches_BLC, positions_BL)
    re_BLKH, im_BLKH, mixed = mixing(operands, segments_BL, None if before is None else before.mix)
    # The convolution's last inputs; zero where they do not belong to the row's last document.
    reach, length = config.convolution - 1, x_BLD.shape[1]
    padded_BLC, owners_BL = preceded(inputs_BLC, segments_BL, history_BTC, reach)
    if before is None:
        recent_BTC, owners_BT = padded_BLC[:, length:], owners_BL[:, length:]
    else:
        last_BT = jnp.sum(segments_BL != 0, axis=1)[:, None] + jnp.arange(reach)
        recent_BTC = jnp.take_along_axis(padded_BLC, last_BT[..., None], axis=1)
        owners_BT = jnp.take_along_axis(owners_BL, last_BT, axis=1)
    after_BTC = jnp.where((owners_BT == owners_BT[:, -1:])[..., None], recent_BTC, 0)
    return x_BLD + _fuse(params, config, normed_BLD, re_BLKH, im_BLKH), SCAState(mixed, after_BTC)


def sca_step(
    params: Params, config: ModelConfig, spectral: Spectrum, x_BD: Array, positions_B: Array, state: SCAState
) -> tuple[Array, SCAState]:
    """One token of `sca`: [B, D] to [B, D], and the next state. `spectral` is `spectrum(params)`, computed once."""
    normed_BD = rms_norm(x_BD, params["norm"], config.sca_norm_epsilon)
    inputs_BC = linear(normed_BD, params["in_proj"])
    taps_TC = params["conv"].astype(inputs_BC.dtype)
    # A loop over the taps is one pass over the columns; as a sum over an axis it took a quarter of the step on CPU.
    summed_BC = inputs_BC * taps_TC[-1]
    for tap in range(taps_TC.shape[0] - 1):
        summed_BC += state.history_BTC[:, tap] * taps_TC[tap]
    branches_BC = jax.nn.silu(summed_BC)
    history_BTC = jnp.concatenate([state.history_BTC[:, 1:], inputs_BC[:, None]], axis=1)
    re_BKH, im_BKH, mixed = mix_step(_operands(params, config, spectral, branches_BC, positions_B), state.mix)
    return x_BD + _fuse(params, config, normed_BD, re_BKH, im_BKH), SCAState(mixed, history_BTC)


def _operands(params: Params, config: ModelConfig, spectral: Spectrum, branches: Array, positions: Array) -> Operands:
    """Cut the columns [..., C] into keys, scores and queries, and take step 2: the content gate softplus(γs+β)."""
    heads, head_dim = config.memory_heads, config.head_dim
    query = (config.query_heads, head_dim, config.spectral_samples)
    each = query[0] * query[1] * query[2]
    keys, scores, q_re, q_im = jnp.split(
        branches, [heads * head_dim, heads * (head_dim + 1), heads * (head_dim + 1) + each], axis=-1
    )
    gates = jax.nn.softplus(params["score_scale"] * scores.astype(jnp.float32) + params["score_bias"])
    decay_K = spectral.decay_K
    if config.decay == "window":
        distance = jnp.maximum(config.context - 1 - positions, 0).astype(jnp.float32)[..., None]
        # The floor on the gates keeps Z at 1e-4 or more from the first token on, as the author's floor on Z does.
        gates = jnp.clip(gates * jnp.exp(-decay_K * distance), WINDOW_FLOOR, WINDOW_CEILING)
        decay_K = jnp.zeros_like(decay_K)
    keys = keys.reshape(*branches.shape[:-1], heads, head_dim)
    q_re, q_im = (part.reshape(*branches.shape[:-1], *query) for part in (q_re, q_im))
    return Operands(keys, gates, decay_K, params["phase_scale"], spectral.grid_KHM, spectral.weights_KHM, q_re, q_im)


def _fuse(params: Params, config: ModelConfig, normed: Array, re: Array, im: Array) -> Array:
    """Step 6: gated RMS norm over all heads at once, SwiGLU per head (sigmoid gate), output projection."""
    lead, dtype = normed.shape[:-1], normed.dtype
    heads, head_dim = config.memory_heads, config.head_dim
    complex_F = jnp.concatenate([re, im], axis=-1).reshape(*lead, -1).astype(jnp.float32)
    gate_F = linear(normed, params["gate_proj"]).astype(jnp.float32)
    fused = rms_norm(complex_F * jax.nn.silu(gate_F), params["gated_norm"], config.norm_epsilon).astype(dtype)
    # The heads stay in front, as the product of each head leaves them, until the gates are applied.
    read = jnp.einsum("...kf,kfn->k...n", fused.reshape(*lead, heads, 2 * head_dim), params["readout"].astype(dtype))
    value, gate = jnp.split(read, 2, axis=-1)
    gated = jnp.moveaxis(apart_on_cpu(value * jax.nn.sigmoid(gate)), 0, -2)
    return linear(gated.reshape(*lead, -1), params["out_proj"])


def _theta_inverse(theta: np.ndarray) -> np.ndarray:
    """Raw values for a grid: softplus increments over M (their sum is free, so θ itself is the total), or logits."""
    if theta.shape[-1] == 1:
        share = (theta - THETA_LOW) / (THETA_HIGH - THETA_LOW)
        return np.log(share) - np.log1p(-share)
    return np.log(np.expm1(theta) + 1e-4)
