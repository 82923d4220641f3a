"""The radix tree: each sequence at the end of one path; what is shared once, but for short runs and deep chains."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nautile.model.decoding.scoring import MAXIMUM_DEPTH, MINIMUM_RUN, prefix_tree

PERSONA, OTHER = [1] * 10, [1] * 9 + [2]


def paths(nodes, before=()):
    """Every node of the tree with the tokens that it ends, and its depth."""
    for node in nodes:
        tokens = (*before, *node.tokens)
        yield node, tokens, 1
        yield from ((below, spelled, depth + 1) for below, spelled, depth in paths(node.children, tokens))


@pytest.mark.slow
@settings(max_examples=60)
@given(st.data())
def test_every_sequence_ends_at_one_node_whose_path_spells_it(data):
    sequences: list[list[int]] = []
    for _ in range(data.draw(st.integers(0, 12))):
        start = data.draw(st.sampled_from([[], *sequences]))
        start = start[: data.draw(st.integers(0, len(start)))]
        sequences.append([*start, *data.draw(st.lists(st.integers(0, 2), max_size=20))])
    ended = {}
    for node, tokens, depth in paths(prefix_tree(sequences)):
        assert depth <= MAXIMUM_DEPTH
        assert node.members or len(node.tokens) >= MINIMUM_RUN
        for index in node.members:
            assert index not in ended
            ended[index] = tokens
    assert ended == {index: tuple(tokens) for index, tokens in enumerate(sequences)}


def test_a_persona_is_run_once_for_its_questions():
    tree = prefix_tree([[*persona, question] for persona in (PERSONA, OTHER) for question in (5, 6, 7)])
    # Nine tokens that both begin with, a last one each, too short for a node of its own.
    assert [len(node.tokens) for node in tree] == [9]
    assert sorted(list(node.tokens) for node in tree[0].children) == [
        [last, question] for last in (1, 2) for question in (5, 6, 7)
    ]


def test_a_sequence_that_others_begin_with_is_their_parent_and_equal_ones_are_one_node():
    [node] = prefix_tree([PERSONA, [*PERSONA, 3], PERSONA, [*PERSONA, 4]])
    assert node.members == [0, 2]
    assert [(list(child.tokens), child.members) for child in node.children] == [([3], [1]), ([4], [3])]


def test_a_chain_deeper_than_the_limit_is_run_from_the_last_state_kept():
    chain = [[0] * (MINIMUM_RUN * length) for length in range(1, 1200)]
    depths = {len(tokens) // MINIMUM_RUN: depth for _, tokens, depth in paths(prefix_tree(chain))}
    assert [depths[length] for length in (1, 2, 3, 4, 5, 1199)] == [1, 2, 3, 4, 4, 4]
