"""JSON schemas of structured replies: validate a schema, validate documents against it, and find its shortest document.

A `$ref` may only point into the schema itself; `model.decoding.constrained` rejects other references before anything
could be fetched.
"""

import json
import math
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import unquote

import jsonschema
from jsonschema.protocols import Validator

from common.errors import ConfigError

Schema = dict[str, Any]
ITEM_SEPARATOR, KEY_SEPARATOR = ", ", ": "  # those of `json.dumps`
LONGEST_BOUND = 100_000  # characters: no model writes more, and a schema may ask for any number of items
SPAN = "x-span"  # true: the string must be a substring of the text that the document is extracted from
# Keywords whose value is a schema, a list of schemas, or an object of schemas by name.
_SCHEMAS = {
    *("items", "additionalProperties", "additionalItems", "contains", "not", "if", "then", "else", "propertyNames"),
    *("unevaluatedItems", "unevaluatedProperties"),
}
_LISTS = {"anyOf", "oneOf", "allOf", "prefixItems"}
_BY_NAME = {"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"}


def schema_validator(schema: Any, name: str) -> Validator:
    """The validator for `schema` (Draft 2020-12, or the draft that `$schema` names).

    Raises `ConfigError`, beginning with `name`, if it is not a valid schema; the message names the faulty keyword.
    """
    if schema is False:
        raise ConfigError(f"{name}: the schema `false` allows no document at all")
    if not isinstance(schema, dict):
        raise ConfigError(f"{name}: a JSON schema is an object, not {type(schema).__name__}")
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        kind.check_schema(schema, format_checker=kind.FORMAT_CHECKER)
    except jsonschema.SchemaError as error:
        where = "/".join(map(str, error.absolute_path)) or "the schema"
        raise ConfigError(f"{name}: not a JSON schema: {where}: {error.message[:200]}") from None
    except RecursionError:
        raise ConfigError(f"{name}: the schema is nested too deep") from None
    return kind(schema, format_checker=kind.FORMAT_CHECKER)


def shortest_document(schema: Any, name: str) -> str:
    """A JSON text no longer than any document that meets the schema: a lower bound on the length of a reply.

    The text need not meet the schema itself, because keywords that do not bound a length (pattern, format) are ignored.
    Raises `ConfigError` if no finite document can meet it, such as an object that must contain another of its kind.
    """
    # By reference. All begin as impossible; each round derives documents from those of the round before, until none
    # becomes shorter. Following every path instead would take forever for a dozen kinds that contain each other.
    documents: dict[str, str | None] = {}
    is_changed = True
    try:
        while is_changed:
            known_refs, is_changed = len(documents), False
            text = _shortest(schema, schema, documents)
            for ref, known_document in list(documents.items()):
                document = _shortest(resolve_ref(ref, schema), schema, documents)
                if document is not None and (known_document is None or len(document) < len(known_document)):
                    documents[ref], is_changed = document, True
            is_changed |= len(documents) > known_refs
    except RecursionError:
        raise ConfigError(f"{name}: the schema is nested too deep") from None
    if text is None:
        raise ConfigError(
            f"{name}: no document can meet the schema: a part of it allows nothing, or must contain itself"
        )
    return text


def entity_schema(labels: Sequence[str]) -> Schema:
    """The schema of the reply of a checkpoint tuned on entities (see `data.labelled.spans.entity_json`)."""
    label: Schema = {"enum": list(labels)} if labels else {"type": "string", "maxLength": 60}
    entity = {
        "type": "object",
        "properties": {"text": {"type": "string", "minLength": 1, SPAN: True}, "label": label},
        "required": ["text", "label"],
        "additionalProperties": False,
    }
    return {"type": "array", "items": entity}


def with_parts(schema: Schema, change: Callable[[Any], Any]) -> Schema:
    """A copy of the schema with `change` applied to each direct subschema."""
    changed: Schema = {}
    for name, value in schema.items():
        if name in _BY_NAME and isinstance(value, dict):
            changed[name] = {key: change(part) for key, part in value.items()}
        elif isinstance(value, list) and (name in _LISTS or name == "items"):
            changed[name] = [change(part) for part in value]
        else:
            changed[name] = change(value) if name in _SCHEMAS else value
    return changed


def with_spans(schema: Any) -> Any:
    """A copy of the schema with `x-span` set on every string that is neither an enumeration nor a constant."""
    if not isinstance(schema, dict):
        return schema
    parts = with_parts(schema, with_spans)
    kinds = schema.get("type")
    if (kinds == "string" or (isinstance(kinds, list) and "string" in kinds)) and not schema.keys() & {"enum", "const"}:
        parts[SPAN] = True
    return parts


def _shortest(schema: Any, root: Schema, documents: dict[str, str | None]) -> str | None:
    """The shortest text for a subschema; None if no finite document is known. `documents`: by reference, so far."""
    if not isinstance(schema, dict):
        return None if schema is False else "0"
    # A document must satisfy every keyword, so the longest of the lower bounds holds.
    bounds: list[str | None] = [_of_types(schema, root, documents)]
    if "const" in schema:
        bounds.append(json.dumps(schema["const"], ensure_ascii=False))
    if "enum" in schema:
        bounds.append(_least([json.dumps(value, ensure_ascii=False) for value in schema["enum"]]))
    if (ref := schema.get("$ref")) is not None:
        bounds.append(documents.setdefault(ref, None))
    for name in ("anyOf", "oneOf"):
        if name in schema:
            bounds.append(_least([_shortest(part, root, documents) for part in schema[name]]))
    bounds += [_shortest(part, root, documents) for part in schema.get("allOf", [])]
    return None if None in bounds else max((bound for bound in bounds if bound is not None), key=len)


def _of_types(schema: Schema, root: Schema, documents: dict[str, str | None]) -> str | None:
    """The shortest text that the keyword `type` allows."""
    if (types := schema.get("type")) is None:
        return "0"  # any type will do
    bounds: list[str | None] = []
    for kind in [types] if isinstance(types, str) else types:
        if kind == "string":
            bounds.append(json.dumps("a" * min(int(schema.get("minLength", 0)), LONGEST_BOUND)))
        elif kind in ("integer", "number"):
            bounds.append(_number(schema))
        elif kind == "array":
            bounds.append(_array(schema, root, documents))
        elif kind == "object":
            bounds.append(_object(schema, root, documents))
        else:
            bounds.append("null" if kind == "null" else "true")
    return _least(bounds)


def _number(schema: Schema) -> str:
    """The allowed number nearest to 0, which has the fewest digits."""
    lowest = max((schema[key] for key in ("minimum", "exclusiveMinimum") if key in schema), default=-math.inf)
    highest = min((schema[key] for key in ("maximum", "exclusiveMaximum") if key in schema), default=math.inf)
    if lowest <= 0 <= highest:
        return "0"
    return str(int(lowest) if lowest > 0 else -int(-highest))


def _array(schema: Schema, root: Schema, documents: dict[str, str | None]) -> str | None:
    """The shortest array: `minItems` items, each the shortest that its schema allows."""
    prefix_items, item_schema = schema.get("prefixItems", []), schema.get("items", True)
    items: list[str | None] = []
    length = 0
    for index in range(int(schema.get("minItems", 0))):
        if index > len(prefix_items) and items:
            items.append(items[-1])  # all items after the prefix have the same schema
        else:
            part = prefix_items[index] if index < len(prefix_items) else item_schema
            items.append(_shortest(part, root, documents))
        if items[-1] is None:
            return None
        length += len(items[-1]) + len(ITEM_SEPARATOR)
        if length > LONGEST_BOUND:
            break
    return f"[{ITEM_SEPARATOR.join(item for item in items if item is not None)}]"


def _object(schema: Schema, root: Schema, documents: dict[str, str | None]) -> str | None:
    """The shortest object: its required members, each with the shortest value that its schema allows."""
    members = []
    for name in schema.get("required", []):
        part = schema.get("properties", {}).get(name, schema.get("additionalProperties", True))
        if "patternProperties" in schema and name not in schema.get("properties", {}):
            part = True  # a pattern may allow any value; a bound that is too low is still valid
        if (value := _shortest(part, root, documents)) is None:
            return None
        members.append(f"{json.dumps(name, ensure_ascii=False)}{KEY_SEPARATOR}{value}")
    return f"{{{ITEM_SEPARATOR.join(members)}}}"


def _least(bounds: Sequence[str | None]) -> str | None:
    """The shortest of several alternatives; None if none is possible."""
    return min((bound for bound in bounds if bound is not None), key=len, default=None)


def resolve_ref(ref: str, root: Schema) -> Any:
    """The subschema of `root` that a JSON pointer names; True, the schema that allows everything, if there is none."""
    part: Any = root
    for step in unquote(ref).split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        try:
            part = part[int(key)] if isinstance(part, list) else part[key]
        except (KeyError, IndexError, ValueError, TypeError):
            return True
    return part
