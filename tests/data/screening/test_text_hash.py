"""Content hashes: what counts as the same text, and which texts are held out for validation."""

import unicodedata

import xxhash
from hypothesis import given
from hypothesis import strategies as st

from nautile.data.records import SynthRecord, to_batch
from nautile.data.screening.duplicates import in_validation, text_hash


def test_case_spacing_and_unicode_form_do_not_count():
    same = ["The  sea\nshell", "the sea shell ", "THE SEA SHELL", "the sea shell"]
    assert len({text_hash(text) for text in same}) == 1
    assert text_hash("caf\u00e9") == text_hash("cafe\u0301")
    assert text_hash("the sea shells") != text_hash("the sea shell")


def test_white_space_does_not_count_at_all_but_positions_do():
    assert text_hash("1 2\u00a0+\u30003\r\n") == text_hash("12+3")
    assert text_hash("x\u00b2 + y") != text_hash("x + y\u00b2")
    assert text_hash("\u00c9T\u00c9") == text_hash("\u00e9t\u00e9")
    assert text_hash("a") != text_hash("b")
    assert text_hash("nothing") == 0x92A0_687F_BE04_5FEE  # the same on every platform and with every version


MIXED = st.text(
    st.sampled_from(
        "aB \n\u00e9\u00c9\u2019\u2014\u0301\u00a0\u3000\u03a3\u03c2\u00df\u0130\u0327"
        "\u212a\u4e2d\u1100\u1161\ud800\U0001f600"
    )
)


@given(MIXED | st.text())
def test_the_fast_path_agrees_with_the_slow_one(text):
    long = "".join(unicodedata.normalize("NFC", text).casefold().split()).encode("utf-8", "replace")
    assert text_hash(text) == xxhash.xxh3_64_intdigest(long)


def test_fields_of_an_exercise_do_not_run_together():
    records = [SynthRecord("a b", "c", "d"), SynthRecord("a", "b c", "d"), SynthRecord("A b", "c", "d", exercise="x")]
    first, shifted, same = map(text_hash, to_batch(records, "synth").texts())
    assert first != shifted
    assert first == same


def test_the_held_out_share_is_the_configured_one():
    hashes = [text_hash(str(n)) for n in range(20_000)]
    assert 0.04 < sum(in_validation(digest, 0.05) for digest in hashes) / len(hashes) < 0.06
    assert not any(in_validation(digest, 0.0) for digest in hashes)
    assert all(in_validation(digest, 1.0) for digest in hashes)
    held_out = {digest for digest in hashes if in_validation(digest, 0.05)}
    assert held_out <= {digest for digest in hashes if in_validation(digest, 0.1)}  # a larger share holds the smaller
