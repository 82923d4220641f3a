"""Synthetic sequence tasks with a label at chosen positions: recall, copying, selective copying, parity, S5, counting.

    tokens_BL, labels_BL = TASKS["recall 8"].draw(np.random.default_rng(0), batch=32, length=64)

A label is what the model must say at that position, from the tokens up to it; 0: nothing is asked there. Tokens and
labels share one vocabulary of `VOCABULARY` ids, in which 0 is the blank. Every task has any length from `shortest` on.

Letters: B sequences, L positions, N pairs or symbols, P permutations.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

VOCABULARY = 144
BLANK, MARKER = 0, 130  # MARKER: where a copy begins, and each place in which a selected symbol is asked for
SYMBOLS = 16  # of copying and counting: the ids 1 to 16
KEYS = VALUES = 64  # of recall: the keys are the ids 1 to 64, the values 65 to 128
SELECTED = 8  # symbols of a selective copy
MOST_COUNTED = 7
PERMUTATIONS_P5 = np.array(list(itertools.permutations(range(5))))  # id 1 + p stands for the p-th one

Drawn = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Task:
    """A task. `draw(rng, batch, length)` gives tokens and labels; `solve(tokens)` the labels, by a program.

    `chance`: the accuracy of the best answer that does not look at the order of the tokens; None: that of the most
    frequent label.
    """

    draw: Callable[[np.random.Generator, int, int], Drawn]
    solve: Callable[[np.ndarray], np.ndarray]
    shortest: int = 2
    chance: float | None = None


def recall(pairs: int) -> Task:
    """Multi-query associative recall: `pairs` keys with their values, blanks, then each key once more, in any order.

    The label at a key's second place is its value. Whoever knows the values alone is right in one of `pairs` cases.
    """

    def draw(rng: np.random.Generator, batch: int, length: int) -> Drawn:
        keys_BN = 1 + _without_repeats(rng, batch, KEYS, pairs)
        values_BN = 1 + KEYS + rng.integers(VALUES, size=(batch, pairs))
        order_BN = _without_repeats(rng, batch, pairs, pairs)
        tokens_BL, labels_BL = np.zeros((2, batch, length), np.int32)
        tokens_BL[:, : 2 * pairs : 2], tokens_BL[:, 1 : 2 * pairs : 2] = keys_BN, values_BN
        tokens_BL[:, length - pairs :] = np.take_along_axis(keys_BN, order_BN, axis=1)
        labels_BL[:, length - pairs :] = np.take_along_axis(values_BN, order_BN, axis=1)
        return tokens_BL, labels_BL

    def solve(tokens_BL: np.ndarray) -> np.ndarray:
        labels_BL = np.zeros_like(tokens_BL)
        for tokens_L, labels_L in zip(tokens_BL, labels_BL, strict=True):
            value_of = dict(zip(tokens_L[: 2 * pairs : 2], tokens_L[1 : 2 * pairs : 2], strict=True))
            labels_L[-pairs:] = [value_of[key] for key in tokens_L[-pairs:]]
        return labels_BL

    return Task(draw, solve, 3 * pairs, 1 / pairs)


def _draw_copy(rng: np.random.Generator, batch: int, length: int) -> Drawn:
    count = length // 2
    symbols_BN = rng.integers(1, SYMBOLS + 1, size=(batch, count))
    tokens_BL, labels_BL = np.zeros((2, batch, length), np.int32)
    tokens_BL[:, :count], tokens_BL[:, count] = symbols_BN, MARKER
    tokens_BL[:, count + 1 : 2 * count] = symbols_BN[:, :-1]  # what should have been said up to here
    labels_BL[:, count : 2 * count] = symbols_BN
    return tokens_BL, labels_BL


def _solve_copy(tokens_BL: np.ndarray) -> np.ndarray:
    count, labels_BL = tokens_BL.shape[1] // 2, np.zeros_like(tokens_BL)
    labels_BL[:, count : 2 * count] = tokens_BL[:, :count]
    return labels_BL


def _draw_selective(rng: np.random.Generator, batch: int, length: int) -> Drawn:
    symbols_BN = rng.integers(1, SYMBOLS + 1, size=(batch, SELECTED))
    places_BN = np.sort(_without_repeats(rng, batch, length - SELECTED, SELECTED), axis=1)
    tokens_BL, labels_BL = np.zeros((2, batch, length), np.int32)
    np.put_along_axis(tokens_BL, places_BN, symbols_BN, axis=1)
    tokens_BL[:, -SELECTED:], labels_BL[:, -SELECTED:] = MARKER, symbols_BN
    return tokens_BL, labels_BL


def _solve_selective(tokens_BL: np.ndarray) -> np.ndarray:
    labels_BL = np.zeros_like(tokens_BL)
    for tokens_L, labels_L in zip(tokens_BL, labels_BL, strict=True):
        labels_L[-SELECTED:] = [token for token in tokens_L if token not in (BLANK, MARKER)]
    return labels_BL


def _draw_parity(rng: np.random.Generator, batch: int, length: int) -> Drawn:
    bits_BL = rng.integers(2, size=(batch, length))
    return (1 + bits_BL).astype(np.int32), (1 + np.cumsum(bits_BL, axis=1) % 2).astype(np.int32)


def _solve_parity(tokens_BL: np.ndarray) -> np.ndarray:
    return np.array([[1 + int(sum(row[: t + 1]) - (t + 1)) % 2 for t in range(len(row))] for row in tokens_BL.tolist()])


def _draw_permutations(rng: np.random.Generator, batch: int, length: int) -> Drawn:
    numbers_BL = rng.integers(len(PERMUTATIONS_P5), size=(batch, length))
    products_BL = np.zeros_like(numbers_BL)
    products_BL[:, 0] = numbers_BL[:, 0]
    for t in range(1, length):
        products_BL[:, t] = _PRODUCTS_PP[products_BL[:, t - 1], numbers_BL[:, t]]
    return (1 + numbers_BL).astype(np.int32), (1 + products_BL).astype(np.int32)


def _solve_permutations(tokens_BL: np.ndarray) -> np.ndarray:
    named = {tuple(each): number for number, each in enumerate(PERMUTATIONS_P5.tolist())}
    labels_BL = np.zeros_like(tokens_BL)
    for tokens_L, labels_L in zip(tokens_BL, labels_BL, strict=True):
        product: tuple[int, ...] = tuple(range(5))
        for t, token in enumerate(tokens_L):
            product = tuple(product[place] for place in PERMUTATIONS_P5[token - 1])
            labels_L[t] = 1 + named[product]
    return labels_BL


def _draw_counts(rng: np.random.Generator, batch: int, length: int) -> Drawn:
    tokens_BL = rng.integers(1, SYMBOLS + 1, size=(batch, length)).astype(np.int32)
    seen_BLV = np.cumsum(tokens_BL[..., None] == np.arange(1, SYMBOLS + 1), axis=1)
    before_BL = np.take_along_axis(seen_BLV, tokens_BL[..., None] - 1, axis=2)[..., 0] - 1
    return tokens_BL, (1 + np.minimum(before_BL, MOST_COUNTED)).astype(np.int32)


def _solve_counts(tokens_BL: np.ndarray) -> np.ndarray:
    return np.array(
        [[1 + min(row[:t].count(token), MOST_COUNTED) for t, token in enumerate(row)] for row in tokens_BL.tolist()]
    )


def _without_repeats(rng: np.random.Generator, batch: int, of: int, count: int) -> np.ndarray:
    """`count` different numbers below `of` for each sequence [B, count]."""
    return np.argsort(rng.random((batch, of)), axis=1)[:, :count]


# [P, P]: the number of the product, in which the second permutation is applied to the places of the first.
_PRODUCTS_PP = np.array(
    [[int("".join(map(str, first[second])), 5) for second in PERMUTATIONS_P5] for first in PERMUTATIONS_P5]
)
_PRODUCTS_PP = np.searchsorted([int("".join(map(str, each)), 5) for each in PERMUTATIONS_P5], _PRODUCTS_PP)

TASKS: dict[str, Task] = {
    "recall 4": recall(4),
    "recall 8": recall(8),
    "recall 16": recall(16),
    # The marker's symbol is the first one's; the others follow their copies.
    "copying": Task(_draw_copy, _solve_copy, chance=1 / SYMBOLS),
    "selective copying": Task(_draw_selective, _solve_selective, 2 * SELECTED, 1 / SYMBOLS),
    "parity": Task(_draw_parity, _solve_parity, chance=1 / 2),
    "S5": Task(_draw_permutations, _solve_permutations, chance=1 / len(PERMUTATIONS_P5)),
    "counting": Task(_draw_counts, _solve_counts),
}


def chance_of(task: Task, length: int) -> float:
    """The accuracy at `length` without a look at the order; of a task that states none, of the most frequent label."""
    if task.chance is not None:
        return task.chance
    labels_BL = task.draw(np.random.default_rng(0), 256, length)[1]
    counts = np.bincount(labels_BL[labels_BL > 0])
    return float(counts.max() / counts.sum())
