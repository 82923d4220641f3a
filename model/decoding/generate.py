"""Batched sampling: prompts in, completions with log-probabilities out.

Each distinct prompt is prefilled once, in parallel with others, and its samples are decoded in lanes
(`model.decoding.lane`): a slot whose sample has ended takes the next one. A lane's columns grow with its longest sample
(to 128 tokens, 256, 512, …), so that attention at token 10 does not pay for token 1,000. Each combination of slots,
columns and sampling settings compiles once per process.

A sample depends only on its prompt, its seed and the parameters, not on its slot, the other samples, the number of
slots or the order in which they are filled.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from nautile.common.errors import ConfigError
from nautile.configs.model import ModelConfig
from nautile.model.decoding.cache import decode_weights
from nautile.model.decoding.lane import STRIDE, Lane, Sample, advance, empty_lane, prefill_prompts
from nautile.model.decoding.sampling import Sampling, sample_keys
from nautile.model.layers.common import Params
from nautile.model.nautile import shapes
from nautile.model.processes import rows_of_each, share_of
from nautile.model.program_thread import program_threads
from nautile.model.sharding import OnMesh, own_mesh, parameter_shardings, whole_on_hosts

CPU_SLOTS = 32  # most slots of a lane on CPU, where the time of a token is proportional to the slots


@dataclass(frozen=True)
class Sampled:
    """A continuation of a prompt: ids (ending with the stop id, if any) and the log-probability of each.

    truncated: whether `max_tokens` was reached before a stop id.
    """

    ids: np.ndarray
    logprobs: np.ndarray
    truncated: bool


@dataclass(frozen=True)
class Completion(Sampled):
    """A continuation whose `logprobs` are log π(id) at the sampling temperature (greedy: at temperature 1).

    log π is of the full distribution, before top-k and top-p.
    forced: index in `ids` of a `think_end` that the thinking budget inserted, not the model.
    """

    forced: int | None = None


def refuse_over_context(config: ModelConfig, sampling: Sampling, prompt_length: int) -> None:
    """Raise ConfigError if `prompt_length` plus `max_tokens` is over the model's context."""
    if (total := prompt_length + sampling.max_tokens) > config.context:
        raise ConfigError(
            f"generate: prompt_length {prompt_length} + max_tokens {sampling.max_tokens} = {total} is over the model's "
            f"context of {config.context} tokens"
        )


class Generator:
    """Samples completions, at most `rows` at a time, for prompts of up to `prompt_length` tokens.

    On a `mesh` each device decodes its share of the rows, so `rows` must be a multiple of the devices. Raises
    ConfigError if `prompt_length` plus `max_tokens` is over the model's context.
    """

    def __init__(
        self, config: ModelConfig, sampling: Sampling, rows: int, prompt_length: int, mesh: Mesh | None = None
    ) -> None:
        if rows < 1 or prompt_length < 1:
            raise ConfigError(f"generate: rows {rows} and prompt_length {prompt_length} must be 1 or more")
        refuse_over_context(config, sampling, prompt_length)
        self.config, self.sampling, self.rows, self.prompt_length = config, sampling, rows, prompt_length
        self._mesh = mesh
        self._divisor = 1 if mesh is None else mesh.size
        platform = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
        self._threads = program_threads(mesh, platform)[:rows]
        self.lanes = len(self._threads) or 1
        self._size = min(CPU_SLOTS, -(-rows // self.lanes)) if self._threads else rows

    def _on_mesh(self, program: Any) -> Any:
        """Wrap a jitted function to run with the mesh (if any) as ambient mesh."""
        return program if self._mesh is None else OnMesh(self._mesh, program)

    def _on_lane(self, lane: int, program: Any) -> Any:
        """`_on_mesh`, started by the lane's own thread."""
        on_mesh = self._on_mesh(program)
        return partial(self._threads[lane], on_mesh) if self._threads else on_mesh

    def __call__(
        self, params: Params, prompts: Sequence[Sequence[int]], seeds: Sequence[tuple[int, ...]]
    ) -> list[Completion]:
        """One completion per prompt, in order. `seeds[i]` identifies sample i; equal prompt and seed, equal sample."""
        self._check(prompts, seeds)
        completions = {
            sample.place: _completion(sample, self.sampling.stop_ids)
            for sample in self._decode(params, prompts, seeds)
            if not sample.active
        }
        return [completions[index] for index in range(len(prompts))]

    def stream(
        self, params: Params, prompt: Sequence[int], seed: tuple[int, ...], every: int = 4
    ) -> Iterator[Completion]:
        """Yield the growing completion of one prompt every few tokens; the last equals that of a plain call.

        `truncated` is meaningful only in the last one.
        """
        self._check([prompt], [seed])
        for sample in self._decode(params, [prompt], [seed], every):
            yield _completion(sample, self.sampling.stop_ids)

    def programs(self, prompts: int) -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
        """The programs for `prompts` prompts and a full lane with its longest ring: (name, function, argument shapes).

        For memory estimates: nothing is computed.
        """
        abstract, config, sampling, size = shapes(self.config), self.config, self.sampling, self._size
        rows = self._on_all_devices(prompts)
        tokens = jax.ShapeDtypeStruct((rows, self.prompt_length), jnp.int32)
        lengths = jax.ShapeDtypeStruct((rows,), jnp.int32)
        yield "weights for decoding", decode_weights, (abstract, config, self.rows == 1)
        yield "prefill", prefill_prompts, (abstract, tokens, lengths, config, self.prompt_length)
        capacity = self.prompt_length + sampling.max_tokens
        state = jax.eval_shape(lambda: empty_lane(config, sampling, size, self.prompt_length, capacity))
        weights = jax.eval_shape(partial(decode_weights, config=config, transposed=self.rows == 1), abstract)
        count = jax.ShapeDtypeStruct((), jnp.int32)
        yield "decode", advance, (weights, state, count, count, config, sampling)

    def _on_all_devices(self, prompts: int) -> int:
        """A number of prompts, rounded up to a multiple of the devices."""
        return -(-prompts // self._divisor) * self._divisor

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

    def _decode(
        self, params: Params, prompts: Sequence[Sequence[int]], seeds: Sequence[tuple[int, ...]], tokens: int = STRIDE
    ) -> Iterator[Sample]:
        """Decode all samples; yield a sample each time it has up to `tokens` more tokens."""
        weights = self._on_mesh(decode_weights)(params, self.config, self.rows == 1)
        keys = sample_keys(seeds)
        # Sorted by length, so that few columns are prefilled, and with equal prompts together, so that each is
        # prefilled once.
        order = sorted(range(len(prompts)), key=lambda index: (len(prompts[index]), tuple(prompts[index]), index))
        # A batch has prompts for all slots: lanes decode while the prompts of the next samples are prefilled.
        slots = min(self.rows, self.lanes * self._size)
        batches = deque(order[first : first + slots] for first in range(0, len(order), slots))
        lanes = [
            Lane(
                self.config, self.sampling, self._size, self.prompt_length, partial(self._on_lane, lane), self._divisor
            )
            for lane in range(self.lanes)
        ]
        waiting: deque[Sample] = deque()
        remaining = len(prompts)  # samples that no lane has started
        # While the host handles one lane, the program of the other runs: on CPU two cores are busy.
        while remaining or any(lane.active() for lane in lanes):
            for lane in lanes:
                # Collecting waits for this lane alone; then its free slots are filled and its next call starts.
                yield from lane.collect()
                while remaining and lane.active() < self._size:
                    if not waiting:
                        members = batches.popleft()
                        tokens_UP, lengths_U, source_M = self._distinct([prompts[index] for index in members])
                        prefilled = self._on_mesh(prefill_prompts)(
                            params, tokens_UP, lengths_U, self.config, self.prompt_length
                        )
                        waiting.extend(
                            Sample(index, source, len(prompts[index]), keys[index])
                            for index, source in zip(members, source_M, strict=True)
                        )
                    before = len(waiting)
                    lane.fill(prefilled, waiting)
                    remaining -= before - len(waiting)
                if lane.active():
                    lane.start(weights, remaining, tokens)

    def _distinct(self, prompts: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray, list[int]]:
        """Distinct prompts, right-aligned [U, P]; their lengths [U]; and for each prompt the index of its row.

        Samples of one prompt share its prefill. The rows are rounded up to a power of two, and the columns to a
        quarter, a half or all of `prompt_length`, so that few shapes are compiled. On a mesh the rows are also a
        multiple of its devices: a fused kernel runs on each device's own rows.
        """
        distinct = {prompt: index for index, prompt in enumerate(dict.fromkeys(map(tuple, prompts)))}
        count = min(self.rows, self._on_all_devices(1 << (len(distinct) - 1).bit_length()))
        longest = max(map(len, distinct))
        width = next(size for part in (4, 2, 1) if (size := self.prompt_length // part) >= longest)
        tokens_UP, lengths_U = np.zeros((count, width), np.int32), np.ones(count, np.int32)
        for prompt, index in distinct.items():
            tokens_UP[index, -len(prompt) :] = prompt
            lengths_U[index] = len(prompt)
        return tokens_UP, lengths_U, [distinct[tuple(prompt)] for prompt in prompts]


def _completion(sample: Sample, stops: tuple[int, ...]) -> Completion:
    """The completion of a sample so far."""
    ids, logprobs = np.concatenate(sample.ids), np.concatenate(sample.logprobs)
    return Completion(ids, logprobs, int(ids[-1]) not in stops, sample.forced)


class SharedGenerator:
    """A `Generator` that all processes call together with the same prompts; each gets all completions.

    `make(rows, mesh)` creates the generator of one process, for its share of the `rows` completions at a time. Each
    process copies the parameters, which are sharded on `mesh`, to its own devices. They wait for each other only at the
    end, not between tokens.
    """

    def __init__(self, make: Callable[[int, Mesh | None], Generator], rows: int, mesh: Mesh | None) -> None:
        self._mesh, self._local_mesh = mesh, mesh
        if mesh is not None and jax.process_count() > 1:
            self._local_mesh = own_mesh(mesh, jax.process_index())
        self._generate = make(rows // jax.process_count(), self._local_mesh)

    def __call__(
        self, params: Params, prompts: Sequence[Sequence[int]], seeds: Sequence[tuple[int, ...]]
    ) -> list[Completion]:
        """One completion per prompt, in order."""
        if self._mesh is None or self._local_mesh is None or jax.process_count() == 1:
            return self._generate(params, prompts, seeds)
        # Each process decodes its slice of the prompts with its own copy of the parameters.
        gathered_params = whole_on_hosts(params, self._mesh)
        local_params = jax.device_put(gathered_params, parameter_shardings(gathered_params, self._local_mesh))
        part = share_of(len(prompts))
        completions = self._generate(local_params, prompts[part], seeds[part])
        # All processes exchange arrays of equal shape: the largest slice, padded.
        most = -(-len(prompts) // jax.process_count())
        gathered = rows_of_each(_to_arrays(completions, most, self._generate.sampling.max_tokens))
        return _from_arrays(gathered, len(prompts))


def _to_arrays(completions: Sequence[Completion], rows: int, width: int) -> dict[str, np.ndarray]:
    """Completions as arrays of `rows` rows, where `used` is 0 for padding rows."""
    arrays: dict[str, np.ndarray] = {
        name: np.zeros((rows, width), kind) for name, kind in (("ids", np.int32), ("logprobs", np.float32))
    }
    arrays |= {name: np.zeros(rows, np.int32) for name in ("used", "length", "truncated", "forced")}
    for row, completion in enumerate(completions):
        length = len(completion.ids)
        arrays["ids"][row, :length], arrays["logprobs"][row, :length] = completion.ids, completion.logprobs
        arrays["used"][row], arrays["length"][row], arrays["truncated"][row] = 1, length, completion.truncated
        arrays["forced"][row] = -1 if completion.forced is None else completion.forced
    return arrays


def _from_arrays(arrays: dict[str, np.ndarray], count: int) -> list[Completion]:
    """The inverse of `_to_arrays`, for the concatenated rows of all processes."""
    # Processes are in order and each has its slice in order: without the padding the rows are those of the prompts.
    rows = np.flatnonzero(arrays["used"])
    assert len(rows) == count
    return [
        Completion(
            ids=arrays["ids"][row, : arrays["length"][row]],
            logprobs=arrays["logprobs"][row, : arrays["length"][row]],
            truncated=bool(arrays["truncated"][row]),
            forced=None if arrays["forced"][row] < 0 else int(arrays["forced"][row]),
        )
        for row in rows
    ]
