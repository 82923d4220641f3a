"""Rows to records: the Hub's columns, and what makes a row unusable."""

import json
from datetime import datetime
from decimal import Decimal
from functools import reduce
from itertools import combinations
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nautile.data.records import (
    MAX_CHARACTERS,
    TEXT_COLUMNS,
    Rejected,
    SynthRecord,
    WebRecord,
    from_dict,
    to_batch,
    to_dict,
)

JSON = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
)


def test_records_round_trip_through_their_rows():
    web = WebRecord("text", id="1", url="u", language_score=0.9, token_count=3, int_score=4)
    synth = SynthRecord("q", "r", "a", exercise="rag", constraints="c")
    assert from_dict(to_dict(web), "web") == web
    assert from_dict({**to_dict(synth), "words": 12}, "synth") == synth  # columns we do not use are dropped


@pytest.mark.parametrize(
    ("row", "form", "reason"),
    [
        ({}, "web", "no_text"),
        ({"text": None}, "web", "no_text"),
        ({"text": " \n"}, "web", "no_text"),
        ({"text": 5}, "web", "wrong_type"),
        ({"text": "a\ud800"}, "web", "invalid_utf8"),
        ({"text": "x" * (MAX_CHARACTERS + 1)}, "web", "too_long"),
        (["text"], "web", "not_an_object"),
        (None, "synth", "not_an_object"),
        ({"query": "q"}, "synth", "no_text"),
        ({"query": "q", "synthetic_answer": ["a"]}, "synth", "wrong_type"),
        ({"query": "q", "synthetic_answer": "a", "synthetic_reasoning": "\udc00"}, "synth", "invalid_utf8"),
    ],
)
def test_unusable_rows_say_why(row, form, reason):
    assert from_dict(row, form) == Rejected(reason)


@pytest.mark.parametrize(("first", "second"), combinations(TEXT_COLUMNS["synth"], 2))
def test_a_row_with_two_faults_is_counted_under_the_first_of_the_schema(first, second):
    row = {"query": "q", "synthetic_answer": "a", first: 5, second: "a\ud800"}
    assert from_dict(row, "synth") == Rejected("wrong_type")


def test_reasoning_may_be_missing_but_not_the_rest():
    assert from_dict({"query": "q", "synthetic_answer": "a"}, "synth") == SynthRecord("q", "", "a")


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        ("\ud800é", "?é"),
        (float("nan"), None),
        (Decimal("4.5"), 4.5),
        (Decimal("NaN"), None),
        (10**400, 10**400),
        (UUID(int=1), "00000000-0000-0000-0000-000000000001"),
        (datetime(2020, 1, 2), "2020-01-02 00:00:00"),
        (b"\xff", None),
        (reduce(lambda inner, _: [inner], range(5000), 0), None),
    ],
)
def test_a_column_that_is_only_shown_may_have_any_value(value, kept):
    row = from_dict({"text": "a", "id": value, "score": value}, "web")
    assert row == WebRecord("a", id=kept, score=kept)
    json.dumps(to_dict(row), ensure_ascii=False, allow_nan=False).encode()


@given(row=JSON, form=st.sampled_from(["web", "synth"]))
def test_any_json_is_a_record_or_rejected(row, form):
    assert isinstance(from_dict(row, form), WebRecord | SynthRecord | Rejected)


@pytest.mark.parametrize(
    ("exercise", "constraints", "message"),
    [("rag", "Passage.", "Who?\n\nPassage."), ("rag", None, "Who?"), ("memo", "Passage.", "Who?")],
)
def test_only_rag_puts_the_constraints_behind_the_query(exercise, constraints, message):
    batch = to_batch([SynthRecord("Who?", "r", "a", exercise=exercise, constraints=constraints)], "synth")
    assert list(batch.turns()) == [(message, "r", "a")]
    assert batch.texts() == [f"{message}\x00r\x00a"]
