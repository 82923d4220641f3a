"""Parse which options of a multiple-choice question a text states.

A letter counts when it is isolated and not a word of its sentence: in "A person would use a spoon, so C" the
first A is an article. A lower-case letter counts in brackets or a box, after "option", at the start before a full stop
or bracket, or as the whole answer.
"""

import re
import unicodedata
from collections.abc import Sequence

from evals.graders.answer_spans import answer_spans

_ISOLATED = re.compile(r"(?<![\w\\])(?<!\w[.'’])([A-Za-z])(?!\w|[.'’]\w)")
_LATEX_WRAP = re.compile(r"\\(?:text|textbf|mathrm|mathbf|boxed|fbox)\s*\{([^{}]*)\}")
_DENIED = re.compile(
    r"(?:\bnot|n't|\bnever|\bexcept|\bthan|\binstead\s+of)\s+(?:option\s+|choice\s+)?[(\[]?$", re.IGNORECASE
)
_NAMED = re.compile(r"\b(?:option|choice|letter)\s+$", re.IGNORECASE)
# What may follow "A" or "I" for it to count as a letter, although it is also a word.
_ENDS = r"[^\S\n]*(?:$|\n|[-–—=:&/,|])|[^\w\s'’]"
_AFTER_A = re.compile(rf"{_ENDS}|[^\S\n]+(?:is|was|because|since|as|and|or|seems)\b", re.IGNORECASE)
_AFTER_I = re.compile(rf"{_ENDS}|[^\S\n]+(?:is|because|since|or)\b", re.IGNORECASE)
_OPENING, _CLOSING = "([{<\"'`*", ")]}>.:\"'`*"


def candidates(text: str, letters: Sequence[str], options: Sequence[str] = ()) -> list[str]:
    """Return the distinct options that `text` states, as letters out of `letters`, in the order of first mention.

    Options in its answer spans count if there are any, else those anywhere. `options` are the options' texts: an answer
    that equals one of them, ignoring case and punctuation, means its letter.
    """
    spans = answer_spans(text)
    committed = [letter for span in spans for letter in mentions(span, letters, options)]
    return list(dict.fromkeys(committed or mentions(text, letters, options)))


def mentions(text: str, letters: Sequence[str], options: Sequence[str] = ()) -> list[str]:
    """Return every mention of an option in `text`, in order, with repeats."""
    text = unicodedata.normalize("NFKC", text).strip()
    for _ in range(3):  # \boxed{\text{(B)}}
        text = _LATEX_WRAP.sub(r"{\1}", text)
    text = text.replace("**", "").replace("$", " ").strip()
    letters_found = [m.group(1).upper() for m in _ISOLATED.finditer(text) if _is_mention(m, text, letters)]
    if letters_found or not options:
        return letters_found
    stated = plain(text)
    return [letter for letter, option in zip(letters, options, strict=False) if stated and plain(option) == stated]


def plain(text: str) -> str:
    """Normalise an option's text for comparison: lower case, no outer punctuation, single spaces."""
    text = " ".join(unicodedata.normalize("NFKC", text).casefold().split())
    return text.strip(" .,:;!?\"'`()[]{}*")


def _is_mention(match: re.Match[str], text: str, letters: Sequence[str]) -> bool:
    letter, start, end = match.group(1), match.start(), match.end()
    if letter.upper() not in letters or _DENIED.search(text[max(0, start - 24) : start]):
        return False
    before, after = text[start - 1 : start], text[end : end + 1]
    if letter.islower():
        leads = not text[:start].strip(_OPENING + " ")
        alone = leads and not text[end:].strip(_CLOSING + " ")
        bracketed = before in tuple("([{") and after in tuple(")]}")
        return (
            alone
            or bracketed
            or (leads and after in tuple(").:]"))
            or bool(_NAMED.search(text[max(0, start - 12) : start]))
        )
    if letter == "A":
        return bool(_AFTER_A.match(text, end))
    if letter == "I":
        return bool(_AFTER_I.match(text, end))
    return True
