"""A lane: a batch of slots that decode together, where a new sample replaces one that has ended.

`model.decoding.generate` drives lanes. A call of `advance` decodes tokens in every active slot until enough samples
have ended. Then new samples take their slots: the prefilled columns of their prompts are copied to just before the next
column, so that all slots keep writing to the same column. When no samples are waiting, a lane shrinks, because on CPU
an idle slot costs as much per token as an active one. The ring of columns grows and shrinks with the longest sample.

Letters, in addition to those of `model.decoding.cache`: B slots, U distinct prompts, P prompt columns, T tokens of a
call, N tokens of the longest completion.
"""

from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from nautile.configs.model import ModelConfig
from nautile.model.decoding.cache import (
    BlockCache,
    Cache,
    DecodeWeights,
    KeysValues,
    columns_of,
    decode_step,
    empty_block,
    length_buckets,
    map_columns,
    prefill,
    repack,
)
from nautile.model.decoding.sampling import Sampling, draw, uniforms
from nautile.model.layers.common import Params, compute_dtype
from nautile.model.layers.sca import SCAState
from nautile.model.loss import next_logits
from nautile.model.sharding import everywhere, split_rows

FIRST_GROWTH = 128  # tokens of a completion at which the ring of columns first grows
STRIDE = 64  # most tokens of one call, which ends earlier to refill slots
SMALLEST_LANE = 8  # slots below which a lane does not shrink
REFILL_SHARE = 8  # a lane stops to be refilled when one in this many of its slots has ended


class Prompts(NamedTuple):
    """Prefilled prompts, their columns right-aligned in P."""

    blocks: tuple[BlockCache, ...]
    hidden_UD: Array  # of the last token
    lengths_U: Array


class LaneState(NamedTuple):
    """The state of a lane on the device."""

    cache: Cache
    hidden_BD: Array  # of the last token
    uniforms_BN: Array  # the number in [0, 1) that decides each token of the sample
    index_B: Array  # tokens of the sample so far
    active_B: Array  # whether the slot has a sample to continue
    thinking_B: Array  # whether `think_end` has not been written yet
    forced_B: Array  # index of a forced `think_end`, or -1


class Written(NamedTuple):
    """The tokens of one call of `advance`: of slot b, the first `count_B[b]` of T."""

    ids_TB: Array
    logprobs_TB: Array
    count_B: Array
    active_B: Array
    forced_B: Array


@dataclass
class Sample:
    """A sample being decoded.

    place: index of its prompt in the caller's list. source: row of its prompt in the prefilled batch. key: random key.
    """

    place: int
    source: int
    prompt_length: int
    key: np.ndarray
    ids: list[np.ndarray] = field(default_factory=list)
    logprobs: list[np.ndarray] = field(default_factory=list)
    written: int = 0
    active: bool = True
    forced: int | None = None


class Lane:
    """`size` slots and the host's record of their samples.

    `on_mesh` wraps each program; the lane's sizes are multiples of `divisor`, the number of devices.
    """

    def __init__(
        self, config: ModelConfig, sampling: Sampling, size: int, prompt_length: int, on_mesh: Any, divisor: int
    ) -> None:
        self._config, self._sampling, self._on_mesh = config, sampling, on_mesh
        self._capacities = [prompt_length + end for end in length_buckets(sampling.max_tokens, FIRST_GROWTH)]
        self._sizes = [size]
        while (smaller := self._sizes[-1] // 4) >= SMALLEST_LANE and smaller % divisor == 0:
            self._sizes.append(smaller)
        self._slots: list[Sample | None] = [None] * size
        self._capacity = self._capacities[0]
        self._state: LaneState = on_mesh(empty_lane)(config, sampling, size, prompt_length, self._capacity)
        self._written: Written | None = None

    def active(self) -> int:
        """The number of incomplete samples."""
        return sum(sample is not None for sample in self._slots)

    def fill(self, prompts: Prompts, waiting: deque[Sample]) -> None:
        """Start waiting samples of these prompts in free slots."""
        free = [slot for slot, sample in enumerate(self._slots) if sample is None][: len(waiting)]
        size = len(self._slots)
        # All slots go into one program: `fresh_B` marks those that take a new sample.
        source_B, fresh_B, keys_B2 = np.zeros(size, np.int32), np.zeros(size, bool), np.zeros((size, 2), np.uint32)
        for slot in free:
            sample = self._slots[slot] = waiting.popleft()
            source_B[slot], fresh_B[slot], keys_B2[slot] = sample.source, True, sample.key
        self._state = self._on_mesh(fill)(self._state, prompts, source_B, fresh_B, keys_B2)

    def start(self, weights: DecodeWeights, waiting: int, tokens: int = STRIDE) -> None:
        """Start a call of `advance` for at most `tokens` tokens, which ends early if `waiting` samples can start."""
        active = self.active()
        # Choose the size of the lane and the capacity of its ring, and move the samples if either changes.
        size, floor = self._plan(active, waiting)
        # The ring must hold the longest sample, prompt included.
        longest = max(sample.prompt_length + sample.written for sample in self._slots if sample)
        # Room for some more tokens, so that the lane is not resized at every call.
        room = min(self._capacities[-1], longest + max(1, FIRST_GROWTH // 8))
        capacity = next(capacity for capacity in self._capacities if capacity >= room)
        if (size, capacity) != (len(self._slots), self._capacity):
            self._resize(size, capacity)
        steps = min(tokens, STRIDE, capacity - longest)
        self._state, self._written = self._on_mesh(advance)(
            weights, self._state, np.int32(steps), np.int32(floor), self._config, self._sampling
        )

    def collect(self) -> list[Sample]:
        """Wait for the call that `start` began; return the samples it continued. Complete ones are not `active`."""
        if self._written is None:
            return []
        # Here the host waits for the device.
        ids_TB, logprobs_TB, count_B, active_B, forced_B = map(np.asarray, self._written)
        self._written = None
        continued = []
        for slot, sample in enumerate(self._slots):
            if sample is None:
                continue
            sample.ids.append(ids_TB[: count_B[slot], slot].copy())
            sample.logprobs.append(logprobs_TB[: count_B[slot], slot].copy())
            sample.written += int(count_B[slot])
            sample.active = bool(active_B[slot])
            sample.forced = None if forced_B[slot] < 0 else int(forced_B[slot])
            continued.append(sample)
            if not sample.active:
                self._slots[slot] = None
        return continued

    def _plan(self, active: int, waiting: int) -> tuple[int, int]:
        """The lane's next size, and the number of active samples at which a call of `advance` ends early."""
        size = len(self._slots)
        # While samples wait, keep the size, and stop for a refill once some slots are free.
        if waiting:
            return size, max(0, active - max(1, size // REFILL_SHARE))
        # Else shrink as far as the active samples allow, and stop when the next smaller size is enough.
        size = min(other for other in self._sizes if other >= active)
        return size, max((other for other in self._sizes if other < size), default=0)

    def _resize(self, size: int, capacity: int) -> None:
        """Move the samples into a lane of another size and ring capacity, active samples first."""
        # Of a smaller lane the active slots come first; the rest repeats the last one, and is idle.
        source_slots = [slot for slot, sample in enumerate(self._slots) if sample][:size]
        if size == len(self._slots):
            source_slots = list(range(size))
        source_B = np.array(source_slots + [source_slots[-1]] * (size - len(source_slots)), np.int32)
        real_B = np.arange(size) < len(source_slots)
        self._state = self._on_mesh(resize_lane)(self._state, source_B, real_B, capacity)
        self._slots = [*(self._slots[slot] for slot in source_slots), *[None] * (size - len(source_slots))]
        self._capacity = capacity


@partial(jax.jit, static_argnames=("config", "columns"))
def prefill_prompts(params: Params, tokens_UP: Array, lengths_U: Array, config: ModelConfig, columns: int) -> Prompts:
    """Prefill right-aligned prompts, padded on the left to `columns`, the prompt columns of every lane."""
    hidden_UPD, cache = prefill(params, config, tokens_UP, lengths_U, tokens_UP.shape[1])
    missing = (columns - tokens_UP.shape[1], 0)

    def widen(cached: Array, axis: int) -> Array:
        return jnp.pad(cached, [missing if axis == other else (0, 0) for other in range(cached.ndim)])

    blocks = tuple(map_columns(block, widen) for block in cache.blocks)
    return jax.tree.map(everywhere, Prompts(blocks, hidden_UPD[:, -1], lengths_U))


@partial(jax.jit, static_argnames=("config", "sampling", "size", "columns", "capacity"))
def empty_lane(config: ModelConfig, sampling: Sampling, size: int, columns: int, capacity: int) -> LaneState:
    """A lane of `size` free slots whose next column is number `columns`."""
    blocks = (empty_block(config, size, capacity),) * config.blocks
    return _by_rows(
        LaneState(
            cache=Cache(blocks, jnp.full(size, columns, jnp.int32), jnp.asarray(columns, jnp.int32)),
            hidden_BD=jnp.zeros((size, config.width), compute_dtype(config)),
            uniforms_BN=jnp.zeros((size, sampling.max_tokens)),
            index_B=jnp.zeros(size, jnp.int32),
            active_B=jnp.zeros(size, bool),
            thinking_B=jnp.zeros(size, bool),
            forced_B=jnp.full(size, -1, jnp.int32),
        )
    )


@partial(jax.jit, donate_argnames="state")
def fill(state: LaneState, prompts: Prompts, source_B: Array, fresh_B: Array, keys_B2: Array) -> LaneState:
    """Start a sample of prompt `source_B[b]` with key `keys_B2[b]` in every slot b where `fresh_B[b]`."""
    cache, columns = state.cache, columns_of(prompts.blocks)
    # All slots write to one column, so a new prompt is put in the columns just before it.
    first = (cache.filled - columns) % cache.columns  # index in the ring of the prompts' first column
    within_S = (jnp.arange(cache.columns) - first) % cache.columns < columns

    def select_fresh(new: Array | int, cached: Array) -> Array:
        return jnp.where(fresh_B.reshape(-1, *[1] * (cached.ndim - 1)), new, cached)

    def into_ring(part: Array, cached: Array, axis: int) -> Array:
        # Rolled and selected as a whole: XLA on CPU would write single columns in a loop.
        free = [(0, cache.columns - columns if axis == other else 0) for other in range(part.ndim)]
        rolled = jnp.roll(jnp.pad(part, free), first, axis=axis)[source_B]
        inside = within_S.reshape(-1, *[1] * (part.ndim - 1 - axis))
        return jnp.where(inside, select_fresh(rolled, cached), cached)

    def put(cached: SCAState | KeysValues, prompt: SCAState | KeysValues) -> SCAState | KeysValues:
        if isinstance(cached, KeysValues) and isinstance(prompt, KeysValues):
            return KeysValues(
                into_ring(prompt.keys_BGHS, cached.keys_BGHS, 3), into_ring(prompt.values_BGSH, cached.values_BGSH, 2)
            )
        return jax.tree.map(lambda old, new: select_fresh(new[source_B], old), cached, prompt)

    blocks = tuple(
        tuple(put(*layers) for layers in zip(cached, prompt, strict=True))
        for cached, prompt in zip(cache.blocks, prompts.blocks, strict=True)
    )
    start_B = select_fresh(cache.filled - prompts.lengths_U[source_B], cache.start_B)
    return _by_rows(
        LaneState(
            cache=Cache(blocks, start_B, cache.filled),
            hidden_BD=select_fresh(prompts.hidden_UD[source_B], state.hidden_BD),
            uniforms_BN=select_fresh(uniforms(keys_B2, state.uniforms_BN.shape[1]), state.uniforms_BN),
            index_B=select_fresh(0, state.index_B),
            active_B=state.active_B | fresh_B,
            thinking_B=state.thinking_B | fresh_B,
            forced_B=select_fresh(-1, state.forced_B),
        )
    )


@partial(jax.jit, static_argnames="capacity")
def resize_lane(state: LaneState, source_B: Array, real_B: Array, capacity: int) -> LaneState:
    """A lane with a ring of `capacity` columns, whose slot b is slot `source_B[b]`, idle unless `real_B[b]`."""
    rows = LaneState(state.cache, *jax.tree.map(lambda part: part[source_B], state[1:]))
    return _by_rows(rows._replace(cache=repack(state.cache, source_B, capacity), active_B=rows.active_B & real_B))


@partial(jax.jit, static_argnames=("config", "sampling"), donate_argnames="state")
def advance(
    weights: DecodeWeights, state: LaneState, steps: Array, floor: Array, config: ModelConfig, sampling: Sampling
) -> tuple[LaneState, Written]:
    """Decode up to `steps` tokens in every active slot, until at most `floor` slots are active."""
    size = state.hidden_BD.shape[0]
    written = Written(
        ids_TB=jnp.zeros((STRIDE, size), jnp.int32),
        logprobs_TB=jnp.zeros((STRIDE, size)),
        count_B=jnp.zeros(size, jnp.int32),
        active_B=state.active_B,
        forced_B=state.forced_B,
    )

    def unfinished(carry: tuple[Array, LaneState, Written]) -> Array:
        return (carry[0] < steps) & (jnp.sum(carry[1].active_B) > floor)

    def body(carry: tuple[Array, LaneState, Written]) -> tuple[Array, LaneState, Written]:
        step, before, written = carry
        state, ids_B, logprobs_B = _one_token(weights, before, config, sampling)
        return (
            step + 1,
            state,
            Written(
                jax.lax.dynamic_update_slice(written.ids_TB, ids_B[None], (step, 0)),
                jax.lax.dynamic_update_slice(written.logprobs_TB, logprobs_B[None], (step, 0)),
                written.count_B + before.active_B,
                state.active_B,
                state.forced_B,
            ),
        )

    _, state, written = jax.lax.while_loop(unfinished, body, (jnp.zeros((), jnp.int32), state, written))
    return state, jax.tree.map(everywhere, written)  # replicated: every host makes its decisions from it


def _one_token(
    weights: DecodeWeights, state: LaneState, config: ModelConfig, sampling: Sampling
) -> tuple[LaneState, Array, Array]:
    """Sample the next token of every slot from its hidden state, and run it through the model."""
    logits_BV = next_logits(state.hidden_BD, weights.embedding, config)
    uniform_B = jnp.take_along_axis(state.uniforms_BN, state.index_B[:, None], axis=1, mode="clip")[:, 0]
    ids_B = draw(logits_BV, uniform_B, sampling)
    thinking_B, forced_B = state.thinking_B, state.forced_B
    if sampling.thinking_budget is not None:
        assert sampling.think_end is not None  # `Sampling` requires it with a budget
        # A sample that still thinks when its budget is spent gets `think_end` instead of the sampled token.
        force_B = thinking_B & (state.index_B >= sampling.thinking_budget) & (ids_B != sampling.think_end)
        ids_B = jnp.where(force_B, sampling.think_end, ids_B)
        forced_B = jnp.where(force_B & state.active_B, state.index_B, forced_B)
        thinking_B = thinking_B & (ids_B != sampling.think_end)
    chosen_B = jnp.take_along_axis(logits_BV, ids_B[:, None], axis=1)[:, 0]
    temperature = sampling.temperature or 1.0
    # Log-probability of the full distribution, before top-k and top-p.
    logprobs_B = chosen_B / temperature - jax.nn.logsumexp(logits_BV / temperature, axis=-1)
    ended_B = state.index_B + 1 >= sampling.max_tokens
    if sampling.stop_ids:
        ended_B |= jnp.isin(ids_B, jnp.asarray(sampling.stop_ids, jnp.int32))
    hidden_BD, cache = decode_step(weights, config, ids_B, state.cache)
    after = state._replace(
        cache=cache,
        hidden_BD=hidden_BD,
        index_B=state.index_B + state.active_B,
        active_B=state.active_B & ~ended_B,
        thinking_B=thinking_B,
        forced_B=forced_B,
    )
    return after, ids_B, logprobs_B


def _by_rows(state: LaneState) -> LaneState:
    """Constrain the slots of a lane to be split over the devices."""
    return jax.tree.map(lambda part: split_rows(part) if part.ndim else part, state)
