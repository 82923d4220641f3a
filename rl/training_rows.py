"""Completions as arrays of few shapes for the training forward pass.

`batches` has whole rows: prompt, then sampled ids, padded on the right. `completion_batches` has the completions alone,
each with the number of its prompt among those of `prompts_of`, so that a prompt is computed once for all of them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from model.decoding.buckets import length_buckets

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


NumberedRow = tuple[TrainingRow, int]  # with the number of its prompt
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


NARROWEST = 32  # inputs of the narrowest batch of completions, unless the longest completion is shorter


def prompts_of(
    rows: Sequence[TrainingRow], columns: int, least: int, multiple: int
) -> tuple[RowBatch, list[NumberedRow]]:
    """The distinct prompts, right-aligned, and each row with the number of its own.

    Arrays: tokens [U, columns], lengths [U] and how many there are, `count`; U is at least `least` and a multiple of
    `multiple`, and those after the last are one token.
    """
    distinct = {prompt: number for number, prompt in enumerate(dict.fromkeys(tuple(row.prompt_ids) for row in rows))}
    size = -(-max(least, len(distinct)) // multiple) * multiple
    tokens_UP, lengths_U = np.zeros((size, columns), np.int32), np.ones(size, np.int32)
    for prompt, number in distinct.items():
        tokens_UP[number, -len(prompt) :] = prompt
        lengths_U[number] = len(prompt)
    numbered = [(row, distinct[tuple(row.prompt_ids)]) for row in rows]
    return {"tokens": tokens_UP, "lengths": lengths_U, "count": np.asarray(len(distinct), np.int32)}, numbered


def completion_batches(rows: Sequence[NumberedRow], longest: int, at_once: Callable[[int], int]) -> Iterator[RowBatch]:
    """Batches of `at_once(width)` completions, from long to short, so that little is padded.

    Each is as wide as its longest needs: 32, 64, 128, … or all inputs of `longest` tokens, whole chunks of the mixing
    operator, whose remainder would be compiled apart. The last is filled up with empty rows, which weigh nothing.
    Arrays, T being the width: targets (int32 [size, T]), weights, sampled (float32 [size, T]), tokens and segments
    (int32 [size, T - 1]: the inputs after the prompt), advantage (float32 [size]), source (int32 [size]: the number of
    the row's prompt).
    """
    left = sorted(rows, key=lambda numbered: -len(numbered[0].ids))
    inputs = length_buckets(max(1, longest - 1), NARROWEST)
    while left:
        width = next(count + 1 for count in inputs if count + 1 >= len(left[0][0].ids))
        size = at_once(width)
        chosen, left = left[:size], left[size:]
        batch: RowBatch = {name: np.zeros((size, width), np.float32) for name in ("weights", "sampled")}
        batch["targets"] = np.zeros((size, width), np.int32)
        batch |= {name: np.zeros((size, width - 1), np.int32) for name in ("tokens", "segments")}
        batch |= {"advantage": np.zeros(size, np.float32), "source": np.zeros(size, np.int32)}
        for index, (row, source) in enumerate(chosen):
            length = len(row.ids)
            batch["targets"][index, :length] = row.ids
            batch["tokens"][index, : length - 1] = row.ids[:-1]
            batch["segments"][index, : length - 1] = 1
            batch["weights"][index, :length] = row.weight
            if row.forced is not None:
                batch["weights"][index, row.forced] = 0.0
            batch["sampled"][index, :length] = row.logprobs
            batch["advantage"][index], batch["source"][index] = row.advantage, source
        yield batch
