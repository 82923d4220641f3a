"""The sorted set and map of 64-bit keys behaves as Python's own."""

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nautile.common import keyed_log
from nautile.common.keyed_log import SortedKeys, to_bytes

KEYS = st.integers(0, 2**64 - 1) | st.integers(0, 9)


@pytest.fixture(autouse=True, scope="module")
def _small_merges():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keyed_log, "SMALLEST_MERGE", 5)
        yield


@pytest.mark.slow
@given(st.lists(st.tuples(st.lists(KEYS, max_size=9), st.lists(KEYS, max_size=9)), max_size=9), st.lists(KEYS))
def test_files_and_single_keys_make_one_set(tmp_path_factory, groups, others):
    path, keys, expected = tmp_path_factory.mktemp("keys") / "x.u8", SortedKeys(), set()
    for in_file, alone in groups:
        path.write_bytes(to_bytes(in_file))
        keys.load(path)
        keys.update(alone)
        expected |= {*in_file, *alone}
        assert all((key in keys) == (key in expected) for key in others)
    assert len(keys) == len(expected)


@given(st.lists(st.tuples(KEYS, KEYS), max_size=60), st.lists(KEYS))
def test_it_is_a_map_in_which_the_latest_value_of_a_key_counts(pairs, others):
    keys, expected = SortedKeys(values=True), {}
    for key, value in pairs:
        keys.add(key, value)
        expected[key] = value
    assert len(keys) == len(expected)
    assert all(keys.get(key) == expected.get(key) for key in [*others, *expected])


def test_loading_many_files_sorts_once(tmp_path):
    """A resume takes seconds, not hours: work for each file must not grow with those before it."""
    draw = np.random.default_rng(0)
    keys, last, began = SortedKeys(), 0, time.process_time()
    for number in range(300):
        values = draw.integers(0, 2**64, 1000, np.uint64)
        values.tofile(tmp_path / "x.u8")
        keys.load(tmp_path / "x.u8")
        last = int(values[number])
    assert last in keys
    assert len(keys) == 300_000
    assert time.process_time() - began < 2
