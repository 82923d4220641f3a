"""The chat template: what is rendered parses back, whatever the texts contain."""

from hypothesis import given
from hypothesis import strategies as st

from configs.model import CHAT_SPECIALS, TokenizerConfig
from data.chat_template import (
    ChatTurn,
    ParsedReply,
    encode_prompt,
    encode_turn,
    encode_turns,
    parse_completion,
    parse_text,
    turn_of,
)
from data.records import SynthRecord
from data.tokenizer import tokenizer_for

PLAIN = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=60)
TEXT = st.one_of(PLAIN, st.lists(st.sampled_from([*CHAT_SPECIALS, "</think>", "x", "\n"]), max_size=6).map("".join))
RANKS = st.sampled_from([256, 2000, 100_256])


@given(query=TEXT, reasoning=TEXT, answer=TEXT, ranks=RANKS)
def test_a_turn_comes_back_as_it_went_in(query, reasoning, answer, ranks):
    tok = tokenizer_for(TokenizerConfig(ranks=ranks))
    ids, start = encode_turn(tok, ChatTurn(query, reasoning, answer))
    assert ids[:start] == encode_prompt(tok, query)
    assert ids[start - 1] == tok.think_start
    reply = parse_completion(tok, ids[start:])
    assert reply == ParsedReply(reasoning.strip(), answer.strip(), finished_thinking=True, finished=True)
    assert tok.decode(ids) == (
        f"<|im_start|>user\n{query}\n<|im_end|><|im_start|>assistant\n"
        f"<|think_start|>{reasoning}<|think_end|>\n{answer}\n<|im_end|>"
    )
    assert [ids.count(one) for one in (tok.im_start, tok.im_end, tok.think_start, tok.think_end)] == [2, 2, 1, 1]


@given(turns=st.lists(st.tuples(TEXT, TEXT, TEXT), max_size=6))
def test_many_turns_are_encoded_as_one_by_one(turns):
    tok = tokenizer_for(TokenizerConfig(ranks=300))
    pieces, lengths, prompts = encode_turns(tok, turns)
    one_by_one = [encode_turn(tok, ChatTurn(*texts)) for texts in turns]
    assert [int(one) for piece in pieces for one in piece] == [one for ids, _ in one_by_one for one in ids]
    assert list(zip(lengths, prompts, strict=True)) == [(len(ids), start) for ids, start in one_by_one]


@given(ids=st.lists(st.integers(0, 304), max_size=40))
def test_any_sampled_ids_parse(ids):
    tok = tokenizer_for(TokenizerConfig(ranks=300))
    reply = parse_completion(tok, ids)
    assert reply.finished == (tok.im_end in ids or tok.end_of_text in ids)
    assert (reply.answer is not None) == reply.finished_thinking


def test_an_unfinished_thought_has_no_answer(tokenizer):
    reply = parse_completion(tokenizer, tokenizer.encode("still thinking"))
    assert reply == ParsedReply("still thinking", None, finished_thinking=False, finished=False)
    cut = parse_completion(tokenizer, [*tokenizer.encode("done"), tokenizer.think_end, *tokenizer.encode("\n4")])
    assert cut == ParsedReply("done", "4", finished_thinking=True, finished=False)


def test_text_of_this_model_and_of_others():
    whole = ParsedReply("because", "4", finished_thinking=True, finished=True)
    assert parse_text("because<|think_end|>\n4\n<|im_end|>ignored") == whole
    assert parse_text("<think>because</think>\n\n4") == whole
    assert parse_text("<think>because") == ParsedReply("because", None, finished_thinking=False, finished=False)
    assert parse_text("4") == ParsedReply("", "4", finished_thinking=True, finished=True)


def test_only_rag_puts_the_constraints_behind_the_query():
    record = SynthRecord("Who?", "r", "a", exercise="rag", constraints="Passage.")
    assert turn_of(record) == ChatTurn("Who?\n\nPassage.", "r", "a")
    assert turn_of(SynthRecord("Who?", "r", "a", exercise="memo", constraints="Passage.")).query == "Who?"
