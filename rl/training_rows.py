"""Padded batches of completions for the training forward pass, in few shapes, because each shape is compiled.

Only completions are trained on: a prompt's targets have weight 0, as with `train_on = "replies"` in pretraining.

`batches` makes whole rows: prompt, then sampled ids, padded on the right. `completion_batches` makes rows of the
completions alone, each with the index of its prompt in `prompts_of`, so that a prompt is computed once for all of them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from nautile.data.tokens.loader import target_weights
from nautile.model.decoding.cache import length_buckets

RowBatch = dict[str, np.ndarray]


@dataclass(frozen=True)
class TrainingRow:
    """One completion with its loss inputs. `weight`: of each token, except the one at index `forced`, whose is zero."""

    prompt_ids: Sequence[int]
    ids: np.ndarray
    logprobs: np.ndarray
    advantage: float
    weight: float
    forced: int | None = None

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.ids)


NumberedRow = tuple[TrainingRow, int]  # a row and the index of its prompt
WIDTHS = 4  # the width of a batch of whole rows is a multiple of a quarter of the longest possible row


def batches(rows: Sequence[TrainingRow], size: int, length: int) -> Iterator[RowBatch]:
    """Batches of `size` whole rows in their order; the last is padded with empty rows of zero weight.

    A batch is a quarter, a half, three quarters or all of `length` tokens wide, so at most four shapes are compiled.
    Arrays: tokens, targets, segments, positions (int32 [size, width]); weights, sampled (float32 [size, width]: the
    loss weight of each target and its log-probability at sampling); advantage (float32 [size]).
    """
    for first in range(0, len(rows), size):
        batch_rows = rows[first : first + size]
        longest = max(map(len, batch_rows))
        width = next(w for quarters in range(1, WIDTHS + 1) if (w := -(-length * quarters // WIDTHS)) >= longest)
        batch: RowBatch = {name: np.zeros((size, width), np.int32) for name in ("tokens", "targets", "segments")}
        batch |= {name: np.zeros((size, width), np.float32) for name in ("weights", "sampled")}
        batch["positions"] = np.tile(np.arange(width, dtype=np.int32), (size, 1))
        batch["advantage"] = np.zeros(size, np.float32)
        for index, row in enumerate(batch_rows):
            tokens = np.concatenate([np.asarray(row.prompt_ids, np.int32), row.ids.astype(np.int32)])
            start, end = len(row.prompt_ids), len(row)
            # The target at column i is the token at i + 1, so the completion's targets begin at `start` - 1.
            columns = np.arange(width)
            batch["tokens"][index, :end] = tokens
            batch["segments"][index, :end] = 1
            batch["targets"][index, : end - 1] = tokens[1:]
            batch["weights"][index] = row.weight * target_weights(columns < end - 1, columns, start)
            # The sampler inserted this token, so the policy neither earns nor loses by it.
            if row.forced is not None:
                batch["weights"][index, start - 1 + row.forced] = 0.0
            batch["sampled"][index, start - 1 : end - 1] = row.logprobs
            batch["advantage"][index] = row.advantage
        yield batch


# A width compiles for 20 s of a core, so that a second one below 64 costs a short run more than it saves.
NARROWEST = 64  # input columns of the narrowest batch of completions, unless the longest completion is shorter


def prompts_of(
    rows: Sequence[TrainingRow], columns: int, least: int, multiple: int
) -> tuple[RowBatch, list[NumberedRow]]:
    """The distinct prompts as a right-aligned batch, and each row with the index of its prompt.

    Arrays: tokens (int32 [U, columns]), lengths (int32 [U]), and count, the number of distinct prompts. U is at least
    `least` and a multiple of `multiple`; the padding rows have a length of one token.
    """
    # In the order of first appearance, so that a resumed run computes the same sums in the same order.
    index_of = {prompt: index for index, prompt in enumerate(dict.fromkeys(tuple(row.prompt_ids) for row in rows))}
    size = -(-max(least, len(index_of)) // multiple) * multiple
    tokens_UP, lengths_U = np.zeros((size, columns), np.int32), np.ones(size, np.int32)
    for prompt, index in index_of.items():
        tokens_UP[index, -len(prompt) :] = prompt
        lengths_U[index] = len(prompt)
    numbered_rows = [(row, index_of[tuple(row.prompt_ids)]) for row in rows]
    return {"tokens": tokens_UP, "lengths": lengths_U, "count": np.asarray(len(index_of), np.int32)}, numbered_rows


def completion_batches(rows: Sequence[NumberedRow], longest: int, rows_at: Callable[[int], int]) -> Iterator[RowBatch]:
    """Batches of `rows_at(width)` completions, from the longest to the shortest, so that there is little padding.

    The number of input columns is 64, 128, 256, … or that of `longest` tokens: whole chunks of the mixing operator,
    which compiles a remainder separately. The last batch is padded with empty rows of zero weight. Arrays, with T
    tokens of the widest completion: targets (int32 [size, T]); weights, sampled (float32 [size, T]); tokens, segments
    (int32 [size, T - 1]: the inputs after the prompt); advantage (float32 [size]); source (int32 [size]: the index of
    the row's prompt).
    """
    # A stable sort: completions of one length keep their order, and a resumed run the order of its sums.
    remaining = sorted(rows, key=lambda numbered: -len(numbered[0].ids))
    bucket_lengths = length_buckets(max(1, longest - 1), NARROWEST)
    while remaining:
        # The longest remaining completion sets the width. Its first token is predicted from the prompt, so it needs
        # one input column less than it has tokens.
        width = next(columns + 1 for columns in bucket_lengths if columns + 1 >= len(remaining[0][0].ids))
        size = rows_at(width)
        batch_rows, remaining = remaining[:size], remaining[size:]
        batch: RowBatch = {name: np.zeros((size, width), np.float32) for name in ("weights", "sampled")}
        batch["targets"] = np.zeros((size, width), np.int32)
        batch |= {name: np.zeros((size, width - 1), np.int32) for name in ("tokens", "segments")}
        batch |= {"advantage": np.zeros(size, np.float32), "source": np.zeros(size, np.int32)}
        for index, (row, source) in enumerate(batch_rows):
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
