"""Splits follow from the content alone; duplicates, contradictions and leaks are counted, never kept silently."""

from dataclasses import replace

import pytest

from nautile.common.errors import ConfigError
from nautile.uses.labelled.rows import LabelledRow, with_labels
from nautile.uses.tune.splits import split_rows

SHARES = {"validation_share": 0.1, "test_share": 0.2, "leakage": "refuse", "labelled": True}


def rows(count, label=lambda i: "ab"[i % 2], text="text {}"):
    return [LabelledRow(text.format(i), label(i), text.format(i), i) for i in range(count)]


def texts(part):
    return {row.text for row in part}


def test_a_row_stays_in_its_split_whatever_is_around_it():
    splits = split_rows(rows(400), None, None, **SHARES)
    again = split_rows(rows(600)[::-1], None, None, **SHARES)
    for name in ("train", "validation", "test"):
        assert texts(getattr(splits, name)) <= texts(getattr(again, name))
    sizes = len(splits.validation) / 400, len(splits.test) / 400
    assert sizes == pytest.approx((0.1, 0.2), abs=0.05)
    assert splits.labels == ("a", "b")
    assert sum(splits.report.balance["train"].values()) == len(splits.train)


def test_rows_of_one_source_stay_together():
    several = [LabelledRow(f"text {i}", "ab"[i % 2], f"author {i % 40}", i) for i in range(400)]
    splits = split_rows(several, None, None, **SHARES)
    parts = [{row.source for row in part} for part in (splits.train, splits.validation, splits.test)]
    assert sum(map(len, parts)) == len(set.union(*parts)) == 40


def test_copies_are_kept_once_and_contradictions_not_at_all():
    copies = [LabelledRow("TEXT  0", "a", "TEXT  0", 900), LabelledRow("Text 1", "a", "Text 1", 901)]
    splits = split_rows(rows(400) + copies, None, None, **SHARES)
    report = splits.report
    assert (report.duplicates, report.contradictory_texts, report.contradictory) == (1, 1, 2)
    assert report.examples == [("text 1", ["a", "b"])]
    assert sum(sum(part.values()) for part in report.balance.values()) == 399


def test_leaks_between_given_splits_are_refused_by_count_or_dropped():
    train, test, validation = rows(40), rows(4), rows(6)
    with pytest.raises(ConfigError, match="4 with test, 2 with validation, 4 with validation and test"):
        split_rows(train, validation, test, **SHARES)
    splits = split_rows(train, validation, test, **{**SHARES, "leakage": "drop"})
    assert (len(splits.train), len(splits.validation), len(splits.test)) == (34, 2, 4)
    assert splits.report.leaked == {"test": 4, "validation": 2, "validation and test": 4}


def test_a_file_that_is_both_validation_and_test_is_refused_without_comparing_every_pair_of_rows(monkeypatch):
    compared = []
    monkeypatch.setattr(LabelledRow, "__eq__", lambda row, other: compared.append(1) or row is other)
    with pytest.raises(ConfigError, match="300 with validation and test"):
        split_rows(rows(40, text="train {}"), rows(300), rows(300), **SHARES)
    assert len(compared) < 3000


def test_a_label_that_occurs_once():
    seldom = LabelledRow("seldom", "c", "seldom", 7)
    with pytest.raises(ConfigError, match=r"1 label\(s\) occur once, such as 'c' in row 7"):
        split_rows([*rows(40), seldom, replace(seldom, text="Seldom ")], None, None, **SHARES)


def test_a_split_without_rows():
    with pytest.raises(ConfigError, match="no row is left for test of 44 rows"):
        split_rows(rows(40), rows(4, text="other {}"), [], **SHARES)


def test_a_label_of_the_test_split_alone_and_a_single_label():
    with pytest.raises(ConfigError, match="the test split: row 0 has the label 'c', which was not learnt"):
        split_rows(rows(40), rows(4, text="other {}"), rows(4, lambda i: "c", "new {}"), **SHARES)
    with pytest.raises(ConfigError, match="no row has another label than 'a'"):
        split_rows(rows(40, lambda i: "a"), None, None, **SHARES)


def test_labels_of_a_texts_copies_are_put_together_where_it_may_have_several():
    several = [with_labels(row, {row.target} if row.number % 3 else set()) for row in rows(400)]
    copy = with_labels(replace(several[1], text="Text  1"), {"a"})
    splits = split_rows([*several, copy], None, None, **SHARES, multi_label=True)
    kept = {row.text: row.labels for part in (splits.train, splits.validation, splits.test) for row in part}
    assert (len(kept), kept["text 1"], kept["text 0"]) == (400, ("a", "b"), ())
    assert (splits.report.duplicates, splits.report.contradictory) == (1, 0)
    with pytest.raises(ConfigError, match="every training row has the label 'a'"):
        split_rows([with_labels(row, {"a", row.target}) for row in rows(400)], None, None, **SHARES, multi_label=True)
