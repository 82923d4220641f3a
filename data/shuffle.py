"""A pseudo-random permutation of 0..size-1 that needs no table: a Feistel network with cycle walking.

The position of row i in an epoch is computed, not stored, so a global shuffle of 600B tokens costs no memory, and any
training step can be computed without the steps before it.
"""

import hashlib

import numpy as np

ROUNDS = 6


def permute(index: np.ndarray, size: int, key: str) -> np.ndarray:
    """Apply the permutation of 0..size-1 that `key` selects to each element of `index` (any shape); returns int64."""
    # The network permutes pairs of `half_bits` bits, 4**half_bits values in all, which is at least `size`.
    half_bits = np.uint64(max(1, (max(size - 1, 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half_bits) - np.uint64(1)
    digest = hashlib.blake2b(key.encode(), digest_size=8 * ROUNDS).digest()
    round_keys = np.frombuffer(digest, "<u8")
    values = np.asarray(index).astype(np.uint64)
    outside = np.ones(values.shape, bool)
    # Cycle walking: values beyond `size` are permuted again until they fall inside. The network's range is below
    # 4 * size, so a value takes under four rounds on average.
    while outside.any():
        left, right = values[outside] >> half_bits, values[outside] & mask
        for round_key in round_keys:
            left, right = right, left ^ (_mix(right, round_key) & mask)
        values[outside] = (left << half_bits) | right
        outside = values >= np.uint64(size)
    return values.astype(np.int64)


def _mix(values: np.ndarray, key: np.uint64) -> np.ndarray:
    """The splitmix64 finaliser: every bit of the result depends on every bit of the value."""
    mixed = values * np.uint64(0x9E3779B97F4A7C15) + key
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
