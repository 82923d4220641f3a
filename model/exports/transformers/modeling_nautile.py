"""PyTorch model code of Nautile for `transformers`: blocks of SCA layers and grouped-query attention layers.

An SCA layer (paper §2.2.4) keeps decayed sums of its keys, each rotated by a phase computed from the key itself, and
reads them with a query:

    S_t = e^-λ S_{t-1} + g_t k_t e^{iφ_t},    Z_t = e^-λ Z_{t-1} + g_t,    φ_t = softsign(η k_t) θ
    o_t = Σ_m ω_m (S_t / Z_t)_m · conj(q_t)_m / √H

A prompt is computed in chunks of positions, and each generated token in one step from the cache. Parameters have the
names and layouts of the paper author's code. Token id 0 is padding; it and the ids that no token has are never
predicted, and are left out of the loss.

Letters of shapes in names (`x_BLD` is [B, L, D]): B batch, L length, D width, C columns of the input projection, K
memory heads, Q query heads of the memory, H head dimension, M spectral samples, J = H·M, V = 2J + 1 (real part of S,
imaginary part, Z), N chunks, T convolution taps, S columns of the cache, G key-value heads.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel, initialization
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.utils import can_return_tuple

from .configuration_nautile import NautileConfig

THETA_LOW, THETA_HIGH = 0.001, 3.0
WINDOW_FLOOR, WINDOW_CEILING = 1e-4, 5000.0
TINY = torch.finfo(torch.float32).tiny
SPAN = 32  # chunks computed at a time, which bounds the memory of a long prompt
IGNORED = -100  # the label that the loss leaves out


Pair = tuple[Tensor, Tensor]
# The cache's field in outputs, and its argument in `generate`: renamed in 5.24.
CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"
# Arguments that `generate` of earlier versions and `Trainer` pass, and that the model does not need: the cache counts
# its columns itself, and the number of targets is only for the loss.
NOT_NEEDED = ("cache_position", "num_items_in_batch")


class RowLayout(NamedTuple):
    """The document and position of each token. Documents are numbered along a row; 0 is padding.

    A token at position 0 begins a new document, so a row may hold several (packed), or padding on the left.
    """

    positions_BL: Tensor  # counted from 0 in each document
    documents_BL: Tensor
    current_BL: Tensor  # as documents_BL, but padding has the document of the last token before it
    previous_B1: Tensor  # the document of the last token before these columns
    single: bool  # in every row these columns are one document, without padding and with an empty cache


class NautileCache:
    """The generation cache: the sums and last convolution inputs of each SCA layer, keys and values of each attention
    layer. Only keys and values grow with the length.
    """

    is_compileable = is_croppable = False  # the sums cannot be undone
    is_linear = (False,)  # so that `generate` reads only the tokens behind the columns that a cache has

    def __init__(self) -> None:
        self.layers: dict[int, Pair] = {}
        self.documents_BS: Tensor | None = None
        self.next_position_B: Tensor | None = None

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Number of columns so far, including padding."""
        return 0 if self.documents_BS is None else self.documents_BS.shape[1]

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Always -1: there is no limit."""
        return -1

    def batch_select_indices(self, indices: Tensor) -> None:
        """Select rows of the batch, in this order."""
        self.layers = {index: (a[indices], b[indices]) for index, (a, b) in self.layers.items()}
        if self.documents_BS is not None and self.next_position_B is not None:
            self.documents_BS = self.documents_BS[indices]
            self.next_position_B = self.next_position_B[indices]

    reorder_cache = batch_select_indices  # the name that beam search calls

    def copy(self) -> "NautileCache":
        """A cache that goes on from here by itself; the layers replace their states and change none in place."""
        other = NautileCache()
        other.layers = dict(self.layers)
        other.documents_BS, other.next_position_B = self.documents_BS, self.next_position_B
        return other

    def advance(self, layout: RowLayout) -> None:
        """Append the columns of `layout`. Call it before the layers, which update their own states."""
        documents_BL = layout.documents_BL
        # The next position follows the last token of the row's current document, if it has tokens in these columns.
        same_BL = (documents_BL > 0) & (documents_BL == layout.current_BL[:, -1:])
        next_B = torch.where(same_BL, layout.positions_BL + 1, 0).max(dim=1).values
        if self.documents_BS is not None and self.next_position_B is not None:
            documents_BL = torch.cat([self.documents_BS, documents_BL], dim=1)
            next_B = torch.where(same_BL.any(dim=1), next_B, self.next_position_B)
        self.documents_BS, self.next_position_B = documents_BL, next_B


def given_cache(cache: Any, past_key_values: Any) -> NautileCache | None:
    """The cache passed under either name. Raises ValueError if both are, or if it is of another class."""
    if cache is not None and past_key_values is not None:
        raise ValueError("pass either cache or past_key_values: they are two names of one argument")
    given = past_key_values if cache is None else cache
    if not isinstance(given, NautileCache | None):
        raise ValueError(
            f"{CACHE} is a {type(given).__name__}, which cannot hold the sums of SCA layers; pass None, or the {CACHE} "
            "that an earlier call returned"
        )
    return given


def refuse_unknown(arguments: dict[str, Any]) -> None:
    """Raise TypeError for an argument that the model does not have and that would change its result unseen."""
    for name, value in arguments.items():
        if value is not None and name not in NOT_NEEDED:
            raise TypeError(f"forward() has no argument {name!r}")


def no_loss(x: Tensor) -> Tensor:
    """The loss where nothing is a target: 0 with a gradient of 0, in place of a mean over no number, which is NaN."""
    return x.sum() * 0.0


def classification_loss(logits: Tensor, labels: Tensor, total: Tensor | int | None = None) -> Tensor:
    """Mean cross-entropy of logits [..., C] over the `labels` [...] that are not -100, or their sum over `total`."""
    if logits.shape[:-1] != labels.shape:
        raise ValueError(f"labels are {tuple(labels.shape)}, and this model needs {tuple(logits.shape[:-1])}")
    if (labels == IGNORED).all():
        return no_loss(logits)
    logits, labels = logits.float().flatten(0, -2), labels.long().flatten()
    summed = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
    return summed / ((labels != IGNORED).sum() if total is None else total)


def labels_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean binary cross-entropy of logits [B, C] over the `labels` [B, C], 1 or 0, that are not -100."""
    if logits.shape != labels.shape:
        raise ValueError(f"labels are {tuple(labels.shape)}, and a model of several labels needs {tuple(logits.shape)}")
    known_BC = labels != IGNORED
    if not known_BC.any():
        return no_loss(logits)
    return F.binary_cross_entropy_with_logits(logits.float()[known_BC], labels.float()[known_BC])


def rms_norm(x: Tensor, scale: Tensor | None, epsilon: float) -> Tensor:
    """x / rms(x), times a learned scale unless None; computed in float32, returned in the type of x."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return (normed if scale is None else normed * scale.float()).to(x.dtype)


def ordered_grid(raw_KHM: Tensor) -> Tensor:
    """The grid in [0.001, 3] of raw values: increasing over M, or for M = 1 a sigmoid."""
    fraction_KHM = torch.sigmoid(raw_KHM)
    if raw_KHM.shape[-1] > 1:
        cumulative_KHM = (F.softplus(raw_KHM) + 1e-4).cumsum(-1)
        fraction_KHM = cumulative_KHM / cumulative_KHM[..., -1:]
    return THETA_LOW + fraction_KHM * (THETA_HIGH - THETA_LOW)


class RMSNorm(nn.Module):
    """`rms_norm` with a learned scale."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(size))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.scale, self.epsilon)


class GatedNorm(nn.Module):
    """`rms_norm` of x · silu(gate) with a learned scale, in float32."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.epsilon = epsilon

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return rms_norm(x.float() * F.silu(gate.float()), self.weight, self.epsilon)


def rope(positions_BL: Tensor, size: int, base: float) -> Pair:
    """Cosine and sine of the RoPE angles, float32 [B, 1, L, size/2], with whole turns removed for precision."""
    turns = base ** (-torch.arange(size // 2, dtype=torch.float64) / (size // 2)) / (2 * torch.pi)
    phase = positions_BL[:, None, :, None].float() * turns.to(positions_BL.device, torch.float32)  # in turns
    angles = 2 * torch.pi * (phase - torch.floor(phase + 0.5))
    return angles.cos(), angles.sin()


def rotate(x_BNLH: Tensor, angles: Pair) -> Tensor:
    """Apply RoPE; the first half of a head pairs with its second half."""
    cos, sin = angles
    first, second = x_BNLH.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x_BNLH.dtype)


def decayed_sums(values_BLKV: Tensor, decay_K: Tensor, layout: RowLayout, state_BKV: Tensor, chunk: int) -> Pair:
    """Sums S_t = e^-λ S_{t-1} + v_t within each document, for every t [B, L, K, V], and the last one [B, K, V].

    `state_BKV` is the sum before the first column. Padding (its values must be 0) adds, decays and resets nothing. Sums
    inside a chunk are a matrix product with the weights e^{-λ·distance}; the state is passed from chunk to chunk.
    """
    length, decay_K1 = values_BLKV.shape[1], decay_K[:, None]
    # A single token: one step of the recurrence. A new document drops the state.
    if length == 1:
        same_B1 = layout.current_BL == layout.previous_B1
        real_B1 = layout.documents_BL > 0
        factor_BK = torch.where(real_B1, torch.exp(-decay_K), 1.0) * same_B1
        state_BKV = factor_BK[..., None] * state_BKV + values_BLKV[:, 0]
        return state_BKV[:, None], state_BKV
    current_BL, real_BL, previous_B1 = layout.current_BL, layout.documents_BL > 0, layout.previous_B1
    if layout.single:  # the decay weights are the same for all rows
        current_BL, real_BL, previous_B1 = current_BL[:1], real_BL[:1], previous_B1[:1]
    # Cut the columns into chunks, the last one padded.
    spare = -length % chunk
    values = F.pad(values_BLKV, (0, 0, 0, 0, 0, spare)).unflatten(1, (-1, chunk)).transpose(2, 3)  # [B, N, K, chunk, V]
    running = torch.cat([current_BL, current_BL[:, -1:].expand(-1, spare)], 1).unflatten(1, (-1, chunk))
    count = F.pad(real_BL, (0, spare)).unflatten(1, (-1, chunk)).cumsum(-1)  # tokens of the chunk up to each position
    # The sums inside each chunk, with weights e^{-λ·distance} inside a document. Distance counts tokens.
    reach = (running[..., :, None] == running[..., None, :]).tril()[:, :, None]
    steps = (count[..., :, None] - count[..., None, :]).clamp(min=0)[:, :, None]
    local = torch.where(reach, torch.exp(-decay_K1[..., None] * steps), 0.0) @ values
    # The weight of the state before a chunk at each of its positions: 0 once a new document has begun.
    before = torch.cat([previous_B1, running[:, :-1, -1]], dim=1)[:, :, None]
    carry = torch.where((running == before)[:, :, None], torch.exp(-decay_K1 * count[:, :, None]), 0.0)[..., None]
    # Pass the state from chunk to chunk, and add it to the sums inside each.
    states = []
    for index in range(local.shape[1]):
        states.append(state_BKV)
        state_BKV = local[:, index, :, -1] + carry[:, index, :, -1] * state_BKV
    sums = local + carry * torch.stack(states, dim=1)[:, :, :, None]
    return sums.transpose(2, 3).flatten(1, 2)[:, :length], state_BKV


class SpectralAttention(nn.Module):
    """The SCA operator with its projections: spectral attention by decayed sums (paper §2.2.4, steps 1 to 6).

    Columns of the input projection: keys K·H | scores K | queries Q·H·M·(re, im).
    """

    def __init__(self, config: NautileConfig) -> None:
        super().__init__()
        self.config = config
        width, heads, size = config.d_model, config.seqcond_heads, config.memory_head_dim
        samples, expanded = config.num_thetas, config.out_expand_factor * size
        inner = heads * (size + 1) + 2 * config.num_query_heads * size * samples
        self.in_proj = nn.Linear(width, inner, bias=False)
        self.conv_weight = nn.Parameter(torch.empty(inner, 1, config.conv_kernel_size))
        # The author's raw θ and ω have his names; free ones (paper §2.2.3) are other functions, and have other names.
        self.theta_name = "theta" if config.grid == "free" else "theta_raw" if samples == 1 else "theta_d_raw"
        self.w_int_name = "w_int" if config.integration == "free" else "w_int_raw"
        shared = 1 if config.integration == "free" else heads // config.num_query_heads
        theta = torch.empty(1, 1, heads, size, samples)
        w_int = torch.empty(1, 1, config.num_query_heads, shared, size, samples)
        self.register_parameter(self.theta_name, nn.Parameter(theta, config.grid != "fixed"))
        self.register_parameter(self.w_int_name, nn.Parameter(w_int, config.integration != "fixed"))
        self.decay_slopes = nn.Parameter(torch.empty(heads))
        self.score_scale = nn.Parameter(torch.ones(heads))
        self.score_bias = nn.Parameter(torch.zeros(heads))
        self.phase_scale = nn.Parameter(torch.ones(heads))
        self.gate_proj = nn.Linear(width, 2 * heads * size, bias=False)
        self.gated_norm = GatedNorm(2 * heads * size, config.norm_epsilon)
        self.W_readout = nn.Parameter(torch.empty(heads, 2 * size, 2 * expanded))
        self.out_proj = nn.Linear(heads * expanded, width, bias=False)

    def grid(self) -> Tensor:
        """The grid θ, float32 [K, H, M]: increasing over M in [0.001, 3], or for M = 1 a sigmoid, or free."""
        theta_KHM = getattr(self, self.theta_name)[0, 0].float()
        return theta_KHM if self.config.grid == "free" else ordered_grid(theta_KHM)

    def integration(self) -> Tensor:
        """The integration weights ω, float32 [K, H, M]: with a sum of 1 over M, or free, by query head."""
        weights = getattr(self, self.w_int_name)[0, 0].float()  # free [Q, 1, H, M], else [Q, K/Q, H, M]
        if self.config.integration == "free":
            return weights.expand(-1, self.config.seqcond_heads // len(weights), -1, -1).flatten(0, 1)
        weights_KHM = torch.exp(weights).flatten(0, 1)
        return weights_KHM / (weights_KHM.sum(-1, keepdim=True) + 1e-6)

    def forward(self, x_BLD: Tensor, layout: RowLayout, state: Pair | None) -> tuple[Tensor, Pair]:
        """[B, L, D] to [B, L, D]. The state, before (None: empty) and after: sums, last convolution inputs."""
        config = self.config
        heads, size, samples = config.seqcond_heads, config.memory_head_dim, config.num_thetas
        batch, length, _ = x_BLD.shape
        inputs_BLC = self.in_proj(x_BLD)
        if state is None:
            state_BKV = x_BLD.new_zeros(batch, heads, 2 * size * samples + 1, dtype=torch.float32)
            history_BTC = inputs_BLC.new_zeros(batch, config.conv_kernel_size - 1, inputs_BLC.shape[-1])
        else:
            state_BKV, history_BTC = state

        # Step 1: the convolution, and its columns as keys, scores and queries.
        columns_BLC, history_BTC = self.convolve(inputs_BLC, history_BTC, layout)
        keys_BLC, scores_BLK, queries_BLC = columns_BLC.split(
            [heads * size, heads, columns_BLC.shape[-1] - heads * (size + 1)], dim=-1
        )

        # Steps 2 and 3: the gate g and the phase φ. A model trained with decay = "window" has its decay in the gates,
        # measured to the end of the context, and none in the sums.
        gates_BLK = F.softplus(self.score_scale.float() * scores_BLK.float() + self.score_bias.float())
        decay_K = F.softplus(self.decay_slopes.float())
        if config.decay == "window":
            distance_BL1 = (config.maxlen - 1 - layout.positions_BL).clamp(min=0)[..., None]
            gates_BLK = (gates_BLK * torch.exp(-decay_K * distance_BL1)).clamp(WINDOW_FLOOR, WINDOW_CEILING)
            decay_K = torch.zeros_like(decay_K)
        gates_BLK = gates_BLK * (layout.documents_BL > 0)[..., None]
        keys_BLKH = keys_BLC.float().unflatten(-1, (heads, size))
        phase_BLKJ = (F.softsign(self.phase_scale.float()[:, None] * keys_BLKH)[..., None] * self.grid()).flatten(-2)
        gated_BLKJ = (gates_BLK[..., None] * keys_BLKH).repeat_interleave(samples, dim=-1)
        parts = [gated_BLKJ * phase_BLKJ.cos(), gated_BLKJ * phase_BLKJ.sin(), gates_BLK[..., None]]
        values_BLKV = torch.cat(parts, dim=-1)

        # Step 4: the sums S and Z, some chunks at a time.
        sums = []
        for start in range(0, length, SPAN * config.chunk):
            columns = slice(start, start + SPAN * config.chunk)
            previous_B1 = layout.previous_B1 if start == 0 else layout.current_BL[:, start - 1 : start]
            span = RowLayout(*(part[:, columns] for part in layout[:3]), previous_B1, layout.single)
            part_BLKV, state_BKV = decayed_sums(values_BLKV[:, columns], decay_K, span, state_BKV, config.chunk)
            sums.append(part_BLKV)
        sums_BLKV = torch.cat(sums, dim=1)

        # Step 5: the readout of S / Z by the queries, summed over M. Where Z is 0 there has been no token yet.
        z_BLK1 = sums_BLKV[..., -1:]
        nonzero_BLK1 = z_BLK1 >= TINY
        mean_BLKV = torch.where(nonzero_BLK1, sums_BLKV[..., :-1] / torch.where(nonzero_BLK1, z_BLK1, 1.0), 0.0)
        re_BLKHM, im_BLKHM = mean_BLKV.unflatten(-1, (2, size, samples)).unbind(-3)
        weights_KHM = self.integration() * size**-0.5
        queries = queries_BLC.float().unflatten(-1, (config.num_query_heads, size, samples, 2))
        queries = queries.repeat_interleave(heads // config.num_query_heads, dim=2)
        q_re_BLKHM, q_im_BLKHM = (queries * weights_KHM[..., None]).unbind(-1)
        out_re_BLKH = (re_BLKHM * q_re_BLKHM + im_BLKHM * q_im_BLKHM).sum(-1)
        out_im_BLKH = (im_BLKHM * q_re_BLKHM - re_BLKHM * q_im_BLKHM).sum(-1)

        # Step 6: gated norm over all heads, a SwiGLU per head, output projection.
        read_BLF = torch.cat([out_re_BLKH, out_im_BLKH], dim=-1).flatten(2)
        fused_BLKF = self.gated_norm(read_BLF, self.gate_proj(x_BLD)).to(x_BLD.dtype).unflatten(-1, (heads, -1))
        value, gate = torch.einsum("blkf,kfn->blkn", fused_BLKF, self.W_readout).chunk(2, dim=-1)
        return self.out_proj((value * torch.sigmoid(gate)).flatten(2)), (state_BKV, history_BTC)

    def convolve(self, inputs_BLC: Tensor, history_BTC: Tensor, layout: RowLayout) -> Pair:
        """Step 1: silu of the causal depthwise convolution within documents, and its last inputs (X = T - 1 + L)."""
        length, reach = inputs_BLC.shape[1], self.config.conv_kernel_size - 1
        taps_CT = self.conv_weight[:, 0]
        padded_BXC = torch.cat([history_BTC, inputs_BLC], dim=1)
        documents_BX = torch.cat([layout.previous_B1.expand(-1, reach), layout.documents_BL], dim=1)
        out_BLC = inputs_BLC * taps_CT[:, reach]
        for tap in range(reach):
            part_BLC = padded_BXC[:, tap : tap + length]
            if not layout.single:
                same_BL = documents_BX[:, tap : tap + length] == layout.documents_BL
                part_BLC = part_BLC * same_BL[..., None]
            out_BLC = out_BLC + part_BLC * taps_CT[:, tap]
        if layout.single:
            history_BTC = padded_BXC[:, length:]
        else:  # the last inputs of the row's last document, skipping padding; zeros if it has fewer
            last_BX = documents_BX == layout.current_BL[:, -1:]
            last_BT = last_BX.int().argsort(dim=1, stable=True)[:, length:, None]
            history_BTC = (padded_BXC * last_BX[..., None]).gather(1, last_BT.expand(-1, -1, padded_BXC.shape[-1]))
        return F.silu(out_BLC), history_BTC


class SCABlock(GradientCheckpointingLayer):
    """The residual SCA layer: x + SCA(norm(x))."""

    def __init__(self, config: NautileConfig, index: int) -> None:
        super().__init__()
        self.index = index
        self.norm = RMSNorm(config.d_model, config.sca_norm_epsilon)
        self.attn = SpectralAttention(config)

    def forward(
        self, x_BLD: Tensor, layout: RowLayout, angles: Pair, past_key_values: NautileCache | None = None
    ) -> Tensor:
        state = None if past_key_values is None else past_key_values.layers.get(self.index)
        mixed_BLD, state = self.attn(self.norm(x_BLD), layout, state)
        if past_key_values is not None:
            past_key_values.layers[self.index] = state
        return x_BLD + mixed_BLD


class GroupedQueryAttention(nn.Module):
    """Causal grouped-query attention within documents: several query heads share a key-value head."""

    def __init__(self, config: NautileConfig) -> None:
        super().__init__()
        self.config = config
        width, kv_width = config.d_model, config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, kv_width, bias=False)
        self.v_proj = nn.Linear(width, kv_width, bias=False)
        self.out_proj = nn.Linear(width, width, bias=False)

    def forward(
        self, x_BLD: Tensor, layout: RowLayout, angles: Pair, past: Pair | None, documents_BS: Tensor
    ) -> tuple[Tensor, Pair]:
        """[B, L, D] to [B, L, D], and all keys and values [B, G, S, H]: those in `past`, then the new ones."""
        config, length = self.config, x_BLD.shape[1]
        q, k, v = (
            project(x_BLD).unflatten(-1, (-1, config.head_dim)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, angles), rotate(k, angles)
        if config.qk_norm:
            q, k = rms_norm(q, None, config.norm_epsilon), rms_norm(k, None, config.norm_epsilon)
        if past is not None:
            k, v = torch.cat([past[0], k], dim=2), torch.cat([past[1], v], dim=2)
        mask_B1LS = None  # a single document needs only `is_causal`
        if not layout.single:
            columns_S = torch.arange(k.shape[2], device=k.device)
            causal_LS = columns_S[-length:, None] >= columns_S
            # Padding attends to padding: a softmax over no column at all would be NaN.
            mask_B1LS = (causal_LS & (layout.documents_BL[:, :, None] == documents_BS[:, None]))[:, None]
        mixed = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask_B1LS, is_causal=layout.single and length > 1, enable_gqa=True
        )
        return self.out_proj(mixed.transpose(1, 2).flatten(2)), (k, v)


class AttentionBlock(GradientCheckpointingLayer):
    """Residual attention, then a residual SwiGLU feed-forward whose gate is the second half of its inner columns."""

    def __init__(self, config: NautileConfig, index: int) -> None:
        super().__init__()
        self.index = index
        self.norm1 = RMSNorm(config.d_model, config.norm_epsilon)
        self.attn = GroupedQueryAttention(config)
        self.norm2 = RMSNorm(config.d_model, config.norm_epsilon)
        self.ff_in = nn.Linear(config.d_model, 2 * config.d_ff)
        self.ff_out = nn.Linear(config.d_ff, config.d_model)

    def forward(
        self, x_BLD: Tensor, layout: RowLayout, angles: Pair, past_key_values: NautileCache | None = None
    ) -> Tensor:
        past, documents_BS = None, layout.documents_BL
        if past_key_values is not None:
            past, documents_BS = past_key_values.layers.get(self.index), past_key_values.documents_BS
        mixed_BLD, keys_values = self.attn(self.norm1(x_BLD), layout, angles, past, documents_BS)
        if past_key_values is not None:
            past_key_values.layers[self.index] = keys_values
        x_BLD = x_BLD + mixed_BLD
        value, gate = self.ff_in(self.norm2(x_BLD)).chunk(2, dim=-1)
        return x_BLD + self.ff_out(value * F.silu(gate))


class NautilePreTrainedModel(PreTrainedModel):
    """Base class with what `transformers` must know of the model, and the initial weights."""

    config_class = NautileConfig
    base_model_prefix = "model"
    _input_embed_layer = "embedding"
    supports_gradient_checkpointing = True
    _no_split_modules = ["SCABlock", "AttentionBlock"]
    _skip_keys_device_placement = ["past_key_values", "cache"]
    _supports_sdpa = True
    _is_stateful = True  # the sums cannot be rolled back by some tokens, which assisted generation would need
    _keys_to_ignore_on_load_unexpected = [r"^score\."]  # the head of a classifier, loaded as a model without it

    def never_predicted(self, size: int, device: torch.device) -> Tensor:
        """Which ids are never predicted, bool [ids]: padding, and those that no token has."""
        ids_V = torch.arange(size, device=device)
        never_V = ids_V == (-1 if self.config.pad_token_id is None else self.config.pad_token_id)
        for first, end in self.config.unused_ids:
            never_V = never_V | ((ids_V >= first) & (ids_V < end))
        return never_V

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initial values for training from scratch."""
        config = self.config
        repeats, pattern = config.num_layers // len(config.pattern), config.pattern
        depth = repeats * (len(pattern) + pattern.count("A"))  # residual branches: two of each attention layer
        if isinstance(module, nn.Linear):
            initialization.normal_(module.weight, std=module.in_features**-0.5)
            if module.bias is not None:
                initialization.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            initialization.normal_(module.weight, std=0.02)
        elif isinstance(module, SpectralAttention):
            heads, samples = config.seqcond_heads, config.num_thetas
            theta = getattr(module, module.theta_name)
            # Raw values whose `grid` is geometric: over the samples or, with a single one, over the heads.
            if samples == 1:
                start = torch.logspace(-2, 0.4624, heads)
                start = torch.logit((start - THETA_LOW) / (THETA_HIGH - THETA_LOW))[:, None, None]
            else:
                start = torch.log(torch.expm1(torch.logspace(-3, 0.4771, samples)) + 1e-4)
            start = ordered_grid(start) if config.grid == "free" else start
            initialization.copy_(theta, start.to(theta.device).expand_as(theta))
            slopes = torch.log(torch.expm1(torch.logspace(-3, -1, heads)))
            initialization.copy_(module.decay_slopes, slopes.to(theta.device))
            initialization.normal_(module.conv_weight, std=(2 / config.conv_kernel_size) ** 0.5)
            initialization.normal_(module.W_readout, std=module.W_readout.shape[1] ** -0.5)
            for scale in (module.score_scale, module.phase_scale):
                initialization.ones_(scale)
            initialization.zeros_(module.score_bias)
            free = config.integration == "free"
            initialization.constant_(getattr(module, module.w_int_name), 1 / samples if free else 0.0)
            initialization.normal_(module.out_proj.weight, std=(module.out_proj.in_features * depth) ** -0.5)
        elif isinstance(module, AttentionBlock):
            for last in (module.attn.out_proj, module.ff_out):
                initialization.normal_(last.weight, std=(last.in_features * depth) ** -0.5)
        elif isinstance(module, RMSNorm | GatedNorm):
            for scale in module.parameters():
                initialization.ones_(scale)


class NautileModel(NautilePreTrainedModel):
    """The model without its head: embedding and layers. There is no norm after the last layer."""

    def __init__(self, config: NautileConfig) -> None:
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocab_size, config.d_model, padding_idx=config.pad_token_id)
        letters = config.num_layers // len(config.pattern) * config.pattern
        self.blocks = nn.ModuleList(
            (SCABlock if letter == "S" else AttentionBlock)(config, index) for index, letter in enumerate(letters)
        )
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: NautileCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        cache: NautileCache | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """The hidden states [B, L, D] after the last layer.

        `attention_mask` [B, columns so far] is 0 at padding; `position_ids` [B, L] restart at 0 in packed documents.
        `cache`: its name from 5.24 on, before `past_key_values`. Raises ValueError for `output_attentions`, for a cache
        of another class, and for a mask of another shape; TypeError for an unknown argument.
        """
        refuse_unknown(kwargs)
        if output_attentions:
            raise ValueError("output_attentions: SDPA returns no attention weights, and SCA layers have none")
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("pass either input_ids or inputs_embeds")
        x_BLD = self.embedding(input_ids) if inputs_embeds is None else inputs_embeds
        cache = given_cache(cache, past_key_values)
        recomputes = self.blocks[0].gradient_checkpointing and self.training
        if cache is not None and recomputes:
            raise ValueError("gradient checkpointing runs the layers twice, and a cache would be filled twice")
        use_cache = self.config.use_cache if use_cache is None else use_cache
        if use_cache and cache is None and not recomputes:
            cache = NautileCache()
        layout = self.layout(x_BLD, attention_mask, position_ids, cache)
        if cache is not None:
            cache.advance(layout)
        angles = rope(layout.positions_BL, self.config.head_dim, self.config.rope_base)
        states = [x_BLD]
        for block in self.blocks:
            x_BLD = block(x_BLD, layout, angles, past_key_values=cache)
            states.append(x_BLD)
        hidden_states = tuple(states) if output_hidden_states else None
        return BaseModelOutputWithPast(last_hidden_state=x_BLD, hidden_states=hidden_states, **{CACHE: cache})

    def layout(
        self, x_BLD: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None, cache: NautileCache | None
    ) -> RowLayout:
        """The `RowLayout` of these columns, from the padding, the positions and the cache."""
        batch, length, _ = x_BLD.shape
        real_BL = torch.ones(batch, length, dtype=torch.bool, device=x_BLD.device)
        if attention_mask is not None:
            if attention_mask.ndim != 2 or attention_mask.shape[1] < length:
                raise ValueError(
                    f"attention_mask is {tuple(attention_mask.shape)}: it must be [batch, columns so far]. To separate "
                    "packed documents, pass position_ids that restart at 0"
                )
            real_BL = attention_mask[:, -length:].bool().expand(batch, -1)
        if cache is None or cache.documents_BS is None or cache.next_position_B is None:
            previous_B1 = torch.ones(batch, 1, dtype=torch.long, device=x_BLD.device)
            next_B1 = torch.zeros_like(previous_B1)
        else:
            previous_B1 = cache.documents_BS.max(dim=1, keepdim=True).values.clamp(min=1)
            next_B1 = cache.next_position_B[:, None]
        if position_ids is None:
            positions_BL = (next_B1 + real_BL.cumsum(1) - 1).clamp(min=0)
        else:
            positions_BL = position_ids[:, -length:].long().expand(batch, -1)
        # A token at position 0 begins the next document.
        numbers_BL = previous_B1 + (real_BL & (positions_BL == 0)).cumsum(1)
        documents_BL = torch.where(real_BL, numbers_BL, 0)
        fresh = cache is None or cache.documents_BS is None
        single = (
            fresh and length > 1 and bool((documents_BL == documents_BL[:, :1]).all() & (documents_BL[:, 0] > 0).all())
        )
        current_BL = torch.cat([previous_B1, documents_BL], dim=1).cummax(1).values[:, 1:]
        return RowLayout(positions_BL, documents_BL, current_BL, previous_B1, single)


class NautileForCausalLM(NautilePreTrainedModel, GenerationMixin):
    """The language model: `NautileModel` with a head tied to the embedding."""

    _tied_weights_keys = {"lm_head.weight": "model.embedding.weight"}

    def __init__(self, config: NautileConfig) -> None:
        super().__init__(config)
        self.model = NautileModel(config)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.post_init()

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        """False: the model creates its own cache."""
        return False

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """`GenerationMixin.generate`. Raises ValueError for a `cache_implementation`, which would not be used."""
        settings = kwargs.get("generation_config") or self.generation_config
        chosen = kwargs.get("cache_implementation") or settings.cache_implementation
        if chosen not in (None, "dynamic"):
            raise ValueError(
                f"cache_implementation={chosen!r}: this model has a cache of its own, the sums of SCA layers beside "
                "the keys and values of attention layers, and no other can hold them; leave the option out"
            )
        return super().generate(*args, **kwargs)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: NautileCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        logits_to_keep: int = 0,
        cache: NautileCache | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits [B, L, ids] of the last `logits_to_keep` columns (0: all), and with `labels` the loss.

        The other arguments and the errors are those of `NautileModel.forward`.
        """
        refuse_unknown(kwargs)
        outputs = self.model(
            input_ids, attention_mask, position_ids, given_cache(cache, past_key_values), inputs_embeds, use_cache,
            output_hidden_states, output_attentions, return_dict=True,
        )  # fmt: skip
        logits = self.lm_head(outputs.last_hidden_state[:, -logits_to_keep:])
        never_V = self.never_predicted(logits.shape[-1], logits.device)
        logits = logits.masked_fill(never_V, torch.finfo(logits.dtype).min)
        loss = None
        if labels is not None:
            # A target that is never predicted would make the loss infinite.
            labels = labels.masked_fill((labels >= 0) & never_V[labels.clamp(min=0)], IGNORED)
            if (labels[..., 1:] == IGNORED).all():
                loss = no_loss(outputs.last_hidden_state)
            else:
                loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, **{CACHE: getattr(outputs, CACHE)}
        )


class NautileClassifier(NautilePreTrainedModel):
    """What the classifiers have in common: the model, a linear head `score`, and the settings `config.classifier`.

    Logits are divided by the temperature, so that their softmax, or the sigmoid of each where a text may have several
    labels, is the calibrated probability; nothing is left out below the threshold, which is for the caller.
    """

    problem_types: tuple[str | None, ...] = (None, "single_label_classification")

    def __init__(self, config: NautileConfig) -> None:
        super().__init__(config)
        if config.problem_type not in self.problem_types:
            known = " or ".join(repr(name) for name in self.problem_types if name)
            raise ValueError(f"config.json: problem_type {config.problem_type!r}: this model knows {known}")
        self.num_labels = config.num_labels
        self.model = NautileModel(config)
        self.replies: list[list[int]] | None = config.classifier.get("replies")
        if self.replies is None:
            self.score = nn.Linear(config.d_model, config.num_labels)
        self.post_init()

    def calibrated(self, logits: Tensor) -> Tensor:
        """Logits, float32, divided by the temperature."""
        return logits.float() / (self.config.classifier.get("temperature") or 1.0)

    def real(self, input_ids: Tensor | None, inputs_embeds: Tensor | None, mask: Tensor | None) -> Tensor:
        """Which columns are text and not padding, bool [B, L]: by the mask, else by the ids."""
        if mask is not None:
            return mask.bool()
        if input_ids is not None and self.config.pad_token_id is not None:
            return input_ids != self.config.pad_token_id
        given = inputs_embeds if input_ids is None else input_ids
        if given is None:
            raise ValueError("pass either input_ids or inputs_embeds")
        return torch.ones(given.shape[:2], dtype=torch.bool, device=given.device)


class NautileForSequenceClassification(NautileClassifier):
    """A label for each text: by a head on the text's features, or by the likelihood of each label's text.

    Features are the hidden state of the last token or, with `pooling` "mean", the mean over all. With `replies` the
    logit of a label is the log-probability of its text after the prompt, less its `bias`.
    """

    problem_types = (*NautileClassifier.problem_types, "multi_label_classification")

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutput:
        """Logits [B, C], and with `labels` the loss. Errors are those of `NautileModel.forward`.

        `labels`: [B], or of 1 and 0 where a text may have several, [B, C]; -100: none.
        """
        total = kwargs.pop("num_items_in_batch", None)
        refuse_unknown(kwargs)
        real_BL = self.real(input_ids, inputs_embeds, attention_mask)
        outputs = self.model(
            input_ids, real_BL, position_ids, None, inputs_embeds, self.replies is not None, output_hidden_states,
            output_attentions, return_dict=True,
        )  # fmt: skip
        hidden_BLD = outputs.last_hidden_state
        if self.replies is None and self.config.classifier.get("pooling") == "mean":
            features_BD = hidden_BLD.float().masked_fill(~real_BL[..., None], 0.0).sum(1) / real_BL.sum(1)[:, None]
        else:
            columns_L = torch.arange(real_BL.shape[1], device=real_BL.device)
            last_B = torch.where(real_BL, columns_L, -1).max(1).values
            features_BD = hidden_BLD[torch.arange(len(last_B), device=last_B.device), last_B]
        if self.replies is None:
            logits = self.score(features_BD.to(self.score.weight.dtype))
        else:
            logits = self.likelihoods(self.replies, features_BD, getattr(outputs, CACHE))
        logits = self.calibrated(logits)
        loss = None
        if labels is not None and self.config.problem_type == "multi_label_classification":
            loss = labels_loss(logits, labels)
        elif labels is not None:
            loss = classification_loss(logits, labels, total)
        return SequenceClassifierOutput(loss=loss, logits=logits, hidden_states=outputs.hidden_states)

    def likelihoods(self, replies: list[list[int]], last_BD: Tensor, cache: NautileCache | None) -> Tensor:
        """log p(reply | prompt) in nats, less the bias, float32 [B, replies]. `last_BD`: states of the last tokens."""
        if cache is None:
            raise ValueError(
                "the likelihoods of labels need a cache, which gradient checkpointing cannot fill: turn it off"
            )
        batch, device = len(last_BD), last_BD.device
        first_BV = self.token_logprobs(last_BD)
        sums = []
        # One label at a time: its cache is as large as that of the prompts.
        for reply in replies:
            sum_B = first_BV[:, reply[0]]
            if len(reply) > 1:
                tokens_BT = torch.tensor(reply[:-1], device=device).expand(batch, -1)
                hidden_BTD = self.model(tokens_BT, past_key_values=cache.copy(), return_dict=True).last_hidden_state
                targets_BT1 = torch.tensor(reply[1:], device=device).expand(batch, -1)[..., None]
                sum_B = sum_B + self.token_logprobs(hidden_BTD).gather(-1, targets_BT1)[..., 0].sum(1)
            sums.append(sum_B)
        bias = self.config.classifier.get("bias") or [0.0] * len(replies)
        return torch.stack(sums, dim=1) - torch.tensor(bias, device=device)

    def token_logprobs(self, hidden: Tensor) -> Tensor:
        """log p of each next token, float32 [..., ids], of hidden states [..., D]."""
        logits = F.linear(hidden, self.model.embedding.weight).float()
        never_V = self.never_predicted(logits.shape[-1], logits.device)
        return logits.masked_fill(never_V, torch.finfo(logits.dtype).min).log_softmax(-1)


class NautileForTokenClassification(NautileClassifier):
    """A label for each token, by a head on its hidden state, which knows the text up to this token."""

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        **kwargs: Any,
    ) -> TokenClassifierOutput:
        """Logits [B, L, C], and with `labels` [B, L] (-100: none) the loss. Errors as of `NautileModel.forward`."""
        total = kwargs.pop("num_items_in_batch", None)
        refuse_unknown(kwargs)
        real_BL = self.real(input_ids, inputs_embeds, attention_mask)
        outputs = self.model(
            input_ids, real_BL, position_ids, None, inputs_embeds, False, output_hidden_states, output_attentions,
            return_dict=True,
        )  # fmt: skip
        logits = self.calibrated(self.score(outputs.last_hidden_state.to(self.score.weight.dtype)))
        loss = None if labels is None else classification_loss(logits, labels, total)
        return TokenClassifierOutput(loss=loss, logits=logits, hidden_states=outputs.hidden_states)
