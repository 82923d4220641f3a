"""A radix tree of token sequences, which stores common prefixes once.

A common run of only a few tokens becomes no node: the sequences that share it repeat it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

MINIMUM_RUN = 8  # tokens; with fewer, storing and copying the state costs more than running them again
MAXIMUM_DEPTH = 4  # nodes on the path from the root to a leaf, whose states are in memory at the same time


@dataclass
class PrefixNode:
    """A run of tokens that follows the parent's. members: indices of the sequences that end with it."""

    tokens: Sequence[int]
    members: list[int]
    children: list["PrefixNode"] = field(default_factory=list)


def prefix_tree(sequences: Sequence[Sequence[int]]) -> list[PrefixNode]:
    """Build the tree and return the children of its root.

    Every sequence is a member of one node, whose path spells it; equal sequences are members of the same node.
    """
    places: dict[tuple[int, ...], list[int]] = {}
    for index, sequence in enumerate(sequences):
        places.setdefault(tuple(sequence), []).append(index)
    distinct = sorted(places)
    # The number of leading tokens that each sequence shares with the one before it.
    shared = np.array([0, *map(_common_length, distinct[:-1], distinct[1:])])
    roots: list[PrefixNode] = []
    # The sequences [first, end) share `agreed` tokens, the first `start` of which are in nodes already.
    ranges = [(0, len(distinct), 0, 0, 1, roots)] if distinct else []
    while ranges:
        first, end, start, agreed, depth, siblings = ranges.pop()
        cuts = [first, *(np.flatnonzero(shared[first + 1 : end] <= agreed) + first + 1).tolist(), end]
        for begin, after in pairwise(cuts):
            sequence = distinct[begin]
            common = len(sequence) if after == begin + 1 else int(shared[begin + 1 : after].min())
            ends = len(sequence) == common  # the first of a range is its shortest
            below = begin + ends
            is_inner = below < after and common - start >= MINIMUM_RUN and depth < MAXIMUM_DEPTH
            node = PrefixNode(sequence[start:common], places[sequence] if ends else [])
            if ends or is_inner:
                siblings.append(node)
            if is_inner:
                ranges.append((below, after, common, common, depth + 1, node.children))
            elif below < after:
                ranges.append((below, after, start, common, depth, siblings))
    return roots


def _common_length(before: tuple[int, ...], after: tuple[int, ...]) -> int:
    """The length of the longest common prefix."""
    length = min(len(before), len(after))
    return next((place for place in range(length) if before[place] != after[place]), length)
