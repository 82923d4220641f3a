"""Grade a reply: strict and lenient verdicts. Strict is the paper's (§5, Table 2).

Strict: thinking has ended, and the answer states exactly one candidate, which is right. Lenient: the last candidate is
right; without an answer the reasoning may contain it (as harnesses with flexible extraction count). Strict implies
lenient, no grader raises on any text, and none searches for a substring.
"""

import re
import string
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from data.chat_template import ParsedReply
from evals.graders import choices, numbers
from evals.graders.answer_spans import answer_spans

GradeIssue = Literal["no_answer", "many_answers", "unfinished"]


@dataclass(frozen=True)
class Verdict:
    """Strict and lenient result. `parsed`: the candidates of the strict reading, joined by ` | `; None without any."""

    strict: bool
    lenient: bool
    parsed: str | None
    problem: GradeIssue | None


def verdict_of(reply: ParsedReply, read: Callable[[str], Sequence[str]], right: Callable[[str], bool]) -> Verdict:
    """Grade with `read`, which returns a text's distinct candidates, and `right`, which checks a candidate."""
    answered = list(read(reply.answer)) if reply.answer else []
    fallback = answered or list(read(reply.reasoning))
    lenient = bool(fallback) and right(fallback[-1])
    problem = issue_of(reply, answered)
    return Verdict(problem is None and lenient, lenient, " | ".join(answered) or None, problem)


def issue_of(reply: ParsedReply, answered: Sequence[object]) -> GradeIssue | None:
    """Why the strict reading has no single candidate; None if `answered` has exactly one and thinking has ended."""
    if not reply.finished_thinking:
        return "unfinished"
    if not answered:
        return "no_answer"
    return "many_answers" if len(answered) > 1 else None


def grade_number(reply: ParsedReply, expected: str) -> Verdict:
    """Grade a number, compared as exact fractions: "1/2" is 0.5. "%" is a unit.

    Lenient also accepts 50% for 0.5, and takes "1 000" for one number. Raises `ValueError` when `expected` is not one.
    """
    wanted = numbers.parse_number(expected)
    if wanted is None:
        raise ValueError(f"the expected answer {expected!r} is not one number")
    answered = numbers.candidates(reply.answer) if reply.answer else []
    fallback = answered or numbers.candidates(reply.reasoning)
    problem = issue_of(reply, answered)
    strict = problem is None and answered[0].value == wanted.value
    text = (reply.answer if answered else reply.reasoning) or ""
    joined = numbers.join_spaced_digits(text)
    last = [*fallback[-1:], *(numbers.candidates(joined)[-1:] if joined != text else [])]
    lenient = any(n.value == wanted.value or _as_share(n) == _as_share(wanted) for n in last)
    return Verdict(strict, lenient, " | ".join(map(str, answered)) or None, problem)


def grade_choice(
    reply: ParsedReply, expected_letter: str, letters: Sequence[str], options: Sequence[str] = ()
) -> Verdict:
    """Grade a choice. `options` are the options' texts: an answer that equals one of them means its letter."""
    return verdict_of(
        reply, lambda text: choices.candidates(text, letters, options), lambda letter: letter == expected_letter
    )


def grade_exact(reply: ParsedReply, aliases: Sequence[str]) -> Verdict:
    """Grade by TriviaQA's exact match: the whole normalised answer is one of the normalised aliases.

    Lenient also reads the first or last line or the first sentence alone, and ignores accents.
    """
    wanted = {trivia_form(alias) for alias in aliases} - {""}
    whole = (reply.answer or "").strip()
    # All of the answer if that is right or it has no answer span, else its answer spans.
    spans = [whole] if trivia_form(whole) in wanted else answer_spans(whole) or [whole]
    forms = list(dict.fromkeys(form for span in spans if (form := trivia_form(span))))
    strict_right = len(forms) == 1 and forms[0] in wanted
    problem = issue_of(reply, forms[:1])
    if problem is None and not strict_right:
        # Wrong because it offers several, one of them right.
        offered = {trivia_form(part) for part in _SEPARATORS.split(whole)} - {""}
        problem = "many_answers" if len(forms) > 1 or (len(offered) > 1 and offered & wanted) else None
    strict = problem is None and strict_right
    unaccented = {_without_accents(form) for form in wanted}
    pieces = _pieces(whole) if whole else _pieces(reply.reasoning)
    lenient = strict or any(_without_accents(trivia_form(piece)) in unaccented for piece in pieces)
    return Verdict(strict, lenient, " | ".join(forms) or None, problem)


def grade_text(reply: ParsedReply, expected: str) -> Verdict:
    """Grade a word or a list: equal except for case, spacing and outer punctuation."""

    def read(text: str) -> list[str]:
        spans = answer_spans(text) or [text.strip()]
        return list(dict.fromkeys(form for span in spans if (form := choices.plain(span))))

    wanted = choices.plain(expected)
    return verdict_of(reply, read, lambda form: form == wanted)


def trivia_form(text: str) -> str:
    """Normalise as TriviaQA: lower case, no punctuation, no articles (unless nothing else is left), single spaces."""
    text = unicodedata.normalize("NFKC", text).casefold()
    text = "".join(" " if c in _PUNCTUATION else c for c in text)
    words = text.split()
    return " ".join([word for word in words if word not in ("a", "an", "the")] or words)


_SEPARATORS = re.compile(r"[,;/]|\bor\b|\band\b")
_PUNCTUATION = set(string.punctuation) | set("‘’“”´`–—…")


def _as_share(number: numbers.Number) -> object:
    return number.value / 100 if number.percent else number.value


def _pieces(text: str) -> list[str]:
    """The parts that a lenient reading accepts as an answer: whole lines or sentences, never a part of a sentence."""
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        return []
    return [text, *answer_spans(text)[-1:], lines[0], lines[-1], text.split(". ")[0]]


def _without_accents(text: str) -> str:
    return "".join(c for c in unicodedata.normalize("NFKD", text) if not unicodedata.combining(c))
