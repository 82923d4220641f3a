"""MinHash in bands: near copies share a band about as often as the formula says, and the values are fixed."""

import random
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nautile.data.screening import duplicates, words
from nautile.data.screening.duplicates import BANDS, ROWS, WORDS, minhash_bands

VOCABULARY = [f"word{n}" for n in range(4000)]


def shares_a_band(left: str, right: str) -> bool:
    signatures = minhash_bands([left, right])
    return bool((signatures[0] == signatures[1]).any())


def with_overlap(share: float, rng: random.Random, length: int = 400) -> tuple[str, str]:
    """Two texts whose sets of 5-grams have about that Jaccard index: the second goes its own way after a while."""
    words = rng.choices(VOCABULARY, k=length)
    common = round(length * 2 * share / (1 + share))
    return " ".join(words), " ".join(words[:common] + rng.choices(VOCABULARY, k=length - common))


def test_the_values_are_the_same_everywhere_and_for_ever():
    signatures = minhash_bands(["The quick brown fox jumps over the lazy dog.", ""])
    assert signatures.shape == (2, BANDS)
    assert signatures.dtype == np.uint64
    assert signatures[:, 0].tolist() == [0x7925E3897B3C358A, 0x2D06800538D394C2]


def test_near_copies_share_a_band_as_often_as_the_formula_says():
    rng = random.Random(1)
    for share in (0.5, 0.75, 0.9):
        expected = 1 - (1 - share**ROWS) ** BANDS
        share_found = np.mean([shares_a_band(*with_overlap(share, rng)) for _ in range(200)])
        assert abs(share_found - expected) < 0.12, (share, share_found, expected)


def grams(text: str) -> set[str]:
    """The 5-grams of a text, shorter at its end; the text itself, without spaces, if it has no word."""
    words = re.findall(r"\w+", text.casefold())
    return {" ".join(words[n : n + WORDS]) for n in range(len(words))} or {"".join(text.split())}


TEXTS = st.lists(st.text(st.sampled_from("aB1 .\n\u00e9\u4e2d"), max_size=30), max_size=6)


@settings(max_examples=60)
@given(TEXTS, st.integers(1, 40))
def test_a_signature_depends_on_the_5_grams_of_its_text_alone(texts, block):
    """Not on the other texts, nor on where a block ends."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(words, "BLOCK", block)
        signatures = minhash_bands(texts)
    assert len(signatures) == len(texts)
    for signature, text in zip(signatures, texts, strict=True):
        assert (signature == minhash_bands([text])[0]).all()
        for other, other_text in zip(signatures, texts, strict=True):
            assert (signature == other).all() == (grams(text) == grams(other_text))


def test_another_algorithm_is_refused(monkeypatch):
    monkeypatch.setattr(duplicates, "ALGORITHM", 1)
    with pytest.raises(RuntimeError, match="pin rensa"):
        minhash_bands(["text"])
