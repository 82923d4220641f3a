r"""Mathematical text in one notation: LaTeX, Unicode and plain text (`sqrt(3)/2`) that mean the same become one text.

Nothing that has a meaning is dropped here: an index, a unit, an ellipsis and the case of a letter stay in the text.
"""

import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

MAX_LENGTH = 2000  # a longer text is not an answer, and reading it would take long
SIGNIFICANT = 6  # digits that a decimal needs to stand for a value that no decimal equals
_MAX_DIGITS = 300
_FUNCTIONS = (
    "arcsinh", "arccosh", "arctanh", "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh", "sqrt", "sin", "cos", "tan",
    "cot", "sec", "csc", "log", "ln", "exp", "lcm", "gcd", "max", "min",
)  # fmt: skip
_GREEK = (
    "alpha", "beta", "gamma", "delta", "epsilon", "theta", "lambda", "omega", "sigma", "infty", "phi", "rho", "tau",
    "pi", "mu",
)  # fmt: skip
_CHARACTERS = str.maketrans(
    {
        "−": "-", "‐": "-", "‑": "-", "–": "-", "—": "-", "×": "*", "·": "*", "⋅": "*", "∙": "*", "∗": "*", "÷": "/",
        "⁄": "/", "∕": "/", "π": "\\pi ", "√": "\\sqrt ", "∞": "\\infty ", "≤": "\\le ", "≥": "\\ge ", "⩽": "\\le ",
        "⩾": "\\ge ", "≠": "\\ne ", "≈": "\\approx ", "∪": "\\cup ", "∩": "\\cap ", "∈": "\\in ", "∅": "\\emptyset ",
        "°": "^\\circ ", "º": "^\\circ ", "±": "\\pm ", "∓": "\\mp ", "…": "\\ldots ", "⋯": "\\ldots ", "′": "'",
        "’": "'", "‘": "'", "“": '"', "”": '"', "ℝ": "\\mathbb{R}", "ℤ": "\\mathbb{Z}", "ℕ": "\\mathbb{N}",
        "ℚ": "\\mathbb{Q}", "ℂ": "\\mathbb{C}", "∖": "\\setminus ", "θ": "\\theta ", "α": "\\alpha ", "β": "\\beta ",
        "γ": "\\gamma ", "δ": "\\delta ", "λ": "\\lambda ", "μ": "\\mu ", "φ": "\\phi ", "ω": "\\omega ", "ρ": "\\rho ",
        "σ": "\\sigma ", "τ": "\\tau ", "Δ": "\\Delta ", "Ω": "\\Omega ", "⟨": "\\langle ", "⟩": "\\rangle ",
        "，": ", ", "：": ":", "；": ";", "（": "(", "）": ")", "＝": "=", "∣": "|", "→": "\\to ", "∘": "^\\circ ",
        "٫": ".", "٬": ",", "。": ".", "、": ", ", "٪": "%",
    }
)  # fmt: skip
_SCRIPTS = re.compile(r"([⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ]+)|([₀₁₂₃₄₅₆₇₈₉]+)")
_RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ₀₁₂₃₄₅₆₇₈₉", "0123456789+-n0123456789")
_GROUP_SPACE = "\u00a0\u202f\u2009\u2002\u2003\u2007"

_REWRITES = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\(?:begin|end)\{(?:align|aligned|equation|gather|gathered)\*?\}", " "),
        (r"\\(?:left|right|m?left|m?right)\s*\.", " "),
        (r"\\(?:left|right|[bB]igg?[lrm]?|mathopen|mathclose)(?![A-Za-z])\s*", ""),
        (r"\\(?:(?:display|text|script)style|(?:no)?limits|rm|bf|it|hfill|null)(?![A-Za-z])", " "),
        (r"\\h?phantom\{[^{}]*\}|\\[hv]space\*?\{[^{}]*\}", " "),
        (r"\\\\\[[^\]]*\]", r"\\\\"),
        # 12{,}5 is a decimal; 1{,}000 and 12{,}34{,}567 are groups
        (r"(?<=[0-9])\s*\{\s*,\s*\}\s*(?=(?:[0-9]{1,2}|[0-9]{4,})(?![0-9]|\s*\{\s*,))", "."),
        (r"(?<=[0-9])\s*\{\s*,\s*\}\s*(?=[0-9])|(?<=[0-9]),\s*\\!\s*(?=[0-9]{3}(?![0-9]))", ","),
        (r"(?<=[0-9])(?<!\\)\\[,!;: ]\s*(?=[0-9]{3}(?![0-9]))", ","),
        (r"(?<!\\)\\!|\\allowbreak(?![A-Za-z])", ""),
        (r"(?<!\\)\\[,;:> ]|~|\\q?quad|\\(?:thin|med|thick)space(?![A-Za-z])", " "),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\\[dt]binom(?![A-Za-z])", r"\\binom"),
        (r"\\(?:leqslant|leqq|leq|le)(?![A-Za-z])|<=|=<", r"\\le "),
        (r"\\(?:geqslant|geqq|geq|ge)(?![A-Za-z])|>=|=>", r"\\ge "),
        (r"\\(?:neq|ne)(?![A-Za-z])|\\not\s*=|!=", r"\\ne "),
        (r"\\lt(?![A-Za-z])", "<"),
        (r"\\gt(?![A-Za-z])", ">"),
        (r"\\(?:times|cdot|ast)(?![A-Za-z])", "*"),
        (r"\\div(?![A-Za-z])", "/"),
        (r"\\colon(?![A-Za-z])", ":"),
        (r"\\(?:lvert|rvert|vert|mid)(?![A-Za-z])", "|"),
        (r"\\lbrace(?![A-Za-z])", r"\\{"),
        (r"\\rbrace(?![A-Za-z])", r"\\}"),
        (r"\\(?:lbrack|lparen)(?![A-Za-z])", "["),
        (r"\\rbrack(?![A-Za-z])", "]"),
        (r"\\(?:ldots|cdots|dots[cbm]?|dotso|hdots)(?![A-Za-z])|\.{3,}", r"\\ldots "),
        (r"\\varnothing(?![A-Za-z])", r"\\emptyset "),
        (r"\^\s*\{?\s*\\circ\s*\}?|\\degree(?![A-Za-z])", r"^\\circ "),
        (r"\\(?:rightarrow|longrightarrow)(?![A-Za-z])|->", r"\\to "),
        (r"\\varepsilon(?![A-Za-z])", r"\\epsilon "),
        (r"\\%", "%"),
        (r"\\(?:textdollar|\$)", r"\\usd "),
        (r"\\&", "&"),
        (r"\\(?:mathbf|mathit|boldsymbol|bm|mathsf|vec|hat|mathrm|text|mbox|operatorname\*?)\s*\{\s*\}", " "),
        (r"\\(?:mathbf|mathit|boldsymbol|bm|mathsf)\s*\{([^{}]*)\}", r"{\1}"),
        (r"\\(?:mathrm|operatorname\*?|text)\s*\{\s*(" + "|".join(_FUNCTIONS) + r")\s*\}", r"\\\1 "),
        # One letter is a variable or a constant, and after a number a unit: `5\,\mathrm{m}`, but `2\mathrm{e}`.
        (r"(?<![0-9])(?<![0-9]\s)\\mathrm\s*\{\s*([A-Za-z])\s*\}|\\mathrm\s*\{\s*([dei])\s*\}", r"\1\2"),
        (r"\\(?:mathrm|mbox|textrm|textbf|textit|textnormal|textsf|texttt)(?=\s*\{)", r"\\text"),
        (r"\*\*", "^"),
        # A function name in plain text has an argument: "5 min" and "3 sec" are none.
        (r"(?<![A-Za-z\\])(" + "|".join(_FUNCTIONS) + r")(?=\s*[\^_({\\0-9]|\s*[A-Za-z](?![A-Za-z]))", r"\\\1 "),
        (r"(?<![A-Za-z\\])(" + "|".join(_GREEK) + r")(?![A-Za-z])", r"\\\1 "),
        (r"(?<![A-Za-z\\])(?:infinity|inf|oo)(?![A-Za-z])", r"\\infty "),
        (r"(?<=[0-9])(?<!\\)['" + _GROUP_SPACE + r"](?=[0-9]{3}(?![0-9]))", ","),
    )
)  # fmt: skip
_END = re.compile(r"(?<!\\)(?:\\[,;:! ]|[.;,\s])+$")
_ESCAPED = re.compile(r"\\\\(?=[A-Za-z])")
_EUROPEAN = re.compile(r"-?[0-9]{1,3}(?:(?:\.[0-9]{3})+,[0-9]{1,2}|(?:\.[0-9]{3}){2,})")  # 1.234,5 and 1.234.567
_THOUSANDS = re.compile(r"(?<=[0-9]),[0-9]{3}(?![0-9])")
_SPACED = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?: [0-9]{3})+(?![0-9,])")
_WRAPS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("\\boxed{", "}"), ("\\fbox{", "}"), ("{", "}"))
_TOKEN = re.compile(r"\\[A-Za-z]+\s*|\\.|\s+|.", re.DOTALL)
_OPENERS = {"(", "[", "{", "\\{", "\\langle", "\\lfloor", "\\lceil", "\\begin"}
_CLOSERS = {")", "]", "}", "\\}", "\\rangle", "\\rfloor", "\\rceil", "\\end"}
_ARGUMENT = re.compile(r"\s*(?:(\\[A-Za-z]+)|([0-9A-Za-z]))")


@lru_cache(maxsize=4096)
def tidy(text: str) -> str:
    r"""`text` in LaTeX of one notation, without what wraps it (`$…$`, `\boxed{…}`, a full stop)."""
    text = _simple_characters(text).strip()
    for _ in range(6):
        before = text
        text = _END.sub("", text) if not text.endswith("...") else text
        text = text.strip()
        for opening, closing in _WRAPS:
            if text.startswith(opening) and text.endswith(closing) and len(text) >= len(opening) + len(closing):
                inner = text[len(opening) : len(text) - len(closing)]
                if "$" not in inner if "$" in opening else is_balanced(inner):
                    text = inner
                    break
        if text == before:
            break
    if "\\begin" not in text:  # commands that were escaped twice; in a matrix a doubled one ends a row
        text = _ESCAPED.sub(r"\\", text)
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    text = text.replace("$", "\\usd " if text.count("$") % 2 else " ")  # in pairs they delimit formulas
    text = _SPACED.sub(lambda match: match.group().replace(" ", ""), " ".join(text.split()))
    if _EUROPEAN.fullmatch(text):
        text = text.replace(".", "").replace(",", ".")
    return " ".join(_arguments(text).split())


def is_balanced(text: str) -> bool:
    """Whether the braces of `text` close in order, and none closes what begins before it."""
    depth = 0
    for token in re.findall(r"\\.|[{}]", text):
        depth += {"{": 1, "}": -1}.get(token, 0)
        if depth < 0:
            return False
    return depth == 0


def split_at(text: str, separators: frozenset[str], thousands: bool = False) -> tuple[list[str], list[str]]:
    """The parts of `text` between separators that stand outside all brackets, and the separators.

    One bracket may close another kind, as those of half-open intervals do. The whole text if brackets do not match.
    `thousands`: a comma before three digits separates nothing ("1,234"), unless a space follows.
    """
    parts, separators_there, depth, start = list[str](), list[str](), 0, 0
    for match in _TOKEN.finditer(text):
        token = match.group().strip()
        if token in _OPENERS:
            depth += 1
        elif token in _CLOSERS:
            depth -= 1
            if depth < 0:
                return [text], []
        elif depth == 0 and token in separators and not (thousands and _THOUSANDS.match(text, match.start())):
            parts.append(text[start : match.start()].strip())
            separators_there.append(token)
            start = match.end()
    return ([*parts, text[start:].strip()], separators_there) if depth == 0 else ([text], [])


def depth_of(text: str) -> int:
    """How deep brackets are nested."""
    depth = deepest = 0
    for match in _TOKEN.finditer(text):
        token = match.group().strip()
        depth += (token in _OPENERS) - (token in _CLOSERS)
        deepest = max(deepest, depth)
    return deepest


def enclosed(text: str) -> bool:
    """Whether the first bracket of `text` closes at its end."""
    depth = 0
    for match in _TOKEN.finditer(text):
        token = match.group().strip()
        depth += (token in _OPENERS) - (token in _CLOSERS)
        if depth <= 0:
            return depth == 0 and match.end() == len(text) and match.start() > 0
    return False


@dataclass(frozen=True)
class WrittenNumber:
    """A rational number as written. `places`: the decimals of a decimal number; None for any other."""

    value: Fraction
    places: int | None = None
    digits: int = 0  # significant digits of a decimal number


_INT = r"[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+"
_NUMBER = re.compile(
    rf"""(?P<sign>[-+]?)\s*(?:
      (?P<whole>{_INT})\s*\\frac\s*\{{\s*(?P<over>[0-9]+)\s*\}}\s*\{{\s*(?P<under>[0-9]+)\s*\}}
    | (?P<whole2>[0-9]+)\s+(?P<over2>[0-9]+)\s*/\s*(?P<under2>[0-9]+)
    | \\frac\s*\{{\s*(?P<top>[-+]?(?:{_INT}))\s*\}}\s*\{{\s*(?P<bottom>[-+]?(?:{_INT}))\s*\}}
    | (?P<body>(?:{_INT})?\.[0-9]+|(?:{_INT})\.?)
      (?: \s*\\overline\s*\{{?(?P<period>[0-9]+)\}}?
        | \s*/\s*(?P<divisor>(?:{_INT})(?:\.[0-9]+)?)
        | [eE](?P<e>[-+]?[0-9]{{1,3}})
        | \s*\*\s*10\s*\^\s*(?:\{{\s*(?P<power>[-+]?[0-9]{{1,3}})\s*\}}|(?P<power2>[0-9])) )?
    | 10\s*\^\s*(?:\{{\s*(?P<ten>[-+]?[0-9]{{1,3}})\s*\}}|(?P<ten2>[0-9]))
    )""",
    re.VERBOSE,
)


@lru_cache(maxsize=4096)
def written_number(text: str) -> WrittenNumber | None:
    r"""The rational number that a tidy `text` writes out (`3\frac{1}{2}`, `1.5e3`, `0.\overline{3}`), else None."""
    if len(text) > _MAX_DIGITS or not (match := _NUMBER.fullmatch(text.strip())):
        return None
    sign = -1 if match["sign"] == "-" else 1

    def number(name: str) -> Fraction:
        return Fraction(match[name].replace(",", "").rstrip("."))

    if match["ten"] or match["ten2"]:
        return WrittenNumber(sign * Fraction(10) ** int(match["ten"] or match["ten2"]))
    if match["body"] is None:
        suffix = "2" if match["whole2"] else ""
        top, bottom = ("top", "bottom") if match["top"] else (f"over{suffix}", f"under{suffix}")
        if number(bottom) == 0:
            return None
        whole = Fraction(0) if match["top"] else number(f"whole{suffix}")
        return WrittenNumber(sign * (whole + number(top) / number(bottom)))
    value = number("body")
    decimals = match["body"].partition(".")[2]
    if period := match["period"]:
        if "." not in match["body"]:
            return None
        return WrittenNumber(sign * (value + Fraction(int(period), (10 ** len(period) - 1) * 10 ** len(decimals))))
    if match["divisor"]:
        return None if number("divisor") == 0 else WrittenNumber(sign * value / number("divisor"))
    if power := match["e"] or match["power"] or match["power2"]:
        return WrittenNumber(sign * value * Fraction(10) ** int(power))
    digits = len((match["body"].replace(",", "").replace(".", "")).lstrip("0"))
    return WrittenNumber(sign * value, len(decimals), digits) if decimals else WrittenNumber(sign * value)


def same_number(a: WrittenNumber, b: WrittenNumber) -> bool:
    """Whether both are the same number. A decimal may stand for a value that no decimal equals (`stands_for`)."""
    if a.value == b.value:
        return True
    pairs = ((a, b.value), (b, a.value))
    return any(not _terminates(value) and stands_for(decimal, value) for decimal, value in pairs)


def stands_for(decimal: WrittenNumber, value: Fraction) -> bool:
    """Whether `decimal` is `value` rounded to its decimals, with `SIGNIFICANT` digits or more."""
    if decimal.places is None or decimal.digits < SIGNIFICANT:
        return False
    return abs(decimal.value - value) * 2 * 10**decimal.places <= 1


def _terminates(value: Fraction) -> bool:
    cofactor = value.denominator
    for prime in (2, 5):
        while cofactor % prime == 0:
            cofactor //= prime
    return cofactor == 1


def _simple_characters(text: str) -> str:
    """`text` without characters that have a LaTeX or ASCII form: superscripts, digits of other scripts, symbols."""
    if text.isascii():
        return text
    text = _SCRIPTS.sub(lambda m: f"{'^' if m[1] else '_'}{{{m[0].translate(_RAISED)}}}", text).translate(_CHARACTERS)
    out = []
    for c in text:
        if c.isascii():
            out.append(c)
        elif (digit := unicodedata.decimal(c, None)) is not None:
            out.append(str(digit))
        elif unicodedata.decomposition(c).startswith("<fraction>"):
            over, under = unicodedata.normalize("NFKC", c).split("⁄")
            out.append(f"\\frac{{{over}}}{{{under}}}")
        elif c not in _GROUP_SPACE and (plain := unicodedata.normalize("NFKC", c)).isascii():
            out.append(plain)  # full-width and mathematical letters
        else:
            out.append(c)
    return "".join(out)


def _arguments(text: str) -> str:
    r"""Write every argument in braces: `\frac12`, `\sqrt 3`, `\sqrt(3)`, `x^(1/2)`, `x^10`."""
    for command, count in (("\\frac", 2), ("\\binom", 2), ("\\sqrt", 1)):
        parts = re.split(re.escape(command) + r"(?![A-Za-z])", text)
        text = parts[0]
        for part in parts[1:]:
            part = part.lstrip()
            root = ""
            if command == "\\sqrt" and part.startswith("["):
                root, _, part = part.partition("]")
                root += "]"
            text += command + root + _braced(part, count)
    out, position = [], 0
    for match in re.finditer(r"[\^_]\s*(?=\()", text):
        if match.start() >= position and (end := _closing(text, match.end())) is not None:
            out += [text[position : match.start()], match.group().strip(), "{", text[match.end() + 1 : end], "}"]
            position = end + 1
    return "".join([*out, text[position:]])


def _braced(text: str, count: int) -> str:
    """`text` with its first `count` arguments in braces."""
    out = ""
    for _ in range(count):
        text = text.lstrip()
        if text.startswith(("{", "(")) and (end := _closing(text, 0)) is not None:
            out, text = out + "{" + text[1:end] + "}", text[end + 1 :]
        elif match := _ARGUMENT.match(text):
            argument, text = match.group().strip(), text[match.end() :]
            if count == 1 and argument.isdigit():  # `\sqrt 12` in plain text is the root of 12
                more = re.match(r"[0-9]*", text)
                argument, text = argument + more.group() if more else argument, text[more.end() if more else 0 :]
            out += "{" + argument + "}"
        else:
            break
    return out + text


def _closing(text: str, start: int) -> int | None:
    """The position of the bracket that closes the one at `start`."""
    depth = 0
    for match in re.finditer(r"\\.|[(){}]", text[start:]):
        depth += {"(": 1, "{": 1, ")": -1, "}": -1}.get(match.group(), 0)
        if depth == 0:
            return start + match.start()
    return None
