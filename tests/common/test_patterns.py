"""Patterns behind literals: nothing that a pattern matches lacks all of its literals."""

import re
import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nautile.common.patterns import FilteredPattern, ignoring_case
from nautile.data.distill import checks
from nautile.data.endpoints import outgoing

PATTERNS = {
    name: pattern for name, pattern in (vars(checks) | outgoing._SIGNS).items() if isinstance(pattern, FilteredPattern)
}

ALPHABET = f"{string.printable}éıİſ\u212a’–…"


@pytest.mark.parametrize("name", PATTERNS)
@settings(max_examples=25)
@given(st.data())
def test_every_match_has_a_literal(name, data):
    filtered = PATTERNS[name]
    text = data.draw(st.from_regex(filtered.pattern, alphabet=ALPHABET))
    [other] = data.draw(st.sampled_from(["i", "ı", "İ", "s", "ſ", "k", "\u212a"]))
    text = text.replace(other.lower()[0], other)
    lowered = ignoring_case(text)
    assert bool(filtered.search(text, lowered)) == bool(filtered.pattern.search(text))
    spans = [match.span() for match in filtered.finditer(text, lowered)]
    assert spans == [match.span() for match in filtered.pattern.finditer(text)]


def test_a_letter_is_what_an_expression_takes_for_it():
    everything = "".join(map(chr, range(0x30000)))
    lowered = [ignoring_case(c) for c in everything]
    for letter in string.ascii_lowercase:
        matched = re.findall(letter, everything, re.IGNORECASE)
        assert matched == [c for c, low in zip(everything, lowered, strict=True) if low == letter.encode()]
