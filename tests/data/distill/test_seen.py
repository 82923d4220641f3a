"""Sets of hashes, and what is known again as a copy."""

from hypothesis import given
from hypothesis import strategies as st

from data.distill import seen as hashes
from data.distill.seen import HashSet, SeenTexts, as_bytes

TEXT = (
    "The harbour was built in stone by the people of the town, who had lost three wooden ones to winter storms, and "
    "it has stood since then with few repairs, though the sea has taken the lamp at its end more than once."
)


@given(st.lists(st.lists(st.integers(0, 2**64 - 1), max_size=9), max_size=9), st.lists(st.integers(0, 2**64 - 1)))
def test_a_hash_set_is_a_set(groups, others):
    old, hashes.LATE = hashes.LATE, 5
    try:
        found, plain = HashSet(), set()
        for group in groups:
            found.update(group)
            plain.update(group)
            assert len(found) == len(plain)
    finally:
        hashes.LATE = old
    assert all((value in found) == (value in plain) for value in [*others, *plain])


def test_hashes_are_read_back(tmp_path):
    (tmp_path / "x.u8").write_bytes(as_bytes([1, 2**64 - 1]))
    found = HashSet()
    found.update([7])
    found.load(tmp_path / "x.u8")
    assert all(value in found for value in (1, 7, 2**64 - 1))
    assert 2 not in found


def test_copies_are_known_again_also_by_the_next_process(tmp_path):
    novelty = SeenTexts(near=True)
    first, case, near, other = novelty.marks([TEXT, TEXT.upper(), TEXT + " So it is.", "Quite another thing."])
    assert novelty.copy(first) is None
    novelty.add(first)
    for path, content in zip((tmp_path / "a", tmp_path / "b"), novelty.take_fresh(), strict=True):
        path.write_bytes(content)
    assert novelty.take_fresh() == (b"", b"")
    later = SeenTexts(near=True)
    later.load(tmp_path / "a", tmp_path / "b")
    for one in (novelty, later):
        assert [one.copy(mark) for mark in (first, case, near, other)] == ["duplicate"] * 2 + ["near_duplicate", None]
    exact = SeenTexts(near=False)
    exact.add(exact.marks([TEXT])[0])
    assert exact.copy(exact.marks([TEXT + " So it is."])[0]) is None
