"""A grammar for a JSON schema in which strings marked with `x-span` can only be parts of a given text.

`llguidance` compiles a schema as a whole, and parts of a text with a separate operator (`substring_chunks`). So the
objects, arrays and alternatives that contain a marked string are written here as rules in its dialect of Lark, and
everything else is left to its schema compiler. The text is escaped as in a JSON string, one chunk per character, so
that no escape sequence is split.
"""

import json
from collections.abc import Sequence
from typing import Any

from nautile.data.json_schema import ITEM_SEPARATOR, KEY_SEPARATOR, SPAN, Schema, resolve_ref, with_parts

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
}  # keywords of each type that the rules here can express


def document_grammar(schema: Schema) -> str:
    """The grammar of an answer: a document of the schema, between the line breaks of the chat template."""
    return f'start: "\\n" document "\\n"?\ndocument: {_json_rule(schema, schema)}\n'


class SpanGrammar:
    """The grammar of an answer whose marked strings are parts of `text`.

    grammar: the text of the grammar; None if no document can satisfy it. unconstrained: JSON pointers to the parts of
    the schema whose marked strings the grammar does not constrain, because the rules here cannot express a keyword. An
    object with marked strings gets only the members that the schema names.
    """

    def __init__(self, schema: Schema, text: str) -> None:
        self._root, self._text = schema, text
        self._lines: list[str] = []
        self._spans: dict[tuple[int, int | None], str] = {}
        self._refs: dict[str, str | None] = {}
        self.unconstrained: list[str] = []
        document = self._node(schema, "")
        self.grammar = None if document is None else self._grammar_text(document)

    def _grammar_text(self, document: str) -> str:
        lines = [f'start: "\\n" {document} "\\n"?', *self._lines]
        if self._spans:
            # UTF-8 cannot spell half a surrogate pair. A zero byte, which no JSON string holds, is in no part.
            text = "".join("\0" if "\ud800" <= character <= "\udfff" else character for character in self._text)
            chunks = [character if character == "\0" else _literal(character)[1:-1] for character in text]
            lines.append(f"TEXT: %regex {json.dumps({'substring_chunks': chunks}, ensure_ascii=False)}")
        for (least, most), name in self._spans.items():
            lines.append(f'{name}: "\\"" (TEXT & {name}_LENGTH) "\\""')
            lines.append(f"{name}_LENGTH: ({CHARACTER}){{{least},{'' if most is None else most}}}")
        return "\n".join(lines) + "\n"

    def _rule(self, body: str) -> str:
        """Add a rule and return its name."""
        name = f"r{len(self._lines)}"
        self._lines.append(f"{name}: {body}")
        return name

    def _node(self, schema: Any, path: str) -> str | None:
        """The name of the rule for a part of the schema; None if no value can meet it."""
        # Without marked strings the library's compiler can have it, with every keyword that it knows.
        if not has_spans(schema, self._root):
            return self._rule(_json_rule(schema, self._root))
        keywords = schema.keys() - IGNORED
        kinds = schema.get("type")
        if keywords == {"$ref"} and schema["$ref"].startswith(tuple(f"#/{name}/" for name in DEFINITIONS)):
            return self._ref(schema["$ref"])
        # Of `oneOf` exactly one alternative may hold: a document that meets several is left to the caller's check.
        if len(keywords) == 1 and (name := next(iter(keywords))) in ("anyOf", "oneOf"):
            return self._choice([self._node(part, f"{path}/{name}/{i}") for i, part in enumerate(schema[name])])
        if keywords == {"allOf"} and len(schema["allOf"]) == 1:
            return self._node(schema["allOf"][0], f"{path}/allOf/0")
        # A marked string with a list of values: those that are in the text are possible.
        if "enum" in keywords and schema.get(SPAN) is True:
            possible = [value for value in schema["enum"] if not isinstance(value, str) or value in self._text]
            return self._rule(_json_rule({**schema, "enum": possible}, self._root)) if possible else None
        # Several types are alternatives, one rule for each.
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
        # A keyword that these rules do not know: the structure is enforced, and the caller checks the strings.
        self.unconstrained.append(path or "/")
        return self._rule(_json_rule(schema, self._root))

    def _has_named_members(self, schema: Schema) -> bool:
        """Whether all required members are named, and members that are not named cannot have marked strings."""
        others = schema.get("additionalProperties", True)
        named = set(schema.get("required", ())) <= schema.get("properties", {}).keys()
        return named and not has_spans(others, self._root)

    def _span(self, least: int, most: int | None) -> str | None:
        if least > len(self._text) or (most is not None and most < least):
            return None
        if most == 0:
            return self._rule(_literal('""'))
        return self._spans.setdefault((least, most), f"SPAN{len(self._spans)}")

    def _choice(self, parts: Sequence[str | None]) -> str | None:
        possible = [part for part in parts if part is not None]
        return self._rule(" | ".join(possible)) if possible else None

    def _array(self, schema: Schema, path: str) -> str | None:
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        item = self._node(schema.get("items", True), f"{path}/items")
        if item is None or most == 0:
            return None if least else self._rule('"[]"')
        further = f"({_literal(ITEM_SEPARATOR)} {item}){{{max(0, least - 1)},{'' if most is None else most - 1}}}"
        items = item if most == 1 else f"{item} {further}"  # the dialect has no {0,0}
        return self._rule(f'"[" {items} "]"' if least else f'"[" ({items})? "]"')

    def _object(self, schema: Schema, path: str) -> str | None:
        """Members in the order of the schema, built from the last to the first.

        Two rules for the remaining members: `first` if no member precedes them, `following` if one does, which starts
        with a separator.
        """
        first: str | None = self._rule('""')
        following: str | None = first
        for name, part in reversed(schema.get("properties", {}).items()):
            value = self._node(part, f"{path}/properties/{name.replace('~', '~0').replace('/', '~1')}")
            required = name in schema.get("required", ())
            key = json.dumps(name, ensure_ascii=False) + KEY_SEPARATOR
            if value is None and required:
                return None
            if value is None:
                continue
            member, after = (
                f"{_literal(key)} {value} {following}",
                f"{_literal(ITEM_SEPARATOR + key)} {value} {following}",
            )
            first = self._rule(member if required else f"{member} | {first}")
            following = self._rule(after if required else f"{after} | {following}")
        return self._rule(f'"{{" {first} "}}"')

    def _ref(self, ref: str) -> str | None:
        """The rule of a definition, which may be recursive."""
        if ref not in self._refs:
            name = f"d{len(self._refs)}"
            self._refs[ref] = name
            target = self._node(resolve_ref(ref, self._root), ref[1:])
            # If no value can meet the definition, only its own rules refer to it, and nothing reaches them.
            self._lines.append(f"{name}: {target or _literal('')}")
            self._refs[ref] = name if target else None
        return self._refs[ref]


def has_spans(schema: Any, root: Schema) -> bool:
    """Whether a part of a schema, or a definition that it refers to, has strings marked with `x-span`."""
    visited: set[str] = set()

    def marked(part: Any) -> bool:
        if not isinstance(part, dict):
            return False
        if part.get(SPAN) is True:
            return True
        children: list[Any] = []
        with_parts({name: value for name, value in part.items() if name not in DEFINITIONS}, children.append)
        if isinstance(ref := part.get("$ref"), str) and ref not in visited:
            visited.add(ref)
            children.append(resolve_ref(ref, root))
        return any(marked(child) for child in children)

    return marked(schema)


def _json_rule(schema: Any, root: Schema) -> str:
    """A rule body that leaves a part of a schema to the library's compiler, with the definitions of the root."""
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    definitions = {name: root[name] for name in DEFINITIONS if name in root}
    if '"$ref"' in json.dumps(schema):
        schema = {**definitions, **schema}
    return f"%json {json.dumps({**schema, 'x-guidance': STYLE})}"


def _literal(words: str) -> str:
    """Quote a literal for the grammar."""
    return json.dumps(words, ensure_ascii=False)
