"""Exact duplicates: what counts as the same text, and memory across processes."""

import unicodedata

import xxhash
from hypothesis import given
from hypothesis import strategies as st

from data.records import SynthRecord, WebRecord
from data.screening.text_hash import Seen, content_hash, in_validation, text_hash


def test_case_spacing_and_unicode_form_do_not_count():
    same = ["The  sea\nshell", "the sea shell ", "THE SEA SHELL", "the sea shell"]
    assert len({text_hash(text) for text in same}) == 1
    assert text_hash("caf\u00e9") == text_hash("cafe\u0301")
    assert text_hash("the sea shells") != text_hash("the sea shell")


def test_white_space_does_not_count_at_all_but_places_do():
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
def test_the_short_way_agrees_with_the_long_one(text):
    long = "".join(unicodedata.normalize("NFC", text).casefold().split()).encode("utf-8", "replace")
    assert text_hash(text) == xxhash.xxh3_64_intdigest(long)


def test_fields_of_an_exercise_do_not_run_together():
    one, two = SynthRecord("a b", "c", "d"), SynthRecord("a", "b c", "d")
    assert content_hash(one) != content_hash(two)
    assert content_hash(one) == content_hash(SynthRecord("A b", "c", "d", exercise="other"))


def test_the_share_held_out_is_the_share_asked_for():
    hashes = [content_hash(WebRecord(str(n))) for n in range(20_000)]
    assert 0.04 < sum(in_validation(one, 0.05) for one in hashes) / len(hashes) < 0.06
    assert not any(in_validation(one, 0.0) for one in hashes)
    assert all(in_validation(one, 1.0) for one in hashes)
    held_out = {one for one in hashes if in_validation(one, 0.05)}
    assert held_out <= {one for one in hashes if in_validation(one, 0.1)}  # a larger share holds the smaller


def test_what_was_seen_can_be_kept_part_by_part(tmp_path):
    seen = Seen()
    assert seen.add(2**64 - 1)
    (tmp_path / "0").write_bytes(seen.take_fresh())
    assert not seen.add(2**64 - 1)
    assert seen.add(7)
    (tmp_path / "1").write_bytes(seen.take_fresh())
    assert seen.take_fresh() == b""
    later = Seen()
    for part in "01":
        later.load(tmp_path / part)
    assert not later.add(7)
    assert not later.add(2**64 - 1)
    assert later.add(8)
