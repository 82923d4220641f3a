"""Words as arrays, against the regular expression that defines them."""

import re
import unicodedata

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nautile.data.screening import words
from nautile.data.screening.words import grams, lower_words, words_of

MIXED = st.text(
    st.sampled_from("aB _7.,-\n\u00e9\u00c9\u00df\u0130\u2019\u2014\u0301\u00a0\u4e2d\u03a3\u212a\ud800\U0001f600")
)
# Without the rarer of the invisible characters, which the definition below does not list.
VISIBLE = st.text(
    st.characters(
        exclude_categories=("Cf", "Cs", "Cn", "Mn"), exclude_characters="\u115f\u1160\u17b4\u17b5\u3164\uffa0"
    )
)
TEXTS = st.lists(MIXED | VISIBLE, max_size=6)


INVISIBLE = "\u00ad\u200b\u200c\u200d\u2060\ufeff\ufe0f\u034f\u061c\U000e0041"
FORMS = st.text(
    st.sampled_from(f"aeo \n\u0301\u0323\u00e9\uff21\uff12\ufb01\u00bd\u09c7\u09be\u0390{INVISIBLE}"), max_size=20
)


def folded(text: str) -> str:
    """The definition: a soft hyphen joins two lines, invisible characters are none, and forms of a letter are one."""
    text = re.sub(r"\u00ad\s*", "", text)
    text = re.sub(f"[{INVISIBLE}]", "", text)
    text = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    return re.sub("[\u0300-\u036f]", "", text)


@settings(max_examples=60)
@given(TEXTS | st.lists(FORMS, max_size=6), st.integers(1, 60))
def test_words_are_those_of_the_regular_expression(texts, block):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(words, "BLOCK", block)
        blocks = list(words_of(texts))
    split = [b.text(begin, end) for b in blocks for begin, end in zip(b.first, b.first[1:], strict=False)]
    assert split == [re.findall(r"[^\W_]+", folded(words.without_markup(text))) for text in texts]


@settings(max_examples=60)
@given(MIXED | st.text("\u0130\u03a3'aA\u0307 \u24b6\u2167\u0643\uac00") | st.text())
def test_words_in_lower_case_are_those_of_the_regular_expression(text):
    assert lower_words(text) == [word.lower().encode() for word in re.findall(r"\w+", text)]


@given(TEXTS)
def test_a_word_has_one_value_wherever_it_stands(texts):
    value: dict[str, int] = {}
    for block in words_of(texts):
        for word, number in zip(block.text(0, len(block.values)), block.values.tolist(), strict=True):
            assert value.setdefault(word, number) == number
    assert len(set(value.values())) == len(value)


def test_the_values_are_the_same_everywhere():
    [block] = words_of(["The thermodynamics of caf\u00e9s", ""])
    assert block.first.tolist() == [0, 4, 4]
    values = [hex(value) for value in block.values.tolist()]
    assert values == [
        "0x83c8f33b3cd0dc54",
        "0x4b24dd0f4ff33009",
        "0xe13a7f89fa116084",
        "0x461972f931d5bda",
    ]


def test_grams_heed_the_order_and_the_length():
    [block] = words_of(["a b c a b c b a c"])
    twos, threes = grams(block.values, 2), grams(block.values, 3)
    assert len(twos) == 8
    assert twos[0] == twos[3]
    assert twos[0] != twos[6]
    assert threes[0] == threes[3]
    assert not np.isin(threes, twos).any()
    assert len(grams(block.values, 10)) == 0
