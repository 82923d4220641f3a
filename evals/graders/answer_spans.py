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
_BOXED = re.compile(r"\\(?:boxed|fbox)\s*\{")


def answer_spans(text: str) -> list[str]:
    """Return the spans of `text` that state an answer, in order; empty if none does."""
    # Markdown's bold, which stands anywhere: "The **answer** is **12**."
    text = text.replace("**", "")
    spans = _boxed_at(text)
    for mark, ends in ((_ANSWER_IS, _SENTENCE_END), (_HASHES, re.compile(r"\n"))):
        for match in mark.finditer(text):
            tail = text[match.end() :]
            end = ends.search(tail)
            sentence = tail[: end.start()] if end else tail
            reason = _REASON.search(sentence)
            spans.append((match.end(), sentence[: reason.start()] if reason else sentence))
    return [span.strip() for _, span in sorted(spans) if span.strip()]


def boxed(text: str) -> list[str]:
    r"""The contents of each `\boxed{…}` with balanced braces, in order. A box that is never closed is ignored."""
    return [content.strip() for _, content in _boxed_at(text)]


def _boxed_at(text: str) -> list[tuple[int, str]]:
    """(start, content) of each closed box."""
    boxes = []
    for match in _BOXED.finditer(text):
        depth = 1
        for position in range(match.end(), len(text)):
            depth += {"{": 1, "}": -1}.get(text[position], 0)
            if depth == 0:
                boxes.append((match.end(), text[match.end() : position]))
                break
    return boxes
