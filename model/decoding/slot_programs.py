"""What decodes slots: the interface that the batching engine drives, and its form in JAX.

The engine decides which request is in which slot; the programs keep the slots' state, prefill prompts, fill slots and
write tokens. The samples are the same whatever computes the logits, for all draw with `model.decoding.slots`.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np

from configs.model import ModelConfig
from model.decoding.buckets import length_buckets
from model.decoding.cache import decode_weights
from model.decoding.slots import (
    PrefillScores,
    SlotOutput,
    SlotSettings,
    advance,
    empty_slots,
    fill_slots,
    prefill_prompts,
)
from model.layers.common import Params


class SlotPrograms(Protocol):
    """Protocol of a runtime's slots.

    count: how many there are. stops: ids that end a sample. lengths: the columns that prompts are padded to; empty if
    any will do.
    """

    config: ModelConfig
    count: int
    stops: tuple[int, ...]
    lengths: Sequence[int]

    def start(self) -> None:
        """Allocate the slots. Called once, by the thread that calls the others."""
        ...

    def prefill(self, tokens_BP: np.ndarray, lengths_B: np.ndarray, score: bool) -> tuple[Any, PrefillScores | None]:
        """Prefill right-aligned prompts; `score`: with the log-probabilities of their tokens."""
        ...

    def fill(self, prefilled: Any, source_R: np.ndarray, into_R: np.ndarray, settings: SlotSettings) -> None:
        """Start a sample of prompt `source_R[r]` in slot `into_R[r]`; drop rows without such a slot."""
        ...

    def advance(self, kept_B: np.ndarray, stride: int, allowed_BW: np.ndarray | None = None) -> SlotOutput:
        """Write up to `stride` tokens in every slot that is active and kept, of those whose bits are set if given."""
        ...


class JaxSlots:
    """`SlotPrograms` over the programs of `model.decoding.slots`."""

    def __init__(
        self,
        params: Params,
        config: ModelConfig,
        stops: tuple[int, ...],
        think_end: int,
        count: int,
        longest: int | None = None,
    ) -> None:
        """`longest`: of the prompts, in tokens; None: the context."""
        self.config, self.count, self.stops = config, count, stops
        buckets = length_buckets(config.context)
        self.lengths = buckets[: 1 + next(i for i, n in enumerate(buckets) if n >= (longest or config.context))]
        self._params, self._think_end = params, think_end

    def start(self) -> None:
        self._weights = decode_weights(self._params, self.config, transposed=True)
        self._slots = empty_slots(self.config, self.count)

    def prefill(self, tokens_BP: np.ndarray, lengths_B: np.ndarray, score: bool) -> tuple[Any, PrefillScores | None]:
        return prefill_prompts(self._params, jnp.asarray(tokens_BP), jnp.asarray(lengths_B), self.config, score)

    def fill(self, prefilled: Any, source_R: np.ndarray, into_R: np.ndarray, settings: SlotSettings) -> None:
        self._slots = fill_slots(self._slots, prefilled, source_R, into_R, settings)

    def advance(self, kept_B: np.ndarray, stride: int, allowed_BW: np.ndarray | None = None) -> SlotOutput:
        self._slots, output = advance(
            self._weights, self._slots, kept_B, self.config, self.stops, self._think_end, stride, allowed_BW
        )
        return output
