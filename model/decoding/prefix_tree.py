"""The radix tree of token sequences: what several of them begin with is in it once.

A run of only a few tokens is no node: the sequences that share it repeat it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

MINIMUM_RUN = 8  # tokens; to keep and copy the state after fewer costs more than to run them again
MAXIMUM_DEPTH = 4  # nodes from the root to a leaf: the states of each are in memory together


@dataclass
class PrefixNode:
    """A run of tokens after the parent's. members: indices of the sequences that end with it."""

    tokens: Sequence[int]
    members: list[int]
    children: list["PrefixNode"] = field(default_factory=list)


def prefix_tree(sequences: Sequence[Sequence[int]]) -> list[PrefixNode]:
    """The children of the root. Every sequence is a member of one node, whose path spells it; equal ones share it."""
    places: dict[tuple[int, ...], list[int]] = {}
    for index, sequence in enumerate(sequences):
        places.setdefault(tuple(sequence), []).append(index)
    distinct = sorted(places)
    # How many tokens each sequence shares with the one before it.
    shared = np.array([0, *map(_common, distinct[:-1], distinct[1:])])
    roots: list[PrefixNode] = []
    # Sequences from `first` to before `end` share `agreed` tokens, of which nodes have the first `start`.
    ranges = [(0, len(distinct), 0, 0, 1, roots)] if distinct else []
    while ranges:
        first, end, start, agreed, depth, siblings = ranges.pop()
        cuts = [first, *(np.flatnonzero(shared[first + 1 : end] <= agreed) + first + 1).tolist(), end]
        for here, after in pairwise(cuts):
            sequence = distinct[here]
            common = len(sequence) if after == here + 1 else int(shared[here + 1 : after].min())
            ends = len(sequence) == common  # the shortest of a range is its first
            below = here + ends
            kept = below < after and common - start >= MINIMUM_RUN and depth < MAXIMUM_DEPTH
            node = PrefixNode(sequence[start:common], places[sequence] if ends else [])
            if ends or kept:
                siblings.append(node)
            if kept:
                ranges.append((below, after, common, common, depth + 1, node.children))
            elif below < after:
                ranges.append((below, after, start, common, depth, siblings))
    return roots


def _common(before: tuple[int, ...], after: tuple[int, ...]) -> int:
    """How many tokens both begin with."""
    length = min(len(before), len(after))
    return next((place for place in range(length) if before[place] != after[place]), length)
