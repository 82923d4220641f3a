"""The shortest document of a schema, which any client of a server may send."""

import tracemalloc

import pytest

from nautile.common.errors import ConfigError
from nautile.data import json_schema
from nautile.data.json_schema import LONGEST_BOUND, shortest_document


def test_a_schema_of_kinds_that_contain_each_other_is_measured_by_few_look_ups(monkeypatch):
    names = [f"kind{number}" for number in range(12)]
    members = {
        "anyOf": [
            {"type": "object", "properties": {"of": {"$ref": f"#/$defs/{name}"}}, "required": ["of"]} for name in names
        ]
    }
    last = {"anyOf": [{"type": "null"}, *members["anyOf"]]}
    schema = {"$ref": "#/$defs/kind0", "$defs": {**dict.fromkeys(names[:-1], members), names[-1]: last}}
    look_ups, resolve_ref = [], json_schema.resolve_ref

    def counted(ref, root):
        look_ups.append(ref)
        assert len(look_ups) < 10_000, "every path through the kinds is followed"
        return resolve_ref(ref, root)

    monkeypatch.setattr(json_schema, "resolve_ref", counted)
    assert shortest_document(schema, "s") == '{"of": null}'


def test_kinds_of_equally_short_documents_and_kinds_without_an_end():
    kinds = {
        "one": {"anyOf": [{"$ref": "#/$defs/two"}, {"const": 1}]},
        "two": {"anyOf": [{"$ref": "#/$defs/one"}, {"const": 2}]},
        "endless": {"type": "array", "items": {"$ref": "#/$defs/endless"}, "minItems": 1},
    }
    assert len(shortest_document({"$ref": "#/$defs/one", "$defs": kinds}, "s")) == 1
    with pytest.raises(ConfigError, match="must contain itself"):
        shortest_document({"$ref": "#/$defs/endless", "$defs": kinds}, "s")


def test_whole_numbers_may_have_a_decimal_point_as_json_schema_allows():
    schema = {"type": "array", "minItems": 2.0, "items": {"type": "string", "minLength": 1.0}}
    json_schema.schema_validator(schema, "s")
    assert shortest_document(schema, "s") == '["a", "a"]'


@pytest.mark.parametrize("items", [{}, {"type": "array", "minItems": 10**12}, {"type": "string", "minLength": 10**12}])
def test_a_count_of_a_million_million_takes_no_memory(items):
    assert len(shortest_document({"type": "array", "minItems": 10**12, "items": items}, "s")) >= LONGEST_BOUND


def test_definitions_that_need_the_next_twice_are_measured_without_writing_them():
    """At 60 levels the shortest document has 2^60 items."""
    pair = {f"d{n}": {"type": "array", "minItems": 2, "items": {"$ref": f"#/$defs/d{n + 1}"}} for n in range(60)}
    schema = {"$ref": "#/$defs/d0", "$defs": {**pair, "d60": {"const": 1}}}
    text = shortest_document(schema, "s")
    assert text.startswith("[" * 60 + "1, 1], [1, 1]], [[1")
    assert len(text) == LONGEST_BOUND
    small = {"$ref": "#/$defs/d58", "$defs": schema["$defs"]}
    assert shortest_document(small, "s") == "[[1, 1], [1, 1]]"


def test_many_long_members_are_measured_without_writing_them():
    names = [f"n{number}" for number in range(3_000)]
    schema = {
        "type": "object",
        "properties": {name: {"type": "string", "minLength": 100_000} for name in names},
        "required": names,
    }
    tracemalloc.start()
    text = shortest_document(schema, "s")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(text) == LONGEST_BOUND
    assert peak < 20e6


@pytest.mark.slow
def test_what_contains_each_other_without_end_is_refused_in_bounded_time():
    """Each round lowers the cost of one more of these kinds."""
    count = 800
    kinds = {
        f"k{n}": {"anyOf": [{"$ref": f"#/$defs/k{m}"} for m in range(count)] + [{"type": "string", "minLength": n + 1}]}
        for n in range(count)
    }
    with pytest.raises(ConfigError, match="s: the schema has too many parts that contain each other"):
        shortest_document({"$ref": "#/$defs/k0", "$defs": kinds}, "s")


def test_the_cheapest_text_is_chosen_by_its_cost():
    def count(text):
        return sum(9 if character == "🙂" else 1 for character in text)

    assert shortest_document({"enum": ["🙂", "abcd"]}, "s") == '"🙂"'
    assert shortest_document({"enum": ["🙂", "abcd"]}, "s", count) == '"abcd"'
    wide = {"type": "array", "minItems": 3, "items": {"anyOf": [{"const": "🙂"}, {"type": "string", "minLength": 5}]}}
    assert shortest_document(wide, "s", count) == '["aaaaa", "aaaaa", "aaaaa"]'


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "array", "minItems": 3, "prefixItems": [{"const": 1}, {"const": 22}]}, "[1, 22, 0]"),
        ({"type": "array", "minItems": 1, "prefixItems": [{"const": 1}, {"const": 22}]}, "[1]"),
        ({"type": "array", "minItems": 2, "prefixItems": [{"const": 1}, {"const": 22}]}, "[1, 22]"),
        ({"type": "array"}, "[]"),
        ({"type": "string", "minLength": 130}, f'"{"a" * 130}"'),
        ({"type": "object", "required": ["b", "a"], "properties": {"a": {"type": "null"}}}, '{"b": 0, "a": null}'),
        ({"type": "number", "minimum": 12.5}, "12"),
        ({"type": "number", "exclusiveMaximum": -1e9}, "-1000000000"),
        ({"$schema": "http://json-schema.org/draft-04/schema#", "type": "integer", "minimum": 5,
          "exclusiveMinimum": True}, "5"),
    ],
)  # fmt: skip
def test_a_document_is_written_in_full(schema, text):
    assert shortest_document(schema, "s") == text


def test_a_bound_that_no_number_reaches_is_refused():
    with pytest.raises(ConfigError, match="no document can meet"):
        shortest_document({"type": "number", "minimum": float("inf")}, "s")
