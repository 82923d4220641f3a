"""Classify by likelihood: the log-probability of each label's text as the reply to a text (zero-shot or few-shot)."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from nautile.common.errors import ConfigError
from nautile.data.tokenizer import Tokenizer
from nautile.uses.labelled.prompts import beginning_ids, context_ids, reply_ids

Group = tuple[Sequence[int], Sequence[Sequence[int]]]  # ids of a context, and of each of its continuations


class ContinuationScorer(Protocol):
    """Computes for each group Σ log p(continuation | beginning + context), float64 [continuations], in nats."""

    def logprobs(self, beginning: Sequence[int], groups: Sequence[Group]) -> list[np.ndarray]: ...


def label_logprobs(
    scorer: ContinuationScorer,
    tokenizer: Tokenizer,
    instructions: str,
    texts: Sequence[str],
    labels: Sequence[str],
    *,
    longest: int,
    context: int,
) -> np.ndarray:
    """log p(label's text | instructions, text) in nats, float64 [texts, labels].

    Texts are truncated to `longest` tokens. Raises `ConfigError` if instructions, text and label do not fit into
    `context` tokens.
    """
    beginning = beginning_ids(tokenizer, instructions)
    continuations = [reply_ids(tokenizer, label) for label in labels]
    contexts = [context_ids(tokenizer, text, longest) for text in texts]
    most = len(beginning) + max(map(len, contexts), default=0) + max(map(len, continuations))
    if most > context:
        raise ConfigError(
            f"labels by likelihood: the instructions ({len(beginning)} tokens), a text of up to {longest} and a label "
            f"have {most} tokens, more than the model's context of {context}; shorten `instructions` or `longest`"
        )
    return np.stack(scorer.logprobs(beginning, [(ids, continuations) for ids in contexts]))


def label_bias(logprobs_NC: np.ndarray) -> np.ndarray:
    """The bias of each label's wording, float64 [C]: its mean log-probability over unlabelled texts.

    Subtracting it makes no label more likely only because of its words (batch calibration, Zhou et al. 2024,
    arXiv:2309.17249).
    """
    return logprobs_NC.mean(axis=0)
