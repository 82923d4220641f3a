"""The chat template: what is rendered parses back, whatever the texts contain."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nautile.configs.model import CHAT_SPECIALS, TokenizerConfig
from nautile.data.chat_template import ParsedReply, encode_prompt, encode_turns, parse_completion, parse_text
from nautile.data.tokenizer import tokenizer_for

PLAIN = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=60)
TEXT = st.one_of(PLAIN, st.lists(st.sampled_from([*CHAT_SPECIALS, "</think>", "x", "\n"]), max_size=6).map("".join))
RANKS = st.sampled_from([256, 2000, 100_256])


@given(query=TEXT, reasoning=TEXT, answer=TEXT, ranks=RANKS)
def test_an_encoded_turn_parses_back(query, reasoning, answer, ranks):
    tok = tokenizer_for(TokenizerConfig(ranks=ranks))
    arrays, (length,), (start,) = encode_turns(tok, [(query, reasoning, answer)])
    ids = np.concatenate(arrays).tolist()
    assert len(ids) == length
    assert ids[:start] == encode_prompt(tok, query)
    assert ids[start - 1] == tok.think_start
    reply = parse_completion(tok, ids[start:])
    assert reply == ParsedReply(reasoning.strip(), answer.strip(), finished_thinking=True, finished=True)
    assert tok.decode(ids) == (
        f"<|im_start|>user\n{query}\n<|im_end|><|im_start|>assistant\n"
        f"<|think_start|>{reasoning}<|think_end|>\n{answer}\n<|im_end|>"
    )
    assert [ids.count(marker) for marker in (tok.im_start, tok.im_end, tok.think_start, tok.think_end)] == [2, 2, 1, 1]


@given(turns=st.lists(st.tuples(TEXT, TEXT, TEXT), max_size=6))
def test_many_turns_are_encoded_as_they_are_one_by_one(turns):
    tok = tokenizer_for(TokenizerConfig(ranks=300))
    arrays, lengths, prompts = encode_turns(tok, turns, threads=2)
    singles = [encode_turns(tok, [turn]) for turn in turns]
    assert [array.tolist() for array in arrays] == [array.tolist() for single in singles for array in single[0]]
    assert lengths == [single[1][0] for single in singles]
    assert prompts == [single[2][0] for single in singles]


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


def test_replies_as_text_of_this_model_and_of_others():
    whole = ParsedReply("because", "4", finished_thinking=True, finished=True)
    assert parse_text("because<|think_end|>\n4\n<|im_end|>ignored") == whole
    assert parse_text("<think>because</think>\n\n4") == whole
    assert parse_text("<think>because") == ParsedReply("because", None, finished_thinking=False, finished=False)
    assert parse_text("4") == ParsedReply("", "4", finished_thinking=True, finished=True)


@pytest.mark.parametrize(
    "text",
    [
        "[THINK]because[/THINK]4",
        "because[/THINK]\n4",
        "<thinking>because</thinking>4",
        "<seed:think>because</seed:think>4",
        "◁think▷because◁/think▷4",
        "<|START_THINKING|>because<|END_THINKING|><|START_RESPONSE|>4<|END_RESPONSE|>",
        "<|begin_of_thought|>because<|end_of_thought|>\n<|begin_of_solution|>4<|end_of_solution|>",
        "<think>because</think><|begin_of_box|>4<|end_of_box|>",
        "<|channel>thought\nbecause<channel|>4",
        "<|channel|>analysis<|message|>because<|end|><|start|>assistant<|channel|>final<|message|>4<|return|>",
        "<|channel|>analysis<|message|>because<|end|><|start|>assistant<|channel|>final <|constrain|>json<|message|>4",
        "analysis because assistantfinal 4",
    ],
)
def test_the_thoughts_of_other_families_are_told_from_their_answers(text):
    assert parse_text(text) == ParsedReply("because", "4", finished_thinking=True, finished=True)


@pytest.mark.parametrize(
    "text", ["[THINK]because", "<seed:think>because", "<|channel|>analysis<|message|>because", "◁think▷because"]
)
def test_a_thought_without_an_end_has_no_answer(text):
    assert parse_text(text) == ParsedReply("because", None, finished_thinking=False, finished=False)


@pytest.mark.parametrize(
    "text", ["analysis of the final game", "Analysis: it is 4.", "a <thought> of mine", "the [THINK] tag"]
)
def test_words_about_thoughts_are_text(text):
    assert parse_text(text).answer == text
