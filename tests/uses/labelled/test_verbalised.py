"""Labels by likelihood through any scorer, and what does not fit the context."""

import numpy as np
import pytest

from nautile.common.errors import ConfigError
from nautile.configs.model import TokenizerConfig
from nautile.data.tokenizer import tokenizer_for
from nautile.uses.labelled.prompts import beginning_ids, context_ids, label_bias, label_logprobs, reply_ids

TOKENIZER = tokenizer_for(TokenizerConfig(ranks=512))


class LengthScorer:
    """Scores a continuation by how many ids it and its context have."""

    def logprobs(self, beginning, groups):
        assert list(beginning) == beginning_ids(TOKENIZER, "Which?")
        return [
            np.array([-float(len(context) + 10 * len(c)) for c in continuations]) for context, continuations in groups
        ]


def ask(texts, **limits):
    limits = {"longest": 5, "context": 200, **limits}
    return label_logprobs(LengthScorer(), TOKENIZER, "Which?", texts, ["yes", "a long label"], **limits)


def test_each_text_is_scored_with_each_label():
    scores = ask(["x", "a longer text that is cut"])
    expected = [
        [
            -len(context_ids(TOKENIZER, text, 5)) - 10 * len(reply_ids(TOKENIZER, label))
            for label in ("yes", "a long label")
        ]
        for text in ("x", "a longer text that is cut")
    ]
    assert scores.tolist() == expected
    assert (scores - label_bias(scores)).mean(axis=0) == pytest.approx([0, 0])


def test_what_does_not_fit_the_context_is_refused():
    with pytest.raises(ConfigError, match="shorten `instructions` or `longest`"):
        ask(["x"], context=12)
