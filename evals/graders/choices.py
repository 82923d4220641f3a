"""The one choice parser: which options of a multiple-choice question a text puts forward.

A letter counts when it stands alone and is not a word of its sentence: in "A person would use a spoon, so C" the
first A is an article. A lower-case letter counts in brackets or a box, after "option", at the start with a stop or
bracket behind it, or as the whole answer.
"""

import re
import unicodedata
from collections.abc import Sequence

from evals.graders.answer_spans import commitments

_STANDING = re.compile(r"(?<![\w\\])(?<!\w[.'’])([A-Za-z])(?!\w|[.'’]\w)")
_LATEX_WRAP = re.compile(r"\\(?:text|textbf|mathrm|mathbf|boxed|fbox)\s*\{([^{}]*)\}")
_DENIED = re.compile(
    r"(?:\bnot|n't|\bnever|\bexcept|\bthan|\binstead\s+of)\s+(?:option\s+|choice\s+)?[(\[]?$", re.IGNORECASE
)
_NAMED = re.compile(r"\b(?:option|choice|letter)\s+$", re.IGNORECASE)
# What may follow a letter that is also a word (A the article, I the pronoun) for it to be a letter all the same.
_ENDS = r"[^\S\n]*(?:$|\n|[-–—=:&/,|])|[^\w\s'’]"
_A_GOES_ON = re.compile(rf"{_ENDS}|[^\S\n]+(?:is|was|because|since|as|and|or|seems)\b", re.IGNORECASE)
_I_GOES_ON = re.compile(rf"{_ENDS}|[^\S\n]+(?:is|because|since|or)\b", re.IGNORECASE)
_OPENING, _CLOSING = "([{<\"'`*", ")]}>.:\"'`*"


def candidates(text: str, letters: Sequence[str], options: Sequence[str] = ()) -> list[str]:
    """The distinct options that `text` puts forward, as letters out of `letters`, in the order of first mention.

    Those in its committed spans when they hold any, else those anywhere. `options` are the texts beside the letters: an
    answer that is exactly one of them, but for case and punctuation, means its letter.
    """
    spans = commitments(text)
    committed = [letter for span in spans for letter in mentions(span, letters, options)]
    return list(dict.fromkeys(committed or mentions(text, letters, options)))


def mentions(text: str, letters: Sequence[str], options: Sequence[str] = ()) -> list[str]:
    """Every mention of an option in `text`, in order, repeats included."""
    text = unicodedata.normalize("NFKC", text).strip()
    for _ in range(3):  # \boxed{\text{(B)}}
        text = _LATEX_WRAP.sub(r"{\1}", text)
    text = text.replace("**", "").replace("$", " ").strip()
    found = [m.group(1).upper() for m in _STANDING.finditer(text) if _is_mention(m, text, letters)]
    if found or not options:
        return found
    spoken = plain(text)
    return [letter for letter, option in zip(letters, options, strict=False) if spoken and plain(option) == spoken]


def plain(text: str) -> str:
    """Lower case, without punctuation at either end, single spaces: how option texts are compared."""
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
        return bool(_A_GOES_ON.match(text, end))
    if letter == "I":
        return bool(_I_GOES_ON.match(text, end))
    return True
