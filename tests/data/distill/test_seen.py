"""Exact and near duplicates among texts, also across processes."""

from nautile.data.screening.duplicates import SeenTexts

TEXT = (
    "The harbour was built in stone by the people of the town, who had lost three wooden ones to winter storms, and "
    "it has stood since then with few repairs, though the sea has taken the lamp at its end more than once."
)


def test_duplicates_are_recognised_also_by_the_next_process(tmp_path):
    seen = SeenTexts(near=True)
    first, case, near, other = seen.hashes([TEXT, TEXT.upper(), TEXT + " So it is.", "Quite another thing."])
    assert seen.duplicate(first) is None
    seen.add(first)
    for path, content in zip((tmp_path / "a", tmp_path / "b"), seen.take_unsaved(), strict=True):
        path.write_bytes(content)
    assert seen.take_unsaved() == (b"", b"")
    later = SeenTexts(near=True)
    later.load(tmp_path / "a", tmp_path / "b")
    for texts in (seen, later):
        duplicates = [texts.duplicate(hashes) for hashes in (first, case, near, other)]
        assert duplicates == ["duplicate", "duplicate", "near_duplicate", None]
    exact = SeenTexts(near=False)
    exact.add(exact.hashes([TEXT])[0])
    assert exact.duplicate(exact.hashes([TEXT + " So it is."])[0]) is None
