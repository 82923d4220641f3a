"""Continuous batching on the device: a fixed number of slots, each a completion of its own age, stepped together.

Three programs. `read_prompts` prefills a few prompts of one length bucket, `place` puts what came of them into free
slots, and `advance` writes some tokens in every slot; its shapes are the number of slots and the context alone, so it
compiles once. A slot's prompt begins at column 0, so what a row computes depends neither on when it joined nor on who
sits beside it.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from configs.model import ModelConfig
from model.decoding.cache import BlockCache, DecodeWeights, decode_ragged, prefill_all
from model.decoding.sampling import draw_each, likeliest, uniforms
from model.layers.common import Params
from model.layers.mixing.operator import empty_state
from model.layers.sca import SCAState, projected
from model.loss import masked_logits
from model.nautile import sca_names

MOST_TOPS = 20  # alternatives that may be asked for beside a token written, OpenAI's limit
SCORED_TOPS = 5  # and beside one of a prompt
SCORE_CHUNK = 64  # columns whose logits are held at once while a prompt is scored


class SlotSettings(NamedTuple):
    """What each sample asked for; a leading axis of rows or slots. `thinking_budget` below 0: none."""

    keys_B2: Array
    temperature_B: Array
    top_k_B: Array
    top_p_B: Array
    max_tokens_B: Array
    thinking_budget_B: Array
    tops_B: Array  # whether alternatives are wanted


class Slots(NamedTuple):
    """The state of all slots. `positions_B`: tokens read so far; `index_B`: tokens written so far."""

    blocks: tuple[BlockCache, ...]
    hidden_BD: Array
    positions_B: Array
    index_B: Array
    active_B: Array
    thinking_B: Array
    uniforms_BS: Array
    wishes: SlotSettings


class SlotOutput(NamedTuple):
    """What one call of `advance` wrote, T tokens at most: a token counts where `count_B` goes beyond its place."""

    count_B: Array
    active_B: Array
    ids_TB: Array
    logprobs_TB: Array
    top_ids_TBN: Array
    top_logprobs_TBN: Array


class PrefilledPrompts(NamedTuple):
    """Prompts read: their last hidden state and caches of a whole context, from column 0 on."""

    blocks: tuple[BlockCache, ...]
    hidden_BD: Array
    lengths_B: Array


class PrefillScores(NamedTuple):
    """log p of each prompt token but the first, right-aligned [B, P-1], and the likeliest in its place [B, P-1, N]."""

    logprobs: Array
    top_ids: Array
    top_logprobs: Array


@partial(jax.jit, static_argnames=("config", "count"))
def empty_slots(config: ModelConfig, count: int) -> Slots:
    """`count` free slots."""
    dtype = jnp.dtype(config.compute_dtype)
    samples, head_dim = config.spectral_samples, config.head_dim
    history = jnp.zeros((count, config.convolution - 1, projected(config)), dtype)
    states = tuple(
        SCAState(empty_state(count, config.memory_heads, head_dim, samples), history) for _ in sca_names(config)
    )
    kept = jnp.zeros((count, config.kv_heads, config.context, config.attention_head_dim), dtype)
    whole, real = jnp.zeros(count, jnp.int32), jnp.zeros(count, jnp.float32)
    wishes = SlotSettings(jnp.zeros((count, 2), jnp.uint32), real, whole, real + 1, whole, whole - 1, whole > 0)
    return Slots(
        tuple(BlockCache(states, kept, kept) for _ in range(config.blocks)),
        jnp.zeros((count, config.width), dtype),
        whole,
        whole,
        whole > 0,
        whole > 0,
        jnp.zeros((count, config.context)),
        wishes,
    )


@partial(jax.jit, static_argnames=("config", "scored"))
def read_prompts(
    params: Params, tokens_BP: Array, lengths_B: Array, config: ModelConfig, scored: bool
) -> tuple[PrefilledPrompts, PrefillScores | None]:
    """Prefill right-aligned prompts (`lengths_B` from 1); `scored`: with the log-probabilities of their tokens."""
    x_BPD, cache = prefill_all(params, config, tokens_BP, lengths_B, tokens_BP.shape[1])

    def to_the_left(held_BGPH: Array) -> Array:
        room = ((0, 0), (0, 0), (0, config.context), (0, 0))
        cut = partial(jax.lax.dynamic_slice_in_dim, slice_size=config.context, axis=1)
        return jax.vmap(cut)(jnp.pad(held_BGPH, room), cache.start_B)

    blocks = tuple(
        held._replace(keys_BGSH=to_the_left(held.keys_BGSH), values_BGSH=to_the_left(held.values_BGSH))
        for held in cache.blocks
    )
    prompted = PrefilledPrompts(blocks, x_BPD[:, -1], lengths_B)
    return prompted, _scores(params, config, x_BPD, tokens_BP) if scored else None


@partial(jax.jit, donate_argnames="slots")
def place(slots: Slots, prompted: PrefilledPrompts, source_R: Array, into_R: Array, wishes: SlotSettings) -> Slots:
    """Slot into_R[r] begins a completion of prompt source_R[r] as wishes[r] says; rows of a slot beyond the last go."""

    def put(held: Array, new: Array) -> Array:
        return held.at[into_R].set(new.astype(held.dtype), mode="drop")

    def taken(held: Array, read: Array) -> Array:
        return put(held, read[source_R])

    zeros_R = jnp.zeros_like(into_R)
    return Slots(
        jax.tree.map(taken, slots.blocks, prompted.blocks),
        taken(slots.hidden_BD, prompted.hidden_BD),
        taken(slots.positions_B, prompted.lengths_B),
        put(slots.index_B, zeros_R),
        put(slots.active_B, zeros_R == 0),
        put(slots.thinking_B, zeros_R == 0),
        put(slots.uniforms_BS, uniforms(wishes.keys_B2, slots.uniforms_BS.shape[1])),
        jax.tree.map(put, slots.wishes, wishes),
    )


@partial(jax.jit, static_argnames=("config", "stops", "think_end", "stride"), donate_argnames="slots")
def advance(
    weights: DecodeWeights,
    slots: Slots,
    kept_B: Array,
    config: ModelConfig,
    stops: tuple[int, ...],
    think_end: int,
    stride: int,
) -> tuple[Slots, SlotOutput]:
    """Up to `stride` tokens in every slot that is active and kept; a stop id is the last that a slot writes."""
    count, alternatives = slots.positions_B.shape[0], min(MOST_TOPS, config.vocabulary)
    slots = slots._replace(active_B=slots.active_B & kept_B)
    written = SlotOutput(
        jnp.zeros(count, jnp.int32),
        slots.active_B,
        jnp.zeros((stride, count), jnp.int32),
        jnp.zeros((stride, count)),
        jnp.zeros((stride, count, alternatives), jnp.int32),
        jnp.zeros((stride, count, alternatives)),
    )

    def body(carry: tuple[Array, Slots, SlotOutput]) -> tuple[Array, Slots, SlotOutput]:
        step, slots, written = carry
        logits_BV = masked_logits(slots.hidden_BD, weights.embedding, config.vocabulary)
        ids_B, thinking_B = _drawn(slots, logits_BV, think_end)
        total_B1 = jax.nn.logsumexp(logits_BV, axis=-1, keepdims=True)
        chosen_B = jnp.take_along_axis(logits_BV, ids_B[:, None], axis=1)[:, 0]
        values_BN, top_ids_BN = jax.lax.cond(
            jnp.any(slots.wishes.tops_B & slots.active_B),
            lambda: likeliest(logits_BV, alternatives),
            lambda: (jnp.zeros((count, alternatives)), jnp.zeros((count, alternatives), jnp.int32)),
        )
        hidden_BD, blocks = decode_ragged(weights, config, ids_B, slots.blocks, slots.positions_B)
        ended_B = jnp.isin(ids_B, jnp.asarray(stops, jnp.int32)) | (slots.index_B + 1 >= slots.wishes.max_tokens_B)
        moved_B = slots.active_B.astype(jnp.int32)
        after = slots._replace(
            blocks=blocks,
            hidden_BD=hidden_BD,
            positions_B=slots.positions_B + moved_B,
            index_B=slots.index_B + moved_B,
            active_B=slots.active_B & ~ended_B,
            thinking_B=thinking_B,
        )
        told = SlotOutput(
            written.count_B + moved_B,
            after.active_B,
            written.ids_TB.at[step].set(ids_B),
            written.logprobs_TB.at[step].set(chosen_B - total_B1[:, 0]),
            written.top_ids_TBN.at[step].set(top_ids_BN),
            written.top_logprobs_TBN.at[step].set(values_BN - total_B1),
        )
        return step + 1, after, told

    def unfinished(carry: tuple[Array, Slots, SlotOutput]) -> Array:
        return (carry[0] < stride) & jnp.any(carry[1].active_B)

    _, slots, written = jax.lax.while_loop(unfinished, body, (jnp.zeros((), jnp.int32), slots, written))
    return slots, written


def _drawn(slots: Slots, logits_BV: Array, think_end: int) -> tuple[Array, Array]:
    """The next id of every slot, and whether it is still thinking after it; a spent budget puts `think_end` in."""
    wishes = slots.wishes
    uniform_B = jnp.take_along_axis(slots.uniforms_BS, slots.index_B[:, None], axis=1)[:, 0]
    ids_B = draw_each(logits_BV, uniform_B, wishes.temperature_B, wishes.top_k_B, wishes.top_p_B)
    spent_B = (wishes.thinking_budget_B >= 0) & (slots.index_B >= wishes.thinking_budget_B)
    ids_B = jnp.where(slots.thinking_B & spent_B, think_end, ids_B)
    return ids_B, slots.thinking_B & (ids_B != think_end)


def _scores(params: Params, config: ModelConfig, x_BPD: Array, tokens_BP: Array) -> PrefillScores:
    """Each token's log-probability after those before it; columns before a prompt's second token mean nothing."""
    before, length = x_BPD.shape[0], x_BPD.shape[1] - 1
    missing = -length % SCORE_CHUNK
    hidden = jnp.pad(x_BPD[:, :-1], ((0, 0), (0, missing), (0, 0)))
    targets = jnp.pad(tokens_BP[:, 1:], ((0, 0), (0, missing)))

    def chunk(part: tuple[Array, Array]) -> PrefillScores:
        hidden_BCD, targets_BC = part
        logits_BCV = masked_logits(hidden_BCD, params["embedding"], config.vocabulary)
        total_BC = jax.nn.logsumexp(logits_BCV, axis=-1)
        chosen_BC = jnp.take_along_axis(logits_BCV, targets_BC[..., None], axis=-1)[..., 0]
        values_BCN, ids_BCN = likeliest(logits_BCV, min(SCORED_TOPS, config.vocabulary))
        return PrefillScores(chosen_BC - total_BC, ids_BCN, values_BCN - total_BC[..., None])

    def chunks(array: Array) -> Array:
        return jnp.swapaxes(array.reshape(before, -1, SCORE_CHUNK, *array.shape[2:]), 0, 1)

    def joined(array: Array) -> Array:
        array = jnp.swapaxes(array, 0, 1)
        return array.reshape(before, -1, *array.shape[3:])[:, :length]

    return jax.tree.map(joined, jax.lax.map(chunk, (chunks(hidden), chunks(targets))))
