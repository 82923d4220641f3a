"""Constrained decoding: replies that follow a JSON schema, by token masks from `llguidance`.

The constraint starts with the answer, after `<|think_end|>`; a thinking budget of 0 makes that the first token. While
the model thinks, every token is allowed except those that end the reply. The answer is a line break, as in the chat
template, then a document of the schema with the separators of `json.dumps` (no other white space, which a weak model
repeats without end), optionally a second line break, and the end.

Masked logits are sampled like any others, and the log-probability of a token is that under the mask: the model's
distribution over what the schema allows at that point.
"""

import copy
import functools
import json
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import numpy as np
from jsonschema.protocols import Validator
from llguidance import LLMatcher, LLTokenizer
from llguidance.tiktoken import lltokenizer_from_encoding

from nautile.common.errors import ConfigError
from nautile.common.text import first_line
from nautile.data.json_schema import (
    ITEM_SEPARATOR,
    KEY_SEPARATOR,
    SPAN,
    Schema,
    TooManySteps,
    bounded_validator,
    inclusive_bounds,
    parse_document,
    resolve_ref,
    schema_validator,
    shortest_document,
    violation,
    with_parts,
)
from nautile.data.tokenizer import Tokenizer

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


WORD = 32  # tokens per uint32 of a mask
EVERY_TOKEN = 2**WORD - 1
MOST_DIGITS, MOST_EXPONENT_DIGITS = 32, 2  # a float holds 17 digits, and up to 1e308
PROBED = 8  # tokens of a document whose masks are tried before a schema is accepted
LARGEST_SCHEMA = 120_000  # characters; what is larger takes seconds to compile


class MaskFailed(RuntimeError):
    """Raised when a reply cannot continue, because its grammar has exceeded the library's limits."""


class Constraint:
    """A JSON schema as a grammar over the tokens of a tokenizer: compiled once, with a `ReplyMask` for each reply.

    least_tokens: tokens for the end of thinking, a document that costs the fewest, and the end of the reply.
    validator: checks a document against the schema. Raises ConfigError, whose message starts with `name`, for an
    invalid schema, one that no document can meet, one with unsupported keywords (`not`, `uniqueItems`, remote `$ref`),
    and one that is too large to be enforced.
    """

    def __init__(self, tokenizer: Tokenizer, schema: Any, name: str = "schema") -> None:
        _refuse_unfit(schema, name)
        self._given, self._name = schema, name
        self.validator: Validator = schema_validator(schema, name)
        shortest = tokenizer.encode("\n" + shortest_document(schema, name, lambda text: len(tokenizer.encode(text))))
        self.least_tokens = len(shortest) + 2
        self._tokenizer, self._think_end = tokenizer, tokenizer.think_end
        self._ends = (tokenizer.im_end, tokenizer.end_of_text)
        self._vocabulary, self._schema = _vocabulary_of(tokenizer), inclusive_bounds(schema)
        self._matcher = self._compile(document_grammar(self._schema))
        # The library's limits are reached only when it computes masks: at the latest where a document may begin.
        probe = self._matcher.deep_copy()
        for token in shortest[:PROBED]:
            if probe.is_error():
                break
            probe.compute_bitmask()
            if not probe.try_consume_tokens([token]):
                break
        for matcher in (self._matcher, probe):
            if matcher.is_error():
                raise ConfigError(
                    f"{name}: no document can meet it, or it cannot be enforced while decoding: {_reason(matcher)}"
                )
        self._text: str | None = None  # the text whose parts marked strings must be

    def fault(self, document: str) -> str | None:
        """How a complete document breaks the schema, in bounded time, whoever wrote the schema; None if it meets it.

        Regular expressions are left to the grammar (`data.json_schema.bounded_validator`).
        """
        try:
            return violation(bounded_validator(self._given, self._name), parse_document(document))
        except (ValueError, TooManySteps) as error:
            return first_line(error)
        except RecursionError:
            return "is nested too deep to be checked"

    @functools.cached_property
    def unconstrained(self) -> tuple[str, ...]:
        """JSON pointers to parts of the schema whose marked strings the grammar cannot constrain, and a check must."""
        return tuple(sorted(SpanGrammar(self._schema, "").unconstrained))

    def within(self, text: str) -> "Constraint | None":
        """This constraint for replies about a text: strings marked with `x-span` in the schema must be parts of it.

        None if no document can satisfy that, as when the text is shorter than a string's minimum.
        """
        if not has_spans(self._schema, self._schema):
            return self
        if SpanGrammar(self._schema, text).grammar is None:
            return None
        constraint = copy.copy(self)
        constraint._text = text
        return constraint

    def begin(self) -> "ReplyMask":
        """A new `ReplyMask`, for a reply that starts at its first token."""
        matcher = self._matcher.deep_copy()
        if self._text is not None and (grammar := SpanGrammar(self._schema, self._text).grammar):
            # Compiled only now: waiting requests would each hold a matcher in memory.
            matcher = self._compile(grammar)
        return ReplyMask(matcher, self._think_end, self._ends, NumberEnd(self._tokenizer))

    def _compile(self, grammar: str) -> LLMatcher:
        return LLMatcher(self._vocabulary, LLMatcher.grammar_from_lark(grammar), log_level=0)


class ReplyMask:
    """The allowed next tokens of one reply, as masks for `model.decoding.sampling.only_allowed`."""

    def __init__(self, matcher: LLMatcher, think_end: int, ends: tuple[int, ...], number_end: "NumberEnd") -> None:
        self._matcher, self._think_end, self._ends, self._number_end = matcher, think_end, ends, number_end
        self._thinking = True

    def write(self, words_W: np.ndarray) -> None:
        """Write the mask of the next token into a row of uint32. Raises `MaskFailed` if the grammar has failed."""
        if self._thinking:
            words_W[:] = EVERY_TOKEN
            for end in self._ends:
                words_W[end // WORD] &= np.uint32(EVERY_TOKEN - (1 << end % WORD))
            return
        allowed = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)
        words_W[: len(allowed)] = allowed
        words_W[len(allowed) :] = 0
        self._number_end.apply(words_W)
        if self._matcher.is_error():
            raise MaskFailed(f"the grammar of the reply's schema has failed: {_reason(self._matcher)}")

    def accept(self, token: int) -> None:
        """Advance by the sampled token. An error of the grammar is raised by the next `write`."""
        if self._thinking:
            self._thinking = token != self._think_end
        else:
            self._matcher.consume_token(token)
            self._number_end.accept(token)


class NumberEnd:
    """Ends a number of a document after `MOST_DIGITS` digits: a schema bounds its value, not how long it is.

    A weak model otherwise goes on with digits to the end of its tokens. Where a schema demands more, more are allowed.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._in_string = self._is_escaped = self._in_exponent = False
        self._digits = 0  # of the number, or of its exponent, that the document ends with so far

    def accept(self, token: int) -> None:
        """Follow the document by one token."""
        for byte in self._tokenizer.decode_bytes([token], specials=False):
            if self._in_string:
                self._in_string = self._is_escaped or byte != ord('"')
                self._is_escaped = byte == ord("\\") and not self._is_escaped
            elif byte in b"0123456789":
                self._digits += 1
            elif byte in b"eE" and self._digits:
                self._in_exponent, self._digits = True, 1
            elif byte not in b".+-" or not self._digits:
                self._in_string, self._in_exponent, self._digits = byte == ord('"'), False, 0

    def apply(self, words_W: np.ndarray) -> None:
        """Take the tokens that continue a number out of a mask if it is long enough and something else may follow."""
        if self._digits < (MOST_EXPONENT_DIGITS + 1 if self._in_exponent else MOST_DIGITS):
            return
        continues_W = _continues_number(self._tokenizer)
        others_W = words_W.copy()
        others_W[: len(continues_W)] &= ~continues_W[: len(words_W)]
        if others_W.any():
            words_W[:] = others_W


@functools.lru_cache(maxsize=4)
def _continues_number(tokenizer: Tokenizer) -> np.ndarray:
    """The mask of the tokens that begin with what may follow a digit in a number."""
    words_W = np.zeros(mask_words(tokenizer.vocabulary), np.uint32)
    for token in range(tokenizer.config.ranks):
        if tokenizer.decode_bytes([token])[0] in b"0123456789.eE":
            words_W[token // WORD] |= np.uint32(1 << token % WORD)
    return words_W


def mask_words(vocabulary: int) -> int:
    """The number of uint32 words in a mask over `vocabulary` tokens."""
    return -(-vocabulary // WORD)


def _refuse_unfit(schema: Any, name: str) -> None:
    """Raise ConfigError for a schema of over `LARGEST_SCHEMA` characters, or with NaN or an integer that is rounded."""
    try:
        text = json.dumps(schema, allow_nan=False)
        if len(text) > LARGEST_SCHEMA:
            raise ConfigError(
                f"{name}: the schema has {len(text)} characters, and at most {LARGEST_SCHEMA} can be enforced"
            )
        json.loads(text, parse_int=_refuse_rounded)
    except RecursionError:
        raise ConfigError(f"{name}: the schema is nested too deep") from None
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from None


def _refuse_rounded(digits: str) -> int:
    """The integer of these digits. Raises ValueError if the library, which reads it as a float, would round it."""
    value = int(digits)
    if abs(value) >= 2**63 and (len(digits) > 300 or int(Decimal(repr(float(value)))) != value):
        raise ValueError(f"the integer {digits[:40]} has more digits than can be enforced")
    return value


def _reason(matcher: LLMatcher) -> str:
    """The library's error message, without the location in the generated grammar."""
    return matcher.get_error().partition("JSON schema: ")[2].split("\n")[0] or matcher.get_error().split("\n")[0]


@functools.lru_cache(maxsize=4)
def _vocabulary_of(tokenizer: Tokenizer) -> LLTokenizer:
    """The library's trie of a vocabulary, built once per process (0.7 s for the full vocabulary)."""
    ends = [tokenizer.im_end, tokenizer.end_of_text]
    return lltokenizer_from_encoding(tokenizer.encoding, n_vocab=tokenizer.vocabulary, eos_token=ends)
