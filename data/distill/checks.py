"""Check a teacher's document, and give the one reason for which it is rejected.

The checks are cheap and err on the side of rejecting: prompts are plenty, and a small student learns a mistake as
readily as a fact. The groundedness check applies where the teacher was given a passage: it finds invented names and
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
MIN_REASONING_WORDS = 2
COPY_NGRAM = 8  # words
LOOP_NGRAM = 4  # words
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
_ASKS_FOR_LANGUAGE = re.compile(
    r"\b(?:transl|tradu|übersetz|languages?\b|in (?:arabic|chinese|dutch|english|french|german|greek|hindi|italian"
    r"|japanese|korean|latin|polish|portuguese|russian|spanish|swedish|turkish)\b)",
    re.IGNORECASE,
)
_WORD = re.compile(r"\w+")
# Words that may begin a sentence without standing in the passage; any other capitalised word counts as a name.
_STARTERS = frozenset(
    _WORD.findall(
        "a an and as at both by each for from he her his however if in it its many most of on one she since so some "
        "such that the their there these they this those to we when where which while with"
    )
)
_NAME_OR_NUMBER = re.compile(r"\b[A-Z][\w'’-]*|\d[\d.,]*")


def reject_reason(
    document: ParsedDocument | None,
    finish: str,
    prompt: Prompt,
    neighbours: Sequence[Neighbour],
    template: Template,
    config: DistillConfig,
) -> RejectReason | None:
    """Why this document is rejected, None if it is kept. `finish`: "length" when the reply hit its limit of tokens."""
    if finish == "length":
        return "truncated"
    if document is None:
        return "unparsable"
    reasoning, answer = document.reasoning, document.answer
    if not answer or not reasoning:
        return "empty"
    text = f"{reasoning}\n{answer}"
    repeats_question = prompt.passage is not None and has_nothing_new(answer, prompt.query)
    if len(_WORD.findall(reasoning)) < MIN_REASONING_WORDS or repeats_question:
        return "too_short"
    if is_too_long(document, template, config.longest_answer):
        return "too_long"
    if is_cut_short(reasoning, template.reasoning) or is_cut_short(answer, template.answer):
        return "truncated"
    if _REFUSAL.search(text):
        return "refusal"
    if leaks_template(text, prompt):
        return "leaked_template"
    if is_repetitive(reasoning) or is_repetitive(answer):
        return "repeated"
    if prompt.passage is not None and not is_grounded(document, prompt):
        return "ungrounded"
    if config.same_language and is_in_another_language(document, prompt):
        return "wrong_language"
    if copied_share(text, neighbours) > config.overlap_limit:
        return "copied_exemplar"
    return None


def is_too_long(document: ParsedDocument, template: Template, limit: int | None) -> bool:
    """Whether it has more than `limit` characters; None: whether a field has twice what the template asks for."""
    if limit is not None:
        return len(document.reasoning) + len(document.answer) > limit
    return len(document.reasoning) > 2 * template.reasoning or len(document.answer) > 2 * template.answer


def is_in_another_language(document: ParsedDocument, prompt: Prompt) -> bool:
    """Whether the reasoning or the answer is surely in another language than the query.

    The answer is not checked where the query asks for a language.
    """
    expected = detect_language(prompt.query) or detect_language(prompt.passage or "")
    if expected is None:
        return False
    parts = [document.reasoning]
    if not _ASKS_FOR_LANGUAGE.search(prompt.query):
        parts.append(document.answer)
    return any((detect_language(part) or expected) != expected for part in parts)


def is_cut_short(text: str, limit: int) -> bool:
    """Whether the limit on the length ended the text, and not the teacher."""
    return bool(_CUT_SHORT.search(text)) or (limit <= LONGEST_UNROLLED and len(text) >= limit - 1)


def has_nothing_new(answer: str, query: str) -> bool:
    """Whether the answer only repeats the question: no word of four letters, and no number, is new."""
    known = {word.lower() for word in _WORD.findall(query)}
    return not any(word.lower() not in known for word in _WORD.findall(answer) if len(word) > 3 or word.isdigit())


def leaks_template(text: str, prompt: Prompt) -> bool:
    """Whether the document mentions what only the teacher was shown, and the question does not."""
    return any(leak.group().lower() not in prompt.query.lower() for leak in _LEAK.finditer(text))


def is_repetitive(text: str) -> bool:
    """Whether the same four words occur three times, or a long text consists of few different words."""
    words = [word.lower() for word in _WORD.findall(text)]
    grams = Counter(zip(*(words[i:] for i in range(LOOP_NGRAM)), strict=False))
    if grams and max(grams.values()) >= max(3, len(words) // 100):
        return True
    return 24 <= len(words) <= 400 and len(set(words)) / len(words) < 0.2


def is_grounded(document: ParsedDocument, prompt: Prompt) -> bool:
    """Whether every name and number in the document stands in the passage or the question."""
    known = set(_WORD.findall(f"{prompt.passage} {prompt.query}".lower()))
    for sentence in re.split(r"(?<=[.:!?])\s+", f"{document.reasoning} {document.answer}"):
        for match in _NAME_OR_NUMBER.finditer(sentence):
            words = set(_WORD.findall(match.group().lower()))
            if not words <= (known | _STARTERS if match.start() == 0 else known):
                return False
    return True


def copied_share(text: str, neighbours: Sequence[Neighbour]) -> float:
    """Share of the text's 8-grams of words that also stand in one of the exemplars; 0 for a text shorter than that."""
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
    return set(zip(*(words[i:] for i in range(COPY_NGRAM)), strict=False))
