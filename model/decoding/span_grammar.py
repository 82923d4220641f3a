"""A JSON schema as a grammar in which the strings that it marks with `x-span` can only be parts of a text.

`llguidance` compiles a schema as a whole, and has parts of a text as an operator of its own (`substring_chunks`). So
the objects, lists and alternatives above a marked string are written here as rules of its dialect of Lark, and
everything without such strings is left to its compiler of schemas. A part of a text is written as in a JSON string,
each character with its escape being a chunk that is taken whole.
"""

import json
from collections.abc import Sequence
from typing import Any

from data.json_schema import ITEM_SEPARATOR, KEY_SEPARATOR, SPAN, Schema, resolved, with_parts

STYLE = {"item_separator": ITEM_SEPARATOR, "key_separator": KEY_SEPARATOR, "whitespace_flexible": False}
CHARACTER = r'/[^"\\\x00-\x1f]|\\["\\\/bfnrt]|\\u[0-9a-fA-F]{4}/'  # of a JSON string
DEFINITIONS = ("$defs", "definitions")
IGNORED = {
    *DEFINITIONS, SPAN, "$schema", "$id", "$comment", "title", "description", "default", "examples", "deprecated",
    "readOnly", "writeOnly",
}  # fmt: skip
KEYWORDS = {
    "string": {"minLength", "maxLength"},
    "array": {"items", "minItems", "maxItems"},
    "object": {"properties", "required", "additionalProperties"},
}  # what the rules of a type express


def document_grammar(schema: Schema) -> str:
    """The grammar of an answer: a document of the schema between the line breaks of the chat template."""
    return f'start: "\\n" document "\\n"?\ndocument: {_compiled(schema, schema)}\n'


class SpanGrammar:
    """The grammar of an answer whose marked strings are parts of `text`.

    grammar: None where no document of the schema can hold to the text. unheld: JSON pointers of the parts of the schema
    whose marked strings are not held to it (those under a keyword that the rules do not express), and only checked.
    An object that contains marked strings has no members but those that the schema names.
    """

    def __init__(self, schema: Schema, text: str) -> None:
        self._root, self._text = schema, text
        self._lines: list[str] = []
        self._spans: dict[tuple[int, int | None], str] = {}
        self._refs: dict[str, str | None] = {}
        self.unheld: list[str] = []
        document = self._node(schema, "")
        self.grammar = None if document is None else self._written(document)

    def _written(self, document: str) -> str:
        lines = [f'start: "\\n" {document} "\\n"?', *self._lines]
        if self._spans:
            chunks = [json.dumps(character, ensure_ascii=False)[1:-1] for character in self._text]
            lines.append(f"TEXT: %regex {json.dumps({'substring_chunks': chunks}, ensure_ascii=False)}")
        for (least, most), name in self._spans.items():
            lines.append(f'{name}: "\\"" (TEXT & {name}_LENGTH) "\\""')
            lines.append(f"{name}_LENGTH: ({CHARACTER}){{{least},{'' if most is None else most}}}")
        return "\n".join(lines) + "\n"

    def _rule(self, body: str) -> str:
        name = f"r{len(self._lines)}"
        self._lines.append(f"{name}: {body}")
        return name

    def _node(self, schema: Any, path: str) -> str | None:
        """The rule of a part of the schema; None where nothing meets it."""
        if not has_spans(schema, self._root):
            return self._rule(_compiled(schema, self._root))
        keywords = schema.keys() - IGNORED
        kinds = schema.get("type")
        if keywords == {"$ref"} and schema["$ref"].startswith(tuple(f"#/{name}/" for name in DEFINITIONS)):
            return self._ref(schema["$ref"])
        if keywords == {"anyOf"}:
            return self._choice([self._node(part, f"{path}/anyOf/{i}") for i, part in enumerate(schema["anyOf"])])
        if "enum" in keywords and schema.get(SPAN) is True:
            kept = [value for value in schema["enum"] if not isinstance(value, str) or value in self._text]
            return self._rule(_compiled({**schema, "enum": kept}, self._root)) if kept else None
        if isinstance(kinds, list) and keywords <= {"type"}.union(*KEYWORDS.values()):
            return self._choice(
                [
                    self._node({**schema, "type": kind, SPAN: schema.get(SPAN) and kind == "string"}, path)
                    for kind in kinds
                ]
            )
        if isinstance(kinds, str) and keywords <= {"type", *KEYWORDS.get(kinds, ())}:
            match kinds:
                case "string":
                    return self._span(schema.get("minLength", 0), schema.get("maxLength"))
                case "array":
                    return self._array(schema, path)
                case "object" if self._has_named_members(schema):
                    return self._object(schema, path)
        self.unheld.append(path or "/")
        return self._rule(_compiled(schema, self._root))

    def _has_named_members(self, schema: Schema) -> bool:
        """Whether its required members are named, and none that is not named may have a marked string."""
        others = schema.get("additionalProperties", True)
        named = set(schema.get("required", ())) <= schema.get("properties", {}).keys()
        return named and not has_spans(others, self._root)

    def _span(self, least: int, most: int | None) -> str | None:
        if least > len(self._text) or (most is not None and most < least):
            return None
        if most == 0:
            return self._rule(_quoted('""'))
        return self._spans.setdefault((least, most), f"SPAN{len(self._spans)}")

    def _choice(self, parts: Sequence[str | None]) -> str | None:
        known = [part for part in parts if part is not None]
        return self._rule(" | ".join(known)) if known else None

    def _array(self, schema: Schema, path: str) -> str | None:
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        item = self._node(schema.get("items", True), f"{path}/items")
        if item is None or most == 0:
            return None if least else self._rule('"[]"')
        further = f"({_quoted(ITEM_SEPARATOR)} {item}){{{max(0, least - 1)},{'' if most is None else most - 1}}}"
        items = item if most == 1 else f"{item} {further}"  # the dialect has no {0,0}
        return self._rule(f'"[" {items} "]"' if least else f'"[" ({items})? "]"')

    def _object(self, schema: Schema, path: str) -> str | None:
        """Members in the order of the schema: what follows a member is a rule, with and without one before it."""
        first: str | None = self._rule('""')
        rest: str | None = first
        for name, part in reversed(schema.get("properties", {}).items()):
            value = self._node(part, f"{path}/properties/{name.replace('~', '~0').replace('/', '~1')}")
            required = name in schema.get("required", ())
            key = json.dumps(name, ensure_ascii=False) + KEY_SEPARATOR
            if value is None and required:
                return None
            if value is None:
                continue
            member, after = f"{_quoted(key)} {value} {rest}", f"{_quoted(ITEM_SEPARATOR + key)} {value} {rest}"
            first = self._rule(member if required else f"{member} | {first}")
            rest = self._rule(after if required else f"{after} | {rest}")
        return self._rule(f'"{{" {first} "}}"')

    def _ref(self, ref: str) -> str | None:
        """The rule of a definition, which may contain itself."""
        if ref not in self._refs:
            name = f"d{len(self._refs)}"
            self._refs[ref] = name
            target = self._node(resolved(ref, self._root), ref[1:])
            # What refers to a definition that nothing meets is a part of it, and not reached.
            self._lines.append(f"{name}: {target or _quoted('')}")
            self._refs[ref] = name if target else None
        return self._refs[ref]


def has_spans(schema: Any, root: Schema) -> bool:
    """Whether a part of a schema, or a definition that it refers to, marks strings that must stand in the text."""
    seen: set[str] = set()

    def marked(part: Any) -> bool:
        if not isinstance(part, dict):
            return False
        if part.get(SPAN) is True:
            return True
        children: list[Any] = []
        with_parts({name: value for name, value in part.items() if name not in DEFINITIONS}, children.append)
        if isinstance(ref := part.get("$ref"), str) and ref not in seen:
            seen.add(ref)
            children.append(resolved(ref, root))
        return any(marked(child) for child in children)

    return marked(schema)


def _compiled(schema: Any, root: Schema) -> str:
    """A part of a schema for the library's own compiler, with the definitions of the whole."""
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    definitions = {name: root[name] for name in DEFINITIONS if name in root}
    if '"$ref"' in json.dumps(schema):
        schema = {**definitions, **schema}
    return f"%json {json.dumps({**schema, 'x-guidance': STYLE})}"


def _quoted(words: str) -> str:
    """A literal of the grammar."""
    return json.dumps(words, ensure_ascii=False)
