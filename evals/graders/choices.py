"""Parse which options of a multiple-choice question a text states.

A letter counts if it is isolated and not a word of its sentence: in "A person would use a spoon, so C" the first A is
an article. A lower-case letter counts in brackets or a box, after "option", at the start before a full stop or bracket,
or as the whole answer. A letter does not count in a name ("vitamin C", "20 °C", "B cells"), in the text of an option,
in a denial ("A and B are wrong") or in a question ("Is it A?").
"""

import re
import unicodedata
from collections.abc import Sequence

from evals.graders.answer_spans import answer_spans

# Not a part of a word, of LaTeX (`\A`), of an abbreviation ("U.S.") or of a contraction ("I'm").
_ISOLATED = re.compile(r"(?<![\w\\])(?<!\w[.'’])([A-Za-z])(?!\w|[.'’]\w)")
_LATEX_WRAP = re.compile(r"\\(?:text|textbf|mathrm|mathbf|boxed|fbox)\s*\{([^{}]*)\}")
_NAMED = re.compile(r"\b(?:option|choice|letter)\s+$", re.IGNORECASE)
_ANSWERED = re.compile(r"\banswer\s+$", re.IGNORECASE)
# The answer before its name: "so B is the correct answer". The first pattern finds where a clause begins, the second
# is matched there. White space is matched possessively, or a run of it would be tried at every length.
_CLAUSE_START = re.compile(r"(?:^|[.!?;,\n]|\bso\b)\s*+", re.IGNORECASE)
_IS_THE_ANSWER = re.compile(
    r"([^.!?;,\n]{1,80}?)\s++(?:is|must\s++be)\s++the\s++"
    r"(?:(?:correct|right|best)\s++)?(?:answer|option|choice)\b",
    re.IGNORECASE,
)
# "A" and "I" are also words: they count as letters only if one of these follows.
_ENDS = r"[^\S\n]*(?:$|\n|[-–—=:&/,|])|[^\w\s'’]"
_AFTER_A = re.compile(rf"{_ENDS}|[^\S\n]+(?:is|was|because|since|as|and|or|seems)\b", re.IGNORECASE)
_AFTER_I = re.compile(rf"{_ENDS}|[^\S\n]+(?:is|because|since|or)\b", re.IGNORECASE)
_OPENING, _CLOSING = "([{<\"'`*", ")]}>.:\"'`*"

# Patterns that are not a mention of an option; their matches are removed.
_LETTER = r"(?:option\s+|choice\s+)?[(\[]?\b[A-Z]\b(?![.'’]\w)[)\]]?"
_LETTERS = rf"(?:{_LETTER}(?:\s?,\s?{_LETTER}){{0,9}},?\s?(?:(?i:or|nor|and)|&)\s{_LETTER}|{_LETTER})"
_NO_MENTION = (
    # names: "vitamin C", "20 °C", "B cells", "D-day"
    re.compile(
        r"(?i:\b(?:vitamins?|types?|grades?|plan|hepatitis|influenza|groups?|class|factor|appendix|figure|mel)\s+)[A-Z]\b"
        r"(?:(?:\s*,|\s+and)\s+[A-Z]\b(?=\s+(?:is|are|and|in)\b))?"
        r"|[0-9]\s?°?\s?[CFK]\b|°\s?[CFK]\b|\b[A-Z][-‐‑][a-z]\w*|\b[A-Z]\s+(?:cells?|notes?|major|minor|flat|sharp)\b"
    ),
    # denials
    re.compile(
        rf"(?i:\b(?:not|never|except|than|neither|instead\s+of|cannot)|n['’]t)\s+(?i:be\s+|either\s+)?{_LETTERS}"
    ),
    re.compile(
        rf"{_LETTERS}\s+(?i:(?:is|are|was|were|seems?)\s+(?:(?:clearly|both|also|all|obviously)\s+)?"
        r"(?:wrong|incorrect|false|impossible|not\b)|(?:is|are|was|were|ca|could)n['’]t\b|cannot\b)"
    ),
)
_SENTENCE_START = re.compile(r"(?:^|(?<=[.!?\n;]))\s*+")
_QUESTION = re.compile(r"[^\s.!?\n;]+\s[^.!?\n;]*\?")  # of several words: "C?" is an answer


def candidates(text: str, letters: Sequence[str], options: Sequence[str] = ()) -> list[str]:
    """Return the distinct options that `text` states, as letters out of `letters`, in the order of first mention.

    If its answer spans mention options, only these count; otherwise all mentions do. `options` are the texts of the
    options: an answer that equals one of them, ignoring case and punctuation, means its letter.
    """
    spans = [*answer_spans(text), *_named_answers(text.replace("**", ""))]
    # What the text commits itself to replaces all it has weighed before.
    committed = [letter for span in spans for letter in mentions(span, letters, options)]
    return list(dict.fromkeys(committed or mentions(text, letters, options)))


def _without_questions(text: str) -> str:
    parts, end = [], 0
    for sentence in _SENTENCE_START.finditer(text):
        if sentence.start() >= end and (question := _QUESTION.match(text, sentence.end())):
            parts += [text[end : sentence.start()], " … "]
            end = question.end()
    return "".join([*parts, text[end:]])


def _named_answers(text: str) -> list[str]:
    """What stands before "is the answer" in its clause, in order."""
    named_answers, end = [], 0
    for clause in _CLAUSE_START.finditer(text):
        if clause.start() >= end and (match := _IS_THE_ANSWER.match(text, clause.end())):
            named_answers.append(match.group(1))
            end = match.end()
    return named_answers


def mentions(text: str, letters: Sequence[str], options: Sequence[str] = ()) -> list[str]:
    """Return every mention of an option in `text`, in order, with repeats."""
    text = unicodedata.normalize("NFKC", text).strip()
    # Each round unwraps one level, from the inside.
    for _ in range(3):  # \boxed{\text{(B)}}
        text = _LATEX_WRAP.sub(r"{\1}", text)
    text = text.replace("**", "").replace("$", " ").strip()
    plain_text = plain(text)
    equal = [letter for letter, option in zip(letters, options, strict=False) if plain(option) == plain_text]
    if equal and len(plain_text) > 1:
        return equal
    # Remove the texts of options that contain isolated letters, which are not mentions; the longest first.
    for option in sorted(options, key=len, reverse=True):
        if len(plain(option)) > 1 and _ISOLATED.search(option):
            words = r"\s+".join(re.escape(word) for word in unicodedata.normalize("NFKC", option).split())
            text = re.sub(rf"(?<!\w){words}(?!\w)", " ", text, flags=re.IGNORECASE)
    text = _without_questions(text)
    for pattern in _NO_MENTION:
        text = pattern.sub(" … ", text)
    return [m.group(1).upper() for m in _ISOLATED.finditer(text) if _is_mention(m, text, letters)]


def plain(text: str) -> str:
    """Normalise an option's text for comparison: lower case, no outer punctuation, single spaces."""
    text = " ".join(unicodedata.normalize("NFKC", text).casefold().split())
    return text.strip(" .,:;!?\"'`()[]{}*")


def _is_mention(match: re.Match[str], text: str, letters: Sequence[str]) -> bool:
    """Whether an isolated letter means an option, by its case and what surrounds it."""
    letter, start, end = match.group(1), match.start(), match.end()
    if letter.upper() not in letters:
        return False
    before, after = text[start - 1 : start], text[end : end + 1]
    if letter.islower():
        leads = not text[:start].strip(_OPENING + " ")
        # "c", "(c)", "c." as the whole text: nothing but brackets and full stops around it.
        alone = leads and not text[end:].strip(_CLOSING + " ")
        bracketed = before in tuple("([{") and after in tuple(")]}")
        return (
            alone
            or bracketed
            or (leads and after in tuple(").:]"))
            or bool(_NAMED.search(text[max(0, start - 12) : start]))
            or bool(_ANSWERED.search(text[max(0, start - 12) : start]) and not text[end:].strip(_CLOSING + " "))
        )
    if letter == "A":
        return bool(_AFTER_A.match(text, end))
    if letter == "I":
        return bool(_AFTER_I.match(text, end))
    return True
