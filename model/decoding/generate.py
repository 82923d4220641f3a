"""Batched sampling: prompts in, completions with log-probabilities out.

A batch is prefilled in parallel and then decoded in jitted loops that end as soon as every row has ended. The cache
grows between the loops (to 128 tokens, 256, 512, …), so that attention at token 10 does not pay for token 1,000; each
(rows, prompt length, cache size, sampling) compiles once per process.

A sample depends on its prompt, its seed and the parameters alone, not on its row, the other rows or the batch size.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from common.errors import ConfigError
from configs.model import ModelConfig
from model.decoding.buckets import length_buckets
from model.decoding.cache import Cache, DecodeWeights, decode_step, decode_weights, grow, prefill, share
from model.decoding.sampling import Sampling, draw, sample_keys, uniforms
from model.layers.common import Params
from model.loss import masked_logits
from model.nautile import shapes
from model.sharding import OnMesh, everywhere, split_rows

FIRST_GROWTH = 128  # tokens of a completion at which its cache first grows


@dataclass(frozen=True)
class Completion:
    """The continuation of a prompt: ids (ending with the stop id, if any) and log π(id) at temperature 1.

    log π is of the whole distribution, whatever top-k and top-p left out of the draw.
    truncated: `max_tokens` was reached before a stop id.
    forced: index in `ids` of a `think_end` that the thinking budget inserted, and the model did not choose.
    """

    ids: np.ndarray
    logprobs: np.ndarray
    truncated: bool
    forced: int | None = None


class _Loop(NamedTuple):
    """The state of the decode loop."""

    cache: Cache
    hidden_BD: Array  # of the last token
    uniforms_TB: Array  # the number in [0, 1) that decides each token
    index: Array  # of the next token
    done_B: Array
    thinking_B: Array  # whether `think_end` has not been written yet
    forced_B: Array  # index of a forced `think_end`, or -1
    counts_B: Array  # tokens before the end
    ids_BT: Array
    logprobs_BT: Array


class Generator:
    """Samples completions in batches of `rows`, for prompts of up to `prompt_length` tokens.

    On a `mesh` of several devices each decodes its share of the rows, whose number must divide among them. Raises
    ConfigError where prompt and completion together are longer than the model's context.
    """

    def __init__(
        self, config: ModelConfig, sampling: Sampling, rows: int, prompt_length: int, mesh: Mesh | None = None
    ) -> None:
        if rows < 1 or prompt_length < 1:
            raise ConfigError(f"generate: rows {rows} and prompt_length {prompt_length} must be 1 or more")
        if prompt_length + sampling.max_tokens > config.context:
            raise ConfigError(
                f"generate: prompt_length {prompt_length} + max_tokens {sampling.max_tokens} = "
                f"{prompt_length + sampling.max_tokens} is over the model's context of {config.context} tokens"
            )
        self.config, self.sampling, self.rows, self.prompt_length = config, sampling, rows, prompt_length
        self._mesh = mesh

    def _on_mesh(self, program: Any) -> Any:
        """A jitted function, with the mesh (if any) as its ambient mesh."""
        return program if self._mesh is None else OnMesh(self._mesh, program)

    def __call__(
        self, params: Params, prompts: Sequence[Sequence[int]], seeds: Sequence[tuple[int, ...]]
    ) -> list[Completion]:
        """One completion per prompt, in order. `seeds[i]` identifies sample i; equal prompt and seed, equal sample."""
        self._check(prompts, seeds)
        if not prompts:
            return []
        weights = self._on_mesh(decode_weights)(params, self.config)
        keys = sample_keys(seeds)
        completions: dict[int, Completion] = {}
        # Sorted by length, so that a batch pads little; equal prompts are together, so that each is prefilled once.
        order = sorted(range(len(prompts)), key=lambda index: (len(prompts[index]), tuple(prompts[index]), index))
        for first in range(0, len(order), self.rows):
            members = order[first : first + self.rows]
            *_, loop = self._decode_batch(params, weights, [prompts[index] for index in members], keys[members])
            completions |= zip(members, _completions(loop, len(members)), strict=True)
        return [completions[index] for index in range(len(prompts))]

    def stream(
        self, params: Params, prompt: Sequence[int], seed: tuple[int, ...], every: int = 4
    ) -> Iterator[Completion]:
        """The completion of one prompt as it grows, every few tokens; the last is what a call would return.

        `truncated` is meaningful in the last one alone.
        """
        self._check([prompt], [seed])
        for loop in self._decode_batch(
            params, self._on_mesh(decode_weights)(params, self.config), [prompt], sample_keys([seed]), every
        ):
            yield _completions(loop, 1)[0]

    def programs(self) -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
        """The programs of a full batch with its largest cache: name, jitted function, and the shapes of its arguments.

        For estimates of memory: nothing is computed.
        """
        abstract, config, sampling = shapes(self.config), self.config, self.sampling
        rows = {name: jax.ShapeDtypeStruct((self.rows,), jnp.int32) for name in ("lengths", "source")}
        tokens = jax.ShapeDtypeStruct((self.rows, self.prompt_length), jnp.int32)
        capacity = self.prompt_length + sampling.max_tokens
        prompts = (abstract, tokens, rows["lengths"], rows["source"], config, capacity)
        yield "weights for decoding", decode_weights, (abstract, config)
        yield "prefill", _prefill, prompts
        hidden, cache = jax.eval_shape(partial(_prefill, config=config, capacity=capacity), *prompts[:4])
        keys = jax.ShapeDtypeStruct((self.rows, 2), jnp.uint32)
        idle = jax.ShapeDtypeStruct((self.rows,), bool)
        loop = jax.eval_shape(partial(_begin, sampling=sampling), hidden, cache, keys, idle)
        weights = jax.eval_shape(partial(decode_weights, config=config), abstract)
        yield "decode", _decode, (weights, loop, jax.ShapeDtypeStruct((), jnp.int32), config, sampling)

    def _check(self, prompts: Sequence[Sequence[int]], seeds: Sequence[tuple[int, ...]]) -> None:
        if len(prompts) != len(seeds):
            raise ConfigError(f"generate: {len(prompts)} prompts but {len(seeds)} seeds")
        for index, prompt in enumerate(prompts):
            if not 1 <= len(prompt) <= self.prompt_length:
                raise ConfigError(
                    f"generate: prompt {index} has {len(prompt)} tokens, and must have 1 to {self.prompt_length}"
                )
            if not 0 <= min(prompt) <= max(prompt) < self.config.vocabulary:
                raise ConfigError(
                    f"generate: prompt {index} has ids {min(prompt)} to {max(prompt)}, outside the vocabulary of "
                    f"{self.config.vocabulary}"
                )

    def _decode_batch(
        self,
        params: Params,
        weights: DecodeWeights,
        prompts: Sequence[Sequence[int]],
        keys: np.ndarray,
        every: int | None = None,
    ) -> Iterator[_Loop]:
        """Decode one batch to its end; yields the state every `every` tokens (None: whenever the cache is full).

        Rows without a prompt are done from the start. A yielded state is donated to the next loop: read it at once.
        """
        tokens_UP, lengths_U, source_B = self._distinct(prompts)
        keys_B2 = np.zeros((self.rows, 2), np.uint32)
        keys_B2[: len(prompts)] = keys
        # Completion lengths at which the cache is full.
        ends = length_buckets(self.sampling.max_tokens, FIRST_GROWTH)
        idle_B = np.arange(self.rows) >= len(prompts)
        capacity = self.prompt_length + ends[0]
        prompted = self._on_mesh(_prefill)(params, tokens_UP, lengths_U, source_B, self.config, capacity)
        loop = self._on_mesh(_begin)(*prompted, keys_B2, idle_B, self.sampling)
        reached = 0
        for end in ends:
            if end > ends[0]:
                loop = loop._replace(cache=self._on_mesh(grow)(loop.cache, self.prompt_length + end))
            while reached < end:
                reached = min(end, reached + (every or end))
                loop = self._on_mesh(_decode)(weights, loop, np.int32(reached), self.config, self.sampling)
                finished = bool(np.all(loop.done_B))
                yield loop
                if finished:
                    return

    def _distinct(self, prompts: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The distinct prompts, right-aligned; their lengths; and for every row the index of its prompt.

        Samples of one prompt share its prefill. The number of prompts is rounded up to a power of two, and the columns
        to a quarter, a half or the whole of `prompt_length`, so that few shapes are compiled.
        """
        distinct = {prompt: index for index, prompt in enumerate(dict.fromkeys(map(tuple, prompts)))}
        count = min(self.rows, 1 << (len(distinct) - 1).bit_length())
        longest = max(map(len, distinct))
        width = next(size for part in (4, 2, 1) if (size := self.prompt_length // part) >= longest)
        tokens_UP, lengths_U = np.zeros((count, width), np.int32), np.ones(count, np.int32)
        for prompt, index in distinct.items():
            tokens_UP[index, -len(prompt) :] = prompt
            lengths_U[index] = len(prompt)
        source_B = np.zeros(self.rows, np.int32)
        source_B[: len(prompts)] = [distinct[tuple(prompt)] for prompt in prompts]
        return tokens_UP, lengths_U, source_B


def _completions(loop: _Loop, count: int) -> list[Completion]:
    """The completions of the first `count` rows so far."""
    arrays = (loop.ids_BT, loop.logprobs_BT, loop.counts_B, loop.forced_B, loop.done_B)
    rows = zip(*(np.asarray(array)[:count] for array in arrays), strict=True)
    return [
        Completion(ids_T[:length].copy(), logprobs_T[:length].copy(), not done, None if forced < 0 else int(forced))
        for ids_T, logprobs_T, length, forced, done in rows
    ]


@partial(jax.jit, static_argnames=("config", "capacity"))
def _prefill(
    params: Params, tokens_UP: Array, lengths_U: Array, source_B: Array, config: ModelConfig, capacity: int
) -> tuple[Array, Cache]:
    """Prefill the distinct prompts, and copy to every row the state of its prompt, on the device that has the row."""
    hidden_UPD, cache = prefill(params, config, tokens_UP, lengths_U, capacity)
    shared = share(jax.tree.map(everywhere, cache), source_B)
    blocks, start_B = jax.tree.map(split_rows, (shared.blocks, shared.start_B))
    return split_rows(everywhere(hidden_UPD[:, -1])[source_B]), shared._replace(blocks=blocks, start_B=start_B)


@partial(jax.jit, static_argnames="sampling", donate_argnames="cache")
def _begin(hidden_BD: Array, cache: Cache, keys_B2: Array, idle_B: Array, sampling: Sampling) -> _Loop:
    """An empty completion for every row."""
    rows, length = hidden_BD.shape[0], sampling.max_tokens
    return _Loop(
        cache=cache,
        hidden_BD=hidden_BD,
        uniforms_TB=uniforms(keys_B2, length).T,
        index=jnp.zeros((), jnp.int32),
        done_B=split_rows(idle_B),
        thinking_B=split_rows(jnp.ones(rows, bool)),
        forced_B=split_rows(jnp.full(rows, -1, jnp.int32)),
        counts_B=split_rows(jnp.zeros(rows, jnp.int32)),
        ids_BT=split_rows(jnp.zeros((rows, length), jnp.int32)),
        logprobs_BT=split_rows(jnp.zeros((rows, length), jnp.float32)),
    )


@partial(jax.jit, static_argnames=("config", "sampling"), donate_argnames="loop")
def _decode(weights: DecodeWeights, loop: _Loop, end: Array, config: ModelConfig, sampling: Sampling) -> _Loop:
    """Tokens up to index `end`, or until every row is done; the loop's arrays are updated in place."""

    def unfinished(loop: _Loop) -> Array:
        return (loop.index < end) & ~jnp.all(loop.done_B)

    return jax.lax.while_loop(unfinished, lambda loop: _one_token(weights, loop, config, sampling), loop)


def _one_token(weights: DecodeWeights, loop: _Loop, config: ModelConfig, sampling: Sampling) -> _Loop:
    """Draw the next token of every row from its hidden state, record it, and run it through the model."""
    logits_BV = masked_logits(loop.hidden_BD, weights.embedding, config.vocabulary)
    ids_B = draw(logits_BV, loop.uniforms_TB[loop.index], sampling)
    thinking_B, forced_B = loop.thinking_B, loop.forced_B
    if sampling.thinking_budget is not None:
        # A row that still thinks when its budget is spent gets `think_end` in place of the drawn token.
        force_B = thinking_B & (loop.index >= sampling.thinking_budget) & (ids_B != sampling.think_end)
        ids_B = jnp.where(force_B, sampling.think_end, ids_B)
        forced_B = jnp.where(force_B & ~loop.done_B, loop.index, forced_B)
        thinking_B = thinking_B & (ids_B != sampling.think_end)
    chosen_B = jnp.take_along_axis(logits_BV, ids_B[:, None], axis=1)[:, 0]
    logprobs_B = chosen_B - jax.nn.logsumexp(logits_BV, axis=-1)
    stop_B = (
        jnp.isin(ids_B, jnp.asarray(sampling.stop_ids, jnp.int32)) if sampling.stop_ids else jnp.zeros_like(loop.done_B)
    )
    hidden_BD, cache = decode_step(weights, config, ids_B, loop.cache)
    column = (0, loop.index)
    return loop._replace(
        cache=cache,
        hidden_BD=hidden_BD,
        index=loop.index + 1,
        done_B=loop.done_B | stop_B,
        thinking_B=thinking_B,
        forced_B=forced_B,
        counts_B=loop.counts_B + ~loop.done_B,
        ids_BT=jax.lax.dynamic_update_slice(loop.ids_BT, ids_B[:, None], column),
        logprobs_BT=jax.lax.dynamic_update_slice(loop.logprobs_BT, logprobs_B[:, None], column),
    )
