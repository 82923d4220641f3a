"""A judge's mark for a distilled document, from 0 to 100: one number, asked for with a fixed rubric."""

import re

from configs.distill import QualityConfig
from data.calls import ChatRequest
from data.drafts import Draft
from data.prompts import Prompt

RUBRIC = "nautile-document-judge-1"
SCHEMA = {
    "type": "object",
    "properties": {"mark": {"type": "integer"}},
    "required": ["mark"],
    "additionalProperties": False,
}
GRAMMAR = 'root ::= "{\\"mark\\":" ("100" | [1-9] [0-9]? | "0") "}"\n'
_SYSTEM = (
    "You mark documents for training a small reasoning model. Is the answer right, does it answer the query, and does "
    "the reasoning lead to it without error? Reply with one JSON object whose `mark` is a whole number: 100 for a "
    "document without fault, 50 for one that is right in part, 0 for a useless or wrong one."
)
_MARK = re.compile(r'"mark"\s*:\s*"?(\d{1,3})\b')


def quality_request(prompt: Prompt, draft: Draft, config: QualityConfig, seed: int) -> ChatRequest:
    """The request for one mark."""
    passage = f"Passage it is based on: {prompt.passage}\n\n" if prompt.passage else ""
    said = f"{passage}Query: {prompt.query}\n\nReasoning: {draft.reasoning}\n\nAnswer: {draft.answer}"
    return ChatRequest(
        endpoint=config.endpoint,
        messages=({"role": "system", "content": _SYSTEM}, {"role": "user", "content": said}),
        max_tokens=config.max_tokens,
        seed=seed,
        schema=SCHEMA,
        grammar=GRAMMAR,
        purpose="quality",
        tag=prompt.id,
    )


def mark_of(text: str) -> int | None:
    """The mark in a reply; None if there is none between 0 and 100."""
    found = _MARK.findall(text) or ([text.strip()] if text.strip().isdecimal() else [])
    return int(found[-1]) if found and 0 <= int(found[-1]) <= 100 else None
