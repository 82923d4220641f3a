"""Prompts of a survey as token ids, in pieces: the preface, a persona, and a question with its options in some order.

The pieces end where the tokenizer would split the whole text anyway, so their ids concatenate to those of the whole
text, and common parts of prompts have the same ids (which a prefix cache needs).
"""

import itertools
from collections.abc import Sequence

import numpy as np

from nautile.data.chat_template import encode_direct_reply, encode_prompt_end, encode_prompt_start
from nautile.data.tokenizer import Tokenizer
from nautile.uses.simulate.config import QuestionConfig, SimulateConfig, SurveyConfig
from nautile.uses.simulate.people import Person, persona_text

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def option_orders(options: int, limit: int, seed: int, name: str) -> list[tuple[int, ...]]:
    """Orders of a question's options: all permutations if there are at most `limit`, else rotations of random ones.

    The rotations of a permutation put each option into each position once, so that a position bias cancels out; their
    number is the largest multiple of `options` up to `limit`. With a `limit` below `options` it cancels only in part.
    `options`: number of options; `name`: of the question, a part of the seed.
    """
    # The number of permutations, as far as needed.
    count = 1
    for factor in range(2, options + 1):
        count *= factor
        if count > limit:
            break
    if count <= limit:
        return list(itertools.permutations(range(options)))
    draw = np.random.default_rng([seed, *name.encode()])
    limit -= limit % options if limit >= options else 0
    orders: dict[tuple[int, ...], None] = {}
    while len(orders) < limit:
        base = draw.permutation(options).tolist()
        starts = range(options) if limit - len(orders) >= options else draw.permutation(options)[: limit - len(orders)]
        orders |= dict.fromkeys(tuple(base[start:] + base[:start]) for start in starts)
    return list(orders)[:limit]


def question_words(question: QuestionConfig, order: Sequence[int], answer: str) -> str:
    """The text of a question with its options in the given order; each has a letter if `answer` is "letter"."""
    options = [" ".join(question.options[i].split()) for i in order]
    if answer == "letter":
        lines = [f"{letter}. {option}" for letter, option in zip(LETTERS, options, strict=False)]
        ending = "Answer with the letter of the option alone."
    else:
        lines, ending = [f"- {option}" for option in options], "Answer with one of the options alone."
    return "\n".join([" ".join(question.text.split()), *lines, ending])


class SurveyPrompts:
    """Token ids of a survey's prompts for one tokenizer; every piece is encoded once."""

    def __init__(self, survey: SurveyConfig, config: SimulateConfig, tokenizer: Tokenizer) -> None:
        self.survey, self.config, self._tokenizer = survey, config, tokenizer
        self.orders = [option_orders(len(q.options), config.orders, config.seed, q.name) for q in survey.questions]
        preface = " ".join(survey.preface.split())
        opening = f"{preface}\n\n" if preface else ""
        chat = config.template == "chat"
        self.beginning = encode_prompt_start(tokenizer, opening) if chat else tokenizer.encode(opening)
        self._questions = [
            [self._question(question, order) for order in orders]
            for question, orders in zip(survey.questions, self.orders, strict=True)
        ]
        self._answers = [self._continuations(question) for question in survey.questions]

    def persona(self, person: Person) -> list[int]:
        """Token ids of a persona, which follow `beginning`."""
        return self._tokenizer.encode(f"{persona_text(self.survey, person)}\n\n")

    def question(self, number: int, order: int) -> list[int]:
        """Token ids of a question in one of its orders, which follow a persona's, up to the beginning of the answer."""
        return self._questions[number][order]

    def continuations(self, number: int, order: int) -> list[list[int]]:
        """Token ids of the answers whose probabilities are compared, one per option in the survey's order."""
        if self.config.answer == "text":
            return self._answers[number]
        letters = self._answers[number]  # by position in the prompt
        option_at = self.orders[number][order]
        return [letters[option_at.index(option)] for option in range(len(option_at))]

    @property
    def longest(self) -> int:
        """Number of ids of the longest question with its longest answer."""
        return max(
            max(map(len, questions)) + max(map(len, answers))
            for questions, answers in zip(self._questions, self._answers, strict=True)
        )

    def _question(self, question: QuestionConfig, order: Sequence[int]) -> list[int]:
        words = question_words(question, order, self.config.answer)
        if self.config.template == "plain":
            return self._tokenizer.encode(f"{words}\nAnswer:")
        # After the line break that begins every reply a letter is one token, so one forward pass scores all letters.
        start_of_reply = self._tokenizer.encode("\n") if self.config.answer == "letter" else []
        return [*encode_prompt_end(self._tokenizer, words), *start_of_reply]

    def _continuations(self, question: QuestionConfig) -> list[list[int]]:
        """Ids of the letter of each position, or of each option's text with its end, so that no answer is a prefix."""
        encode, plain = self._tokenizer.encode, self.config.template == "plain"
        if self.config.answer == "letter":
            return [encode(f" {letter}" if plain else letter) for letter in LETTERS[: len(question.options)]]
        options = [" ".join(option.split()) for option in question.options]
        if plain:
            return [encode(f" {option}\n") for option in options]
        return [encode_direct_reply(self._tokenizer, option) for option in options]
