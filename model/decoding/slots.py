"""Programs of continuous batching: a fixed number of slots, decoded together, each at its own position.

There are three: `prefill_prompts` prefills a few prompts of one length bucket, `fill_slots` copies the result into free
slots, and `advance` decodes some tokens in every slot. The shapes of `advance` depend only on the number of slots and
the context, so it compiles once. A slot's prompt starts at column 0, so a sample depends neither on when it joins nor
on the other slots.

The engine decides which request is in which slot; a runtime's `SlotPrograms` hold the slots' state. All runtimes sample
with `draw_tokens`, so equal logits give equal samples.

Letters: B slots (or rows of prompts), R rows to fill, P prompt columns, S positions of the context, T tokens of a
stride, N alternatives, and those of `model.decoding.cache`.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from nautile.configs.model import ModelConfig
from nautile.model.decoding.cache import (
    BlockCache,
    DecodeWeights,
    decode_ragged,
    decode_weights,
    empty_block,
    length_buckets,
    map_columns,
    prefill,
)
from nautile.model.decoding.constrained import Constraint, ReplyMask
from nautile.model.decoding.sampling import draw_each, likeliest, only_allowed, sample_keys, uniforms
from nautile.model.layers.common import Params, compute_dtype
from nautile.model.loss import chunks, join_chunks, next_logits

FinishReason = Literal["stop", "length"]


class QueueFull(RuntimeError):
    """The queue is full; retry after about `retry_after` seconds."""

    def __init__(self, waiting: int, retry_after: int) -> None:
        super().__init__(f"{waiting} requests are waiting, and the queue holds no more; try again in {retry_after} s")
        self.retry_after = retry_after


class EngineStopped(RuntimeError):
    """The engine accepts no more requests: it is shutting down, or it has failed."""


@dataclass(frozen=True)
class DecodeRequest:
    """A request for one sample, or with `max_tokens` 0 for the scores of a prompt.

    seed: identifies the sample, as in `model.decoding.generate`.
    score_prompt: also return the log-probabilities of the prompt's tokens.
    alternatives: number of likeliest tokens to return at each position.
    constraint: grammar of the answer; log-probabilities are then those under its masks.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    seed: tuple[int, ...] = (0,)
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    thinking_budget: int | None = None
    score_prompt: bool = False
    alternatives: int = 0
    constraint: Constraint | None = None


@dataclass(frozen=True)
class PromptScores:
    """log p of each prompt token after the first, and the likeliest alternatives (id, log p) at its position."""

    logprobs: list[float]
    alternatives: list[list[tuple[int, float]]]


@dataclass(frozen=True)
class Chunk:
    """The next tokens of a sample, ending with the stop id if there is one; `finish` is set on the last chunk."""

    ids: list[int]
    logprobs: list[float]
    alternatives: list[list[tuple[int, float]]]
    finish: FinishReason | None


@dataclass(frozen=True)
class RequestFailed:
    """The engine failed or was stopped before the sample was complete, or the sample's constraint failed."""

    message: str


EngineEvent = PromptScores | Chunk | RequestFailed


@dataclass(eq=False)
class Handle:
    """A request in the queue or in a slot."""

    request: DecodeRequest
    cancelled: bool = False
    mask: ReplyMask | None = None  # of a request with a constraint, once it is in a slot
    submitted_at: float = field(default_factory=time.monotonic)


MAX_ALTERNATIVES = 20  # per generated token, as in OpenAI's API
MAX_PROMPT_ALTERNATIVES = 5  # per scored prompt token
SCORE_CHUNK = 64  # columns whose logits are in memory at a time while a prompt is scored
_LARGEST = np.iinfo(np.int32).max  # a client may send any integer; this exceeds every number of tokens


class SlotSettings(NamedTuple):
    """Sampling settings of each row or slot. `thinking_budget_B` below 0: no budget."""

    keys_B2: Array
    temperature_B: Array
    top_k_B: Array
    top_p_B: Array
    max_tokens_B: Array
    thinking_budget_B: Array
    alternatives_B: Array  # whether to return alternatives


class Slots(NamedTuple):
    """The state of all slots."""

    blocks: tuple[BlockCache, ...]
    hidden_BD: Array  # of the last token
    positions_B: Array  # tokens of prompt and sample so far
    index_B: Array  # tokens of the sample so far
    active_B: Array  # whether the slot has a sample to continue
    thinking_B: Array  # whether `think_end` has not been written yet
    uniforms_BS: Array  # the number in [0, 1) that decides each token of the sample
    settings: SlotSettings


class SlotOutput(NamedTuple):
    """The tokens of one call of `advance`: of slot b, the first `count_B[b]` of T."""

    count_B: Array
    active_B: Array  # whether the sample continues
    ids_TB: Array
    logprobs_TB: Array
    top_ids_TBN: Array
    top_logprobs_TBN: Array


class DrawnTokens(NamedTuple):
    """The next token of every slot and its log p, and the N likeliest tokens and theirs."""

    ids_B: Array
    logprobs_B: Array
    top_ids_BN: Array
    top_logprobs_BN: Array


class PrefilledPrompts(NamedTuple):
    """The last hidden states of prompts, and their caches with columns for the whole context, starting at column 0."""

    blocks: tuple[BlockCache, ...]
    hidden_BD: Array
    lengths_B: Array


class PrefillScores(NamedTuple):
    """log p of each prompt token after the first, right-aligned [B, P-1], and the likeliest tokens [B, P-1, N]."""

    logprobs: Array | np.ndarray
    top_ids: Array | np.ndarray
    top_logprobs: Array | np.ndarray


def slot_settings(requests: Sequence[DecodeRequest], unused: int) -> SlotSettings:
    """Sampling settings of the requests, padded with `unused` rows that have no slot."""
    rows = [*requests, *[DecodeRequest((0,), 1)] * unused]
    # Integers only in a compiled program: -1 stands for no budget.
    budgets = [-1 if request.thinking_budget is None else min(request.thinking_budget, _LARGEST) for request in rows]
    # The compiled programs take these arrays of the host as theirs.
    return SlotSettings._make(
        (
            sample_keys([request.seed for request in rows]),
            np.array([request.temperature for request in rows], np.float32),
            np.array([min(request.top_k, _LARGEST) for request in rows], np.int32),
            np.array([request.top_p for request in rows], np.float32),
            np.array([request.max_tokens for request in rows], np.int32),
            np.array(budgets, np.int32),
            np.array([request.alternatives > 0 for request in rows]),
        )
    )


@partial(jax.jit, static_argnames=("config", "count"))
def empty_slots(config: ModelConfig, count: int) -> Slots:
    """`count` free slots."""
    return slots_without_caches(config, count)._replace(
        blocks=(empty_block(config, count, config.context),) * config.blocks,
        hidden_BD=jnp.zeros((count, config.width), compute_dtype(config)),
    )


@partial(jax.jit, static_argnames=("config", "count"))
def slots_without_caches(config: ModelConfig, count: int) -> Slots:
    """`count` free slots for a runtime that holds the caches itself; hidden states have width 0."""
    zeros_B, false_B = jnp.zeros(count, jnp.int32), jnp.zeros(count, bool)
    settings = SlotSettings(
        keys_B2=jnp.zeros((count, 2), jnp.uint32),
        temperature_B=jnp.zeros(count),
        top_k_B=zeros_B,
        top_p_B=jnp.ones(count),
        max_tokens_B=zeros_B,
        thinking_budget_B=zeros_B - 1,
        alternatives_B=false_B,
    )
    return Slots(
        blocks=(),
        hidden_BD=jnp.zeros((count, 0)),
        positions_B=zeros_B,
        index_B=zeros_B,
        active_B=false_B,
        thinking_B=false_B,
        uniforms_BS=jnp.zeros((count, config.context)),
        settings=settings,
    )


@partial(jax.jit, static_argnames=("config", "score"))
def prefill_prompts(
    params: Params, tokens_BP: Array, lengths_B: Array, config: ModelConfig, score: bool
) -> tuple[PrefilledPrompts, PrefillScores | None]:
    """Prefill right-aligned prompts (`lengths_B` >= 1); with `score` also return the scores of their tokens."""
    x_BPD, cache = prefill(params, config, tokens_BP, lengths_B, tokens_BP.shape[1])

    def left_aligned(cached: Array, axis: int) -> Array:
        """P columns at `axis` to S: pad each row on the right, and cut it at its prompt's first column."""
        padded = jnp.pad(cached, [(0, config.context if axis == other else 0) for other in range(cached.ndim)])
        cut = partial(jax.lax.dynamic_slice_in_dim, slice_size=config.context, axis=axis - 1)
        return jax.vmap(cut)(padded, cache.start_B)

    blocks = tuple(map_columns(block, left_aligned) for block in cache.blocks)
    prefilled = PrefilledPrompts(blocks, x_BPD[:, -1], lengths_B)
    return prefilled, _scores(params, config, x_BPD, tokens_BP) if score else None


@partial(jax.jit, donate_argnames="slots")
def fill_slots(
    slots: Slots, prefilled: PrefilledPrompts, source_R: Array, slots_R: Array, settings: SlotSettings
) -> Slots:
    """Start a sample of prompt `source_R[r]` with `settings[r]` in slot `slots_R[r]`; ignore unknown slots."""

    # A slot number out of range is dropped, so padding rows write nothing.
    def put(cached: Array, new_R: Array) -> Array:
        return cached.at[slots_R].set(new_R.astype(cached.dtype), mode="drop")

    def put_prompt(cached: Array, prompts: Array) -> Array:
        return put(cached, prompts[source_R])

    zeros_R, true_R = jnp.zeros_like(slots_R), jnp.ones_like(slots_R, dtype=bool)
    return Slots(
        blocks=jax.tree.map(put_prompt, slots.blocks, prefilled.blocks),
        hidden_BD=put_prompt(slots.hidden_BD, prefilled.hidden_BD),
        positions_B=put_prompt(slots.positions_B, prefilled.lengths_B),
        index_B=put(slots.index_B, zeros_R),
        active_B=put(slots.active_B, true_R),
        thinking_B=put(slots.thinking_B, true_R),
        uniforms_BS=put(slots.uniforms_BS, uniforms(settings.keys_B2, slots.uniforms_BS.shape[1])),
        settings=jax.tree.map(put, slots.settings, settings),
    )


@partial(jax.jit, static_argnames=("config", "stops", "think_end", "stride"), donate_argnames="slots")
def advance(
    weights: DecodeWeights,
    slots: Slots,
    occupied_B: Array,
    config: ModelConfig,
    stops: tuple[int, ...],
    think_end: int,
    stride: int,
    allowed_BW: Array | None = None,
) -> tuple[Slots, SlotOutput]:
    """Decode up to `stride` tokens in every active slot that is occupied; a slot stops after a stop id.

    allowed_BW: bit masks of the tokens that may be sampled (`only_allowed`), the same for all `stride` tokens.
    """
    count, alternatives = slots.positions_B.shape[0], min(MAX_ALTERNATIVES, config.vocabulary)
    slots = slots._replace(active_B=slots.active_B & occupied_B)
    output = SlotOutput(
        count_B=jnp.zeros(count, jnp.int32),
        active_B=slots.active_B,
        ids_TB=jnp.zeros((stride, count), jnp.int32),
        logprobs_TB=jnp.zeros((stride, count)),
        top_ids_TBN=jnp.zeros((stride, count, alternatives), jnp.int32),
        top_logprobs_TBN=jnp.zeros((stride, count, alternatives)),
    )

    def body(carry: tuple[Array, Slots, SlotOutput]) -> tuple[Array, Slots, SlotOutput]:
        step, slots, output = carry
        # Idle slots compute too, because the program has one shape; their tokens are not counted.
        logits_BV = next_logits(slots.hidden_BD, weights.embedding, config)
        if allowed_BW is not None:
            logits_BV = only_allowed(logits_BV, allowed_BW)
        tokens, after = draw_tokens(slots, logits_BV, config, stops, think_end)
        hidden_BD, blocks = decode_ragged(weights, config, tokens.ids_B, slots.blocks, slots.positions_B)
        after = after._replace(blocks=blocks, hidden_BD=hidden_BD)
        output = SlotOutput(
            count_B=output.count_B + slots.active_B,
            active_B=after.active_B,
            ids_TB=output.ids_TB.at[step].set(tokens.ids_B),
            logprobs_TB=output.logprobs_TB.at[step].set(tokens.logprobs_B),
            top_ids_TBN=output.top_ids_TBN.at[step].set(tokens.top_ids_BN),
            top_logprobs_TBN=output.top_logprobs_TBN.at[step].set(tokens.top_logprobs_BN),
        )
        return step + 1, after, output

    def unfinished(carry: tuple[Array, Slots, SlotOutput]) -> Array:
        return (carry[0] < stride) & jnp.any(carry[1].active_B)

    _, slots, output = jax.lax.while_loop(unfinished, body, (jnp.zeros((), jnp.int32), slots, output))
    return slots, output


def draw_tokens(
    slots: Slots, logits_BV: Array, config: ModelConfig, stops: tuple[int, ...], think_end: int
) -> tuple[DrawnTokens, Slots]:
    """Sample the next token of every slot; return it and the updated slots, except caches and hidden states.

    A slot stops after a stop id or after `max_tokens`.
    """
    count, alternatives = slots.positions_B.shape[0], min(MAX_ALTERNATIVES, config.vocabulary)
    ids_B, thinking_B = _next_ids(slots, logits_BV, think_end)
    # The log-probability, and the alternatives only if an active slot needs them, because selecting them is expensive.
    total_B1 = jax.nn.logsumexp(logits_BV, axis=-1, keepdims=True)
    chosen_B = jnp.take_along_axis(logits_BV, ids_B[:, None], axis=1)[:, 0]
    values_BN, top_ids_BN = jax.lax.cond(
        jnp.any(slots.settings.alternatives_B & slots.active_B),
        lambda: likeliest(logits_BV, alternatives),
        lambda: (jnp.zeros((count, alternatives)), jnp.zeros((count, alternatives), jnp.int32)),
    )
    ended_B = jnp.isin(ids_B, jnp.asarray(stops, jnp.int32)) | (slots.index_B + 1 >= slots.settings.max_tokens_B)
    # The counters of an idle slot do not advance.
    steps_B = slots.active_B.astype(jnp.int32)
    after = slots._replace(
        positions_B=slots.positions_B + steps_B,
        index_B=slots.index_B + steps_B,
        active_B=slots.active_B & ~ended_B,
        thinking_B=thinking_B,
    )
    return DrawnTokens(ids_B, chosen_B - total_B1[:, 0], top_ids_BN, values_BN - total_B1), after


def _next_ids(slots: Slots, logits_BV: Array, think_end: int) -> tuple[Array, Array]:
    """Sample the next id of every slot (`think_end` once the thinking budget is spent), and whether it still thinks."""
    settings = slots.settings
    uniform_B = jnp.take_along_axis(slots.uniforms_BS, slots.index_B[:, None], axis=1)[:, 0]
    ids_B = draw_each(logits_BV, uniform_B, settings.temperature_B, settings.top_k_B, settings.top_p_B)
    spent_B = (settings.thinking_budget_B >= 0) & (slots.index_B >= settings.thinking_budget_B)
    ids_B = jnp.where(slots.thinking_B & spent_B, think_end, ids_B)
    return ids_B, slots.thinking_B & (ids_B != think_end)


def _scores(params: Params, config: ModelConfig, x_BPD: Array, tokens_BP: Array) -> PrefillScores:
    """log p of each token given those before it; columns before a prompt's second token are meaningless."""

    def score(part: tuple[Array, Array]) -> PrefillScores:
        hidden_BCD, targets_BC = part
        logits_BCV = next_logits(hidden_BCD, params["embedding"], config)
        total_BC = jax.nn.logsumexp(logits_BCV, axis=-1)
        chosen_BC = jnp.take_along_axis(logits_BCV, targets_BC[..., None], axis=-1)[..., 0]
        values_BCN, ids_BCN = likeliest(logits_BCV, min(MAX_PROMPT_ALTERNATIVES, config.vocabulary))
        return PrefillScores(chosen_BC - total_BC, ids_BCN, values_BCN - total_BC[..., None])

    length = tokens_BP.shape[1] - 1
    scores = jax.lax.map(score, (chunks(x_BPD[:, :-1], SCORE_CHUNK), chunks(tokens_BP[:, 1:], SCORE_CHUNK)))
    return jax.tree.map(lambda array: join_chunks(array, length), scores)


class SlotPrograms(Protocol):
    """Protocol of a runtime's slots.

    count: number of slots. stops: ids that end a sample. lengths: column counts that prompts are padded to; empty if
    the runtime takes any length.
    """

    config: ModelConfig
    count: int
    stops: tuple[int, ...]

    @property
    def lengths(self) -> Sequence[int]: ...

    def start(self) -> None:
        """Allocate the slots. Called once, in the thread that calls the other methods."""
        ...

    def prepare(self, rows: Sequence[int]) -> Iterator[Any]:
        """Compile what prefills each number of `rows` prompts; after each program, yields what `fill` takes, empty."""
        ...

    def prefill(self, tokens_BP: np.ndarray, lengths_B: np.ndarray, score: bool) -> tuple[Any, PrefillScores | None]:
        """Prefill right-aligned prompts; with `score` also return the log-probabilities of their tokens."""
        ...

    def fill(self, prefilled: Any, source_R: np.ndarray, slots_R: np.ndarray, settings: SlotSettings) -> None:
        """Start a sample of prompt `source_R[r]` in slot `slots_R[r]`; ignore rows whose slot does not exist."""
        ...

    def advance(self, occupied_B: np.ndarray, stride: int, allowed_BW: np.ndarray | None = None) -> SlotOutput:
        """Decode up to `stride` tokens in every active slot that is occupied, among those allowed by the masks."""
        ...


class JaxSlots:
    """`SlotPrograms` with the JAX programs of `model.decoding.slots`."""

    def __init__(
        self,
        params: Params,
        config: ModelConfig,
        stops: tuple[int, ...],
        think_end: int,
        count: int,
        longest: int | None = None,
    ) -> None:
        """`longest`: the longest prompt in tokens; None: the context."""
        self.config, self.count, self.stops = config, count, stops
        buckets = length_buckets(config.context)
        self.lengths = buckets[: 1 + next(i for i, n in enumerate(buckets) if n >= (longest or config.context))]
        self._params, self._think_end = params, think_end
        self._compiled: dict[tuple[int, ...], Any] = {}  # by the shape of the prompts

    def start(self) -> None:
        self._weights = decode_weights(self._params, self.config, transposed=True)
        self._slots = empty_slots(self.config, self.count)

    def prepare(self, rows: Sequence[int]) -> Iterator[Any]:
        # Compiled and not run: prompts that fill the context take a large model minutes on a CPU.
        for length in self.lengths:
            for count in rows:
                tokens, lengths = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((count, length), (count,)))
                lowered = prefill_prompts.lower(self._params, tokens, lengths, self.config, False)
                self._compiled[count, length] = lowered.compile()
                yield jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), lowered.out_info[0])

    def prefill(self, tokens_BP: np.ndarray, lengths_B: np.ndarray, score: bool) -> tuple[Any, PrefillScores | None]:
        prompts = jnp.asarray(tokens_BP), jnp.asarray(lengths_B)
        if not score and (compiled := self._compiled.get(tokens_BP.shape)):
            return compiled(self._params, *prompts)
        return prefill_prompts(self._params, *prompts, self.config, score)

    def fill(self, prefilled: Any, source_R: np.ndarray, slots_R: np.ndarray, settings: SlotSettings) -> None:
        self._slots = fill_slots(self._slots, prefilled, source_R, slots_R, settings)

    def advance(self, occupied_B: np.ndarray, stride: int, allowed_BW: np.ndarray | None = None) -> SlotOutput:
        self._slots, output = advance(
            self._weights, self._slots, occupied_B, self.config, self.stops, self._think_end, stride, allowed_BW
        )
        return output
