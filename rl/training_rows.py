"""Completions as arrays of few shapes for the training forward pass: prompt, then sampled ids, padded on the right."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

RowBatch = dict[str, np.ndarray]


@dataclass(frozen=True)
class TrainingRow:
    """One completion and what the loss needs of it; `weight` is that of each token except the one at index `forced`."""

    prompt_ids: Sequence[int]
    ids: np.ndarray
    logprobs: np.ndarray
    advantage: float
    weight: float
    forced: int | None = None

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.ids)


WIDTHS = 4  # a batch is as wide as its longest row needs, in quarters of the longest possible row


def batches(rows: Sequence[TrainingRow], size: int, length: int) -> Iterator[RowBatch]:
    """Batches of `size` rows in their order; the last is padded with empty rows, which weigh nothing.

    Each is a quarter, a half, three quarters or all of `length` tokens wide, so at most four shapes are compiled.
    Arrays: tokens, targets, segments, positions (int32 [size, width]), weights, sampled (float32 [size, width]: the
    weight of each target and the log-probability it was sampled with), advantage (float32 [size]).
    """
    for first in range(0, len(rows), size):
        chosen = rows[first : first + size]
        longest = max(map(len, chosen))
        width = next(w for part in range(1, WIDTHS + 1) if (w := -(-length * part // WIDTHS)) >= longest)
        batch: RowBatch = {name: np.zeros((size, width), np.int32) for name in ("tokens", "targets", "segments")}
        batch |= {name: np.zeros((size, width), np.float32) for name in ("weights", "sampled")}
        batch["positions"] = np.tile(np.arange(width, dtype=np.int32), (size, 1))
        batch["advantage"] = np.zeros(size, np.float32)
        for index, row in enumerate(chosen):
            tokens = np.concatenate([np.asarray(row.prompt_ids, np.int32), row.ids.astype(np.int32)])
            start, end = len(row.prompt_ids), len(row)
            batch["tokens"][index, :end] = tokens
            batch["segments"][index, :end] = 1
            batch["targets"][index, : end - 1] = tokens[1:]
            batch["weights"][index, start - 1 : end - 1] = row.weight
            if row.forced is not None:
                batch["weights"][index, start - 1 + row.forced] = 0.0
            batch["sampled"][index, start - 1 : end - 1] = row.logprobs
            batch["advantage"][index] = row.advantage
        yield batch
