"""The interface between the batching engine and the runtime that decodes its slots, and the JAX implementation.

The engine decides which request is in which slot; the programs hold the slots' state, prefill prompts, fill slots and
decode tokens. All runtimes sample with `model.decoding.slots`, so equal logits give equal samples.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np

from nautile.configs.model import ModelConfig
from nautile.model.decoding.buckets import length_buckets
from nautile.model.decoding.cache import decode_weights
from nautile.model.decoding.slots import (
    PrefillScores,
    SlotOutput,
    SlotSettings,
    advance,
    empty_slots,
    fill_slots,
    prefill_prompts,
)
from nautile.model.layers.common import Params


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

    def start(self) -> None:
        self._weights = decode_weights(self._params, self.config, transposed=True)
        self._slots = empty_slots(self.config, self.count)

    def prefill(self, tokens_BP: np.ndarray, lengths_B: np.ndarray, score: bool) -> tuple[Any, PrefillScores | None]:
        return prefill_prompts(self._params, jnp.asarray(tokens_BP), jnp.asarray(lengths_B), self.config, score)

    def fill(self, prefilled: Any, source_R: np.ndarray, slots_R: np.ndarray, settings: SlotSettings) -> None:
        self._slots = fill_slots(self._slots, prefilled, source_R, slots_R, settings)

    def advance(self, occupied_B: np.ndarray, stride: int, allowed_BW: np.ndarray | None = None) -> SlotOutput:
        self._slots, output = advance(
            self._weights, self._slots, occupied_B, self.config, self.stops, self._think_end, stride, allowed_BW
        )
        return output
