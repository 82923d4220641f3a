"""What a model is asked about a text: instructions, the text, and the reply that answers at once.

The ids are those of the chat template with an empty reasoning (`data.chat_template`), cut where prompts that share
their instructions part: the beginning of all of them, the context of a text, and the continuation.
"""

from collections.abc import Sequence

from data.chat_template import encode_direct_reply, encode_prompt_end, encode_prompt_start
from data.labelled.label_set import LabelSet
from data.tokenizer import Tokenizer

MOST_LISTED = 20  # labels that the instructions name
INSTRUCTIONS = {
    "label": "Which label fits the text?",
    "entities": 'List the named entities of the text as JSON: [{"text": "...", "label": "..."}].',
    "chat": "",
    "opinions": "",
}


def instructions_for(form: str, own: str, labels: Sequence[str]) -> str:
    """The instructions of a form: the operator's, or our own, which name up to `MOST_LISTED` labels."""
    if own:
        return own.replace("{labels}", ", ".join(labels))
    text = INSTRUCTIONS[form]
    return f"{text} One of: {', '.join(labels)}." if labels and len(labels) <= MOST_LISTED else text


def with_examples(instructions: str, examples: Sequence[tuple[str, str]]) -> str:
    """Instructions followed by solved examples (text, label), each on two lines."""
    shown = [f"Text: {' '.join(text.split())}\nLabel: {label}" for text, label in examples]
    return "\n\n".join([instructions, *shown])


def cut(tokenizer: Tokenizer, text: str, longest: int) -> str:
    """The text without white space around it, cut after `longest` tokens; a character that is cut apart goes."""
    ids = tokenizer.encode(text.strip())
    return text.strip() if len(ids) <= longest else tokenizer.decode(ids[:longest]).rstrip("\N{REPLACEMENT CHARACTER}")


def beginning_ids(tokenizer: Tokenizer, instructions: str) -> list[int]:
    """Ids that every prompt with these instructions begins with."""
    return encode_prompt_start(tokenizer, f"{instructions}\n\n" if instructions else "")


def context_ids(tokenizer: Tokenizer, text: str, longest: int) -> list[int]:
    """Ids that follow them, of a text and of the reply's beginning."""
    return encode_prompt_end(tokenizer, cut(tokenizer, text, longest))


def prompt_ids(tokenizer: Tokenizer, labels: LabelSet, text: str) -> list[int]:
    """The whole prompt of a text for a tuned checkpoint."""
    return beginning_ids(tokenizer, labels.instructions) + context_ids(tokenizer, text, labels.longest)


def reply_ids(tokenizer: Tokenizer, reply: str) -> list[int]:
    """Ids of a reply after the prompt, to its end marker."""
    return encode_direct_reply(tokenizer, reply)
