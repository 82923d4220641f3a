"""JSON schemas of structured replies: validate a schema, validate documents against it, and find its shortest document.

A `$ref` may only point into the schema itself; `model.decoding.constrained` rejects other references before anything
could be fetched.
"""

import contextlib
import copy
import functools
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from decimal import Decimal
from typing import Any, NamedTuple
from urllib.parse import unquote

import jsonschema
from jsonschema.protocols import Validator

from nautile.common.errors import ConfigError
from nautile.common.files import distinct_members, refuse_constant

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
MOST_STEPS = 20_000  # of checking a document, each a keyword of a part of the schema: 0.7 s
_MOST_VISITS = 100_000  # of parts of a schema, in all rounds: half a second
_ENDLESS = 10**12  # a size or a cost at which it no longer matters how large it is
_RUN = "a" * 64
_BY_NAME = {"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"}
_Check = Callable[..., Iterable[jsonschema.ValidationError] | None]  # of one keyword


class TooManySteps(RuntimeError):
    """Raised where checking a document by a schema takes too long."""


def schema_validator(schema: Any, name: str) -> Validator:
    """The validator for `schema` (Draft 2020-12, or the draft that `$schema` names).

    Raises `ConfigError`, beginning with `name`, if it is not a valid schema; the message names the faulty keyword.
    """
    if schema is False:
        raise ConfigError(f"{name}: the schema `false` allows no document at all")
    if not isinstance(schema, dict):
        raise ConfigError(f"{name}: a JSON schema is an object, not {type(schema).__name__}")
    if not isinstance(schema.get("$schema", ""), str):
        raise ConfigError(f"{name}: not a JSON schema: $schema: is not a text")
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        kind.check_schema(schema, format_checker=kind.FORMAT_CHECKER)
    except jsonschema.SchemaError as error:
        where = "/".join(map(str, error.absolute_path)) or "the schema"
        raise ConfigError(f"{name}: not a JSON schema: {where}: {error.message[:200]}") from None
    except RecursionError:
        raise ConfigError(f"{name}: the schema is nested too deep") from None
    return kind(schema, format_checker=kind.FORMAT_CHECKER)


def parse_document(text: str) -> Any:
    """The value of a JSON text, strictly. Raises `ValueError` for NaN, infinite numbers and members of one name."""
    return json.loads(text, parse_constant=refuse_constant, parse_float=_finite, object_pairs_hook=distinct_members)


def violation(validator: Validator, value: Any) -> str | None:
    """The most telling way in which a value breaks the schema, after the JSON pointer to its place; None if it fits."""
    error = jsonschema.exceptions.best_match(validator.iter_errors(value))
    return None if error is None else f"{pointer_to(error) or '/'}: {error.message[:200]}"


def pointer_to(error: jsonschema.ValidationError) -> str:
    return "".join(f"/{str(step).replace('~', '~0').replace('/', '~1')}" for step in error.absolute_path)


def shortest_document(schema: Any, name: str, count: Callable[[str], int] = len) -> str:
    """A JSON text that costs no more than any document that meets the schema: a bound on the length of a reply.

    `count`: the cost of a text, such as its number of tokens; that of a document is the sum over its parts. The text
    need not meet the schema itself, because keywords that do not bound a length (pattern, format) are ignored. It is
    cut after `LONGEST_BOUND` characters. Raises `ConfigError` if no finite document can meet the schema, such as an
    object that must contain another of its kind, and for a schema of too many parts.
    """
    try:
        document = _Shortest(schema, name, count).search()
    except RecursionError:
        raise ConfigError(f"{name}: the schema is nested too deep") from None
    if document is None:
        raise ConfigError(
            f"{name}: no document can meet the schema: a part of it allows nothing, or must contain itself"
        )
    return document.text(LONGEST_BOUND)


def entity_schema(labels: Sequence[str]) -> Schema:
    """The schema of the reply of a checkpoint tuned on entities (see `uses.labelled.rows.entity_json`)."""
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


def inclusive_bounds(schema: Any) -> Any:
    """A copy of the schema whose exclusive bounds of numbers are inclusive ones just inside them.

    `llguidance` lets an exclusive bound itself through. Of integers nothing is lost; of other numbers those between the
    bound and its neighbour, which has some six decimals more.
    """
    if not isinstance(schema, dict):
        return schema
    parts = with_parts(schema, inclusive_bounds)
    if not parts.keys() & {"exclusiveMinimum", "exclusiveMaximum"}:
        return parts
    kinds = schema.get("type")
    is_whole = kinds == "integer" or (isinstance(kinds, list) and "integer" in kinds and "number" not in kinds)
    ends = _ends(schema)
    width = math.inf
    if ends[0] and ends[1]:
        with contextlib.suppress(OverflowError):  # of an integer that no float holds
            width = float(ends[1][0] - ends[0][0])
    for (name, direction), end in zip((("minimum", 1), ("maximum", -1)), ends, strict=True):
        parts.pop(f"exclusive{name.capitalize()}", None)
        if end is not None:
            value, is_exclusive = end
            parts[name] = _inside(value, direction, width, is_whole) if is_exclusive else value
    return parts


def bounded_validator(schema: Any, name: str) -> Validator:
    """A validator for a schema from outside: without its patterns, and with at most `MOST_STEPS` steps.

    Python's `re` may take exponential time for a pattern. Without them the schema is wider, so of alternatives of which
    exactly one must hold any may. More steps raise `TooManySteps`: alternatives that contain each other can take any
    number. Use it for one document.
    """
    validator, steps = schema_validator(schema, name), itertools.count()

    def counted(check: _Check) -> _Check:
        def keyword(
            validator: Validator, value: Any, instance: Any, schema: Any
        ) -> Iterator[jsonschema.ValidationError]:
            if next(steps) >= MOST_STEPS:
                raise TooManySteps(f"{name}: takes over {MOST_STEPS} steps to check: simplify it")
            yield from check(validator, value, instance, schema) or ()

        return keyword

    # In the checks and not in a copy of the schema: a reference may make a schema of any part of it.
    known: dict[str, _Check] = {**validator.VALIDATORS}
    checks = {
        **{keyword: counted(check) for keyword, check in known.items()},
        **dict.fromkeys(("pattern", "patternProperties", "unevaluatedProperties"), lambda *_: ()),
        "additionalProperties": lambda *parts: (
            () if "patternProperties" in parts[-1] else counted(known["additionalProperties"])(*parts)
        ),
        "oneOf": counted(known.get("anyOf", lambda *_: ())),
    }
    kind: Any = jsonschema.validators.extend(type(validator), checks)
    # A part of the schema may name another draft, whose validator would count nothing.
    kind.evolve = _same_kind
    bounded: Validator = kind(schema, format_checker=validator.format_checker)
    return bounded


def _same_kind(validator: Any, **changes: Any) -> Any:
    """`evolve` of a validator, which would choose another kind for a part of the schema that names its draft."""
    part = copy.copy(validator)
    for name, value in changes.items():
        setattr(part, name, value)
    return part


def with_spans(schema: Any) -> Any:
    """A copy of the schema with `x-span` set on every string that is neither an enumeration nor a constant."""
    if not isinstance(schema, dict):
        return schema
    parts = with_parts(schema, with_spans)
    kinds = schema.get("type")
    if (kinds == "string" or (isinstance(kinds, list) and "string" in kinds)) and not schema.keys() & {"enum", "const"}:
        parts[SPAN] = True
    return parts


class _Document(NamedTuple):
    """A JSON text that is not written out, because it may have any length: its parts in order, `times` over.

    Parts are shared: where each definition contains the next one twice, the text has 2^n characters and this n parts.
    """

    parts: "tuple[str | _Document, ...]"
    times: int
    size: int  # characters, up to `_ENDLESS`
    cost: int  # the sum of the parts' costs, up to `_ENDLESS`

    def text(self, limit: int) -> str:
        """The first `limit` characters."""
        pieces: list[str] = []
        # The parts to write and how often, the next one last. A loop, because definitions may be a thousand deep.
        waiting: list[tuple[str | _Document, int]] = [(self, 1)]
        while waiting and limit > 0:
            part, times = waiting.pop()
            if isinstance(part, str):
                pieces.append((part * min(times, limit // len(part) + 1))[:limit] if part else "")
                limit -= len(pieces[-1])
            elif part.size and times:
                waiting.append((part, times - 1))
                waiting += [(piece, 1) for piece in reversed(part.parts)] if part.times == 1 else _repeated(part)
        return "".join(pieces)


def _repeated(document: _Document) -> "list[tuple[str | _Document, int]]":
    """What to write for a document of several repetitions: a text at once, anything else one repetition at a time."""
    if len(document.parts) == 1:
        return [(document.parts[0], document.times)]
    return [(_Document(document.parts, 1, document.size, document.cost), document.times)]


class _Shortest:
    """The search for the cheapest document of one schema."""

    def __init__(self, root: Any, name: str, count: Callable[[str], int]) -> None:
        self._root, self._name, self._visits = root, name, 0
        self._cost_of = functools.cache(count)
        # By reference. All begin as impossible; each round derives documents from those before, until none becomes
        # cheaper. Following every path instead would take forever for a dozen kinds that contain each other.
        self._documents: dict[str, _Document | None] = {}

    def search(self) -> _Document | None:
        is_changed = True
        while is_changed:
            known_refs, is_changed = len(self._documents), False
            document = self._of(self._root)
            # The last one found first: of a chain of definitions it is the one that the others need.
            for ref, known in reversed(list(self._documents.items())):
                cheapest = self._of(resolve_ref(ref, self._root))
                if cheapest is not None and (known is None or cheapest.cost < known.cost):
                    self._documents[ref], is_changed = cheapest, True
            is_changed |= len(self._documents) > known_refs
        return document

    def _joined(self, *parts: str | _Document, times: int = 1) -> _Document:
        """The document of these parts, `times` over."""
        sizes = sum(len(part) if isinstance(part, str) else part.size for part in parts)
        costs = sum(self._cost_of(part) if isinstance(part, str) else part.cost for part in parts)
        return _Document(parts, times, min(times * sizes, _ENDLESS), min(times * costs, _ENDLESS))

    def _value(self, value: Any) -> _Document:
        return self._joined(json.dumps(value, ensure_ascii=False))

    def _of(self, schema: Any) -> _Document | None:
        """The cheapest document of a subschema; None if no finite one is known."""
        self._visits += 1
        if self._visits > _MOST_VISITS:
            raise ConfigError(f"{self._name}: the schema has too many parts that contain each other: simplify it")
        if not isinstance(schema, dict):
            return None if schema is False else self._joined("0")
        # A document must satisfy every keyword, so the most expensive of the lower bounds holds.
        bounds: list[_Document | None] = []
        if "const" in schema:
            bounds.append(self._value(schema["const"]))
        if "enum" in schema:
            bounds.append(_least([self._value(value) for value in schema["enum"]]))
        if (ref := schema.get("$ref")) is not None:
            bounds.append(self._documents.setdefault(ref, None))
        for name in ("anyOf", "oneOf"):
            if name in schema:
                bounds.append(_least([self._of(part) for part in schema[name]]))
        bounds += [*(self._of(part) for part in schema.get("allOf", [])), self._of_types(schema)]
        known = [bound for bound in bounds if bound is not None]
        return None if None in bounds else max(known, key=lambda document: document.cost)

    def _of_types(self, schema: Schema) -> _Document | None:
        """The cheapest document that the keyword `type` allows."""
        if (types := schema.get("type")) is None:
            return self._joined("0")  # any type will do
        bounds: list[_Document | None] = []
        for kind in [types] if isinstance(types, str) else types:
            if kind == "string":
                whole, rest = divmod(int(schema.get("minLength", 0)), len(_RUN))
                letters = (self._joined(_RUN, times=whole), _RUN[:rest])
                bounds.append(self._joined('"', *letters, '"') if whole or rest else self._joined('""'))
            elif kind in ("integer", "number"):
                bounds.append(None if (number := _number(schema)) is None else self._joined(number))
            elif kind == "array":
                bounds.append(self._array(schema))
            elif kind == "object":
                bounds.append(self._object(schema))
            else:
                bounds.append(self._joined("null" if kind == "null" else "true"))
        return _least(bounds)

    def _array(self, schema: Schema) -> _Document | None:
        """The cheapest array: `minItems` items, each the cheapest that its schema allows."""
        least, prefix = int(schema.get("minItems", 0)), schema.get("prefixItems", [])
        if not least:
            return self._joined("[]")
        parts: list[str | _Document] = []
        for part in prefix[:least]:
            if (item := self._of(part)) is None:
                return None
            parts += [item, ITEM_SEPARATOR]
        # All items behind the prefix have the same schema.
        if further := least - len(prefix[:least]):
            if (item := self._of(schema.get("items", True))) is None:
                return None
            parts += [self._joined(item, ITEM_SEPARATOR, times=further - 1), item]
        else:
            parts.pop()
        return self._joined("[", *parts, "]")

    def _object(self, schema: Schema) -> _Document | None:
        """The cheapest object: its required members, each with the cheapest value that its schema allows."""
        named = schema.get("properties", {})
        parts: list[str | _Document] = []
        for name in schema.get("required", []):
            part = named.get(name, schema.get("additionalProperties", True))
            if "patternProperties" in schema and name not in named:
                part = True  # a pattern may allow any value; a bound that is too low is still valid
            if (value := self._of(part)) is None:
                return None
            parts += [ITEM_SEPARATOR] if parts else []
            parts += [json.dumps(name, ensure_ascii=False) + KEY_SEPARATOR, value]
        return self._joined("{", *parts, "}") if parts else self._joined("{}")


def _number(schema: Schema) -> str | None:
    """The allowed number nearest to 0, which has the fewest digits; None if every number is over a bound."""
    low, high = _ends(schema)
    lowest, highest = low[0] if low else -math.inf, high[0] if high else math.inf
    if lowest <= 0 <= highest:
        return "0"
    if lowest == math.inf or highest == -math.inf:
        return None
    return str(int(lowest) if lowest > 0 else -int(-highest))


def _finite(digits: str) -> float:
    if not math.isfinite(value := float(digits)):
        raise ValueError(f"{digits[:20]} is too large a number")
    return value


def _ends(schema: Schema) -> tuple[tuple[float, bool] | None, tuple[float, bool] | None]:
    """The narrowest lower and upper bound of the numbers, each as `_end` gives it."""
    return _end(schema, "minimum", "exclusiveMinimum", max), _end(schema, "maximum", "exclusiveMaximum", min)


def _end(schema: Schema, inclusive: str, exclusive: str, narrower: Any) -> tuple[float, bool] | None:
    """The narrower of two bounds on one side, and whether it is exclusive; None if there is none."""
    ends: list[tuple[float, bool]] = []
    if isinstance(schema.get(inclusive), int | float):
        # In Draft 4 the exclusive bound says whether this one is.
        ends.append((schema[inclusive], schema.get(exclusive) is True))
    if isinstance(value := schema.get(exclusive), int | float) and not isinstance(value, bool):
        ends.append((value, True))
    if not ends:
        return None
    value = narrower(value for value, _ in ends)
    return value, (value, True) in ends


def _inside(bound: float, direction: int, width: float, is_whole: bool) -> float:
    """The number next to a bound, in a direction, to some six decimals more than the bound has, or to a float's end."""
    if is_whole or abs(bound) >= 2**53:
        if isinstance(bound, float) and not math.isfinite(bound):
            return bound
        return math.floor(bound) + 1 if direction > 0 else math.ceil(bound) - 1
    exact = Decimal(repr(bound))
    step = Decimal(10) ** (min(0, int(exact.as_tuple().exponent)) - 6)
    while step * 1000 > width:
        step /= 10
    value = float(exact + direction * step)
    return value if (value - bound) * direction > 0 else math.nextafter(bound, direction * math.inf)


def _least(bounds: Sequence[_Document | None]) -> _Document | None:
    """The cheapest of several alternatives; None if none is possible."""
    return min((bound for bound in bounds if bound is not None), key=lambda document: document.cost, default=None)


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
