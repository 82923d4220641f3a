"""Find the spans that state an answer: `\\boxed{…}`, `#### …`, `the answer is …`. All answer parsers prefer them.

A span ends with its sentence, or before a reason or a rejected alternative (`because`, `not`, `rather than`), so that
"the answer is 12, not 13" states only 12, while "the answer is 12 or 13" has two candidates.
"""

import re

# "The answer to the question is: 12", "Answer: 12", "the correct option would be B"; not "the answer is not 12".
_ANSWER_IS = re.compile(
    r"\b(?:answer|correct\s+(?:option|choice|letter))\b"
    r"(?:[^\S\n]+(?:to|for)\b[^.\n:=]{0,80}?)?"  # "the answer to the question is"
    r"\s*(?:\b(?:is|was|would\s+be|must\s+be|should\s+be|will\s+be|equals)\b(?![^\S\n]*not\b)[^\S\n]*:?|[=:：])"
    r"[\s:]*",
    re.IGNORECASE,
)
_HASHES = re.compile(r"####\s*")
# A full stop inside "3.5" ends nothing.
_SENTENCE_END = re.compile(r"[.!?。！？](?=\s|$)|\n|;")
_REASON = re.compile(r"\b(?:because|since|rather\s+than|instead\s+of|not)\b", re.IGNORECASE)
_LINE_END = re.compile(r"\n")
_BOXED = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BRACE = re.compile(r"[{}]")
MOST_SPANS = 32  # that end together: a sentence with more marks repeats itself


def answer_spans(text: str) -> list[str]:
    """Return the spans of `text` that state an answer, in order; empty if none does.

    Of more than `MOST_SPANS` spans that end together only the first and the last are returned.
    """
    # Markdown's bold, which stands anywhere: "The **answer** is **12**."
    text = text.replace("**", "")
    spans = _boxed_at(text)
    for mark, ends in ((_ANSWER_IS, _SENTENCE_END), (_HASHES, _LINE_END)):
        for starts, end in _marked_sentences(text, mark, ends):
            for start in starts:
                sentence = text[start:end]
                reason = _REASON.search(sentence)
                spans.append((start, sentence[: reason.start()] if reason else sentence))
    return [span.strip() for _, span in sorted(spans) if span.strip()]


def boxed(text: str) -> list[str]:
    r"""The contents of each `\boxed{…}` with balanced braces, in order. A box that is never closed is ignored."""
    return [content.strip() for _, content in _boxed_at(text)]


def _marked_sentences(text: str, mark: re.Pattern[str], ends: re.Pattern[str]) -> list[tuple[list[int], int]]:
    """(starts, end) of the spans of each sentence with a mark; a start is the end of a mark.

    A small model may repeat the mark to the end of its reply. Each span would contain all that follow it, and reading
    them would take a time that grows with the square of the length.
    """
    sentences: list[tuple[list[int], int]] = []
    for match in mark.finditer(text):
        if not sentences or match.end() > sentences[-1][1]:
            end = ends.search(text, match.end())
            sentences.append(([], end.start() if end else len(text)))
        sentences[-1][0].append(match.end())
    half = MOST_SPANS // 2
    return [
        (starts if len(starts) <= MOST_SPANS else [*starts[:half], *starts[-half:]], end) for starts, end in sentences
    ]


def _boxed_at(text: str) -> list[tuple[int, str]]:
    """(start, content) of each closed box."""
    starts = {match.end() for match in _BOXED.finditer(text)}
    boxes, open_braces = [], list[int]()  # where the content of each open brace starts
    for match in _BRACE.finditer(text) if starts else ():
        if match.group() == "{":
            open_braces.append(match.end())
        elif open_braces and (start := open_braces.pop()) in starts:
            boxes.append((start, text[start : match.start()]))
    return sorted(boxes)
