"""The pieces of a prompt are the ids of one text, and each option stands in each place equally often."""

import itertools

import numpy as np
import pytest

from nautile.configs.model import TokenizerConfig
from nautile.data.chat_template import encode_prompt
from nautile.data.tokenizer import tokenizer_for
from nautile.uses.simulate.config import SimulateConfig
from nautile.uses.simulate.people import Person
from nautile.uses.simulate.prompts import SurveyPrompts, option_orders
from nautile.uses.simulate.reading import parse_survey

PERSON = Person("0", {"age": 30, "region": "north"})


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizer_for(TokenizerConfig(ranks=300))


def test_all_permutations_where_they_are_few():
    assert sorted(option_orders(3, 6, 0, "q")) == sorted(itertools.permutations(range(3)))
    assert len(option_orders(2, 8, 0, "q")) == 2


@pytest.mark.parametrize(("options", "limit", "count"), [(7, 8, 7), (4, 8, 8), (3, 5, 3), (5, 3, 3), (4, 23, 20)])
def test_else_rotations_that_put_each_option_into_each_place_alike(options, limit, count):
    orders = option_orders(options, limit, 0, "q")
    assert len(set(orders)) == len(orders) == count
    assert all(sorted(order) == list(range(options)) for order in orders)
    if limit >= options:
        places = np.array(orders)
        for place in range(options):
            assert np.bincount(places[:, place]).tolist() == [count // options] * options
    assert orders == option_orders(options, limit, 0, "q")
    assert orders != option_orders(options, limit, 0, "another")


@pytest.mark.parametrize("preface", ["A town asks.", ""])
def test_the_pieces_of_a_chat_prompt_are_the_template_of_the_whole_text(table, tokenizer, preface):
    survey = parse_survey(table | {"preface": preface}, "t")
    prompts = SurveyPrompts(survey, SimulateConfig(answer="text"), tokenizer)
    opening = f"{preface}\n\n" if preface else ""
    query = (
        f"{opening}I am 30 and live in the north.\n\nShould there be more parks?\n- no\n- maybe\n- yes\n"
        "Answer with one of the options alone."
    )
    ids = prompts.beginning + prompts.persona(PERSON) + prompts.question(0, 0)
    assert ids == [*encode_prompt(tokenizer, query), tokenizer.think_end]
    assert tokenizer.decode(prompts.continuations(0, 0)[2]) == "\nyes\n<|im_end|>"


def test_letters_follow_the_order_of_the_options(table, tokenizer):
    prompts = SurveyPrompts(parse_survey(table, "t"), SimulateConfig(), tokenizer)
    for number, order in enumerate(prompts.orders[0]):
        text = tokenizer.decode(prompts.question(0, number))
        letters = [tokenizer.decode(ids) for ids in prompts.continuations(0, number)]
        assert [letters[option] for option in order] == ["A", "B", "C"]
        assert f"{letters[2]}. yes" in text
        assert text.endswith("<|think_end|>\n")


def test_a_marker_in_a_persona_is_text(table, tokenizer):
    prompts = SurveyPrompts(parse_survey(table, "t"), SimulateConfig(), tokenizer)
    ids = prompts.persona(Person("0", {"age": 1, "region": "<|im_end|>"}))
    assert tokenizer.im_end not in ids


def test_a_plain_prompt_has_no_template(table, tokenizer):
    prompts = SurveyPrompts(parse_survey(table, "t"), SimulateConfig(template="plain"), tokenizer)
    ids = prompts.beginning + prompts.persona(PERSON) + prompts.question(1, 0) + prompts.continuations(1, 0)[0]
    text = tokenizer.decode(ids)
    assert text.startswith("A town asks.\n\nI am 30")
    assert text.endswith("Answer: A")
    assert ids == tokenizer.encode(text)
