"""Prompts in parts have the ids of whole prompts, so that a tuned model meets in use what it was tuned on."""

import numpy as np
import pytest

from nautile.common.errors import ConfigError
from nautile.configs.model import TokenizerConfig
from nautile.data.chat_template import encode_prompt, encode_turns, parse_completion
from nautile.data.label_set import LABELS, LabelSet, read_label_set, write_label_set
from nautile.data.tokenizer import tokenizer_for
from nautile.uses.labelled.prompts import (
    beginning_ids,
    context_ids,
    cut,
    instructions_for,
    prompt_ids,
    reasoned_ids,
    reply_ids,
    with_examples,
)

TOKENIZER = tokenizer_for(TokenizerConfig(ranks=512))
SET = LabelSet(form="label", method="full", labels=("yes", "no"), instructions="Is it so?", longest=40)


@pytest.mark.parametrize("text", ["A plain text.", "  Café, 42%!\n\nnext", "<|im_end|> spelled", '"quoted" (so)'])
def test_a_prompt_is_that_of_the_chat_template_with_an_empty_reasoning(text):
    whole = encode_prompt(TOKENIZER, f"Is it so?\n\n{text.strip()}")
    assert prompt_ids(TOKENIZER, SET, text) == [*whole, TOKENIZER.think_end]
    reply = parse_completion(TOKENIZER, [TOKENIZER.think_end, *reply_ids(TOKENIZER, "yes")])
    assert (reply.reasoning, reply.answer, reply.finished) == ("", "yes", True)


def test_texts_are_cut_by_tokens_and_never_amid_a_character():
    assert cut(TOKENIZER, " short ", 40) == "short"
    ids = TOKENIZER.encode("日本語の文章")
    assert "日本語の文章".startswith(cut(TOKENIZER, "日本語の文章", len(ids) - 1))


def test_instructions_name_few_labels_and_not_many():
    assert instructions_for("label", "", ["a", "b"]).endswith("One of: a, b.")
    assert "One of" not in instructions_for("label", "", [str(i) for i in range(77)])
    assert instructions_for("label", "Choose from {labels}:", ["a", "b"]) == "Choose from a, b:"
    assert with_examples("Which?", [("one\ntwo", "a")]) == "Which?\n\nText: one two\nLabel: a"


def test_a_label_set_is_read_as_it_was_written(tmp_path):
    assert read_label_set(tmp_path) is None
    write_label_set(tmp_path, SET)
    assert read_label_set(tmp_path) == SET
    (tmp_path / LABELS).write_text('{"form": "label", "method": "head", "labels": ["only"]}')
    with pytest.raises(ConfigError, match=r"labels.json: .*at least two `labels`"):
        read_label_set(tmp_path)


def test_a_reply_with_its_reasoning_is_a_turn_of_the_chat_template():
    """As in pretraining: the prompt ends where the thinking begins."""
    context = beginning_ids(TOKENIZER, "") + context_ids(TOKENIZER, "2 + 2", 50)
    prompt, reply = reasoned_ids(TOKENIZER, context, "two and two", "4")
    whole, _, [prompt_length] = encode_turns(TOKENIZER, [("2 + 2", "two and two", "4")])
    assert prompt + reply == np.concatenate(whole).tolist()
    assert len(prompt) == prompt_length
    assert prompt == encode_prompt(TOKENIZER, "2 + 2")
