"""Grade a reply by strict and lenient verdicts. The paper's scores are strict (§5, Table 2).

Strict: thinking has ended, and the answer states exactly one candidate, which is right. Lenient: the last candidate is
right; without an answer it may be in the reasoning (as in harnesses with flexible extraction). Strict implies lenient,
no grader raises on any text, and none searches for a substring. A grader that fails gives no verdict (None), which is
not a wrong answer.
"""

import re
import string
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from nautile.data.chat_template import ParsedReply
from nautile.evals.graders import choices, numbers
from nautile.evals.graders.answer_spans import answer_spans, without_denials

GradeIssue = Literal["no_answer", "many_answers", "unfinished", "not_graded"]


@dataclass(frozen=True)
class Verdict:
    """The strict and the lenient result. `parsed`: the candidates of the strict reading joined by ` | `, or None.

    A result is None if the grader failed (`problem` is then "not_graded"): a missing score, and not a wrong answer.
    """

    strict: bool | None
    lenient: bool | None
    parsed: str | None
    problem: GradeIssue | None


NOT_GRADED = Verdict(None, None, None, "not_graded")


def verdict_of(reply: ParsedReply, parse: Callable[[str], Sequence[str]], is_right: Callable[[str], bool]) -> Verdict:
    """Grade with `parse`, which returns the distinct candidates of a text, and `is_right`, which checks a candidate."""
    candidates = list(parse(reply.answer)) if reply.answer else []
    fallback = candidates or list(parse(reply.reasoning))
    lenient = bool(fallback) and is_right(fallback[-1])
    problem = issue_of(reply, candidates)
    return Verdict(problem is None and lenient, lenient, " | ".join(candidates) or None, problem)


def issue_of(reply: ParsedReply, candidates: Sequence[object]) -> GradeIssue | None:
    """Why the strict reading fails; None if thinking has ended and the answer has exactly one candidate."""
    if not reply.finished_thinking:
        return "unfinished"
    if not candidates:
        return "no_answer"
    return "many_answers" if len(candidates) > 1 else None


def grade_number(reply: ParsedReply, expected: str) -> Verdict:
    """Grade a number, compared as an exact fraction: "1/2" is 0.5. "%" is a unit, which strict grading ignores.

    Lenient also accepts 50% for 0.5, and reads "1 000" and "12,5" as one number too. Raises `ValueError` if
    `expected` is not a single number.
    """
    target = numbers.parse_number(expected)
    if target is None:
        raise ValueError(f"the expected answer {expected!r} is not a single number")
    candidates = numbers.candidates(reply.answer) if reply.answer else []
    fallback = candidates or numbers.candidates(reply.reasoning)
    problem = issue_of(reply, candidates)
    # "50%" has the value 50, so that a question for a percentage may be answered with or without the sign.
    strict = problem is None and candidates[0].value == target.value
    # The last candidate counts, with digits apart read as several numbers or as one.
    text = (reply.answer if candidates else reply.reasoning) or ""
    joined = numbers.join_digits(text)
    last = [*fallback[-1:], *(numbers.candidates(joined)[-1:] if joined != text else [])]
    lenient = any(n.value == target.value or _as_share(n) == _as_share(target) for n in last)
    return Verdict(strict, lenient, " | ".join(map(str, candidates)) or None, problem)


def grade_choice(
    reply: ParsedReply, expected_letter: str, letters: Sequence[str], options: Sequence[str] = ()
) -> Verdict:
    """Grade a choice among options. `options` are their texts: an answer that equals one of them means its letter."""
    return verdict_of(
        reply, lambda text: choices.candidates(text, letters, options), lambda letter: letter == expected_letter
    )


def grade_exact(reply: ParsedReply, aliases: Sequence[str]) -> Verdict:
    """Grade by TriviaQA's exact match: the whole normalised answer is one of the normalised aliases.

    Lenient also reads the first or last line or the first sentence alone, and ignores accents.
    """
    # An alias of punctuation alone has an empty form, which would match an answer of punctuation.
    targets = {trivia_form(alias) for alias in aliases} - {""}
    answer = (reply.answer or "").strip()
    # Grade the whole answer if it is right or has no answer spans, else its answer spans.
    spans = [answer] if trivia_form(answer) in targets else answer_spans(answer) or [without_denials(answer)]
    forms = list(dict.fromkeys(form for span in spans if (form := trivia_form(span))))
    strict_right = len(forms) == 1 and forms[0] in targets
    problem = issue_of(reply, forms[:1])
    if problem is None and not strict_right:
        # A wrong answer that lists several candidates, one of them right, counts as `many_answers`.
        # "Paris, London or Rome" lists the right answer among others.
        listed = {trivia_form(part) for part in _SEPARATORS.split(answer)} - {""}
        problem = "many_answers" if len(forms) > 1 or (len(listed) > 1 and listed & targets) else None
    strict = problem is None and strict_right
    unaccented = {_without_accents(form) for form in targets}
    pieces = _pieces(answer) if answer else _pieces(reply.reasoning)
    lenient = strict or any(_without_accents(trivia_form(piece)) in unaccented for piece in pieces)
    return Verdict(strict, lenient, " | ".join(forms) or None, problem)


def grade_text(reply: ParsedReply, expected: str) -> Verdict:
    """Grade a word or a list: equal except for case, spacing and outer punctuation."""

    def parse(text: str) -> list[str]:
        spans = answer_spans(text) or [without_denials(text).strip()]
        return choices.in_order_of_last([form for span in spans if (form := text_form(span))])

    target = text_form(expected)
    return verdict_of(reply, parse, lambda form: form == target)


def text_form(text: str) -> str:
    r"""Normalise a word or a list: no LaTeX or Markdown around it (`\boxed{\text{Monday}}`), lower case."""
    text = choices.without_wraps(text)
    return choices.plain(text)


def trivia_form(text: str) -> str:
    """Normalise as TriviaQA: lower case, no punctuation, no articles (unless nothing else is left), single spaces."""
    text = unicodedata.normalize("NFKC", choices.INVISIBLE.sub("", text)).casefold()
    text = "".join(" " if c in _PUNCTUATION else c for c in text)
    words = text.split()
    return " ".join([word for word in words if word not in ("a", "an", "the")] or words)


_SEPARATORS = re.compile(r"[,;/]|\bor\b|\band\b")
_PUNCTUATION = set(string.punctuation) | set("‘’“”„´`–—…«»「」。、")


def _as_share(number: numbers.Number) -> object:
    return number.value / 100 if number.percent else number.value


def _pieces(text: str) -> list[str]:
    """The parts that lenient grading accepts as an answer: whole lines or sentences, never a part of a sentence."""
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        return []
    # What a model says around its answer stands before or after it: "Paris" in its first line or sentence, or in its
    # last.
    return [text, *answer_spans(text)[-1:], lines[0], lines[-1], text.split(". ")[0]]


def _without_accents(text: str) -> str:
    return "".join(c for c in unicodedata.normalize("NFKD", text) if not unicodedata.combining(c))
