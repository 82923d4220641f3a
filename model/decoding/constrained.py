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
from decimal import Decimal
from typing import Any

import numpy as np
from jsonschema.protocols import Validator
from llguidance import LLMatcher, LLTokenizer
from llguidance.tiktoken import lltokenizer_from_encoding

from nautile.common.errors import ConfigError
from nautile.common.text import first_line
from nautile.data.json_schema import (
    TooManySteps,
    bounded_validator,
    inclusive_bounds,
    parse_document,
    schema_validator,
    shortest_document,
    violation,
)
from nautile.data.tokenizer import Tokenizer
from nautile.model.decoding.span_grammar import SpanGrammar, document_grammar, has_spans

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
