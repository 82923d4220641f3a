"""The shortest document of a schema, which any client of a server may send."""

import pytest

from common.errors import ConfigError
from data import json_schema
from data.json_schema import LONGEST_BOUND, shortest_document


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
