"""The table-free permutation."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from nautile.data.shuffle import permute


@given(size=st.integers(1, 3000), key=st.text(max_size=8))
def test_it_is_a_permutation(size, key):
    assert sorted(permute(np.arange(size), size, key)) == list(range(size))


def test_parts_agree_with_the_whole_and_keys_differ():
    size = 10_007
    whole = permute(np.arange(size), size, "a")
    assert (permute(np.array([5, 9000]), size, "a") == whole[[5, 9000]]).all()
    assert (permute(np.arange(size), size, "b") == whole).mean() < 0.01


def test_it_looks_shuffled():
    """Neighbours do not stay neighbours and positions are not correlated; also for a size far beyond any table."""
    size = 20_000
    positions = permute(np.arange(size), size, "seed")
    assert abs(np.corrcoef(np.arange(size), positions)[0, 1]) < 0.03
    assert (np.abs(np.diff(positions)) == 1).mean() < 0.001
    huge = permute(np.arange(2000), 10**12, "seed")
    assert len(set(huge.tolist())) == 2000
    assert 0.4 < np.median(huge) / 10**12 < 0.6
