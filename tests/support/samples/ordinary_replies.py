"""A thousand ordinary documents that mention JSON, passages, documents and apologies, and texts that leak or refuse.

`ordinary_replies.json` has patterns of a query, its reasoning and its answer. Their slots are filled in turn from lists
of unequal lengths, so that hardly any two documents are alike.
"""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

from nautile.data.distill.parse_reply import ParsedDocument
from nautile.data.distill.prompts import Prompt

PASSAGE = "A hat is a head covering worn for protection since 1800."
LEAKS = [  # text of a document, whether its teacher was given a passage
    ("The passage says what a hat is.", True),
    ("According to the given passage, a hat is worn.", True),
    ("From this passage we know that it is worn.", True),
    ("Passage: A hat is a head covering.", True),
    ("The provided text says that it is worn.", True),
    ("A hat is a head covering <|im_end|>", False),
    ("<think>A hat is worn.</think>", False),
    ("As in <document 3> the steps are short.", False),
    ("Documents of the collection: a hat is worn.", False),
    ("Exercises of the same kind: - What is a cap?", False),
    ("Write the document for this query. A hat is worn.", False),
    ("We should keep to their form, tone and length.", False),
    ('{"reasoning": "A hat is worn."', False),
    ("We must output JSON. A hat is worn.", False),
    ("I need to reply with one JSON object. A hat is worn.", False),
    ("The result is JSON with reasoning and answer. A hat is worn.", False),
]
REFUSALS = [  # answers
    "I'm sorry, but I cannot help with hats.",
    "I'm sorry, but I can't help with that.",
    "I’m sorry, but I can’t assist with that request.",
    "Sorry, I can't provide that.",
    "I am unable to answer this question.",
    "I cannot fulfil your request. It would be unsafe.",
    "I cannot provide medical advice.",
    "I'm not able to help with this.",
    "I can't comply with that.",
    "I won't write that.",
    "As an AI language model, I cannot answer questions on hats.",
    "As an AI, I do not have personal opinions.",
    "Unfortunately, I am not able to provide such a list.",
    "I apologize, but I cannot generate this content.",
    "I don't have enough information to answer.",
    "Thank you for asking. I'm sorry, but I can't help with that.",
]


def ordinary_documents(count: int) -> Iterator[tuple[Prompt, ParsedDocument]]:
    """`count` different documents that neither leak nor refuse."""
    source = json.loads(Path(__file__).with_suffix(".json").read_bytes())
    patterns = source["patterns"]
    for number, pattern in zip(range(count), itertools.cycle(patterns), strict=False):
        turn = number // len(patterns) + number
        slots = {name: values[turn % len(values)] for name, values in source["slots"].items()}
        query, reasoning, answer = (pattern[name].format(**slots) for name in ("query", "reasoning", "answer"))
        yield Prompt(f"o/{number}", query, "instruction"), ParsedDocument(reasoning, answer)
