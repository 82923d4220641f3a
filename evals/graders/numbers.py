r"""Parse the numbers that a text states, as exact fractions. Rewards and all number graders use it.

It reads notation (thousands, decimals, fractions, mixed numbers, percent, scientific, scale words, LaTeX, the decimal
digits of any script, number words if there is no digit), not meaning. The operands of an equation are not candidates:
in "5 + 7 = 12" only 12 is. Nor are negated numbers ("not 13"), digits inside a name ("H2O"), ordinals ("5th"), terms of
an expression ("5x", "18 + y"), bounds ("between 15 and 18", "over 18"), times ("5:30"), amounts in several units ("1
hour 30 minutes"), or what another is measured against: "18 out of 100" is the score 18, and no ratio. If a text states
which number is its answer, neither is any later amount of its sentence: in "the answer is $20 for 4 people" only 20 is.
"""

import math
import re
import unicodedata
from bisect import bisect, bisect_left
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

from nautile.evals.graders.answer_spans import (
    answer_spans,
    behind_questions,
    boxes_at,
    short_runs,
    without_bold,
    without_denials,
)
from nautile.evals.graders.choices import CJK, INVISIBLE, in_order_of_last

MAX_DIGITS = 300  # a longer literal is noise; Python itself refuses int() of more than 4,300 digits
_SCALES = {
    "k": 10**3, "dozen": 12, "hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9,
    "trillion": 10**12, "mn": 10**6, "bn": 10**9, "tn": 10**12, "lakh": 10**5, "crore": 10**7,
    "十": 10, "百": 100, "千": 1000, "万": 10**4, "萬": 10**4, "亿": 10**8, "億": 10**8,
    "백": 100, "천": 1000, "만": 10**4, "억": 10**8,
}  # fmt: skip
_CJK_SCALES = "十百千万萬亿億백천만억"
SCALE_WORDS = "hundred|thousand|million|billion|trillion|dozen|lakh|crore|[mbt]n"
_SCALE_LETTERS = {"k": "thousand", "m": "million", "b": "billion", "t": "trillion"}
_WORDS = {
    "zero": 0, "one": 1, "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9,
    "ten": 10, "eleven": 11, "twelve": 12, "thirteen": 13, "fourteen": 14, "fifteen": 15, "sixteen": 16,
    "seventeen": 17, "eighteen": 18, "nineteen": 19, "twenty": 20, "thirty": 30, "forty": 40, "fifty": 50,
    "sixty": 60, "seventy": 70, "eighty": 80, "ninety": 90,
}  # fmt: skip

_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+")
# Kinds of minus, hyphen and dash, Arabic separators, fraction slashes, the apostrophe that groups digits in Switzerland
_CHARACTERS = str.maketrans(
    {
        "−": "-",
        "‐": "-",
        "‑": "-",
        "–": "-",
        "‒": "-",
        "₋": "-",
        "—": " — ",
        "٫": ".",
        "٬": ",",
        "⁄": "/",
        "∕": "/",
        "⋅": "·",
        "’": "'",
        "ʼ": "'",
        "﹣": "-",
    }
)
_LATEX = (
    # \frac{3}{4}, \frac34, \frac3{4}; "- 3/4" with its sign; 1{,}000; 1\,000; \times; what only dresses a number
    (
        re.compile(r"\\[cdt]?frac\s*(?:\{\s*([0-9.]+)\s*\}|([0-9]))\s*(?:\{\s*([0-9.]+)\s*\}|([0-9]))"),
        r" \1\2/\3\4",
    ),
    (re.compile(r"(?<=-)\s+(?=[0-9.]+/)"), ""),
    # 12{,}5 is a decimal, 1{,}000 and 12{,}34{,}567 are groups
    (re.compile(r"(?<=[0-9])\{\s*,\s*\}(?=(?:[0-9]{1,2}|[0-9]{4,})(?![0-9]|\s*\{\s*,))"), "."),
    (re.compile(r"\s*\{\s*,\s*\}\s*|(?<=[0-9]),\s*\\!\s*(?=[0-9]{3}(?![0-9]))"), ","),
    (re.compile(r"\\approx(?![A-Za-z])"), "≈"),
    (re.compile(r"</?(?:b|i|u|em|strong|p|span|code|answer)>", re.IGNORECASE), " "),
    (re.compile(r"\\[,!;: ](?=[0-9]{3}(?![0-9]))"), ","),
    (re.compile(r"\\(?:times|cdot)(?![A-Za-z])"), "×"),
    (re.compile(r"\s*\^\s*\{?\s*\\circ\s*\}?|\\degree(?![A-Za-z])"), "°"),
    # the power of a unit, "m}^{2}" and "cm²"
    (re.compile(r"(?<=[A-Za-z])\s*\}\s*\^\s*\{?\s*[0-9]\s*\}?"), "}"),
    (re.compile(r"\\(?:text|textbf|mathrm|mathbf|boxed|fbox)\b|\\(?=[%$#&])|\\[,!;:]"), ""),
)
# "half a dozen" is 6, "2 and a half" the mixed number 2 1/2
_HALVES = (
    (re.compile(r"\bhalf\s+a\s+dozen\b", re.IGNORECASE), "six"),
    (re.compile(r"(?<=[0-9])\s+and\s+(?:a|one)\s+half\b", re.IGNORECASE), " 1/2"),
    (re.compile(r"(?<=[0-9])\s+and\s+(?:a|one)\s+third\b", re.IGNORECASE), " 1/3"),
    (re.compile(r"(?<=[0-9])\s+and\s+(?:a|one)\s+quarter\b", re.IGNORECASE), " 1/4"),
    (re.compile(r"(?<=[0-9])\s+and\s+three[\s-]quarters\b", re.IGNORECASE), " 3/4"),
)
# "$1.2M" with a currency; of the letters alone only M beside the digits: "5 M" and "5B" are no value.
_LETTER_SCALE = re.compile(
    r"(?:(?<=[$€£¥₹])\s?([0-9][0-9.,]{0,15})\s?([KMBT])|(?<![\w.,$€£¥₹])([0-9][0-9.,]{0,15})(M))(?![A-Za-z0-9²³^])"
)
# A word for thousands or millions outside of the box or the marks that hold its number: `\boxed{18} million`.
_OUTSIDE = re.compile(
    r"(?<=[0-9])((?:\\[,;:! )\]]|[$}*_`~]|[^\S\n]|\\(?:text|mathrm|textbf|mbox)\s*\{){1,12})"
    rf"({SCALE_WORDS})s?\b",
    re.IGNORECASE,
)
# "1 million 200 thousand" is one number.
_COMPOUND = re.compile(
    rf"(?<![\w.,])(?:[0-9]{{1,3}}(?:\.[0-9]{{1,9}})?\s{{1,2}}(?:{SCALE_WORDS})\s{{1,2}}(?:and\s)?){{1,3}}"
    rf"[0-9]{{1,3}}\s{{1,2}}(?:{SCALE_WORDS})\b",
    re.IGNORECASE,
)
# 0.1\overline{6}, 0.\dot{3}, 0.1(6), and with marks over the digits
_REPEATING = re.compile(
    r"(?<![\w.,])([0-9]{1,9})\.([0-9]{0,20}?)(?:\\(?:overline|bar|dot)\s*(?:\{\s*([0-9]{1,20})\s*\}|([0-9]))"
    "|\\(([0-9]{1,20})\\)(?!\\w)|((?:[0-9][\u0304\u0305\u0307]){1,20}))"
)
_POINT = re.compile(r"(?<=[0-9])\s+point\s+((?:[0-9]\s+){0,20}[0-9])(?![0-9.])", re.IGNORECASE)
# How sure a text is of its answer: "18, I'm 100% sure"
_SURE = re.compile(
    r"(?:\bwith\s+)?(?:\b(?:I['’]m|I\s+am|about|over|a)\s+){0,2}(?<![\w.,])[0-9]{1,3}(?:\.[0-9]{1,3})?\s?\\?%\s*"
    r"(?:sure|certain|confident|confidence|certainty|positive)\b"
    r"|\bconfidence(?:\s+(?:level|score))?\s*(?:is|of|:|=)?\s*[0-9]{1,3}(?:\.[0-9]{1,3})?\s?(?:\\?%|/10\b)",
    re.IGNORECASE,
)
# "two thirds"; "three-quarters", but "three quarters" may be coins
_PARTS = {
    "half": 2, "third": 3, "fourth": 4, "fifth": 5, "sixth": 6, "seventh": 7, "eighth": 8, "ninth": 9, "tenth": 10,
    "quarter": 4,
}  # fmt: skip
_WORD_FRACTION = re.compile(
    rf"(?<![\w-])({'|'.join(word for word, value in _WORDS.items() if 1 <= value <= 9)})"
    rf"(?:-|[\s-]+(?!quarter))({'|'.join(_PARTS)})s?\b",
    re.IGNORECASE,
)
_WORD_AND_A_PART = re.compile(
    r"\b([a-z]+)\s+and\s+(?:(?:a|one)\s+(half|third|quarter)|three[\s-](quarter)s|two[\s-](third)s)\b", re.IGNORECASE
)
# A decimal comma where the digits can be neither a group of thousands nor the next item of a list: "0,75", "12,05",
# "€12,50", "12,5 %", "12,5 km". "12,5" alone may be a list, as the roots in a box are.
_DECIMAL_COMMA = re.compile(
    r"(?<![\w.,])0,(?=[0-9]+(?![\w,]))|(?<![\w.,(\[])[0-9]{1,9},(?=0[0-9](?![\w,.]))"
    r"|(?<=[€£¥₹])[0-9]{1,9},(?=[0-9]{1,2}(?![\w,.]))"
    r"|(?<![\w.,(\[])[0-9]{1,9},(?=[0-9]{1,2}\s?(?:\\?%|per\s?cent\b|[€£¥₹]|EUR\b|euros?\b))"
    r"|(?<![\w.,(\[{$])[0-9]{1,9},(?=[0-9]{1,2}\s?(?:[kcm]?m|k?g|mg|m?l|lit(?:er|re)s?|[kcm]m[²³]|hours?|minutes?)(?!\w))",
    re.IGNORECASE,
)
_CURRENCY_AFTER_LETTERS = re.compile(r"(?<=[A-Za-z])[$€£¥₹]")
_CURRENCY = re.compile(r"[$€£¥₹]")
_NEGATIVE_WORD = re.compile(r"\b(?:negative|minus|neg\.?)\s+(?=[0-9.])|(?:负|負|マイナス)\s*(?=[0-9.])", re.IGNORECASE)
# "x = - 3", "\\boxed{ - 3 }", "Answer: - 3", unlike the subtraction in "x - 3" and the bullet at the start of a line
_SIGN_APART = re.compile(r"(?:(?<=[={(\[:])|(?<=\\[(\[])|(?<![0-9$]\$)(?<![0-9])(?<=\$))[^\S\n]*[-−]\s+(?=[0-9.])")
# "±3" states two numbers, 3 and -3
_PLUS_MINUS = re.compile(r"(?:±|\\pm|\+/-|\+-)\s*([0-9][0-9.,]*)")

_SPACE = "\u00a0\u202f\u2009\u2007"  # spaces that group digits; an ordinary space separates numbers
_LITERAL = re.compile(
    rf"""
    (?<![^\W{CJK}])(?<![\^第点{_CJK_SCALES}])
    (?:
      # 3 1/2, 3 and 1/2; but 3 1/2/4 is no mixed number
      (?P<whole>[0-9]{{1,9}}) (?:\s+and)? \s+ (?P<over>[0-9]{{1,9}})/(?P<under>[0-9]{{1,9}}) (?![0-9/])
    | (?P<body>
        [0-9]{{1,3}}(?:\.[0-9]{{3}})+,[0-9]{{1,2}}(?![0-9])                # 1.234,5
      | [0-9]{{1,3}}(?:\.[0-9]{{3}}){{2,}}(?![0-9])                        # 1.234.567; but 1.234 is a decimal
      | [0-9]{{1,3}}(?:[,'_{_SPACE}][0-9]{{3}})+(?![0-9])(?:\.[0-9]+)?     # 1,234.5, 1'234
      | [0-9]{{1,2}}(?:,[0-9]{{2}})+,[0-9]{{3}}(?![0-9])(?:\.[0-9]+)?      # 1,23,456, as in India
      | [0-9]+(?:\.[0-9]+)?
      | \.[0-9]+                                                         # .5
      )
      # 1e3, 1.5 × 10^3
      (?: [eE](?P<e>[-+]?[0-9]{{1,4}})(?![\w]) | \s*[×x*·]\s*10\s*\^\s*\{{?(?P<power>[-+]?[0-9]{{1,4}})\}}? )?
      # 10^3; any other power is found too, so that it is refused as a whole
      (?P<raised>\s*\^\s*\{{?(?P<exponent>[-+]?[0-9]{{1,4}})?\}}?)?
      # 3/4, 1.5/2; but not the date 3/4/2024
      (?:\s*/\s*(?P<divisor>[0-9]+(?:\.[0-9]+)?)(?![0-9]|\s*/))?
    )
    (?P<percent>\s*%|\s+per\s?cent\b)?
    (?:\s*-?(?P<scale>{SCALE_WORDS})s?\b|(?P<kilo>k)(?![A-Za-z])|(?P<cjk>[{_CJK_SCALES}])(?![0-9{_CJK_SCALES}]))?
    """,
    re.VERBOSE | re.IGNORECASE,
)
_BOUNDARY = re.compile(r"[.!?。](?=\s|$)|\n|;|,(?=\s)|\bor\b|\band\b", re.IGNORECASE)
# "not 13", "isn't -13", "rather than 13", just before the number
_DENIED = re.compile(
    r"(?:(?:\bnot(?:\s+equal\s+to)?|n't(?:\s+be)?|\bcannot\s+be|\bnever|\b(?:rather|other)\s+than|\binstead\s+of|\bexcept"
    r"|\banything\s+but)\s+|¬\s*|\\(?:neg|lnot)\s+)[{\s]*-?$",
    re.IGNORECASE,
)
_BOUNDS = re.compile(r"\bbetween\s+\S+\s+and\s+\S+", re.IGNORECASE)
# Behind a number that is no answer: "5th", "5x", "18 + y", "18π", "5 factorial", "18 or more", "101_2", "3x2".
_NO_VALUE = re.compile(
    r"(?:st|nd|rd|th)\b|[axyz]\b|(?-i:[einqrB])(?![A-Za-z.])|\s?_\s?\{?(?!10\b)[0-9a-z]|(?!(?:[kcmd]?m|ft|in|yd)[23]\b)[a-z]{1,3}[0-9]|\s*[-+*×·]\s*[nxyz]\b|\s*(?:π|pi\b)|\s+(?:factorial|squared|cubed)\b"
    r"|\+(?!\s*[0-9])|\s+or\s+(?:more|less|fewer)\b"
    # bounds, digits that repeat, and words for thousands and millions that are not read
    rf"|\s?(?:[<>]=?|[≤≥≠])\s*[a-z]\b|(?:\.{{2,3}}|…)?\s+\(?(?:repeating|recurring)\b|[‰{_CJK_SCALES}]"
    r"|\s(?-i:[MB])(?![\w.])|\s?(?:mil|mille|tausend|mio|mrd|mill(?:i[oó]n(?:en|es|s|i)?|ones|iard\w*)|тыс|тысяч\w*|млн|млрд"
    r"|милли[оа]\w*)\b",
    re.IGNORECASE,
)
# Parts of an answer span after the answer: a remark in brackets, or what the answer is measured against ("out of 8").
# A remark in brackets that names an alternative is none: "12 (or 13)".
_REMARK = re.compile(r"(?<=[0-9A-Za-z%])\s*\((?!\s*(?:or|maybe|perhaps|possibly|alternatively)\b)[^()]*\)", re.I)
_AGAINST = re.compile(
    r"\b(?:(?<![0-9]\s)over|over(?=\s[0-9.]{1,9}\s[a-z])|out\s+of|within|during|in|for|from|after|at|per)\s+(?:[a-z]+\s+)?[0-9]",
    re.I,
)
_COMMA_OF_LIST_OR_DECIMAL = re.compile(r"(?<![\w.,(\[])([0-9]+),([0-9]{1,2}|[0-9]{4,})(?![\w,]|\.[0-9])")
_EMPHASIS = re.compile(r"(?<!\w)_{1,2}(?=[^\s_])([^_\n]{1,40})(?<!\s)_{1,2}(?!\w)")
_SPACED = re.compile(r"(?<![\w.,])[0-9]{1,3}(?: [0-9]{3})+(?![\w]|[.,][0-9]{3})")
_WORD = re.compile(r"[a-z]+", re.IGNORECASE)
_APART_WORDS = re.compile(r"[^\s,a-z-]|\n", re.IGNORECASE)  # between two words of different numbers
# "one" that stands for a thing: "no one", "one of them", "the first one"
_PRONOUN = re.compile(
    r"\b(?:no|every|any|each|which|this|that|the|first|second|last|only|other|another|right|correct|good)\s+one\b"
    r"|\bone(?:['’]s\b|\s+(?:of|more|another|can|could|must|has|should|would|is|needs|may|who)\b)",
    re.IGNORECASE,
)
_FACTORIAL = re.compile(r"(?<=[0-9])!")  # a sentence's exclamation mark ends its span
_SIZE = re.compile(r"\\(?:left|right|[bB]igg?[lrm]?)(?![A-Za-z])\s*")
_OPEN_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{(?![^{}]*\})")
# A stretch of a formula: no word of two letters or more, no end of a clause, no equals sign. If it has a function, a
# root, an index, a constant, a variable in a sum, or a sign of inequality, its numbers are terms and bounds of it.
_STRETCH = re.compile(r"(?:\\[A-Za-z]+|[^A-Za-z=≈\n;,]|(?<=[0-9]),(?=[0-9])|(?<![A-Za-z])[A-Za-z](?![A-Za-z]))+")
_TERM_OF = re.compile(
    r"\\(?:sqrt|frac|[cdt]frac|pi|log|ln|lg|sin|cos|tan|exp|binom|sum|int|prod|lim|lfloor|lceil|theta|alpha|beta"
    r"|leq?|geq?|lt|gt|leqslant|geqslant|neq?|not)(?![A-Za-z])"
    r"|[√π∛≤≥≠]|[0-9)}]i\b|(?<![0-9])_\s*\{?\s*[0-9]|(?<![A-Za-z0-9])[a-z]\s*[-+*×]\s*[0-9]|[0-9]\s*[-+*×]\s*[b-z](?![\w'’.])"
    r"|(?<![-=<>])(?<!^)[<>](?![<>-])(?=\s*-?\\?[$0-9.])|^[<>](?=-?[0-9.])"
)
# Words that make another number of the next one, and what stands before them in their clause.
_MADE_OF = re.compile(
    r"\b(?:(?:less|more|greater|fewer|higher|lower|larger|smaller)\s+than|(?:half|third|quarter)\s+of|twice|double"
    r"|triple|root\s+of|multiple\s+of|divided\s+by|up\s+to)\s+(?=-?[0-9.])",
    re.IGNORECASE,
)
# What is no value whatever stands beside it: a time of day; an amount in several units, of which none is the whole
# ("1 hour 30 minutes", "5'6\""); the number behind "over"; of "18 out of 100" the 100; an index.
_UNITS = (
    ("years?|yrs?", "months?", "weeks?", "days?|d", "hours?|hrs?|h", "minutes?|mins?|m", "seconds?|secs?|s"),
    ("miles?|mi", "yards?|yd", "feet|foot|ft|'", "inch(?:es)?|in|''|\""),
    ("km|kilomet(?:er|re)s?", "met(?:er|re)s?|m", "cm|centimet(?:er|re)s?", "mm|millimet(?:er|re)s?"),
    ("kg|kilograms?|kilos?", "g|grams?"),
    ("tons?", "pounds?|lbs?", "ounces?|oz"),
    ("gallons?", "quarts?", "pints?", "cups?", "ounces?|oz"),
    ("dollars?|euros?|pounds?", "cents?|pence"),
)
_AMOUNT = r"(?:[0-9]{1,9}\s)?[0-9][0-9.,/]{0,12}[\s-]?"
_APART = re.compile(
    r"(?<![\w:.,])[0-9]{1,2}:[0-5][0-9](?::[0-5][0-9])?(?![0-9:]|-?[0-9])|"
    + "|".join(
        rf"(?<![\w./]){_AMOUNT}(?:{larger})(?:(?<!\w)|(?!\w)|(?=[0-9]))"
        rf"(?:\s?,?\s?(?:and\s)?{_AMOUNT}(?:{'|'.join(units[at:])})(?!\w))+"
        for units in _UNITS
        for at, larger in enumerate(units[:-1], 1)
    ),
    re.IGNORECASE,
)
_NOT_ITSELF = re.compile(
    r"\b(?:(?<![0-9]\s)over|over(?=\s[0-9.]{1,9}\s[a-z])|under|above|below|than|exceeds|exceeding)[\s{}]{1,3}(?=-?[0-9.])"
    r"|(?<![\w./,%])[0-9]{1,9}[\s{}]{1,3}(?:(?:[a-z]+\s){0,2}out\s)?of[\s{}]{1,3}(?:the\s)?(?=[0-9])"
    r"|(?<=[0-9])\s?_\s?\{?(?=[0-9])"
    # "x >= 18", "x != 18"; an exponent; the argument of a function; a value between bars
    r"|(?:[<>]=|<>|(?<![0-9)])!=)\s{0,3}(?=-?[0-9.])|\^\s?\{\s?-?(?=[0-9])"
    r"|\b(?:log|ln|sin|cos|tan|exp|sqrt)\s?\(?\s?(?=[0-9.])|(?<![A-Za-z\\])[fgh]\((?=-?[0-9.])"
    r"|\|\{?-(?=[0-9.]{1,20}\}?(?:\\right)?\|)",
    re.IGNORECASE,
)
_DIGIT = re.compile("[0-9]")
_BEFORE_IN_CLAUSE = re.compile(r"[^.,;!?\n=≈]*$")


@dataclass(frozen=True)
class Number:
    """A number as stated: its exact value without the percent sign, and whether it had one."""

    value: Fraction
    percent: bool = False

    def __str__(self) -> str:
        """Format as a terminating decimal if possible, else as a fraction in lowest terms."""
        # Dividing out factors of 10 leaves 1 if the decimal terminates, after `places` digits.
        cofactor, places = self.value.denominator, 0
        while math.gcd(cofactor, 10) > 1:
            cofactor, places = cofactor // math.gcd(cofactor, 10), places + 1
        plain = str(self.value)
        if places and cofactor == 1:
            digits = str(abs(self.value.numerator) * 10**places // self.value.denominator).rjust(places + 1, "0")
            plain = f"{'-' if self.value < 0 else ''}{digits[:-places]}.{digits[-places:]}"
        return plain + ("%" if self.percent else "")


def candidates(text: str) -> list[Number]:
    """Return the distinct numbers that `text` states as its answer, in the order of their last mentions.

    Those in its answer spans (`\\boxed`, "the answer is") if there are any, else all of them.
    """
    text = _OUTSIDE.sub(r" \2\1", short_runs(text))
    text = _SIGN_APART.sub(" -", _SIZE.sub("", without_denials(without_bold(text))))
    if _DIGIT.search(unsure := _SURE.sub("", text)):
        text = unsure
    if (cut := _OPEN_BOX.search(text)) and not boxes_at(text[cut.start() :]):
        text = text[: cut.start()]  # truncated inside a box: the content is incomplete
    committed = [number for span in answer_spans(text) for number in numbers_in(_answer_part(span))]
    if committed or boxes_at(text):
        return in_order_of_last(committed)
    return in_order_of_last(numbers_in(behind_questions(text)))


def _answer_part(span: str) -> str:
    """The part of an answer span before remarks and reference amounts; the whole span if it is an equation."""
    if "=" in span:
        return span
    span = _FACTORIAL.sub(" factorial", span)
    span = _REMARK.sub("", span) or span
    against = _AGAINST.search(span)
    return span[: against.start()] if against and numbers_in(span[: against.start()]) else span


def join_digits(text: str) -> str:
    """Join digits that `numbers_in` reads as separate numbers, as "1 000" and "12,5" may be."""
    text = _SPACED.sub(lambda match: match.group().replace(" ", ""), text)
    return _COMMA_OF_LIST_OR_DECIMAL.sub(r"\1.\2", text)


def numbers_in(text: str) -> list[Number]:
    """Return every number in `text`, in order, with repeats; number words count only if there is no digit."""
    text = _normalised(text)
    if not any("0" <= c <= "9" for c in text):
        text = _NEGATIVE_WORD.sub("-", _pointed(_with_digits(_PRONOUN.sub(" ", text))))
    # Literals with their positions, without negated ones, ordinals, terms and bounds.
    literals = [(m.start(), m.end(), n) for m in _LITERAL.finditer(text) if (n := _number(m, text)) is not None]
    no_values = bytearray(len(text) + 1)  # 1 at the characters of bounds and of terms of an expression
    spans = [match.span() for match in _BOUNDS.finditer(text)]
    spans += [match.span() for match in _APART.finditer(text)]
    spans += [(match.end(), match.end() + 2) for match in _NOT_ITSELF.finditer(text)]
    spans += [match.span() for match in _STRETCH.finditer(text) if _TERM_OF.search(match.group())]
    for made in _MADE_OF.finditer(text):
        clause = _BEFORE_IN_CLAUSE.search(text, max(0, made.start() - 200), made.start())
        spans.append((clause.start() if clause else made.start(), made.end() + 1))
    for start, end in spans:
        no_values[start:end] = b"\1" * (end - start)
    stated = [
        (start, end, number)
        for start, end, number in literals
        if not _DENIED.search(text[max(0, start - 20) : start])
        and not _NO_VALUE.match(text, end)
        and not no_values[start]
    ]
    return [number for _, _, number in _results_only(stated, text)]


def parse_number(text: str) -> Number | None:
    """Parse an expected answer; None if `text` states no number or several."""
    values = candidates(text)
    return values[0] if len(values) == 1 else None


def _normalised(text: str) -> str:
    """The text in ASCII notation: digits of any script, superscripts as powers, fractions, LaTeX, no currency signs."""
    # Character by character: superscripts, digits of other scripts, fractions such as ½, full-width forms.
    out = []
    text = _REPEATING.sub(_as_fraction, INVISIBLE.sub("", text))
    for i, c in enumerate(text):
        if c.isascii():
            out.append(c)
        elif c in "⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺":
            previous = text[i - 1] if i else ""
            out.append(("" if previous in "⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺" and previous else "^") + c.translate(_SUPERSCRIPTS))
        elif (digit := unicodedata.decimal(c, None)) is not None:
            out.append(str(digit))
        elif unicodedata.decomposition(c).startswith("<fraction>"):
            out.append(" " + unicodedata.normalize("NFKC", c))
        elif "\uff00" <= c <= "\uffef":
            out.append(unicodedata.normalize("NFKC", c))
        else:
            out.append(c)
    # Then by patterns, whose order matters: LaTeX such as `\$` is resolved before currency signs are removed.
    text = _EMPHASIS.sub(r"\1", without_bold("".join(out)).replace("**", "^").translate(_CHARACTERS))
    for pattern, replacement in _HALVES:
        text = pattern.sub(replacement, text)
    text = _LETTER_SCALE.sub(lambda m: f"{m[1] or m[3]} {_SCALE_LETTERS[(m[2] or m[4]).lower()]}", text)
    text = _WORD_AND_A_PART.sub(_mixed, text)
    text = _WORD_FRACTION.sub(lambda match: f"{_WORDS[match[1].lower()]}/{_PARTS[match[2].lower()]}", text)
    text = _DECIMAL_COMMA.sub(lambda match: match.group().replace(",", "."), text)
    for pattern, replacement in _LATEX:
        text = pattern.sub(replacement, text)
    text = _pointed(_CURRENCY.sub("", _CURRENCY_AFTER_LETTERS.sub(" ", text)))
    text = _COMPOUND.sub(_summed, text)
    text = _PLUS_MINUS.sub(r" \1 , -\1", text)
    text = _SIGN_APART.sub(" -", text)
    return _NEGATIVE_WORD.sub("-", text)


def _as_fraction(match: re.Match[str]) -> str:
    """A decimal that repeats as a fraction: 0.1(6) is 15/90."""
    whole, fixed = match[1], match[2]
    period = "".join(filter(str.isdecimal, match[3] or match[4] or match[5] or match[6]))
    over = int(whole + fixed + period) - int(whole + fixed)
    return f"{over}/{(10 ** len(period) - 1) * 10 ** len(fixed)}"


def _mixed(match: re.Match[str]) -> str:
    """Words such as "two and a quarter" as a mixed number."""
    part, over = (match[2], 1) if match[2] else (match[3], 3) if match[3] else (match[4], 2)
    word = match[1].lower()
    return f"{_WORDS[word]} {over}/{_PARTS[part.lower()]}" if word in _WORDS else match.group()


def _pointed(text: str) -> str:
    """`text` with "1 point 5" as a decimal."""
    return _POINT.sub(lambda match: "." + "".join(match[1].split()), text)


def _summed(match: re.Match[str]) -> str:
    """Amounts of falling scales ("1 million 200 thousand") as one number, others as they stand."""
    words = [word for word in match.group().lower().split() if word != "and"]
    amounts, scales = list(map(Fraction, words[::2])), [_SCALES[word] for word in words[1::2]]
    falls = all(larger > smaller for larger, smaller in pairwise(scales))
    total = sum(amount * scale for amount, scale in zip(amounts, scales, strict=True))
    return str(total) if falls else match.group()


def _number(match: re.Match[str], text: str) -> Number | None:
    """Evaluate one literal; None for an unevaluated power, a division by zero, or too many digits."""
    shift = int(match["exponent"] or match["e"] or match["power"] or 0)
    # "1e9999" is short and would have ten thousand digits.
    if len(match.group()) > MAX_DIGITS or abs(shift) > MAX_DIGITS:
        return None
    if match["whole"]:
        if int(match["under"]) == 0:
            return None
        value = int(match["whole"]) + Fraction(int(match["over"]), int(match["under"]))
    else:
        value = Fraction(_plain_decimal(match["body"]))
        if match["raised"]:
            # Powers of ten are notation; "2^10" is an expression that the text has not evaluated.
            if value != 10 or not match["exponent"]:
                return None
            value = Fraction(10) ** shift
        else:
            value *= Fraction(10) ** shift
        if match["divisor"]:
            if Fraction(match["divisor"]) == 0:
                return None
            value /= Fraction(match["divisor"])
    if scale := match["scale"] or match["kilo"] or match["cjk"]:
        value *= _SCALES[scale.lower()] if scale != "K" else 1  # a capital K is as often kelvin or a school grade
    return Number(-value if _negative(match.start(), text) else value, bool(match["percent"]))


def _negative(start: int, text: str) -> bool:
    """Whether a minus directly before the literal is a sign, not a subtraction or a range."""
    if start == 0 or text[start - 1] != "-":
        return False
    # A minus after a letter, a digit or a bracket subtracts or joins ("x-3", "5 - 3", "pages 3-5"); any other is a
    # sign.
    attached = text[start - 2] if start > 1 else " "
    before = text[: start - 1].rstrip()
    return not (attached.isalnum() or attached in ")]}%" or (before and before[-1].isdigit()))


def _plain_decimal(body: str) -> str:
    """Rewrite `body` with a decimal point and without digit grouping."""
    if body.count(".") > 1 or ("," in body and 0 <= body.find(".") < body.find(",")):
        return body.replace(".", "").replace(",", ".")
    return re.sub(rf"[,'_{_SPACE}]", "", body)


def _results_only(numbers: list[tuple[int, int, Number]], text: str) -> list[tuple[int, int, Number]]:
    """Drop the numbers before the last equals sign of their clause, if a number follows it."""
    literals = [start for start, _, _ in numbers]
    edges = [0]  # where clauses start
    for match in _BOUNDARY.finditer(text):
        before = bisect(literals, match.start()) - 1
        if before < 0 or match.start() >= numbers[before][1]:  # "2 and 1/2" is one literal, not two clauses
            edges.append(match.start())
    results = []
    for start, end in pairwise([*edges, len(text) + 1]):
        clause = numbers[bisect_left(literals, start) : bisect_left(literals, end)]
        equals = max(text.rfind("=", start, end), text.rfind("≈", start, end))
        results += [literal for literal in clause if literal[0] > equals] or clause
    return results


def _with_digits(text: str) -> str:
    """`text` with numbers in words as digits: "one hundred and five" is 105, "two or three" are two."""
    out: list[str] = []
    total = current = 0  # completed thousands, millions, …; the part below the next scale word
    state = ""  # the kind of the last number word, "" outside a number
    done = end = 0  # what has been written of `text`; the end of the number's last word

    def close() -> None:
        nonlocal total, current, state, done
        if state:
            out.append(str(total + current) if total + current < 10**MAX_DIGITS else "…")
            done = end
        total, current, state = 0, 0, ""

    for match in _WORD.finditer(text):
        token, gap = match.group().lower(), text[end : match.start()]
        if state and (_APART_WORDS.search(gap) or ("," in gap and state != "scale")):
            close()
        value = _WORDS.get(token)
        begins = value is not None or token in ("hundred", "thousand", "million", "dozen")
        # "twenty" and "five" join, "five" and "six" do not.
        if value is not None and state and not ((state == "tens" and 0 < value < 10) or state in ("hundred", "scale")):
            close()
        if begins and not state:
            out.append(text[done : match.start()])
        if value is not None:
            current, state = current + value, "tens" if value >= 20 else "unit"
        elif token in _SCALES and token != "k" and (state or begins):
            current = max(current, 1) * _SCALES[token]
            state = "hundred" if token == "hundred" else "scale"
            if token not in ("hundred", "dozen"):
                total, current = total + current, 0
        elif token == "and" and state in ("hundred", "scale"):
            continue
        else:
            close()
            continue
        end = match.end()
    close()
    return "".join([*out, text[done:]])
