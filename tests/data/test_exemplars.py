"""The sample for retrieval: stratified, and a function of the set of records alone."""

from collections import Counter
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from data.deduplicate import content_hash
from data.exemplars import Sample, read_candidates, write_candidates, write_exemplars
from data.files import read_jsonl
from data.records import SynthRecord

RECORDS = [
    SynthRecord(f"q{n}\u2028", "r", str(n), exercise="rare" if n % 10 == 0 else "math" if n % 2 else None)
    for n in range(60)
]


def sampled(records, size):
    sample = Sample(size)
    for record in records:
        sample.offer(content_hash(record), record)
    return sample


@given(order=st.permutations(RECORDS), size=st.integers(0, 70))
def test_order_does_not_matter_and_exercises_are_even(order, size):
    chosen = sampled(order, size).chosen()
    assert chosen == sampled(RECORDS, size).chosen()
    assert len(chosen) == min(size, 60)
    counts = Counter(record.exercise for record in chosen)
    if size <= 18:  # as long as the rarest lasts
        assert not counts or max(counts.values()) - min(counts[e] for e in ("rare", "math", None)) <= 1
    assert counts["rare"] == min(6, -(-size // 3)) or size % 3


@given(cuts=st.lists(st.integers(0, 60), max_size=3))
def test_parts_kept_in_files_add_up_to_the_whole(tmp_path_factory, cuts):
    folder = tmp_path_factory.mktemp("sample")
    edges = [0, *sorted(cuts), 60]
    joined = Sample(9)
    for n, (start, end) in enumerate(pairwise(edges)):
        write_candidates(folder / str(n), sampled(RECORDS[start:end], 9).candidates())
        read_candidates(folder / str(n), joined)
    assert joined.chosen() == sampled(RECORDS, 9).chosen()


def test_exemplars_are_rows_of_synth(tmp_path):
    write_exemplars(tmp_path / "e.jsonl", RECORDS[:5])
    assert list(read_jsonl([tmp_path / "e.jsonl"], "synth")) == RECORDS[:5]
