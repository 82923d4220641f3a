r"""Find the mathematical answers that a reply states: boxes, formulas after "the answer is", or all formulas."""

import re
from bisect import bisect_left
from collections.abc import Sequence

from nautile.evals.graders.answer_spans import (
    behind_questions,
    boxes_at,
    sentences_at,
    short_runs,
    without_bold,
    without_denials,
)
from nautile.evals.graders.numbers import SCALE_WORDS

# Of limited length, or many marks that are never closed would take a time that grows with the square of theirs.
_SEGMENT = re.compile(r"\$\$(.{1,1000}?)\$\$|\$(.{1,1000}?)\$|\\\((.{1,1000}?)\\\)|\\\[(.{1,1000}?)\\\]", re.DOTALL)
_OPEN_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_COPULA = re.compile(r"\b(?:is|are|equals|equal\s+to|was|be|becomes|gives)\b\s*:?")
_NUMBER = re.compile(r"[0-9]")
_OR = re.compile(r"\bor\b|\n")
# A word that belongs to the number before it, outside of its box or dollar signs. Of limited length, as above: many
# formulas may stand before the same marks.
_SCALE = re.compile(rf"[\s$}}*_`]{{0,40}}+({SCALE_WORDS})s?\b", re.IGNORECASE)
# What stands between the parts of one answer: "$1$ and $2$", "\boxed{1}, \boxed{2}".
_BETWEEN = re.compile(
    r"[A-Za-z](?:_\{?[A-Za-z0-9]+\}?)?\s*=|[\s$.]|\\[()\[\],;!]|\\q?quad|\\text\s*\{|\\(?:boxed|fbox)\s*\{|[{}]"
)
_JOINTS = frozenset({",", ";", "and", ",and", "or", ",or", ""})
_LONGEST_BETWEEN = 40
_OR_MORE = re.compile(
    r"[^\S\n]*+[$}]*+[^\S\n]*+\(?\bor\s+((?:-?[$]?[0-9]|\$(?!\\boxed)|\\\()(?:[^\n.;()]|\([^()\n]*\)|\.(?=[0-9])){0,60})"
)

Span = tuple[int, int]


def candidates(text: str, several: bool = False) -> list[str]:
    """The answers that `text` states, in order, with repeats: in its answer spans, else its formulas, else its lines.

    `several`: the expected answer has several parts, so formulas joined by "and", "or" or a comma may be one answer.
    """
    text = without_denials(without_bold(short_runs(text)))
    spans = _stated(text)
    if spans is None:
        return []
    if not spans:
        text = behind_questions(text)
        spans = [_content(match) for match in _SEGMENT.finditer(text)]
    if not spans:
        stripped = text.strip()
        return [part.strip() for part in (stripped.split("\n") if several else _OR.split(stripped)) if part.strip()]
    return _texts(text, spans, several)


def _stated(text: str) -> list[Span] | None:
    """The answer spans in order; None if the last box is cut off, and nothing else is stated."""
    boxes = boxes_at(text)
    starts, spans = [box[0] for box in boxes], list(boxes)
    for start, end in sentences_at(text):
        first, after = bisect_left(starts, start), bisect_left(starts, end)
        if first == after:
            spans += _formulas(text, start, end)
    # What a box is an alternative to: "\boxed{5} or 6".
    for box in boxes:
        if other := _OR_MORE.match(text, box[1]):
            spans.append((other.start(1), other.end(1)))
    if not spans and _OPEN_BOX.search(text):  # truncated inside a box: the content is incomplete
        return None
    return sorted({span for span in spans if text[span[0] : span[1]].strip()})


def _formulas(text: str, start: int, end: int) -> list[Span]:
    """The formulas of a sentence that state the answer; the whole of it if it has none."""
    first = _SEGMENT.match(text, start)
    if first:  # a display may go on over the end of the line
        end = max(end, first.end())
    segments = list(_SEGMENT.finditer(text, start, end))
    if not segments:
        return [(start, end)]
    # "The value of $x$ is $5$ for $y = 2$": the first formula after the last verb that has one, or a number behind it.
    starts = [segment.start() for segment in segments]
    verbs = []
    for match in _COPULA.finditer(text, start, end):
        before = bisect_left(starts, match.start())  # the segments that begin before the verb
        if not before or match.start() >= segments[before - 1].end():
            verbs.append(match.end())
    if verbs and verbs[-1] >= segments[-1].end() and _NUMBER.search(text, verbs[-1], end):
        return [(verbs[-1], end)]
    cut = max((verb for verb in verbs if verb <= segments[-1].start()), default=start)
    chosen = [segment for segment in segments if segment.start() >= cut]
    if re.search(r"[0-9=]|[-+]\s*$", text[cut : chosen[0].start()]):  # "12 $\pi$", "x = $5$": the formula is a part
        return [(cut, end)]
    stated = [chosen[0]]
    for segment in chosen[1:]:
        if _joint(text[stated[-1].end() : segment.start()]) in _JOINTS:
            stated.append(segment)
        else:
            break
    return [_content(match) for match in stated]


def _content(match: re.Match[str]) -> Span:
    return next(match.span(number) for number in range(1, 5) if match.group(number) is not None)


def _joint(between: str) -> str | None:
    """The word or sign between two formulas; None if more than that stands there, or only the end of a line."""
    if len(between) > _LONGEST_BETWEEN:
        return None
    word = _BETWEEN.sub("", between)
    return None if not word and "\n" in between.strip("$ ") else word


def _texts(text: str, spans: Sequence[Span], several: bool) -> list[str]:
    """The texts of spans; with `several`, those that are joined are one."""
    texts: list[str] = []
    last_end = 0
    for start, end in spans:
        scale = _SCALE.match(text, end)
        content = text[start:end].strip() + (f" {scale[1]}" if scale else "")
        parts = [content] if several else [part.strip() for part in re.split(r"\bor\b", content) if part.strip()]
        if several and texts and texts[-1] != content and _joint(text[last_end:start]) in _JOINTS:
            texts[-1] += f" , {content}"
        else:
            texts += parts
        last_end = end
    return texts
