"""A pseudo-random permutation of 0..size-1 that needs no table: a Feistel network with cycle walking.

Row i of an epoch is found by arithmetic alone, so a global shuffle of 600B tokens costs no memory and any step can be
had without the steps before it.
"""

import hashlib

import numpy as np

ROUNDS = 6


def permute(index: np.ndarray, size: int, key: str) -> np.ndarray:
    """Where each of `index` (any shape, 0 <= index < size) goes under the permutation named `key`; int64."""
    half_bits = max(1, (max(size - 1, 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << half_bits) - 1)
    digest = hashlib.blake2b(key.encode(), digest_size=8 * ROUNDS).digest()
    round_keys = np.frombuffer(digest, "<u8")
    place = np.asarray(index).astype(np.uint64)
    outside = np.ones(place.shape, bool)
    while outside.any():  # the network permutes a power of four below 4*size: under four walks on average
        place[outside] = _feistel(place[outside], np.uint64(half_bits), mask, round_keys)
        outside = place >= np.uint64(size)
    return place.astype(np.int64)


def _feistel(place: np.ndarray, half_bits: np.uint64, mask: np.uint64, round_keys: np.ndarray) -> np.ndarray:
    left, right = place >> half_bits, place & mask
    for key in round_keys:
        left, right = right, left ^ (_mix(right, key) & mask)
    return (left << half_bits) | right


def _mix(value: np.ndarray, key: np.uint64) -> np.ndarray:
    """The finaliser of splitmix64: every bit of the result depends on every bit of the value."""
    mixed = value * np.uint64(0x9E3779B97F4A7C15) + key
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
