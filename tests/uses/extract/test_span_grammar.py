"""Strings that must stand in a text can only be written as parts of it: whatever tokens are drawn from the masks."""

import json
from collections import Counter

import numpy as np
import pytest

from nautile.configs.model import TokenizerConfig
from nautile.data.json_schema import schema_validator
from nautile.data.tokenizer import tokenizer_for
from nautile.model.decoding.constrained import Constraint, mask_words
from nautile.uses.extract.stage import ReplyChecker

TOKENIZER = tokenizer_for(TokenizerConfig(ranks=300))
TEXT = 'He said "two\nkettles" for \\5 é \x01 \u2028 😀, and {"a": "b"} too'
NAME = {"type": "string", "minLength": 1, "maxLength": 12, "x-span": True}
TREE = {
    "type": "object",
    "properties": {
        "n": {"$ref": "#/$defs/name"},
        "kids": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 1},
    },
    "required": ["n"],
}
SCHEMA = {
    "$defs": {"name": NAME, "tree": TREE},
    "type": "object",
    "properties": {
        'q"é': {"anyOf": [{"$ref": "#/$defs/name"}, {"type": "null"}]},
        "where": {"type": "array", "items": {"$ref": "#/$defs/name"}, "minItems": 1, "maxItems": 2},
        "maybe": {"type": ["string", "null"], "x-span": True, "maxLength": 5},
        "kind": {"enum": ["kettle", "pan", 7], "x-span": True},
        "tree": {"$ref": "#/$defs/tree"},
        "free": {"type": "string", "maxLength": 3},
    },
    "required": ["where", "free"],
}


def written(constraint, seed, most=200):
    """A reply whose tokens are drawn evenly from those that may come; None if it does not end."""
    mask, draw, ids = constraint.begin(), np.random.default_rng(seed), []
    mask.accept(TOKENIZER.think_end)
    words_W = np.zeros(mask_words(TOKENIZER.vocabulary), np.uint32)
    for _ in range(most):
        mask.write(words_W)
        token = int(draw.choice(np.flatnonzero(np.unpackbits(words_W.view(np.uint8), bitorder="little"))))
        if token in (TOKENIZER.im_end, TOKENIZER.end_of_text):
            return TOKENIZER.decode(ids)
        ids.append(token)
        mask.accept(token)
    return None


def test_every_reply_holds_to_the_text_and_to_the_schema():
    constraint = Constraint(TOKENIZER, SCHEMA)
    assert constraint.unconstrained == ()
    checker = ReplyChecker(constraint.validator, SCHEMA, "marked")
    held = constraint.within(TEXT)
    replies = [written(held, seed) for seed in range(60)]
    results = [checker.check(TEXT, reply) for reply in replies if reply is not None]
    assert [result for result in results if result.reason] == []
    assert len(results) > 40
    # Each kind of member was written by some, and characters that need an escape too.
    members = Counter(name for result in results for name in json.loads(result.document))
    assert set(members) == set(SCHEMA["properties"])
    assert any("\\" in result.document for result in results)
    # Without the text the same schema is held to its form alone, and the strings are invented.
    assert "span" in {checker.check(TEXT, reply).reason for seed in range(9) if (reply := written(constraint, seed))}


def test_a_part_of_the_text_may_be_the_whole_of_it_and_no_more():
    constraint = Constraint(TOKENIZER, {"type": "string", "minLength": 3, "x-span": True})
    assert json.loads(written(constraint.within("a\tb"), 0)) == "a\tb"
    assert constraint.within("ab") is None  # shorter than the string must be
    empty = Constraint(TOKENIZER, {"type": "string", "x-span": True}).within("")
    assert json.loads(written(empty, 0)) == ""


def test_half_a_surrogate_pair_in_the_text_is_in_no_reply():
    """JSON can spell one, and UTF-8, in which the grammar is passed on, cannot."""
    text = "ab\ud83dcd"
    held = Constraint(TOKENIZER, {"type": "string", "minLength": 1, "x-span": True}).within(text)
    replies = {json.loads(reply) for seed in range(40) if (reply := written(held, seed))}
    assert replies == {"a", "b", "ab", "c", "d", "cd"}


@pytest.mark.parametrize(
    ("change", "reply"),
    [
        ({}, '{"b": "xy"}'),
        ({"required": ["a"]}, None),
        ({"properties": {"a": {"type": "array", "items": {"enum": ["no"], "x-span": True}}}}, '{"a": []}'),
    ],
)
def test_what_the_text_cannot_meet_is_left_out_or_refused(change, reply):
    """An optional member is left out, a list is empty, and without a required member there is no document."""
    long = {"type": "string", "minLength": 5, "x-span": True}
    short = {"type": "string", "minLength": 2, "x-span": True}
    schema = {"type": "object", "properties": {"a": long, "b": short}, "required": ["b"], **change}
    schema["required"] = [name for name in schema["required"] if name in schema["properties"]]
    if "b" not in schema["properties"]:
        schema["required"] = ["a"]
    held = Constraint(TOKENIZER, schema).within("xy")
    assert (held and json.loads(written(held, 0))) == (reply and json.loads(reply))


def test_strings_under_other_keywords_are_named_because_they_are_only_checked():
    schema = {
        "type": "object",
        "properties": {
            "code": {"type": "string", "pattern": "^[a-z]+$", "x-span": True},
            "a/b": {"allOf": [NAME, {"minLength": 1}]},
            "map": {"type": "object", "additionalProperties": NAME},
        },
    }
    constraint = Constraint(TOKENIZER, schema)
    assert constraint.unconstrained == ("/properties/a~1b", "/properties/code", "/properties/map")
    assert constraint.within("x") is not None
    plain = Constraint(TOKENIZER, {"type": "object"})
    assert plain.within("x") is plain
    assert schema_validator(schema, "s")


@pytest.mark.parametrize("keyword", ["oneOf", "anyOf", "allOf"])
def test_strings_in_alternatives_are_parts_of_the_text(keyword):
    """Also where exactly one alternative may hold, and behind a single condition."""
    name = {"type": "string", "minLength": 2, "x-span": True}
    alternatives = [name] if keyword == "allOf" else [name, {"type": "array", "items": name, "minItems": 1}]
    schema = {"type": "object", "properties": {"of": {keyword: alternatives}}, "required": ["of"]}
    constraint = Constraint(TOKENIZER, schema)
    assert constraint.unconstrained == ()
    checker = ReplyChecker(constraint.validator, schema, "marked")
    held = constraint.within(TEXT)
    replies = [reply for seed in range(20) if (reply := written(held, seed)) is not None]
    assert {checker.check(TEXT, reply).reason for reply in replies} == {None}


def test_a_long_text_costs_no_more_for_each_token():
    """The grammar has a rule for each character; its states are made as they are reached."""
    text = " ".join(f"order {number} of {number * 37 % 101} kettles" for number in range(1000))
    held = Constraint(TOKENIZER, {"type": "string", "minLength": 8, "maxLength": 20, "x-span": True}).within(text)
    value = json.loads(written(held, 3))
    assert 8 <= len(value) <= 20
    assert value in text
