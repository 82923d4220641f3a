"""Replies that are held to a JSON schema while they are decoded: which tokens may come next, by `llguidance`.

The constraint begins at the answer, behind `<|think_end|>`; a thinking budget of 0 makes that the first token. While
the model thinks every token may come but those that end the reply. The answer is a line break, as in the chat template,
then a document of the schema as `json.dumps` separates it (no free white space, of which a weak model writes without
end), a second line break if the model likes, and the end.

The masked logits are drawn from as any others, and the log-probability of a token is that under the mask: the model's
distribution over what the schema allows at that point.
"""

import copy
import functools
from typing import Any

import numpy as np
from jsonschema.protocols import Validator
from llguidance import LLMatcher, LLTokenizer
from llguidance.tiktoken import lltokenizer_from_encoding

from common.errors import ConfigError
from data.json_schema import schema_validator, shortest_document
from data.tokenizer import Tokenizer
from model.decoding.span_grammar import SpanGrammar, document_grammar, has_spans

WORD = 32  # tokens whose bits share a word of a mask
EVERY_TOKEN = 2**WORD - 1


class MaskFailed(RuntimeError):
    """A reply cannot go on: its grammar has grown past the library's limits."""


class Constraint:
    """A schema as a grammar over the tokens of a tokenizer; compiled once, begun for each reply.

    least_tokens: what the thinking's end, the shortest document that the schema may allow, and the reply's end take.
    validator: checks a document against the schema. Raises ConfigError, which begins with `name`, for a schema that is
    none, that no document can meet, or that uses what the grammar does not know (`not`, `uniqueItems`, remote `$ref`).
    """

    def __init__(self, tokenizer: Tokenizer, schema: Any, name: str = "schema") -> None:
        self.validator: Validator = schema_validator(schema, name)
        shortest = shortest_document(schema, name)
        self.least_tokens = len(tokenizer.encode(f"\n{shortest}")) + 2
        self._think_end = tokenizer.think_end
        self._ends = (tokenizer.im_end, tokenizer.end_of_text)
        self._vocabulary, self._schema = _vocabulary_of(tokenizer), schema
        self._matcher = self._compiled(document_grammar(schema))
        if self._matcher.is_error():
            raise ConfigError(f"{name}: cannot be met, or not be held to while decoding: {_reason(self._matcher)}")
        self._text: str | None = None  # that marked strings are parts of
        self.unheld = tuple(sorted(SpanGrammar(schema, "").unheld))

    def within(self, text: str) -> "Constraint | None":
        """This constraint for replies about a text: strings that the schema marks with `x-span` are parts of it.

        None where no document can be held to the text, for one that is shorter than a string must be. `unheld` has the
        places in the schema whose marked strings are left to be checked.
        """
        if not has_spans(self._schema, self._schema):
            return self
        if SpanGrammar(self._schema, text).grammar is None:
            return None
        held = copy.copy(self)
        held._text = text
        return held

    def begin(self) -> "ReplyMask":
        """The mask of a reply from its first token on."""
        matcher = self._matcher.deep_copy()
        if self._text is not None and (grammar := SpanGrammar(self._schema, self._text).grammar):
            # Compiled here because a matcher of every waiting text would be held in memory.
            matcher = self._compiled(grammar)
        return ReplyMask(matcher, self._think_end, self._ends)

    def _compiled(self, grammar: str) -> LLMatcher:
        return LLMatcher(self._vocabulary, LLMatcher.grammar_from_lark(grammar), log_level=0)


class ReplyMask:
    """Which tokens may come next in one reply (`model.decoding.sampling.only_allowed`)."""

    def __init__(self, matcher: LLMatcher, think_end: int, ends: tuple[int, ...]) -> None:
        self._matcher, self._think_end, self._ends = matcher, think_end, ends
        self._thinking = True

    def write(self, words_W: np.ndarray) -> None:
        """Write the mask of the next token into a row of uint32. Raises `MaskFailed`."""
        if self._thinking:
            words_W[:] = EVERY_TOKEN
            for end in self._ends:
                words_W[end // WORD] &= np.uint32(EVERY_TOKEN - (1 << end % WORD))
            return
        allowed = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)
        words_W[: len(allowed)] = allowed
        words_W[len(allowed) :] = 0
        if self._matcher.is_error():
            raise MaskFailed(f"the reply cannot be held to its schema any further: {_reason(self._matcher)}")

    def accept(self, token: int) -> None:
        """Go on with the token that was drawn; what a grammar has against one shows at the next `write`."""
        if self._thinking:
            self._thinking = token != self._think_end
        else:
            self._matcher.consume_token(token)


def mask_words(vocabulary: int) -> int:
    """Words of a mask over so many tokens."""
    return -(-vocabulary // WORD)


def _reason(matcher: LLMatcher) -> str:
    """What the library has against a grammar, without the place in a text that nobody wrote."""
    return matcher.get_error().partition("JSON schema: ")[2].split("\n")[0] or matcher.get_error().split("\n")[0]


@functools.lru_cache(maxsize=4)
def _vocabulary_of(tokenizer: Tokenizer) -> LLTokenizer:
    """The library's trie of a vocabulary, built once per process (0.7 s for the whole one)."""
    ends = [tokenizer.im_end, tokenizer.end_of_text]
    return lltokenizer_from_encoding(tokenizer.encoding, n_vocab=tokenizer.vocabulary, eos_token=ends)
