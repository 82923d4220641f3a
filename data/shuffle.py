"""A pseudo-random permutation of 0..size-1 that needs no table: a Feistel network with cycle walking.

Row i of an epoch follows by arithmetic alone, so a global shuffle of 600B tokens costs no memory, and any step can be
computed without the steps before it.
"""

import hashlib

import numpy as np

ROUNDS = 6


def permute(index: np.ndarray, size: int, key: str) -> np.ndarray:
    """Map each of `index` (any shape, 0 <= index < size) by the permutation that `key` names; int64."""
    half_bits = np.uint64(max(1, (max(size - 1, 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half_bits) - np.uint64(1)
    digest = hashlib.blake2b(key.encode(), digest_size=8 * ROUNDS).digest()
    round_keys = np.frombuffer(digest, "<u8")
    values = np.asarray(index).astype(np.uint64)
    outside = np.ones(values.shape, bool)
    while outside.any():  # the network permutes a power of four below 4*size: under four walks on average
        left, right = values[outside] >> half_bits, values[outside] & mask
        for round_key in round_keys:
            left, right = right, left ^ (_mix(right, round_key) & mask)
        values[outside] = (left << half_bits) | right
        outside = values >= np.uint64(size)
    return values.astype(np.int64)


def _mix(values: np.ndarray, key: np.uint64) -> np.ndarray:
    """The finaliser of splitmix64: every bit of a result depends on every bit of its value."""
    mixed = values * np.uint64(0x9E3779B97F4A7C15) + key
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
