"""Text as it is written: put together it is what the parser of whole completions finds, cut where a stop string is."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.model import TokenizerConfig
from data.chat_template import parse_completion
from data.tokenizer import tokenizer_for
from flows.serve.token_stream import Writer, bytes_of

TOKENIZER = tokenizer_for(TokenizerConfig(ranks=256))
WHOLE = tokenizer_for(TokenizerConfig())
# Bytes that matter: white space, letters, halves of characters; and the markers.
IDS = [*TOKENIZER.encode("ab \n.\t"), *TOKENIZER.encode("é\N{NO-BREAK SPACE}漢"), *range(256, 261)]
STOPS = ["ab", "b.", "\n\n", "aab a", "é"]
completions = st.lists(st.sampled_from(IDS), max_size=40)


def written(writer, ids, cuts):
    """Everything that comes out, the ids given in pieces."""
    thinking = answer = ""
    places = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    for start, end in pairwise(places):
        told = writer.write(ids[start:end])
        thinking, answer = thinking + told.thinking, answer + told.answer
    told = writer.finish()
    return thinking + told.thinking, answer + told.answer


def until_the_end(ids):
    """As the engine hands them over: nothing comes after an id that ends the turn."""
    ends = [place for place, one in enumerate(ids) if one in (TOKENIZER.im_end, TOKENIZER.end_of_text)]
    return ids[: ends[0] + 1] if ends else ids


@settings(max_examples=300, deadline=None)
@given(completions, st.lists(st.integers(0, 40), max_size=6))
def test_a_turn_in_pieces_is_what_the_parser_finds(ids, cuts):
    ids = until_the_end(ids)
    writer = Writer(TOKENIZER, turn=True)
    thinking, answer = written(writer, ids, cuts)
    reply = parse_completion(TOKENIZER, ids)
    assert (thinking, answer) == (reply.reasoning, reply.answer or "")
    assert (writer.part == "answer") == reply.finished_thinking
    assert len(writer.parts) == len(ids)


@settings(max_examples=300, deadline=None)
@given(completions, st.lists(st.integers(0, 40), max_size=6), st.lists(st.sampled_from(STOPS), max_size=3))
def test_plain_text_ends_before_its_first_stop_string(ids, cuts, stops):
    ids = [one for one in ids if one not in (TOKENIZER.im_end, TOKENIZER.end_of_text)]
    whole = TOKENIZER.decode(ids)
    places = [place for stop in stops if (place := whole.find(stop)) >= 0]
    writer = Writer(TOKENIZER, stops)
    _, text = written(writer, ids, cuts)
    assert writer.stopped == bool(places)
    if not stops or not places:
        assert text == whole
    else:
        # A stop that is found late may have begun before another that was found first.
        assert whole.startswith(text)
        assert not any(stop in text for stop in stops)
        assert any(whole[len(text) :].startswith(stop) for stop in stops)


@settings(max_examples=200, deadline=None)
@given(completions, st.lists(st.integers(0, 40), max_size=6))
def test_stop_strings_leave_the_thinking_alone(ids, cuts):
    ids = until_the_end(ids)
    reply = parse_completion(TOKENIZER, ids)
    thinking, answer = written(Writer(TOKENIZER, ["b"], turn=True), ids, cuts)
    assert thinking == reply.reasoning
    assert answer == (reply.answer or "").partition("b")[0].rstrip()


def test_the_ids_that_were_taken_are_counted():
    writer = Writer(TOKENIZER, ["cd"])
    told = writer.write(TOKENIZER.encode("abcdef"))
    assert (told.answer, told.taken, writer.stopped) == ("ab", 4, True)
    assert writer.write(TOKENIZER.encode("gh")).taken == 0


def test_what_may_begin_a_stop_string_waits():
    writer = Writer(TOKENIZER, ["END"])
    assert writer.write(TOKENIZER.encode("one E")).answer == "one "
    assert writer.write(TOKENIZER.encode("N")).answer == ""
    assert writer.write(TOKENIZER.encode("d")).answer == "ENd"
    assert writer.finish().answer == ""


@pytest.mark.parametrize("one", [100_256, 100_260, 10**9])
def test_an_id_that_is_not_in_use_reads_as_a_replacement(one):
    assert bytes_of(WHOLE, one).decode() == "\N{REPLACEMENT CHARACTER}"
    assert Writer(WHOLE).write([one]).answer == "\N{REPLACEMENT CHARACTER}"
