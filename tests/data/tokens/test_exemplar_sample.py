"""The sample for retrieval: stratified, and a function of the set of records alone."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nautile.data.records import SynthRecord
from nautile.data.screening.duplicates import text_hash
from nautile.data.sources.local_files import read_jsonl
from nautile.data.tokens.build import (
    ExemplarSample,
    candidates_per_exercise,
    choose_exemplars,
    write_exemplars,
    write_rows,
)

RECORDS = [
    SynthRecord(f"q{n}\u2028", "r", str(n), exercise="rare" if n % 10 == 0 else "math" if n % 2 else None)
    for n in range(60)
]
EVERY = np.ones(60, bool)


def sampled(numbers, most):
    """A sample offered the records of these numbers, each as the document of its own number."""
    sample = ExemplarSample(most)
    for number in numbers:
        record = RECORDS[number]
        sample.offer(text_hash(record.query), number, record.exercise, lambda record=record: record)
    return sample


def chosen_of(folder, parts, size, kept=EVERY, most=None):
    paths = []
    for file, numbers in enumerate(parts):
        paths.append(folder / f"{file}.jsonl")
        write_rows(paths[-1], sampled(numbers, size if most is None else most).rows())
    return choose_exemplars([(path, kept) for path in paths], size)


@pytest.mark.slow
@given(order=st.permutations(range(60)), size=st.integers(0, 70))
def test_order_does_not_matter_and_exercises_are_even(tmp_path_factory, order, size):
    folder = tmp_path_factory.mktemp("sample")
    chosen = chosen_of(folder, [order], size)
    assert chosen == chosen_of(folder, [range(60)], size)
    assert len(chosen) == min(size, 60)
    counts = Counter(record.exercise for record in chosen)
    if size <= 18:  # as long as the rarest lasts
        assert not counts or max(counts.values()) - min(counts[e] for e in ("rare", "math", None)) <= 1
    assert counts["rare"] == min(6, -(-size // 3)) or size % 3


@pytest.mark.slow
@given(cuts=st.lists(st.integers(0, 60), max_size=3))
def test_units_add_up_to_the_whole(tmp_path_factory, cuts):
    folder = tmp_path_factory.mktemp("sample")
    edges = [0, *sorted(cuts), 60]
    parts = [range(start, end) for start, end in pairwise(edges)]
    assert chosen_of(folder, parts, 9) == chosen_of(folder, [range(60)], 9)


def test_a_copy_that_is_dropped_is_no_exemplar(tmp_path):
    whole = chosen_of(tmp_path, [range(60)], 9)
    kept = EVERY.copy()
    kept[RECORDS.index(whole[0])] = False
    assert whole[0] not in chosen_of(tmp_path, [range(60)], 9, kept)


def test_only_what_is_kept_is_made_whole():
    built = []
    sample = ExemplarSample(3)
    for number in range(1000):
        sample.offer(
            text_hash(RECORDS[number % 60].query) ^ number, number, "e", lambda n=number: built.append(n) or RECORDS[0]
        )
    assert len(built) < 60  # 3 * (1 + ln(1000 / 3)) = 20 are expected
    assert len(list(sample.rows())) == 3


@pytest.mark.parametrize(
    ("size", "files", "candidates"), [(100_000, 1, 100_000), (100_000, 500, 800), (20, 9, 20), (100, 9, 64)]
)
def test_a_file_keeps_a_few_times_its_part(size, files, candidates):
    assert candidates_per_exercise(size, files) == candidates


def test_exemplars_are_rows_of_synth(tmp_path):
    write_exemplars(tmp_path / "e.jsonl", RECORDS[:5])
    assert list(read_jsonl([tmp_path / "e.jsonl"], "synth")) == RECORDS[:5]
