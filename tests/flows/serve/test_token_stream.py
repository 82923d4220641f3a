"""Streamed text: put together it is what the parser of whole completions returns, cut at stop strings."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nautile.configs.model import TokenizerConfig
from nautile.data.chat_template import parse_completion
from nautile.data.tokenizer import tokenizer_for
from nautile.flows.serve.token_stream import TokenStream, bytes_of

TOKENIZER = tokenizer_for(TokenizerConfig(ranks=256))
WHOLE = tokenizer_for(TokenizerConfig())
# Bytes that matter: white space, letters, halves of characters; and the markers.
IDS = [*TOKENIZER.encode("ab \n.\t"), *TOKENIZER.encode("é\N{NO-BREAK SPACE}漢"), *range(256, 261)]
STOPS = ["ab", "b.", "\n\n", "aab a", "é"]
completions = st.lists(st.sampled_from(IDS), max_size=40)


def streamed(stream, ids, cuts):
    """All text of the stream, with the ids given in chunks that end at `cuts`."""
    thinking = answer = ""
    borders = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    for start, end in pairwise(borders):
        added = stream.write(ids[start:end])
        thinking, answer = thinking + added.thinking, answer + added.answer
    added = stream.finish()
    return thinking + added.thinking, answer + added.answer


def until_the_end(ids):
    """As the engine sends them: nothing comes after an id that ends the turn."""
    ends = [index for index, token in enumerate(ids) if token in (TOKENIZER.im_end, TOKENIZER.end_of_text)]
    return ids[: ends[0] + 1] if ends else ids


@settings(max_examples=100)
@given(completions, st.lists(st.integers(0, 40), max_size=6))
def test_a_streamed_turn_equals_the_parsed_completion(ids, cuts):
    ids = until_the_end(ids)
    stream = TokenStream(TOKENIZER, chat=True)
    thinking, answer = streamed(stream, ids, cuts)
    reply = parse_completion(TOKENIZER, ids)
    assert (thinking, answer) == (reply.reasoning, reply.answer or "")
    assert (stream.part == "answer") == reply.finished_thinking
    assert len(stream.parts) == len(ids)


@settings(max_examples=100)
@given(completions, st.lists(st.integers(0, 40), max_size=6), st.lists(st.sampled_from(STOPS), max_size=3))
def test_plain_text_ends_before_its_first_stop_string(ids, cuts, stops):
    ids = [token for token in ids if token not in (TOKENIZER.im_end, TOKENIZER.end_of_text)]
    whole = TOKENIZER.decode(ids)
    stops_at = [index for stop in stops if (index := whole.find(stop)) >= 0]
    stream = TokenStream(TOKENIZER, stops)
    _, text = streamed(stream, ids, cuts)
    assert stream.stopped == bool(stops_at)
    if not stops or not stops_at:
        assert text == whole
    else:
        # A stop string that is complete only later may have begun before the one that ended the stream.
        assert whole.startswith(text)
        assert not any(stop in text for stop in stops)
        assert any(whole[len(text) :].startswith(stop) for stop in stops)


@settings(max_examples=80)
@given(completions, st.lists(st.integers(0, 40), max_size=6))
def test_stop_strings_leave_the_thinking_alone(ids, cuts):
    ids = until_the_end(ids)
    reply = parse_completion(TOKENIZER, ids)
    thinking, answer = streamed(TokenStream(TOKENIZER, ["b"], chat=True), ids, cuts)
    assert thinking == reply.reasoning
    assert answer == (reply.answer or "").partition("b")[0].rstrip()


def test_the_ids_before_a_stop_string_are_counted():
    stream = TokenStream(TOKENIZER, ["cd"])
    added = stream.write(TOKENIZER.encode("abcdef"))
    assert (added.answer, added.used, stream.stopped) == ("ab", 4, True)
    assert stream.write(TOKENIZER.encode("gh")).used == 0


def test_what_may_begin_a_stop_string_waits():
    stream = TokenStream(TOKENIZER, ["END"])
    assert stream.write(TOKENIZER.encode("one E")).answer == "one "
    assert stream.write(TOKENIZER.encode("N")).answer == ""
    assert stream.write(TOKENIZER.encode("d")).answer == "ENd"
    assert stream.finish().answer == ""


@pytest.mark.parametrize("token", [100_256, 100_260, 10**9])
def test_an_id_that_is_not_in_use_reads_as_a_replacement(token):
    assert bytes_of(WHOLE, token).decode() == "\N{REPLACEMENT CHARACTER}"
    assert TokenStream(WHOLE).write([token]).answer == "\N{REPLACEMENT CHARACTER}"
