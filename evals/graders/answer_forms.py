r"""Read the form of a mathematical answer (a value, words, a list, an interval, a relation), and compare two forms.

A text is taken apart here, by its brackets, commas and relations, down to single values; only two values that are not
numbers need a computer algebra system, which is asked through a function. So what such a system drops or rewrites is
compared all the same: the order and the ends of a sequence, units, the base of a number, the kind of a bracket.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from nautile.evals.graders.notation import depth_of, enclosed, same_number, split_at, tidy, written_number

Question = Literal["same", "multiple", "positive multiple"]
# Whether two values are the same, or one is a multiple of the other by a number. Called with tidy LaTeX.
Ask = Callable[[Question, str, str], bool]
Kind = Literal["value", "words", "list", "sequence", "brackets", "union", "relation", "matrix", "ratio"]

MAX_DEPTH = 40  # of nested brackets
MAX_PARTS = 200
ELLIPSIS = "\\ldots"
_RELATIONS = frozenset({"=", "<", ">", "\\le", "\\ge", "\\ne", "\\in", "\\approx", "\\to", "\\equiv", "\\sim"})
_FLIPPED = {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le"}
_INFINITE = re.compile(r"\s*([-+]?)\s*\\infty\s*")
_FORMULA = re.compile(r"[0-9A-Za-z\s+*/^_=<>(){}\[\],;|!.-]*[0-9A-Za-z\s(){}\[\]|!.]")
_DATE = re.compile(r"[0-9]{1,4}([-/.])[0-9]{1,2}\1[0-9]{1,4}|[0-9]+(?:-[0-9]+)+")
_LONGEST_FORMULA = 200
_COMMAS = frozenset({",", ";"})
_BRACKETS = {"(": ")", "[": "]", "\\{": "\\}", "\\langle": "\\rangle"}
_MATRIX = re.compile(
    r"\\begin\{([pbBvV]?(?:small)?matrix|array|cases)\}(?:\{[^{}]*\})?((?:(?!\\begin).)*)\\end\{\1\}", re.DOTALL
)
_PLUS_MINUS = re.compile(r"\\pm(?![A-Za-z])")  # and not `\pmod`
_TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
_AND = re.compile(
    r"\s*,?\s*(?:\\text\s*\{\s*,?\s*(?:and|or)\s*,?\s*\}|(?<![A-Za-z\\{])(?:and|or)(?![A-Za-z}])|(?<=\s)(?:oder|und|et|ou)(?=\s))\s*"
)
_FRENCH = re.compile(r"^(\]|\[)([^\[\]]*[,;][^\[\]]*)(\[|\])$")
_BASE = re.compile(
    r"^(-?[0-9][0-9A-Fa-f,.]*)\s*_\s*(?:\{\s*(?:\\text\s*\{)?\s*([A-Za-z]+|[0-9]{1,2})\s*\}?\s*\}|([0-9]{1,2}))$"
)
_WORDS = {
    "two": "2", "three": "3", "four": "4", "five": "5", "six": "6", "seven": "7", "eight": "8", "nine": "9",
    "ten": "10", "twelve": "12", "sixteen": "16",
}  # fmt: skip
_SCALES = {
    "dozen": "12", "hundred": "10^{2}", "thousand": "10^{3}", "million": "10^{6}", "billion": "10^{9}",
    "trillion": "10^{12}", "mn": "10^{6}", "bn": "10^{9}", "tn": "10^{12}", "lakh": "10^{5}", "crore": "10^{7}",
}  # fmt: skip
_NO_UNIT = re.compile(r"\b(?:factorial|wrong|incorrect|not|false)\b|^\s*(?:squared|cubed)\b", re.IGNORECASE)
# The name of a value: x, a_{37}, f(2), f^{-1}(x), |AB|, A:B, \angle ABC, \frac{NO}{BO}; no other expression.
_NAME = re.compile(
    r"(?:\\(?:angle|triangle|overline|overrightarrow|vec|Delta|mathcal|mathbb|alpha|beta|gamma|theta|lambda|mu|phi|omega"
    r"|sigma|rho|tau|delta|epsilon|max|min)\s*|\\text\s*\{[^{}]*\}|\\frac\{[A-Za-z_]+\}\{[A-Za-z_]+\}|[A-Za-z]|['\s|:/]"
    r"|_\s*(?:[0-9A-Za-z]|\{[A-Za-z0-9\s,]*\})|\{[A-Za-z\s]*\}|\^\{-1\}|(?<=[fghFGHPQEVTWSDNRpq}'])\s*\([^()=]*\))+"
)
_RELATIVE_NAME = re.compile(r"[A-Za-z]|\\text")

# Spellings of one unit; the plural is dropped before. What is in no line is a word, compared as such.
_SPELLINGS = {
    "mm": "millimeter millimetre", "cm": "centimeter centimetre", "dm": "decimeter decimetre", "m": "meter metre",
    "km": "kilometer kilometre", "in": "inch inche", "ft": "foot feet", "yd": "yard", "mi": "mile", "mg": "milligram",
    "g": "gram gm", "kg": "kilogram", "lb": "pound", "oz": "ounce", "ml": "milliliter millilitre", "l": "liter litre",
    "gal": "gallon", "s": "second sec", "min": "minute", "h": "hour hr", "day": "", "week": "", "month": "",
    "year": "yr", "degree": "deg", "radian": "rad", "percent": "pct percentage", "usd": "dollar", "cent": "",
    "eur": "euro", "gbp": "", "am": "a.m", "pm": "p.m", "mph": "", "celsius": "", "fahrenheit": "", "unit": "",
    "hz": "hertz", "n": "newton", "j": "joule", "w": "watt", "v": "volt", "pa": "pascal", "mol": "mole",
    "k": "kelvin", "nd": "", "th": "", "rd": "", "st": "",
}  # fmt: skip
_UNITS = {spelling: unit for unit, others in _SPELLINGS.items() for spelling in (unit, *others.split())}
# Units that need no \text around them; a single letter may be a variable.
_BARE = "|".join(
    sorted((n for n in _UNITS if len(n) > 1 and n not in ("st", "nd", "rd", "th", "am", "pm")), key=len, reverse=True)
)
_SUFFIX = re.compile(
    r"(?:\s*(?:"
    r"\\text\s*\{(?P<text>[^{}]*)\}(?:\s*\^\s*\{?\s*(?P<power>[0-9])\s*\}?)?"
    r"|(?P<circ>\^\\circ)\s*(?P<scale>[CF](?![A-Za-z]))?"
    r"|(?P<percent>%)"
    r"|\\pmod\s*\{?\s*(?P<modulus>[0-9]+)\s*\}?"
    r"|\\(?P<usd>usd)"
    r"|(?P<sign>[€£¥₹])"
    rf"|(?:(?<=[0-9\s}}])(?P<bare>(?:{_BARE})s?(?:\s*/\s*[a-z]{{1,4}})?|[a-z]{{1,4}}\s*/\s*[a-z]{{1,4}})(?:\s*\^\s*\{{?\s*(?P<bare_power>[0-9])\s*\}}?)?)"
    r"|(?<=[0-9\s])(?P<clock>[ap]\.?\s?m\.?)"
    r"|(?<=[0-9}\s])\s(?P<words>[A-Za-z][a-z]{2,}(?:\s+[a-z]{2,}){0,3})"
    r"))\s*$",
    re.IGNORECASE,
)
_PREFIX = re.compile(r"^\s*(-?)\s*(?:(?:US)?\\(usd)|([€£¥₹]|USD|EUR|GBP|Rs\.?))\s*(?=-?\s*[0-9.\\])")
_ANGLE = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])")
_CURRENCY = {"€": "eur", "EUR": "eur", "£": "gbp", "GBP": "gbp", "USD": "usd", "¥": "yen", "₹": "rupee"}
_UNIT_NOISE = frozenset({"of", "the", "a", "an", "is", "unit", "total"})
_PUNCTUATION = re.compile(r"[^\w\s%/+-]")


@dataclass(frozen=True)
class AnswerForm:
    """A mathematical answer taken apart. `parts`: of anything but a value or words.

    `text`: the value in tidy LaTeX; the words; the brackets of "brackets"; the operators of a relation, in order.
    `unit`: the words and signs that follow or precede a value.
    """

    kind: Kind
    text: str = ""
    parts: tuple["AnswerForm", ...] = ()
    unit: tuple[str, ...] = ()


@lru_cache(maxsize=2048)
def read(text: str) -> AnswerForm:
    """The form of `text`. Any text has one; what cannot be taken apart is a value as it stands."""
    text = tidy(text)
    return _read(text) if depth_of(text) <= MAX_DEPTH else AnswerForm("value", text)


def _read(text: str) -> AnswerForm:
    text = text.strip().strip(",;").strip()
    if text.startswith("{") and enclosed(text):
        return _read(text[1:-1])
    if text.startswith("\\text") and (match := _TEXT.fullmatch(text)):
        return _words(match[1])
    # The label of a part or an option: "(a) 5" and "\text{(C)} 5" are 5.
    text = re.sub(r"^(?:\([a-z]\)\s+|\\text\s*\{\s*\([A-Z]\)\s*\}\s*)(?=[-0-9\\(])(?!\\text)", "", text)
    if match := _MATRIX.fullmatch(text):
        if match[1][0] in "vV":
            return AnswerForm("value", text)
        rows = [row for row in re.split(r"\\\\", match[2]) if row.strip()]
        cells = [tuple(_read(cell) for cell in row.split("&")) for row in rows]
        return AnswerForm("matrix", text, tuple(AnswerForm("brackets", "[]", row) for row in cells))
    parts, _ = split_at(text, frozenset({";"}))  # x = 1, y = 2; x = 3, y = 4
    if 1 < len(parts) <= MAX_PARTS and all(len(split_at(part, frozenset({","}), True)[0]) > 1 for part in parts):
        return AnswerForm("list", parts=tuple(_read(part) for part in parts))
    parts, _ = split_at(_AND.sub(" , ", text), _COMMAS, thousands=True)
    if 1 < len(parts) <= MAX_PARTS:
        return _several([part for part in parts if part])
    parts, operators = split_at(text, _RELATIONS)
    if operators and all(parts):
        if "\\approx" in operators[1:]:  # x = 1/3 and, roughly, 0.33
            operators = operators[: operators.index("\\approx", 1)]
            parts = parts[: len(operators) + 1]
        return AnswerForm("relation", " ".join(operators), tuple(_read(part) for part in parts))
    parts, signs = split_at(text, frozenset({"\\cup"}))
    if signs:
        return AnswerForm("union", parts=tuple(_read(part) for part in parts))
    if _PLUS_MINUS.search(text):  # two values, at whatever depth the sign stands
        signed = (_PLUS_MINUS.sub(sign, text) for sign in "+-")
        both = [re.sub(r"\\mp(?![A-Za-z])", sign, one_sign) for one_sign, sign in zip(signed, "-+", strict=True)]
        return AnswerForm("list", parts=tuple(map(_read, both)))
    if ELLIPSIS in text and text != ELLIPSIS:
        parts, _ = split_at(text, frozenset({ELLIPSIS}))
        return _sequence([item for part in parts for item in (part, ELLIPSIS)][:-1])
    for opening, closing in _BRACKETS.items():
        if text.startswith(opening) and (text.endswith(closing) or (opening in "([" and text.endswith((")", "]")))):
            if not enclosed(text):
                break
            inner = text[len(opening) : len(text) - (1 if text.endswith((")", "]")) else len(closing))].strip()
            return _bracketed(opening, text[-1] if opening in "([" else closing, inner)
    if match := _FRENCH.match(text):  # ]0, 1[
        return _bracketed("(" if match[1] == "]" else "[", ")" if match[3] == "[" else "]", match[2])
    parts, signs = split_at(text, frozenset({":"}))
    if signs and all(parts):
        *whole, last = [_read(part) for part in parts]
        return AnswerForm("ratio", parts=(*whole, replace(last, unit=())), unit=last.unit)
    return _value(text)


def _several(parts: Sequence[str]) -> AnswerForm:
    if any(ELLIPSIS in part for part in parts):
        return _sequence(parts)
    forms = list[AnswerForm]()
    for part, form in ((part, _read(part)) for part in parts):
        last = form.parts[-1] if form.kind == "relation" else form
        if not _PLUS_MINUS.search(part) or last.kind != "list":
            forms.append(form)
        elif last is form:
            forms += form.parts
        else:
            forms += [replace(form, parts=(*form.parts[:-1], value)) for value in last.parts]
    return AnswerForm("list", parts=tuple(forms))


def _sequence(parts: Sequence[str]) -> AnswerForm:
    """A list of which some is left out. It is known by all that is written of it, in order."""
    items = [item for part in parts for item in re.split(rf"({re.escape(ELLIPSIS)})", part) if item.strip()]
    forms = [AnswerForm("words", ELLIPSIS) if item.strip() == ELLIPSIS else _read(item) for item in items]
    return AnswerForm("sequence", parts=tuple(forms))


def _bracketed(opening: str, closing: str, inner: str) -> AnswerForm:
    parts, _ = split_at(inner, _COMMAS)
    if opening == "\\{":
        if "|" in inner or ":" in inner:  # a set by its condition
            return AnswerForm("value", f"\\{{{inner}\\}}")
        return _several([part for part in parts if part]) if inner else AnswerForm("list")
    if len(parts) == 1:
        if opening == "(" and closing == ")":
            return _words(inner) if re.fullmatch(r"[A-Z]", inner) else _read(inner)
        if not inner:
            return AnswerForm("value", opening + closing)
        form = _read(inner)
        return form if form.kind == "matrix" else AnswerForm("brackets", opening + closing, (form,))
    ends = [_read(part) for part in parts]
    if len(ends) == 2:  # an infinite end is open, however it is written
        opening = "(" if opening == "[" and "\\infty" in parts[0] else opening
        closing = ")" if closing == "]" and "\\infty" in parts[1] else closing
    return AnswerForm("brackets", opening + closing, tuple(ends))


def _words(text: str) -> AnswerForm:
    r"""What `\text{…}` holds: words, unless it is a number or a formula."""
    text = text.strip()
    rest = _AND.sub(",", text)
    if written_number(text) is not None or (re.search(r"[0-9]", rest) and not re.search(r"[A-Za-z]{2}", rest)):
        return _read(text)
    return AnswerForm("words", _plain(text))


def _plain(text: str) -> str:
    text = _PUNCTUATION.sub(" ", _TEXT.sub(r" \1 ", text).replace("\\", "")).casefold()
    words = text.split()
    return " ".join([word for word in words if word not in ("a", "an", "the")] or words)


def _value(text: str) -> AnswerForm:
    """A single value with its unit, or words."""
    unit: list[str] = []
    if match := _PREFIX.match(text):
        unit.append(_CURRENCY.get(match[3], "rupee") if match[3] else "usd")
        text = match[1] + text[match.end() :]
    while text and (match := _SUFFIX.search(text)) and match.start() > 0:
        before = text[: match.start()].strip()
        if (match["words"] or match["bare"] or match["clock"]) and written_number(before) is None:
            break  # "2 mg" has a unit, and "x mg" is a product
        if match["circ"] and _ANGLE.search(before):
            break  # an argument in degrees, not an answer in degrees
        if _NO_UNIT.search(match["text"] or match["words"] or ""):
            break  # the value is another one, or none
        scale = (match["text"] or match["words"] or match["bare"] or "").strip().casefold().split()
        if scale and scale[0] in _SCALES:
            before = f"{before}*{_SCALES[scale[0]]}"
            unit[:0] = _unit_words(" ".join(scale[1:]))
        else:
            unit[:0] = _unit_of(match)
        text = before
    if match := _BASE.match(text):
        base = (match[2] or match[3]).casefold()
        base, digits = _WORDS.get(base, base), match[1].replace(",", "").upper()
        if not base.isdigit() or all(int(digit, 16) < int(base) for digit in digits if digit.isalnum()):
            return AnswerForm("value", digits, unit=(*unit, f"base {base}"))
    if text in ("\\emptyset", "\\mathbb{R}", "\\R"):
        infinite = (AnswerForm("value", "-\\infty"), AnswerForm("value", "\\infty"))
        return AnswerForm("list") if text == "\\emptyset" else AnswerForm("brackets", "()", infinite)
    letters = _TEXT.sub(r"\1", text)
    if re.fullmatch(r"[^\W\d_]{2,}(?:[\s'-]+[^\W\d_]+)*", letters) and (len(letters) > 3 or "\\text" in text):
        return AnswerForm("words", _plain(letters), unit=tuple(unit))
    return AnswerForm("value", text, unit=tuple(unit))


def _unit_of(match: re.Match[str]) -> list[str]:
    """The words of a unit, in one spelling."""
    if match["circ"]:
        return [{"C": "celsius", "F": "fahrenheit"}.get((match["scale"] or "").upper(), "degree")]
    if match["percent"]:
        return ["percent"]
    if match["usd"]:
        return ["usd"]
    if match["modulus"]:
        return [f"mod {match['modulus']}"]
    if match["sign"]:
        return [_CURRENCY[match["sign"]]]
    if match["clock"]:
        return ["am" if match["clock"].casefold().startswith("a") else "pm"]
    power = match["power"] or match["bare_power"]
    words = _unit_words(match["text"] or match["bare"] or match["words"] or "")
    if power and words:
        words[-1] += f"^{power}"
    return words


def _unit_words(text: str) -> list[str]:
    text = re.sub(r"\^\s*\{?\s*\\?circ\s*\}?", " degree ", text.casefold()).replace("%", " percent ")
    text = text.replace("per cent", "percent")
    text = re.sub(r"([a-z])\s*\^\s*\{?\s*([0-9])\s*\}?", r"\1^\2", text)
    text = re.sub(r"\b([ap])\.?\s?m\b\.?", r"\1m", text)
    words, square = list[str](), ""
    for word in re.findall(r"[^\W\d_]+(?:\^[0-9])?|/", text):
        if word in ("square", "sq", "squared", "cubic", "cu", "cubed"):
            power = "^2" if word.startswith("sq") else "^3"
            if word.endswith("ed") and words:
                words[-1] += power
            else:
                square = power
            continue
        name, _, power = word.partition("^")
        name = _UNITS.get(name) or _UNITS.get(name.removesuffix("s")) or _UNITS.get(name.removesuffix("es")) or name
        name = "/" if name == "per" else name
        if name not in _UNIT_NOISE:
            words.append(name + (f"^{power}" if power else square))
            square = ""
    return words


def is_formula(text: str) -> bool:
    """Whether plain text is a formula as a whole: "(3, 4)", "2x+3", "sin(x)"; no words, list, date or time of day."""
    if len(text) > _LONGEST_FORMULA or _DATE.fullmatch(text.strip()):
        return False
    is_set = re.fullmatch(r"\s*\{.*\}\s*", text) is not None
    text = tidy(text)
    letters = re.sub(r"\\[A-Za-z]+|\\[{}]", " ", text)
    if not _FORMULA.fullmatch(letters) or re.search(r"[A-Za-z]{2}", re.sub(r"[0-9]", " ", letters)):
        return False
    if not re.search(r"[0-9A-Za-z\\]", text) or not (is_set or re.search(r"[-+*/^=<>(\[{|!\\]", text)):
        return False
    return is_set or len(split_at(text, _COMMAS)[0]) == 1


def equal(expected: AnswerForm, given: AnswerForm, ask: Ask) -> bool:
    """Whether an answer is what was expected. Whatever `ask` raises is raised here."""
    if expected == given:
        return True
    if "relation" in (expected.kind, given.kind):
        return _relations_equal(expected, given, ask)
    if expected.kind == given.kind == "value":
        return _values_equal(expected, given, ask)
    if "words" in (expected.kind, given.kind):
        return _words_equal(expected, given)
    if expected.kind == given.kind == "ratio" and len(expected.parts) == len(given.parts):
        return _ratios_equal(expected, given, ask)
    if "ratio" in (expected.kind, given.kind):
        ratio, other = (expected, given) if expected.kind == "ratio" else (given, expected)
        if other.kind != "value" or len(ratio.parts) != 2 or not all(part.kind == "value" for part in ratio.parts):
            return False
        top, bottom = ratio.parts
        return _values_equal(AnswerForm("value", f"\\frac{{{top.text}}}{{{bottom.text}}}"), other, ask)
    if {expected.kind, given.kind} <= {"list", "union"}:
        return _sets_equal(expected.parts, given.parts, ask)
    if {expected.kind, given.kind} == {"list", "value"} and 1 in (len(expected.parts), len(given.parts)):
        listed, value = (expected, given) if expected.kind == "list" else (given, expected)
        return equal(listed.parts[0], value, ask)
    if {expected.kind, given.kind} == {"matrix", "value"}:
        return "\\begin" in expected.text and "\\begin" in given.text and ask("same", expected.text, given.text)
    if {expected.kind, given.kind} == {"list", "brackets"}:  # x = 1, y = 2 and (1, 2)
        listed, point = (expected, given) if expected.kind == "list" else (given, expected)
        if point.text != "()" or not _are_named_apart(listed.parts):
            return False
    elif expected.kind != given.kind or (expected.kind == "brackets" and expected.text != given.text):
        return False
    return len(expected.parts) == len(given.parts) and all(
        equal(a, b, ask) for a, b in zip(expected.parts, given.parts, strict=True)
    )


def _sets_equal(a: Sequence[AnswerForm], b: Sequence[AnswerForm], ask: Ask) -> bool:
    """Whether each of either is among the other; in order where each of one has a name of its own ("x = 1, y = 2")."""
    for named, other in ((a, b), (b, a)):
        if _are_named_apart(named) and not any(map(_is_assignment, other)):
            return len(a) == len(b) and all(equal(x, y, ask) for x, y in zip(a, b, strict=True))
    # What was expected twice is given twice; repeating an answer makes it no other.
    if len(a) != len(b) and (not a or not b or len(set(a)) < len(a)):
        return False
    return _each_in(a, b, ask) and _each_in(b, a, ask)


def _are_named_apart(parts: Sequence[AnswerForm]) -> bool:
    """Whether each of several parts is the value of a name of its own."""
    names = [part.parts[0].text for part in parts if _is_assignment(part)]
    return len(names) == len(parts) > 1 and len(set(names)) == len(names)


def _each_in(some: Sequence[AnswerForm], others: Sequence[AnswerForm], ask: Ask) -> bool:
    # Equal texts first, because asking takes long.
    return all(part in others or any(equal(part, other, ask) for other in others) for part in some)


def _words_equal(a: AnswerForm, b: AnswerForm) -> bool:
    """Words are compared by their letters; a value of letters alone is a word as well (`E` and `\\text{E}`)."""
    texts = [form.text if form.kind == "words" else _plain(form.text) for form in (a, b)]
    if {a.kind, b.kind} <= {"words", "value"} and texts[0] == texts[1] != "":
        return _units_agree(a.unit, b.unit)
    return False


def _values_equal(a: AnswerForm, b: AnswerForm, ask: Ask) -> bool:
    if not _units_agree(a.unit, b.unit):
        return False
    based = [any(word.startswith("base ") for word in form.unit) for form in (a, b)]
    if any(based):  # the digits of a number in a base, which its value in ten is not
        return a.text.replace(",", "").upper() == b.text.replace(",", "").upper()
    if _squeezed(a.text) == _squeezed(b.text):
        return True
    ends = [_INFINITE.fullmatch(form.text) for form in (a, b)]
    if any(ends):  # decided by the sign
        return None not in ends and len({bool(end[1] == "-") for end in ends if end}) == 1
    x, y = written_number(a.text), written_number(b.text)
    if x is not None and y is not None:
        percent = ["percent" in form.unit for form in (a, b)]
        if percent[0] != percent[1]:  # 28 % is 28 as a percentage and 0.28 as a number
            shares = [n.value / 100 if is_percent else n.value for n, is_percent in ((x, percent[0]), (y, percent[1]))]
            return x.value == y.value or shares[0] == shares[1]
        return same_number(x, y)
    if (x or y) and any(re.fullmatch(r"[A-DF-Za-df-hj-z]", form.text) for form in (a, b)):
        return False  # a number and a variable
    return not (_is_unreadable(a.text) or _is_unreadable(b.text)) and ask("same", a.text, b.text)


def _squeezed(text: str) -> str:
    """`text` without spaces that have no meaning; between digits a space has one."""
    return re.sub(r"(?<![0-9]) | (?![0-9])", "", text)


def _is_unreadable(text: str) -> bool:
    """Whether a text can be no value: it has words, a number with an index, or nothing to compute with."""
    return not text or bool(re.search(r"[0-9]\s?_|\\text|\\ldots|\\mathbb|\\emptyset|\\\{|[^\x00-\x7f]", text))


def _units_agree(a: Sequence[str], b: Sequence[str]) -> bool:
    """Whether units contradict each other. One may leave its unit out, or words that are no unit."""
    if not a or not b or tuple(a) == tuple(b):
        return True
    known = [[w for w in unit if w.partition("^")[0] in _UNITS or w == "/" or w.startswith("base ")] for unit in (a, b)]
    others = [[w for w in unit if w not in known_words] for unit, known_words in zip((a, b), known, strict=True)]
    if known[0] and known[1] and known[0] != known[1]:
        return False
    stems = [{w.removesuffix("s") for w in words} for words in others]
    return not others[0] or not others[1] or stems[0] <= stems[1] or stems[1] <= stems[0]


def _ratios_equal(a: AnswerForm, b: AnswerForm, ask: Ask) -> bool:
    """Whether two ratios are in proportion. A time of day ("10:30") is no ratio, and is compared by its numbers."""
    if not _units_agree(a.unit, b.unit):
        return False
    numbers = [[written_number(part.text) for part in form.parts] for form in (a, b)]
    if any(n is None for side in numbers for n in side):
        return all(equal(x, y, ask) for x, y in zip(a.parts, b.parts, strict=True))
    first, second = ([n.value for n in side if n is not None] for side in numbers)
    if first == second:
        return True
    if a.unit or b.unit or _is_time(a) or _is_time(b) or 0 in (first[0], second[0]):
        return False
    return all(x * second[0] == y * first[0] for x, y in zip(first, second, strict=True))


def _is_time(ratio: AnswerForm) -> bool:
    """Whether a ratio is written as a time of day: two digits after the colon, not in lowest terms or from 00 on."""
    hour, minute = ratio.parts[0].text, ratio.parts[1].text
    if not re.fullmatch(r"[0-9]{1,2}", hour) or not re.fullmatch(r"[0-5][0-9]", minute):
        return False
    return minute.startswith("0") or int(minute) % 5 == 0


def _is_assignment(form: AnswerForm) -> bool:
    return form.kind == "relation" and set(form.text.split()) <= {"=", "\\in"} and _is_name(form.parts[0])


def _is_name(form: AnswerForm) -> bool:
    """Whether a side of an equation is a name: `x`, `f(x)`, `a_3`, `|AB|`, `(x, y)`, `\\text{area}`."""
    if form.kind in ("brackets", "list", "ratio"):
        return all(map(_is_name, form.parts)) and bool(form.parts)
    text = form.text
    named = form.kind == "words" or bool(_NAME.fullmatch(text) and _RELATIVE_NAME.search(text))
    return named and text not in ("e", "i")


def _relations_equal(a: AnswerForm, b: AnswerForm, ask: Ask) -> bool:
    if a.kind == b.kind == "relation":
        return _two_relations_equal(a, b, ask)
    relation, other = (a, b) if a.kind == "relation" else (b, a)
    operators = relation.text.split()
    if set(operators) <= {"=", "\\in", "\\approx"}:
        # What was given may be any equation with the value at its end; what was expected, if it is an equation and not
        # a name's value, is not its last part.
        ends = relation.parts[0], relation.parts[-1]
        if relation is a and len(operators) == 1 and operators[0] == "=" and not any(map(_is_name, ends)):
            return False
        sides = [relation.parts[-1]]
        if _is_name(relation.parts[-1]) and not _is_name(relation.parts[0]):  # 5 = x
            sides = [relation.parts[0]]
        if "\\approx" in operators:
            sides = [relation.parts[operators.index("\\approx")], relation.parts[-1]]
        return any(equal(side, other, ask) for side in sides)
    interval = _as_interval(relation)
    return interval is not None and other.kind in ("brackets", "union") and equal(interval, other, ask)


def _two_relations_equal(a: AnswerForm, b: AnswerForm, ask: Ask) -> bool:
    first, second = a.text.split(), b.text.split()
    if set(first) <= {"=", "\\in"} and set(second) <= {"=", "\\in"}:
        if _is_assignment(a) and _is_assignment(b) and equal(a.parts[0], b.parts[0], ask):
            return equal(a.parts[-1], b.parts[-1], ask)
        if len(a.parts) == len(b.parts) == 2 and all(part.kind == "value" for part in (*a.parts, *b.parts)):
            return ask("multiple", _difference(a), _difference(b))
        return equal(a.parts[-1], b.parts[-1], ask) and equal(a.parts[0], b.parts[0], ask)
    for other in (b, _reversed(b)):
        if other is not None and first == other.text.split() and len(a.parts) == len(other.parts):
            sides = list(zip(a.parts, other.parts, strict=True))
            if len(sides) > 2 or any(x == y or "value" not in (x.kind, y.kind) for x, y in sides):
                if all(equal(x, y, ask) for x, y in sides):
                    return True
            elif all(part.kind == "value" for part in (*a.parts, *other.parts)):
                kind: Question = "positive multiple" if first[0] in _FLIPPED else "multiple"
                return ask(kind, _difference(a), _difference(other))
    ranges = _as_interval(a), _as_interval(b)
    variables = _middle(a), _middle(b)
    for relation, interval, variable, member in ((a, ranges[0], variables[0], b), (b, ranges[1], variables[1], a)):
        if member.text == "\\in" and relation.text != "\\in" and interval is not None and variable == member.parts[0]:
            return equal(interval, member.parts[1], ask)  # -2 < x < 7 and x in (-2, 7)
    return None not in ranges and variables[0] == variables[1] and equal(ranges[0] or a, ranges[1] or b, ask)


def _difference(relation: AnswerForm) -> str:
    return f"({relation.parts[0].text})-({relation.parts[1].text})"


def _reversed(relation: AnswerForm) -> AnswerForm | None:
    operators = relation.text.split()
    if not set(operators) <= _FLIPPED.keys() | {"=", "\\ne"}:
        return None
    turned = [_FLIPPED.get(operator, operator) for operator in reversed(operators)]
    return replace(relation, text=" ".join(turned), parts=tuple(reversed(relation.parts)))


def _middle(relation: AnswerForm) -> AnswerForm | None:
    """The one side of an inequality with a variable."""
    named = [
        part
        for part in relation.parts
        if part.kind == "value" and _RELATIVE_NAME.search(re.sub(r"\\[A-Za-z]+", "", part.text))
    ]
    return named[0] if len(named) == 1 and all(part.kind == "value" for part in relation.parts) else None


def _as_interval(relation: AnswerForm) -> AnswerForm | None:
    """An inequality in one name as an interval: -2 < x <= 7 is (-2, 7]."""
    operators = relation.text.split()
    if operators == ["\\ne"]:
        name, value = relation.parts
        if not _is_name(name):
            return None
        below = AnswerForm("brackets", "()", (AnswerForm("value", "-\\infty"), value))
        above = AnswerForm("brackets", "()", (value, AnswerForm("value", "\\infty")))
        return AnswerForm("union", parts=(below, above))
    if not set(operators) <= _FLIPPED.keys():
        return None
    if operators[0] in (">", "\\ge"):
        turned = _reversed(relation)
        if turned is None or turned.text.split()[0] in (">", "\\ge"):
            return None
        return _as_interval(turned)
    if any(operator in (">", "\\ge") for operator in operators) or (middle := _middle(relation)) is None:
        return None
    if not _is_name(middle):
        return None
    at = relation.parts.index(middle)
    if len(relation.parts) > 3 or (len(relation.parts) == 3 and at != 1):
        return None
    low = relation.parts[at - 1] if at else AnswerForm("value", "-\\infty")
    high = relation.parts[at + 1] if at + 1 < len(relation.parts) else AnswerForm("value", "\\infty")
    opening = "[" if at and operators[at - 1] == "\\le" else "("
    closing = "]" if at + 1 < len(relation.parts) and operators[at] == "\\le" else ")"
    return AnswerForm("brackets", opening + closing, (low, high))
