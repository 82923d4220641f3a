"""Interleaving of sources: exact shares, and counts that agree with the rows one by one."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from data.tokens.loader import Mixture

WEIGHTS = st.dictionaries(st.sampled_from("abcde"), st.floats(0.01, 100), min_size=1)


@given(weights=WEIGHTS, first=st.integers(0, 5000), rows=st.integers(0, 300))
def test_counts_and_places_agree_and_shares_are_exact(weights, first, rows):
    mixture = Mixture(weights)
    source, nth = mixture.assign(first, rows)
    before, after = mixture.counts(first), mixture.counts(first + rows)
    assert after.sum() == first + rows
    for i, name in enumerate(mixture.sources):
        assert nth[source == i].tolist() == list(range(before[i], after[i]))  # each source's rows in turn, none twice
        exact = weights[name] / sum(weights.values()) * (first + rows)
        assert abs(after[i] - exact) <= len(weights) + 0.01


def test_two_to_one_is_two_to_one_in_every_three():
    source, _ = Mixture({"synth": 2, "web": 1}).assign(0, 30_000)
    assert set(np.unique(source.reshape(-1, 3).sum(axis=1))) == {1}


def test_no_overflow_far_into_a_run():
    mixture = Mixture({"a": 1 / 3, "b": 1 / 7, "c": 11})
    counts = mixture.counts(10**10)
    _, nth = mixture.assign(10**10, 100)
    assert (nth >= 0).all()
    assert counts.min() > 0
