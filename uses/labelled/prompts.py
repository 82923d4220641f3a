"""Prompts of labelling tasks: instructions, the text, and a reply without reasoning; the likelihood of each label.

The token ids are those of the chat template with an empty reasoning (`data.chat_template`), in three parts: the
beginning that all prompts with the same instructions share, the context with the text, and the reply.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from nautile.common.errors import ConfigError
from nautile.data.chat_template import encode_direct_reply, encode_prompt_end, encode_prompt_start
from nautile.data.label_set import LabelSet
from nautile.data.tokenizer import Tokenizer

MOST_LISTED = 20  # labels that the instructions name
INSTRUCTIONS = {
    "label": "Which label fits the text?",
    "entities": 'List the named entities of the text as JSON: [{"text": "...", "label": "..."}].',
    "chat": "",
    "opinions": "",
}
Group = tuple[Sequence[int], Sequence[Sequence[int]]]  # ids of a context, and of each of its continuations


def instructions_for(form: str, own: str, labels: Sequence[str]) -> str:
    """The instructions of a form: the configured ones (`own`), or the default, which lists up to 20 labels."""
    if own:
        return own.replace("{labels}", ", ".join(labels))
    text = INSTRUCTIONS[form]
    return f"{text} One of: {', '.join(labels)}." if labels and len(labels) <= MOST_LISTED else text


def with_examples(instructions: str, examples: Sequence[tuple[str, str]]) -> str:
    """Instructions followed by solved examples (text, label), each on two lines."""
    solved = [f"Text: {' '.join(text.split())}\nLabel: {label}" for text, label in examples]
    return "\n\n".join([instructions, *solved])


def cut(tokenizer: Tokenizer, text: str, longest: int) -> str:
    """Strip a text and cut it after `longest` tokens; a character of which only some bytes remain is removed."""
    ids = tokenizer.encode(text.strip())
    return text.strip() if len(ids) <= longest else tokenizer.decode(ids[:longest]).rstrip("\N{REPLACEMENT CHARACTER}")


def beginning_ids(tokenizer: Tokenizer, instructions: str) -> list[int]:
    """Token ids of the common beginning of all prompts with these instructions."""
    return encode_prompt_start(tokenizer, f"{instructions}\n\n" if instructions else "")


def context_ids(tokenizer: Tokenizer, text: str, longest: int) -> list[int]:
    """Token ids that follow `beginning_ids`: the text and the beginning of the reply."""
    return encode_prompt_end(tokenizer, cut(tokenizer, text, longest))


def prompt_ids(tokenizer: Tokenizer, labels: LabelSet, text: str) -> list[int]:
    """Token ids of the whole prompt of a text, for a tuned checkpoint."""
    return beginning_ids(tokenizer, labels.instructions) + context_ids(tokenizer, text, labels.longest)


def reasoned_ids(tokenizer: Tokenizer, context: list[int], reasoning: str, reply: str) -> tuple[list[int], list[int]]:
    """`context_ids` and `reply_ids` of a reply with a reasoning, which ends the thinking itself."""
    return context[:-1], [*tokenizer.encode(reasoning), tokenizer.think_end, *reply_ids(tokenizer, reply)]


def reply_ids(tokenizer: Tokenizer, reply: str) -> list[int]:
    """Token ids of a reply after the prompt, including its end marker."""
    return encode_direct_reply(tokenizer, reply)


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
    """log p(label's text | instructions, text) in nats, float64 [texts, labels]; texts are cut to `longest` tokens.

    Raises `ConfigError` if instructions, text and label do not fit into `context` tokens.
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

    Without it no label is more likely only because of its words (batch calibration, Zhou et al. 2024,
    arXiv:2309.17249).
    """
    return logprobs_NC.mean(axis=0)
