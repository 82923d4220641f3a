"""Completions as fixed-shape arrays for the training forward pass: prompt, then sampled ids, padded on the right."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

Batch = dict[str, np.ndarray]


@dataclass(frozen=True)
class Row:
    """One completion and what the loss needs of it; `weight` is that of each of its tokens."""

    prompt_ids: Sequence[int]
    ids: np.ndarray
    logprobs: np.ndarray
    advantage: float
    weight: float


def batches(rows: Sequence[Row], size: int, length: int) -> Iterator[Batch]:
    """Batches of `size` rows of `length` tokens; the last is filled up with empty rows, which weigh nothing.

    Arrays: tokens, targets, segments, positions (int32 [size, length]), weights, sampled (float32 [size, length]:
    the weight of each target and the log-probability it was sampled with), advantage (float32 [size]).
    """
    for first in range(0, len(rows), size):
        batch: Batch = {name: np.zeros((size, length), np.int32) for name in ("tokens", "targets", "segments")}
        batch |= {name: np.zeros((size, length), np.float32) for name in ("weights", "sampled")}
        batch["positions"] = np.tile(np.arange(length, dtype=np.int32), (size, 1))
        batch["advantage"] = np.zeros(size, np.float32)
        for place, row in enumerate(rows[first : first + size]):
            _lay(batch, place, row)
        yield batch


def _lay(batch: Batch, place: int, row: Row) -> None:
    every = np.concatenate([np.asarray(row.prompt_ids, np.int32), row.ids.astype(np.int32)])
    start, end = len(row.prompt_ids), len(every)
    batch["tokens"][place, :end] = every
    batch["segments"][place, :end] = 1
    batch["targets"][place, : end - 1] = every[1:]
    batch["weights"][place, start - 1 : end - 1] = row.weight
    batch["sampled"][place, start - 1 : end - 1] = row.logprobs
    batch["advantage"][place] = row.advantage
