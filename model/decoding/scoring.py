"""Log-probabilities of continuations of texts, and the texts' features, in batches of few shapes.

`continuation_logprobs` runs each text whole, several in a row; `SharedPrefixScorer` computes common prefixes once. Its
texts form a radix tree, whose nodes are run from the root down, in batches of nodes at one depth. Each row continues
the state of its parent. An SCA layer's state has a fixed size and is copied to the children; keys and values stay in
the batch that computed them, and a program collects those of a row's ancestors for one block at a time. The first
tokens of all continuations of a context are scored from its last hidden state; only later tokens are run for each.

The tree is traversed depth first, batch by batch, so at each depth the states of at most `rows` nodes are in memory. A
run is padded on the right to its length bucket, and a batch to one row or `rows`; each combination compiles once per
process.

Letters, in addition to those of `model.nautile`: U rows of an earlier batch, A columns of all ancestors, C
continuations of a context.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby, pairwise
from operator import itemgetter
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from nautile.common.errors import ConfigError
from nautile.configs.model import ModelConfig
from nautile.data.tokens.shards import FirstFit
from nautile.model.decoding.cache import KeysValues, cast_matrices, empty_block, length_buckets
from nautile.model.layers.attention import attention
from nautile.model.layers.common import Params, compute_dtype
from nautile.model.layers.sca import sca
from nautile.model.loss import next_logits, token_logprobs
from nautile.model.nautile import embed, forward

PACKED_LENGTH = 256  # tokens of a row that short texts share: little of it stays empty, and attention stays cheap
CPU_COLUMNS = 1024  # of a batch on a CPU: with more, a block's values leave its cache (2.1 times the time at 64,000)
SCORED_SHARE = 8  # logits are computed of 1 / SCORED_SHARE of a batch's columns at a time


def continuation_logprobs(
    params: Params, config: ModelConfig, sequences: Sequence[tuple[Sequence[int], int]], rows: int
) -> np.ndarray:
    """Σ log p(ids[i] | ids[:i]) over i ≥ first, in nats, for each of `sequences` = (ids, first); float64 [N], in order.

    At most `rows` rows are run at a time. Short texts share a row, as documents do in training, so the last digits of a
    sum depend on the other texts of the call. Raises `ConfigError` for a sequence over the model's context, or one
    whose `first` is not among 1 … len(ids).
    """
    for index, (ids, first) in enumerate(sequences):
        refuse_unscorable(f"sequence {index}", len(ids), first, config)
    sums_N = np.zeros(len(sequences))
    for batch in _packed_batches(sequences, rows, config):
        hidden_BLD = _forward(params, config, batch.tokens_BL, batch.segments_BL, batch.positions_BL)
        size = -(-batch.tokens_BL.size // SCORED_SHARE)
        pieces = [slice(start, start + size) for start in range(0, len(batch.sequence_S), size)]
        # All programs are started before the first result is waited for.
        logprobs = [
            _chosen_logprobs(params, config, hidden_BLD, *(_filled(part[piece], size) for part in batch.scored))
            for piece in pieces
        ]
        for piece, logprobs_C in zip(pieces, logprobs, strict=True):
            of_sequence = batch.sequence_S[piece]
            np.add.at(sums_N, of_sequence, np.asarray(logprobs_C, np.float64)[: len(of_sequence)])
    return sums_N


class _PackedBatch(NamedTuple):
    """Rows of texts, and what is scored in them: S tokens, each predicted from the column before it."""

    tokens_BL: np.ndarray
    segments_BL: np.ndarray  # the number of the text in its row, from 1; 0: padding
    positions_BL: np.ndarray
    scored: tuple[np.ndarray, np.ndarray]  # columns of the flattened rows [S], and the tokens after them [S]
    sequence_S: np.ndarray  # index of the sequence that each scored token belongs to


def _packed_batches(
    sequences: Sequence[tuple[Sequence[int], int]], rows: int, config: ModelConfig
) -> Iterator[_PackedBatch]:
    """Texts of up to `PACKED_LENGTH` tokens share rows of one length; longer ones share rows of their own bucket."""
    buckets = length_buckets(config.context)
    shared = _bucket(buckets, min(PACKED_LENGTH, config.context))
    members: dict[int, list[int]] = {}
    for index in sorted(range(len(sequences)), key=lambda i: -len(sequences[i][0])):
        members.setdefault(max(shared, _bucket(buckets, len(sequences[index][0]))), []).append(index)
    for length, group in members.items():
        lengths = [len(sequences[index][0]) for index in group]
        # A few texts need no long rows: one alone is as wide as its bucket.
        width = _bucket(buckets, max(lengths[0], min(length, -(-sum(lengths) // rows))))
        size = _rows_at_once(rows, width)
        packer, placed = FirstFit(width), []
        for index in group:
            batch, row = divmod(packer.place(len(sequences[index][0])), size)
            placed.append((batch, row, index))
        placed.sort(key=itemgetter(0))
        for _, members_of_batch in groupby(placed, itemgetter(0)):
            yield _packed([(row, *sequences[index], index) for _, row, index in members_of_batch], size, width)


def _rows_at_once(rows: int, width: int) -> int:
    """The rows of a batch of `width` columns: `rows`, and on a CPU no more than stay in its cache."""
    return rows if jax.default_backend() != "cpu" else min(rows, max(1, CPU_COLUMNS // width))


def _packed(texts: Sequence[tuple[int, Sequence[int], int, int]], rows: int, width: int) -> _PackedBatch:
    """The arrays of a batch of texts = (row, ids, first, index)."""
    tokens_BL, segments_BL, positions_BL = np.zeros((3, rows, width), np.int32)
    filled_B = [0] * rows
    columns, targets, sequence = [], [], []
    for row, ids, first, index in texts:
        start, end = filled_B[row], filled_B[row] + len(ids)
        tokens_BL[row, start:end] = ids
        segments_BL[row, start:end] = segments_BL[row, start - 1] + 1 if start else 1
        positions_BL[row, start:end] = np.arange(len(ids))
        columns.append(np.arange(row * width + start + first - 1, row * width + end - 1))
        targets.append(ids[first:])
        sequence.append(np.full(len(ids) - first, index))
        filled_B[row] = end
    scored = np.concatenate(columns), np.concatenate(targets).astype(np.int32)
    return _PackedBatch(tokens_BL, segments_BL, positions_BL, scored, np.concatenate(sequence))


def _filled(values: np.ndarray, size: int) -> np.ndarray:
    """int32 [size]: the values, then zeros, so that every call has one shape."""
    return np.pad(values, (0, size - len(values))).astype(np.int32)


_forward = jax.jit(forward, static_argnames="config")


@partial(jax.jit, static_argnames="config")
def _chosen_logprobs(
    params: Params, config: ModelConfig, hidden_BLD: Array, columns_C: Array, targets_C: Array
) -> Array:
    """log p(target) [C] after columns of the flattened rows."""
    hidden_CD = hidden_BLD.reshape(-1, hidden_BLD.shape[-1])[columns_C]
    logprobs_BC, _ = token_logprobs(params, config, hidden_CD[None], targets_C[None])
    return logprobs_BC[0]


def _bucket_batches(
    texts: Sequence[Sequence[int]], rows: int, config: ModelConfig
) -> Iterator[tuple[list[int], np.ndarray, np.ndarray]]:
    """Texts of one length bucket share a compiled shape: indices of at most `rows` texts, their tokens and lengths.

    The tokens [B, L] are padded on the right, and a last batch with empty rows of length 1.
    """
    buckets = length_buckets(config.context)
    members: dict[int, list[int]] = {length: [] for length in buckets}
    for index, ids in enumerate(texts):
        members[_bucket(buckets, len(ids))].append(index)
    for length, bucket in members.items():
        size = _rows_at_once(rows, length)
        for start in range(0, len(bucket), size):
            batch = bucket[start : start + size]
            tokens_BL, lengths_B = np.zeros((size, length), np.int32), np.ones(size, np.int32)
            for row, index in enumerate(batch):
                tokens_BL[row, : len(texts[index])], lengths_B[row] = texts[index], len(texts[index])
            yield batch, tokens_BL, lengths_B


def refuse_unscorable(name: str, length: int, first: int, config: ModelConfig) -> None:
    """Raise `ConfigError` for a sequence over the context, or one with nothing before its first scored token."""
    if not 1 <= first <= length <= config.context:
        raise ConfigError(
            f"score: {name} of {length} tokens, scored from {first}, is empty or over the model's context of "
            f"{config.context} tokens"
        )


MINIMUM_RUN = 8  # tokens; with fewer, storing and copying the state costs more than running them again
MAXIMUM_DEPTH = 4  # nodes on the path from the root to a leaf, whose states are in memory at the same time


@dataclass
class PrefixNode:
    """A run of tokens that follows the parent's. members: indices of the sequences that end with it."""

    tokens: Sequence[int]
    members: list[int]
    children: list["PrefixNode"] = field(default_factory=list)


def prefix_tree(sequences: Sequence[Sequence[int]]) -> list[PrefixNode]:
    """Build the radix tree of token sequences and return the children of its root.

    A common run of only a few tokens becomes no node: the sequences that share it repeat it. Every sequence is a member
    of one node, whose path spells it; equal sequences are members of the same node.
    """
    places: dict[tuple[int, ...], list[int]] = {}
    for index, sequence in enumerate(sequences):
        places.setdefault(tuple(sequence), []).append(index)
    distinct = sorted(places)
    # The number of leading tokens that each sequence shares with the one before it.
    shared = np.array([0, *map(_common_length, distinct[:-1], distinct[1:])])
    roots: list[PrefixNode] = []
    # The sequences [first, end) share `agreed` tokens, the first `start` of which are in nodes already.
    ranges = [(0, len(distinct), 0, 0, 1, roots)] if distinct else []
    while ranges:
        first, end, start, agreed, depth, siblings = ranges.pop()
        cuts = [first, *(np.flatnonzero(shared[first + 1 : end] <= agreed) + first + 1).tolist(), end]
        for begin, after in pairwise(cuts):
            sequence = distinct[begin]
            common = len(sequence) if after == begin + 1 else int(shared[begin + 1 : after].min())
            ends = len(sequence) == common  # the first of a range is its shortest
            below = begin + ends
            is_inner = below < after and common - start >= MINIMUM_RUN and depth < MAXIMUM_DEPTH
            node = PrefixNode(sequence[start:common], places[sequence] if ends else [])
            if ends or is_inner:
                siblings.append(node)
            if is_inner:
                ranges.append((below, after, common, common, depth + 1, node.children))
            elif below < after:
                ranges.append((below, after, start, common, depth, siblings))
    return roots


def _common_length(before: tuple[int, ...], after: tuple[int, ...]) -> int:
    """The length of the longest common prefix."""
    length = min(len(before), len(after))
    return next((place for place in range(length) if before[place] != after[place]), length)


SHORTEST_RUN = 4  # smallest bucket, of the tokens of a run and of the distinct first tokens of a context

Group = tuple[Sequence[int], Sequence[Sequence[int]]]
Item = TypeVar("Item")


class PrefixBatch(NamedTuple):
    """The states after a batch of runs, and the runs' own keys and values.

    layers: in the order of the pattern, `SCAState` [blocks, U, ...] or keys and values [blocks, U, T, kv heads, H].
    """

    layers: tuple[Any, ...]
    segments_UT: Array  # 1: token, 0: padding
    parent_U: Array  # row in the previous batch of the path that each row continues
    length_U: Array  # tokens since the root
    hidden_UD: Array  # of the last token


class _Continuation(NamedTuple):
    """A continuation to score: its group and its index there, the row of its context, its ids."""

    group: int
    place: int
    row: int
    ids: Sequence[int]


class SharedPrefixScorer:
    """Scores continuations, `rows` at a time. The state after the last `beginning` is cached."""

    def __init__(self, params: Params, config: ModelConfig, rows: int) -> None:
        self._params, self._config = cast_matrices(params, config), config
        self._sizes = sorted({1, rows})
        self._lengths = length_buckets(config.context, SHORTEST_RUN)
        self._first_counts = length_buckets(config.vocabulary, SHORTEST_RUN)
        self._beginning: tuple[int, ...] | None = None
        self._path: tuple[PrefixBatch, ...] = ()

    def logprobs(self, beginning: Sequence[int], groups: Sequence[Group]) -> list[np.ndarray]:
        """Σ log p(continuation | beginning + context) in nats for each group = (context, continuations).

        Returns a float64 array [C] per group, in order. Common prefixes of the contexts are computed once. Raises
        `ConfigError` for a text over the model's context, or a continuation with nothing before it.
        """
        for number, (context, continuations) in enumerate(groups):
            before = len(beginning) + len(context)
            for place, ids in enumerate(continuations):
                name = f"continuation {place} of group {number}"
                refuse_unscorable(name, before + len(ids), before, self._config)
        sums = [np.zeros(len(continuations)) for _, continuations in groups]
        # Kept between calls: the questions of a benchmark share their examples.
        if self._beginning != tuple(beginning):
            self._beginning, path = tuple(beginning), (_root(self._config),)
            self._path = (*path, self._run(path, [(PrefixNode(beginning, []), 0)])) if beginning else path
        tree = prefix_tree([context for context, _ in groups])
        self._descend(self._path, [(node, 0) for node in tree], groups, sums)
        return sums

    def _descend(
        self,
        path: tuple[PrefixBatch, ...],
        nodes: list[tuple[PrefixNode, int]],
        groups: Sequence[Group],
        sums: list[np.ndarray],
    ) -> None:
        """Run nodes, each after its row in the last batch of `path`, and add the scores of their subtrees to `sums`."""
        for batch in self._batches(nodes, [len(node.tokens) for node, _ in nodes]):
            extended = (*path, self._run(path, batch))
            continuations = [
                _Continuation(group, place, row, ids)
                for row, (node, _) in enumerate(batch)
                for group in node.members
                for place, ids in enumerate(groups[group][1])
                if len(ids)
            ]
            if continuations:
                self._score(extended, continuations, sums)
            children = [(child, row) for row, (node, _) in enumerate(batch) for child in node.children]
            self._descend(extended, children, groups, sums)

    def _run(self, path: tuple[PrefixBatch, ...], batch: list[tuple[PrefixNode, int]]) -> PrefixBatch:
        source_B, lengths_B, tokens_BT = self._padded([(node.tokens, row) for node, row in batch])
        return _run(self._params, self._config, path, source_B, tokens_BT, lengths_B)

    def _score(self, path: tuple[PrefixBatch, ...], continuations: list[_Continuation], sums: list[np.ndarray]) -> None:
        """Add the log-probabilities of continuations of the contexts in the last batch of `path`."""
        # Start all programs before waiting for the first result. `columns` numbers each row's distinct first tokens.
        columns: list[dict[int, int]] = [{} for _ in path[-1].parent_U]
        for item in continuations:
            columns[item.row].setdefault(item.ids[0], len(columns[item.row]))
        targets_UC = np.zeros((len(columns), _bucket(self._first_counts, max(map(len, columns)))), np.int32)
        for row, distinct in enumerate(columns):
            targets_UC[row, : len(distinct)] = list(distinct)
        firsts_UC = _first_logprobs(self._params, self._config, path[-1].hidden_UD, targets_UC)
        longer = [item for item in continuations if len(item.ids) > 1]
        later = []
        for batch in self._batches(longer, [len(item.ids) - 1 for item in longer]):
            source_B, lengths_B, tokens_BT = self._padded([(item.ids[:-1], item.row) for item in batch])
            _, _, targets_BT = self._padded([(item.ids[1:], item.row) for item in batch])
            later.append(
                (batch, _later_logprobs(self._params, self._config, path, source_B, tokens_BT, targets_BT, lengths_B))
            )
        first_logprobs_UC = np.asarray(firsts_UC)
        for item in continuations:
            sums[item.group][item.place] += first_logprobs_UC[item.row, columns[item.row][item.ids[0]]]
        for batch, values_B in later:
            for item, value in zip(batch, np.asarray(values_B)[: len(batch)], strict=True):
                sums[item.group][item.place] += value

    def _batches(self, items: list[Item], lengths: list[int]) -> Iterator[list[Item]]:
        """Batches of items in the same length bucket, at most the scorer's `rows` in each."""
        members: dict[int, list[Item]] = {}
        for item, length in zip(items, lengths, strict=True):
            members.setdefault(_bucket(self._lengths, length), []).append(item)
        most = self._sizes[-1]
        for _, bucket in sorted(members.items()):
            yield from (bucket[start : start + most] for start in range(0, len(bucket), most))

    def _padded(self, runs: list[tuple[Sequence[int], int]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Arrays of runs (tokens, row of the parent): rows of the parents [B], lengths [B] and padded tokens [B, T]."""
        size = _bucket(self._sizes, len(runs))
        source_B, lengths_B = np.zeros(size, np.int32), np.zeros(size, np.int32)
        tokens_BT = np.zeros((size, _bucket(self._lengths, max(len(tokens) for tokens, _ in runs))), np.int32)
        for row, (tokens, source) in enumerate(runs):
            source_B[row], lengths_B[row], tokens_BT[row, : len(tokens)] = source, len(tokens), tokens
        return source_B, lengths_B, tokens_BT


def _bucket(sizes: Sequence[int], needed: int) -> int:
    """The smallest size that is enough; `sizes` are in increasing order."""
    return next(size for size in sizes if size >= needed)


def _root(config: ModelConfig) -> PrefixBatch:
    """The batch of the empty text, which all others continue."""
    dtype = compute_dtype(config)
    no_columns = jnp.zeros((config.blocks, 1, 0, config.kv_heads, config.attention_head_dim), dtype)
    layers = tuple(
        (no_columns, no_columns)
        if isinstance(state, KeysValues)
        else jax.tree.map(lambda part: jnp.broadcast_to(part, (config.blocks, *part.shape)), state)
        for state in empty_block(config, 1, 0)
    )
    zero, hidden = jnp.zeros(1, jnp.int32), jnp.zeros((1, config.width), dtype)
    return PrefixBatch(layers, jnp.zeros((1, 0), jnp.int32), zero, zero, hidden)


def _hidden(
    params: Params,
    config: ModelConfig,
    path: tuple[PrefixBatch, ...],
    source_B: Array,
    tokens_BT: Array,
    lengths_B: Array,
) -> tuple[Array, PrefixBatch]:
    """Run tokens after rows `source_B` of the last batch of `path`: the residual stream [B, T, D], and their batch."""
    last = path[-1]
    rows = [source_B]  # in each batch of the path, the row that a run descends from
    for batch in reversed(path[1:]):
        rows.insert(0, batch.parent_U[rows[0]])
    columns_T = jnp.arange(tokens_BT.shape[1])
    segments_BT = (columns_T < lengths_B[:, None]).astype(jnp.int32)
    positions_BT = last.length_U[source_B][:, None] + columns_T
    segments_BA = jnp.concatenate([batch.segments_UT[row] for batch, row in zip(path, rows, strict=True)], axis=1)

    def of_ancestors(parts: tuple[Array, ...]) -> Array:
        return jnp.concatenate([part[row] for part, row in zip(parts, rows, strict=True)], axis=1)

    def block(x_BTD: Array, stacked: tuple) -> tuple[Array, tuple]:
        layers, parents = stacked
        states: list[Any] = []
        for (letter, name), parent in zip(config.layers, parents, strict=True):
            if letter == "S":
                initial = jax.tree.map(lambda part: part[source_B], parent)
                x_BTD, state = sca(layers[name], config, x_BTD, segments_BT, positions_BT, initial)
                states.append(state)
            else:
                keys, values = zip(*parent, strict=True)
                prefix = (of_ancestors(keys), of_ancestors(values), segments_BA)
                x_BTD, keys_values = attention(layers[name], config, x_BTD, segments_BT, positions_BT, prefix)
                states.append(keys_values)
        return x_BTD, tuple(states)

    # Of an SCA layer the state of the parents, of an attention layer the keys and values of all ancestors.
    parents = tuple(
        last.layers[index] if letter == "S" else tuple(batch.layers[index] for batch in path)
        for index, letter in enumerate(config.pattern)
    )
    hidden_BTD, states = jax.lax.scan(block, embed(params, config, tokens_BT), (params["blocks"], parents))
    # The last hidden state of an empty run is that of its parent.
    ends_BTD = jnp.concatenate([last.hidden_UD[source_B][:, None], hidden_BTD], axis=1)
    final_BD = jnp.take_along_axis(ends_BTD, lengths_B[:, None, None], axis=1)[:, 0]
    length_B = last.length_U[source_B] + lengths_B
    return hidden_BTD, PrefixBatch(states, segments_BT, source_B, length_B, final_BD)


@partial(jax.jit, static_argnames="config")
def _run(
    params: Params,
    config: ModelConfig,
    path: tuple[PrefixBatch, ...],
    source_B: Array,
    tokens_BT: Array,
    lengths_B: Array,
) -> PrefixBatch:
    return _hidden(params, config, path, source_B, tokens_BT, lengths_B)[1]


@partial(jax.jit, static_argnames="config")
def _first_logprobs(params: Params, config: ModelConfig, hidden_UD: Array, targets_UC: Array) -> Array:
    """log p of each target [U, C] as the next token after hidden states [U, D]."""
    logits_UV = next_logits(hidden_UD, params["embedding"], config)
    chosen_UC = jnp.take_along_axis(logits_UV, targets_UC, axis=1)
    return chosen_UC - jax.nn.logsumexp(logits_UV, axis=1, keepdims=True)


@partial(jax.jit, static_argnames="config")
def _later_logprobs(
    params: Params,
    config: ModelConfig,
    path: tuple[PrefixBatch, ...],
    source_B: Array,
    tokens_BT: Array,
    targets_BT: Array,
    lengths_B: Array,
) -> Array:
    """Σ log p(target) [B] over the first `lengths_B` targets of each run."""
    hidden_BTD, _ = _hidden(params, config, path, source_B, tokens_BT, lengths_B)
    logprobs_BT, _ = token_logprobs(params, config, hidden_BTD, targets_BT)
    return jnp.sum(jnp.where(jnp.arange(tokens_BT.shape[1]) < lengths_B[:, None], logprobs_BT, 0.0), axis=1)


Pooling = Literal["last", "mean"]


def pooled_states(
    params: Params,
    config: ModelConfig,
    texts: Sequence[Sequence[int]],
    rows: int,
    pooling: Pooling = "last",
    done: Callable[[int], None] = lambda _: None,
) -> np.ndarray:
    """The residual stream after the last block, at each text's last token or its mean over tokens: float32 [texts, D].

    rows: texts per batch. done: called with the number of texts finished. Raises `ConfigError` for a text without
    tokens or over the model's context.
    """
    for number, ids in enumerate(texts, 1):
        refuse_unreadable(number, len(ids), config)
    features_ND = np.zeros((len(texts), config.width), np.float32)
    finished = 0
    for batch, tokens_BL, lengths_B in _bucket_batches(texts, rows, config):
        features_ND[batch] = np.asarray(_pooled(params, config, tokens_BL, lengths_B, pooling))[: len(batch)]
        finished += len(batch)
        done(finished)
    return features_ND


def token_states(params: Params, config: ModelConfig, texts: Sequence[Sequence[int]], rows: int) -> list[np.ndarray]:
    """The residual stream after the last block at each token: float32 [tokens, D] for each text. As `pooled_states`."""
    for number, ids in enumerate(texts, 1):
        refuse_unreadable(number, len(ids), config)
    states: dict[int, np.ndarray] = {}
    for batch, tokens_BL, lengths_B in _bucket_batches(texts, rows, config):
        hidden_BLD = np.asarray(_states(params, config, tokens_BL, lengths_B))
        states |= {index: hidden_BLD[row, : len(texts[index])] for row, index in enumerate(batch)}
    return [states[index] for index in range(len(texts))]


def refuse_unreadable(number: int, tokens: int, config: ModelConfig) -> None:
    """Raise `ConfigError` for a text without tokens or over the model's context."""
    if not 0 < tokens <= config.context:
        raise ConfigError(f"text {number} has {tokens} tokens, and the model reads 1 to {config.context}")


@partial(jax.jit, static_argnames="config")
def _states(params: Params, config: ModelConfig, tokens_BL: Array, lengths_B: Array) -> Array:
    column_L = jnp.arange(tokens_BL.shape[1])
    inside_BL = column_L < lengths_B[:, None]
    positions_BL = jnp.broadcast_to(column_L, tokens_BL.shape)
    return forward(params, config, tokens_BL, inside_BL.astype(jnp.int32), positions_BL).astype(jnp.float32)


@partial(jax.jit, static_argnames=("config", "pooling"))
def _pooled(params: Params, config: ModelConfig, tokens_BL: Array, lengths_B: Array, pooling: Pooling) -> Array:
    inside_BL = jnp.arange(tokens_BL.shape[1]) < lengths_B[:, None]
    hidden_BLD = _states(params, config, tokens_BL, lengths_B)
    if pooling == "mean":
        return jnp.sum(jnp.where(inside_BL[..., None], hidden_BLD, 0.0), axis=1) / lengths_B[:, None]
    return jnp.take_along_axis(hidden_BLD, lengths_B[:, None, None] - 1, axis=1)[:, 0]
