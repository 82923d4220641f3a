"""What a teacher's document must be to be kept; each one that is not has its one reason.

The checks are cheap and err on the side of rejecting: prompts are plenty, and a small student learns a fault as
eagerly as a fact. The groundedness check applies where the teacher was given a passage: it finds invented names and
numbers, and no other invention. Of 64 replies of the embedded teacher about one in seven is rejected, and of those
kept about four in five are right.
"""

import re
from collections import Counter
from collections.abc import Sequence
from typing import Literal

from configs.distill import DistillConfig
from data.distill.parse_reply import ParsedDocument
from data.distill.prompts import Prompt
from data.distill.teacher_prompt import LONGEST_UNROLLED, Template
from data.retrieval.exemplar_index import Neighbour
from data.screening.language import detect_language

RejectReason = Literal[
    "unparsable",
    "truncated",
    "empty",
    "too_short",
    "too_long",
    "refusal",
    "leaked_template",
    "repeated",
    "ungrounded",
    "wrong_language",
    "copied_exemplar",
    "contaminated",
    "duplicate",
    "near_duplicate",
]
SHORTEST = 2  # words of a reasoning
NGRAM = 8  # words, for copying
LOOP = 4  # words that come again and again
_REFUSAL = re.compile(
    r"\b(?:i(?:'m| am) sorry|as an ai\b|i (?:do not|don't) have enough information"
    r"|i (?:cannot|can't|am unable to|am not able to) (?:help|assist|answer|provide|fulfil))",
    re.IGNORECASE,
)
_LEAK = re.compile(
    r"<\|[a-z_]+\|>|</?think>|</?document|\bpassage\b|\bexercises? of the same kind\b|\bjson\b"
    r"|\bdocuments of the collection\b|\bexemplar",
    re.IGNORECASE,
)
_CUT_SHORT = re.compile(r"(?:[\s,;:(/\-–]|\.\.)\.$|…$")  # a full stop that only the grammar put there
_ASKS_FOR_ANOTHER = re.compile(
    r"\b(?:transl|tradu|übersetz|languages?\b|in (?:arabic|chinese|dutch|english|french|german|greek|hindi|italian"
    r"|japanese|korean|latin|polish|portuguese|russian|spanish|swedish|turkish)\b)",
    re.IGNORECASE,
)
_WORD = re.compile(r"\w+")
# Words that may begin a sentence though the passage has them not; any other capital is taken for a name.
_STARTERS = frozenset(
    _WORD.findall(
        "a an and as at both by each for from he her his however if in it its many most of on one she since so some "
        "such that the their there these they this those to we when where which while with"
    )
)
_NAME_OR_NUMBER = re.compile(r"\b[A-Z][\w'’-]*|\d[\d.,]*")


def reject_reason(
    draft: ParsedDocument | None,
    finish: str,
    prompt: Prompt,
    neighbours: Sequence[Neighbour],
    template: Template,
    config: DistillConfig,
) -> RejectReason | None:
    """Why this draft is not kept, or None. `finish`: "length" when the reply hit its limit of tokens."""
    if finish == "length":
        return "truncated"
    if draft is None:
        return "unparsable"
    if not draft.answer or not draft.reasoning:
        return "empty"
    text = f"{draft.reasoning}\n{draft.answer}"
    says_it = prompt.passage is None or not says_nothing(draft.answer, prompt.query)
    if len(_WORD.findall(draft.reasoning)) < SHORTEST or not says_it:
        return "too_short"
    if too_long(draft, template, config.longest_answer):
        return "too_long"
    if cut_short(draft.reasoning, template.reasoning) or cut_short(draft.answer, template.answer):
        return "truncated"
    if _REFUSAL.search(text):
        return "refusal"
    if leaks(text, prompt):
        return "leaked_template"
    if loops(draft.reasoning) or loops(draft.answer):
        return "repeated"
    if prompt.passage is not None and not grounded(draft, prompt):
        return "ungrounded"
    if config.same_language and in_another_language(draft, prompt):
        return "wrong_language"
    if overlap(text, neighbours) > config.overlap_limit:
        return "copied_exemplar"
    return None


def too_long(draft: ParsedDocument, template: Template, most: int | None) -> bool:
    """Whether it is longer than `most` characters together; by default, a part than twice what the template asks."""
    if most is not None:
        return len(draft.reasoning) + len(draft.answer) > most
    return len(draft.reasoning) > 2 * template.reasoning or len(draft.answer) > 2 * template.answer


def in_another_language(draft: ParsedDocument, prompt: Prompt) -> bool:
    """Whether the reasoning, or the answer where none is asked for, is surely in another language than the query."""
    asked = detect_language(prompt.query) or detect_language(prompt.passage or "")
    if asked is None:
        return False
    parts = [draft.reasoning] if _ASKS_FOR_ANOTHER.search(prompt.query) else [draft.reasoning, draft.answer]
    return any((detect_language(part) or asked) != asked for part in parts)


def cut_short(text: str, bound: int) -> bool:
    """Whether a bound on the length, and not the writer, ended the text."""
    return bool(_CUT_SHORT.search(text)) or (bound <= LONGEST_UNROLLED and len(text) >= bound - 1)


def says_nothing(answer: str, query: str) -> bool:
    """Whether the answer only repeats the question: no word of four letters, and no number, is new."""
    asked = {word.lower() for word in _WORD.findall(query)}
    return not any(word.lower() not in asked for word in _WORD.findall(answer) if len(word) > 3 or word.isdigit())


def leaks(text: str, prompt: Prompt) -> bool:
    """Whether the document speaks of what only the teacher saw, where the question does not."""
    return any(leak.group().lower() not in prompt.query.lower() for leak in _LEAK.finditer(text))


def loops(text: str) -> bool:
    """Whether the same four words come three times, or few different words make a long text."""
    words = [word.lower() for word in _WORD.findall(text)]
    grams = Counter(zip(*(words[i:] for i in range(LOOP)), strict=False))
    if grams and max(grams.values()) >= max(3, len(words) // 100):
        return True
    return 24 <= len(words) <= 400 and len(set(words)) / len(words) < 0.2


def grounded(draft: ParsedDocument, prompt: Prompt) -> bool:
    """Whether every name and number in the document stands in the passage or the question."""
    known = set(_WORD.findall(f"{prompt.passage} {prompt.query}".lower()))
    for sentence in re.split(r"(?<=[.:!?])\s+", f"{draft.reasoning} {draft.answer}"):
        for found in _NAME_OR_NUMBER.finditer(sentence):
            words = set(_WORD.findall(found.group().lower()))
            if not words <= (known | _STARTERS if found.start() == 0 else known):
                return False
    return True


def overlap(text: str, neighbours: Sequence[Neighbour]) -> float:
    """Share of the text's 8-grams of words that also stand in one of the exemplars; 0 for a text shorter than one."""
    grams = _grams(text)
    if not grams:
        return 0.0
    shown: set[tuple[str, ...]] = set()
    for neighbour in neighbours:
        record = neighbour.record
        shown |= _grams(record.query) | _grams(record.synthetic_reasoning) | _grams(record.synthetic_answer)
    return len(grams & shown) / len(grams)


def _grams(text: str) -> set[tuple[str, ...]]:
    words = [word.lower() for word in _WORD.findall(text)]
    return set(zip(*(words[i:] for i in range(NGRAM)), strict=False))
