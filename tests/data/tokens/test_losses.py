"""The line that says what an ingest could not read."""

from collections import Counter

from nautile.data.tokens.losses import losses_line


def test_nothing_is_said_where_nothing_is_lost():
    assert losses_line({"a": 10}, {}, {"a": Counter()}) == ""
    # Filters drop what they are told to drop.
    assert losses_line({"a": 10}, {}, {"a": Counter(language=3, score=2, contaminated=1)}) == ""


def test_files_and_rows_are_counted_with_reason_and_path():
    assert losses_line(
        {"a.jsonl": 90, "c.jsonl": 10},
        {"b.jsonl": "b.jsonl: is empty\nmore", "d.jsonl": "d.jsonl: is binary"},
        {"a.jsonl": Counter(not_json=2, language=4), "c.jsonl": Counter(no_text=3)},
    ) == (
        "lost: 2 of 4 files (b.jsonl: is empty, and 1 more); "
        "5 of 100 rows (3 no_text, 2 not_json; in a.jsonl, and 1 more)"
    )
