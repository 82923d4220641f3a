"""Replies checked: JSON, the schema, and strings that must stand in the text."""

import pytest

from nautile.data.json_schema import entity_schema, schema_validator
from nautile.uses.extract.stage import ReplyChecker, Span, card_of, summary_of
from nautile.uses.labelled.config import ExtractConfig

SCHEMA = {
    "$defs": {"name": {"type": "string", "x-span": True}},
    "type": "object",
    "properties": {
        "who": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/name"}]},
        "kind/of": {"enum": ["person", "place"]},
        "where": {"type": "array", "items": {"$ref": "#/$defs/name"}},
        "note": {"type": "string"},
    },
    "required": ["who"],
}
TEXT = 'Ada met Ada in Rome — "Roma".'


def check(reply, text=TEXT, schema=SCHEMA, spans="marked"):
    return ReplyChecker(schema_validator(schema, "s"), schema, spans).check(text, reply)


def test_spans_have_their_places_through_references_and_alternatives():
    result = check('{"who": "Ada", "where": ["Rome", "\\"Roma\\"", ""], "note": "not in it", "kind/of": "place"}')
    assert result.reason is None
    assert result.spans == (Span("/where/0", 15, 19, 1), Span("/where/1", 22, 28, 1), Span("/who", 0, 3, 2))
    assert all(TEXT[span.start : span.end] in ("Ada", "Rome", '"Roma"') for span in result.spans)
    assert check('{"who": null}').spans == ()


def test_all_strings_but_enumerations_may_have_to_be_spans():
    assert check('{"who": null, "kind/of": "place"}', spans="all").reason is None
    refused = check('{"who": null, "note": "ada"}', spans="all")
    assert (refused.reason, refused.detail) == ("span", "/note: 'ada'")


@pytest.mark.parametrize(
    ("reply", "reason", "detail"),
    [
        ('{"who": "Bob"}', "span", "/who: 'Bob'"),
        ('{"where": ["Rome"]}', "schema", "'who' is a required property"),
        ('{"who": null, "kind/of": "thing"}', "schema", "/kind~1of"),
        ('{"who": nul', "not_json", "Expecting value"),
        ('{"who": null, "who": "Ada"}', "not_json", "two members of the same name"),
        ('{"who": null, "n": 1e999}', "not_json", "too large"),
        ('{"who": null, "n": NaN}', "not_json", "not a JSON number"),
        ("[" * 100_000, "not_json", ""),
    ],
)
def test_what_does_not_hold_is_refused_with_its_reason(reply, reason, detail):
    result = check(reply)
    assert (result.document, result.reason) == (None, reason)
    assert detail in result.detail


@pytest.mark.parametrize("spans", ["marked", "all"])
def test_a_document_too_deep_to_be_checked_is_refused_and_ends_no_run(spans):
    tree = {"$ref": "#/$defs/tree", "$defs": {"tree": {"type": "array", "items": {"$ref": "#/$defs/tree"}}}}
    assert check("[" * 30 + "]" * 30, schema=tree, spans=spans).reason is None
    result = check("[" * 600 + "]" * 600, schema=tree, spans=spans)
    assert (result.document, result.reason, result.detail) == (None, "schema", "/: is nested too deep to be checked")


def test_entities_of_a_tuned_model():
    schema = entity_schema(["name", "place"])
    assert check('[{"text": "Rome", "label": "place"}]', schema=schema).spans == (Span("/0/text", 15, 19, 1),)
    assert check('[{"text": "Rome", "label": "thing"}]', schema=schema).reason == "schema"


def test_the_card_counts_every_row_and_shows_no_markup_of_a_reply():
    row = {"json": None, "spans": [], "reason": "span", "detail": "/a: '<b>`x`|'", "tokens": 3, "cut": 0}
    rows = [row, {**row, "json": "{}", "reason": None, "detail": "", "spans": [{}]}]
    summary = summary_of(rows)
    assert summary == {
        "rows": 2,
        "extracted": 1,
        "refused": {"span": 1},
        "spans": 1,
        "tokens": 6,
        "cut": 0,
        "cut_tokens": 0,
    }
    config = ExtractConfig(texts={"reader": "csv", "path": "t.csv"}, json_schema='{"type": "object"}')
    card = card_of(summary, config, rows)
    assert "<b>" not in card
    assert "| a string that must occur in the text does not | 1 | 50.0 % |" in card
