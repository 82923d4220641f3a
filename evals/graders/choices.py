"""Parse which options of a multiple-choice question a text states.

A letter counts if it is isolated and not a word of its sentence: in "A person would use a spoon, so C" the first A is
an article. A lower-case letter counts in brackets or a box, after "option", at the start before a full stop or bracket,
or as the whole answer. A letter does not count in a formula (`k_{A}`, `f(a)`), in a name ("vitamin C", "20 °C", "B
cells"), in the text of an option, in a denial ("A and B are wrong") or in a question ("Is it A?"). Otherwise all
letters are read alike: A and I count wherever B does, unless they can be the article or the pronoun there.
"""

import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import TypeVar

from nautile.evals.graders.answer_spans import answer_spans, without_bold, without_denials, without_questions

# A character of a word. Chinese, Japanese and Korean have no spaces, so their characters may touch a letter.
CJK = "\u3005-\u30ff\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff"
_IN_WORD = rf"[^\W{CJK}]"
# Not a part of a word, of LaTeX (`\A`), of an abbreviation ("U.S.") or of a contraction ("I'm").
_ISOLATED = re.compile(rf"(?<!{_IN_WORD})(?<!\\)(?<!\w[.'’])([A-Za-z])(?!{_IN_WORD}|[.'’]\w)")
_LATEX_WRAP = re.compile(
    r"([_^]?)\\(?:text(?:bf|it|tt|sf|rm|sc)?|emph|math(?:rm|bf|it|tt|sf)|boxed|fbox)\s*\{([^{}]*)\}"
)
INVISIBLE = re.compile("[\u00ad\u200b-\u200f\u202a-\u202e\u2060-\u2064\ufeff]")  # within words too
_EMPHASIS = re.compile(r"(?<!\w)_{1,2}([^\W_]+)_{1,2}(?!\w)")  # __B__
_NAMED = re.compile(r"\b(?:option|choice|letter)\s+[(\[{]?$", re.IGNORECASE)
_ANSWERED = re.compile(r"\banswer\s+$", re.IGNORECASE)
# The answer before its name: "so B is the correct answer". The first pattern finds where a clause begins, the second
# is matched there. White space is matched possessively, or a run of it would be tried at every length.
_CLAUSE_START = re.compile(r"(?:^|[.!?;,\n]|\bso\b)\s*+", re.IGNORECASE)
_IS_THE_ANSWER = re.compile(
    r"([^.!?;,\n]{1,80}?)\s++(?:is|must\s++be)\s++the\s++"
    r"(?:(?:correct|right|best)\s++)?(?:answer|option|choice)\b",
    re.IGNORECASE,
)
# "A" and "I" are also words. They can be so only before another word, and before none of these: no article stands
# before "is", and no pronoun of the first person.
# Not before a quotation mark: A "smart" person. "…" stands for a name that was removed.
_ENDS = rf"[^\S\n]*(?:$|\n|[^\w\s'’\"“`…]|[{CJK}])|[^\w\s'’…]|['’](?!\w)"
_AFTER_BOTH = r"is|because|since|or|which|but|not|rather|instead|due|if|then|so|given|although|while|where|whereas"
_AFTER_A = re.compile(
    rf"{_ENDS}|[^\S\n]+(?:{_AFTER_BOTH}|was|as|and|seems|for|by|would|should|can|must)\b", re.IGNORECASE
)
_AFTER_I = re.compile(rf"{_ENDS}|[^\S\n]+(?:{_AFTER_BOTH})\b", re.IGNORECASE)
_QUOTE = re.compile(r"[^\S\n]*[\"“`][^\"”`\n]*[\"”`][^\S\n]*(?:$|[.\n])")  # A "one", and no more
_SCRIPT = re.compile(r"[_^]\s?\{[^{}]*(?:\{[^{}]*\}[^{}]*){0,3}\}")
# A bracket that belongs to what stands before it: `\frac{h}{24}`, `k_{a}`, `f(a)`, `P(A)`; but not "option(A)".
_ATTACHED = re.compile(
    r"(?:[_^}\])]|\\(?!left|[bB]ig)[A-Za-z]+\s?|(?<![^\W_])[A-Za-z0-9]|\b(?:sin|cos|tan|log|ln|exp|max|min|Pr))[(\[{]$"
)
Mention = TypeVar("Mention")
_OPENING, _CLOSING = "([{<\"'`*\\", ")]}>.:\"'`*\\"

# Patterns that are not a mention of an option; their matches are removed.
_LETTER = r"(?:option\s+|choice\s+)?[(\[]?\b[A-Z]\b(?![.'’]\w)[)\]]?"
_LETTERS = rf"(?:{_LETTER}(?:\s?,\s?{_LETTER}){{0,9}},?\s?(?:(?i:or|nor|and)|&)\s{_LETTER}|{_LETTER})"
_NO_MENTION = (
    # names: "vitamin C", "20 °C", "B cells", "D-day"
    re.compile(
        r"(?i:\b(?:vitamins?|types?|grades?|plan|hepatitis|influenza|groups?|class|factor|appendix|figure|mel)\s+)[A-Z]\b"
        r"(?:(?:\s*,|\s+and)\s+[A-Z]\b(?=\s+(?:is|are|and|in)\b))?"
        r"|[A-Z](?:\+\+|#)|[0-9]\s?°?\s?[CFK]\b|\b(?i:degrees?)\s[CFK]\b|°\s?[CFK]\b|\b[A-Z][-‐‑][a-z]\w*|\b[A-Z]\s+(?:cells?|notes?|major|minor|flat|sharp)\b"
    ),
    # denials
    re.compile(
        rf"(?i:\b(?:not|never|except|than|neither|instead\s+of|cannot)|n['’]t)\s+(?i:be\s+|either\s+)?{_LETTERS}"
    ),
    re.compile(
        rf"{_LETTERS}\s+(?i:(?:is|are|was|were|seems?|would\s+be)\s+(?:(?:clearly|both|also|all|obviously|very)\s+)?"
        r"(?:(?:a|an|the)\s+)?(?:wrong|incorrect|false|impossible|unlikely|distractors?|out\b|not\b)"
        r"|(?:is|are|was|were|ca|could|does|do|did|would)n['’]t\b|cannot\b|(?:does|do|did|would|can|should|could)\s+not\b"
        r"|fails?\b|(?:can|could|may|must|should)\s+be\s+(?:ruled\s+out|eliminated|excluded|rejected|discarded)\b"
        r"|(?:has|have)\s+nothing\b)"
    ),
    re.compile(
        r"(?i:\b(?:eliminat|exclud|reject|discard|rul)(?:e|es|ed|ing|s)?\s+(?:out\s+)?|\b(?:any|every|all|anything|everything"
        r"|nothing|none)(?:\s+(?:answer|option|choice))?\s+(?:but|except|other\s+than)\s+|\bother\s+than\s+|\bwithout\s+"
        rf"|\bopposite\s+of\s+)(?i:the\s+)?{_LETTERS}"
    ),
    # denials in other languages; Chinese, Japanese and Korean have no boundary between a word and a letter
    re.compile(
        r"(?:不是|不选|不選|并非|並非|排除)\s*[A-Z](?![A-Za-z0-9])|[A-Z]\s*(?:是错|是錯|是不|不是|不对|不對|不正确|不正確|ではな|ではあり"
        r"|じゃな|は違|は間違|[이가은는]\s?아니)"
    ),
    re.compile(rf"(?i:\b(?:nicht|pas|não\s+é|no\s+es|non\s+è|не)\s+){_LETTERS}"),
)


def candidates(text: str, letters: Sequence[str], options: Sequence[str] = ()) -> list[str]:
    """Return the distinct options that `text` states, as letters out of `letters`, in the order of their last mention.

    If its answer spans mention options, only these count; otherwise all mentions do. `options` are the texts of the
    options: an answer that equals one of them, ignoring case and punctuation, means its letter.
    """
    text = without_denials(without_bold(text))
    spans = [*answer_spans(text), *_named_answers(text)]
    # What the text commits itself to replaces all it has weighed before.
    committed = [letter for span in spans for letter in mentions(span, letters, options)]
    return in_order_of_last(committed or mentions(text, letters, options))


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
    text = without_wraps(_SCRIPT.sub("_", text))
    plain_text = plain(text)
    texts = dict(zip(letters, map(plain, options), strict=False))
    equal = [letter for letter, option in texts.items() if option == plain_text]
    if equal and len(plain_text) > 1:
        return equal
    # Remove the texts of options that contain isolated letters, which are not mentions; the longest first.
    for option in sorted(options, key=len, reverse=True):
        if len(plain(option)) > 1 and _ISOLATED.search(option):
            words = r"\s+".join(re.escape(word) for word in unicodedata.normalize("NFKC", option).split())
            text = re.sub(rf"(?<!\w){words}(?!\w)", " ", text, flags=re.IGNORECASE)
    text = without_questions(text)
    for pattern in _NO_MENTION:
        text = pattern.sub(" … ", text)
    return [m.group(1).upper() for m in _ISOLATED.finditer(text) if _is_mention(m, text, letters, texts)]


def without_wraps(text: str) -> str:
    r"""`text` without what only dresses it: bold type, dollar signs, `\boxed` and `\text`, whose braces stay."""
    # Each round unwraps one level, from the inside.
    for _ in range(3):  # \boxed{\text{(B)}}
        text = _LATEX_WRAP.sub(lambda match: f"{match[1] or ' '}{{{match[2]}}}", text)
    return _EMPHASIS.sub(r"\1", without_bold(text).replace("$", " ")).strip()


def in_order_of_last(mentioned: Sequence[Mention]) -> list[Mention]:
    """Each of `mentioned` once, in the order of their last mentions."""
    return list(dict.fromkeys(reversed(mentioned)))[::-1]


def plain(text: str) -> str:
    """Normalise an option's text for comparison: lower case, no outer punctuation, single spaces."""
    text = " ".join(INVISIBLE.sub("", unicodedata.normalize("NFKC", text)).casefold().replace("−", "-").split())
    return text.strip(" .,:;!?\"'`()[]{}*“”„‘’«»「」。")


def _is_mention(match: re.Match[str], text: str, letters: Sequence[str], options: Mapping[str, str]) -> bool:
    """Whether an isolated letter means an option, by its case and what surrounds it."""
    letter, start, end = match.group(1), match.start(), match.end()
    if letter.upper() not in letters:
        return False
    before, after = text[start - 1 : start], text[end : end + 1]
    if _ATTACHED.search(text[max(0, start - 20) : start]):
        return False
    leads = not text[:start].strip(_OPENING + " ")
    if letter.islower():
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
    if letter not in "AI":
        return True
    word = _AFTER_A if letter == "A" else _AFTER_I
    if word.match(text, end) or (leads and _QUOTE.match(text, end)):
        return True
    if _NAMED.search(text[max(0, start - 12) : start]):
        return True
    # "A knife", where "knife" is the text of option A; but not in the sentence "A knife cuts"
    own = options.get(letter, "")
    if len(own) < 2 or leads:
        return len(own) > 1 and plain(text[end : end + 3 * len(own)]).startswith(own)
    words = r"\s+".join(map(re.escape, own.split()))
    return re.compile(rf"\W*{words}(?:{_ENDS}|\s+(?:{_AFTER_BOTH})\b)", re.IGNORECASE).match(text, end) is not None
