r"""Find the JSON objects in a model's reply, and read backslashes in them as the model meant them.

Models write LaTeX into JSON strings without doubling its backslashes. `"\sqrt{2}"` is then no JSON, and `"\frac{1}{2}"`
is: a form feed and `rac{1}{2}`. So the escapes of an object are looked at together. Some can only be LaTeX (`\s`, `\f`,
`\times`), some only JSON (`\\frac`, `\"`), and `\n`, `\t` are a command or white space by what follows: `\nabla` is a
command, `\nThen` a new line. What can be read in two ways makes the object `ambiguous`; nothing is guessed.
"""

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

MAX_OBJECTS = 64  # positions that are tried
MAX_LITERAL = 50_000  # characters of a Python dict; its parser is slow
# Not strict: models write line breaks into their strings, which JSON forbids.
_DECODER = json.JSONDecoder(strict=False)
_BEGIN = re.compile(r'\{(?=\s*")')
_PYTHON_BEGIN = re.compile(r"\{(?=\s*['\"“‘])")
_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{4}|[\s\S]|\Z)")
_COMMAND = re.compile(r"[A-Za-z]+")
# Commands that begin with `\\n` or `\\t`. The rest of these begins no line: "abla", "imes".
_CERTAIN = frozenset(
    _COMMAND.findall(
        "nabla natural neq newline newcommand nearrow nwarrow nleq ngeq ngtr nonumber normalsize normalfont not notag "
        "notin nsubseteq nsupseteq nsucc nVdash nvDash nvdash nolimits nobreak noindent "
        "tag tanh tau tbinom text textbf textcolor textdegree textit textnormal textrm textsc textsf textstyle "
        "textsubscript textsuperscript texttt textup textwidth tfrac therefore theta thickapprox thicksim thinspace "
        "tilde times tiny toprule triangle triangledown triangleleft trianglelefteq triangleright trianglerighteq "
        "twoheadrightarrow"
    )
)
# The rest of these may begin a line: "to", "u", "exists".
_UNCERTAIN = frozenset(
    _COMMAND.findall(
        "ncong ne neg nexists ni nleftarrow nless nmid nparallel nprec nrightarrow nsim nu tan to top tr tt"
    )
)
_WORDS = ("nexists", "nless")  # the rest is a whole word
# Before an uncertain command: an operator, a bracket, an index, the beginning of inline mathematics, one space.
_IN_MATHEMATICS = re.compile(r"(?:[=+^_(<,]|(?<! ) |[\s\"(=]\$|[_^]\{[^{}\"]{0,40})\Z")
_READS_ON = re.compile(r"\s+[^\W\d_]{2,}")  # after it: a sentence
_MATHEMATICS = re.compile(r"\$|\\[(\[]")
_BEGIN_ROWS = r"\\begin\{(?:[pbvBV]?matrix|smallmatrix|d?cases|array|align(?:ed|at)?|gather(?:ed)?|split|eqnarray)\*?\}"
_ROWS = re.compile(_BEGIN_ROWS)
# A row of a matrix that ends in one backslash: the model doubled those of commands and forgot the row's.
_HALF_A_ROW_END = re.compile(
    rf"{_BEGIN_ROWS}(?:(?!\\end\{{)[\s\S]){{0,2000}}?(?<![\\&])\\(?:[ \t]*\n|[ \t]+[\d&a-zA-Z({{\\-]|\d)"
)
# Doubled twice: "\\\\frac" in the reply.
_DOUBLED_TWICE = re.compile(
    r"(?<!\\)\\\\(?:frac|sqrt|times|cdot|text|left|right|boxed|begin|end|sum|int|theta|alpha|beta|pi|leq?|geq?|neq)(?![A-Za-z])"
)
_FOLDER = re.compile(r"\\[A-Za-z]\w*|(?:[\s\S]*[^A-Za-z])?[C-E]:")
_STRING_OR_COMMA = re.compile(r'("(?:[^"\\]|\\[\s\S])*")|,\s*(?=[}\]])')
_PREFIXED = re.compile(r"[:,\[{]\s*[rRbBuUfF]{1,2}['\"]")  # a string of Python that reads backslashes in another way
_UNICODE_DOUBLED_TWICE = re.compile(r"\\u[0-9a-fA-F]{4}")
_LINES_DOUBLED_TWICE = re.compile(r"(?<![\"'])\\n\\n|[.:!?]\\n(?=[A-Z\d*#-])")
_GARBLED = (_HALF_A_ROW_END, _DOUBLED_TWICE, _UNICODE_DOUBLED_TWICE)
# Characters that nobody means: control characters but tab and line breaks, half a surrogate pair, the replacement mark.
_NO_TEXT = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff\ufffd]")


@dataclass(frozen=True)
class ReplyObject:
    """A JSON object, and where it stands in the reply: characters [begin, end).

    `ambiguous`: one of its strings can be read in two ways or holds characters that are no text, or two of its members
    have one name.
    """

    value: dict[str, Any]
    begin: int
    end: int
    ambiguous: bool


def reply_objects(text: str) -> list[ReplyObject]:
    """The JSON objects in a text that are not inside another one; without any, a repaired one.

    Repaired are trailing commas, curly quotes and a Python dict. At most `MAX_OBJECTS` beginnings are tried.
    """
    objects = list(_valid_objects(text))
    if objects:
        return objects
    begin, end = _PYTHON_BEGIN.search(text), text.rfind("}")
    if begin is None or end < begin.start():
        return []
    repaired = _repaired(text[begin.start() : end + 1], begin.start())
    return [repaired] if repaired else []


def _valid_objects(text: str) -> Iterator[ReplyObject]:
    # As long as the text and without any escape but `\"` and `\\`, so that only the objects' ends are found in it.
    masked = re.sub(r'\\(["\\])|\\[\s\S]', lambda match: match.group() if match[1] else "__", text)
    begin, attempts = _BEGIN.search(masked), 0
    while begin is not None and attempts < MAX_OBJECTS:
        attempts += 1
        try:
            value, end = _DECODER.raw_decode(masked, begin.start())
        except (ValueError, RecursionError):
            end = begin.end()
        else:
            if isinstance(value, dict):
                escaped, ambiguous = _escaped(text[begin.start() : end])
                value, repeated = _loaded(escaped)
                if isinstance(value, dict):
                    yield ReplyObject(value, begin.start(), end, ambiguous or repeated or _is_garbled(value))
        begin = _BEGIN.search(masked, end)


def _repaired(text: str, offset: int) -> ReplyObject | None:
    """Parse an object with a common and harmless mistake; None if something else is wrong."""
    # Of a string nothing is removed.
    without_commas = _STRING_OR_COMMA.sub(lambda match: match[1] or "", text)
    with_straight_quotes = without_commas.translate({0x201C: '"', 0x201D: '"'})
    for candidate in (without_commas, with_straight_quotes):
        escaped, ambiguous = _escaped(candidate)
        value, repeated = _loaded(escaped)
        if isinstance(value, dict):
            return ReplyObject(value, offset, offset + len(text), ambiguous or repeated or _is_garbled(value))
    if "'" not in text or len(text) > MAX_LITERAL or _PREFIXED.search(text):
        return None
    escaped, ambiguous = _escaped(text, python=True)
    try:
        tree = ast.parse(escaped, mode="eval")
        value = ast.literal_eval(tree)  # a Python dict; only literals are evaluated, no code
        dicts = (node for node in ast.walk(tree) if isinstance(node, ast.Dict))
        ambiguous = ambiguous or any(len(ast.literal_eval(node)) < len(node.keys) for node in dicts)
    except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
        return None
    if not isinstance(value, dict):
        return None
    return ReplyObject(value, offset, offset + len(text), ambiguous or _is_garbled(value))


def _loaded(text: str) -> tuple[Any, bool]:
    """(value of a JSON text, None if it has none; whether an object in it has two members of one name).

    A number with a point stays as it is written, not rounded.
    """
    repeated = False

    def members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal repeated
        found = dict(pairs)
        repeated = repeated or len(found) < len(pairs)
        return found

    try:
        value = json.loads(
            text, strict=False, parse_float=str, parse_constant=lambda name: None, object_pairs_hook=members
        )
    except (ValueError, RecursionError):
        return None, False
    return value, repeated


def _escaped(text: str, *, python: bool = False) -> tuple[str, bool]:
    """(the object with every backslash that is part of its text doubled, whether some can be read in two ways).

    `python`: the object is a Python dict, in which `\\'` is an escape.
    """
    escapes = list(_ESCAPE.finditer(text))
    if not escapes:
        return text, False
    kinds = [_kind(text, match) for match in escapes]
    # How this model writes LaTeX, by the escapes that leave no doubt.
    raw, doubled = "text" in kinds, "doubled" in kinds
    pieces, position, ambiguous = [], 0, raw and doubled and _ROWS.search(text) is not None
    for number, (match, kind) in enumerate(zip(escapes, kinds, strict=True)):
        escape = match.group()
        piece = escape
        if kind == "text":
            piece = f"\\{escape}"
        elif kind == "quote":
            piece = escape if python else "'"
        elif kind == "row_end" and raw:
            # Of a model that doubles nothing this is the end of a row; of one that does both, nobody can say.
            piece, ambiguous = "\\\\\\\\", ambiguous or doubled
        elif kind == "uncertain":
            is_command = _looks_like_a_command(text, match)
            piece = f"\\{escape}" if is_command else escape
            if doubled:
                ambiguous = ambiguous or raw or is_command
            else:
                ambiguous = ambiguous or is_command != (raw or bool(_MATHEMATICS.search(text)))
        elif escape in (r"\n", r"\t") and (raw or not doubled) and text[match.end() : match.end() + 1].islower():
            # A folder or a line: "C:\new", or after a folder whose backslash is text, "\Users\name".
            before = (
                escapes[number - 1].start() if number and kinds[number - 1] == "text" else max(0, match.start() - 3)
            )
            ambiguous = ambiguous or _FOLDER.fullmatch(text, before, match.start()) is not None
        pieces += [text[position : match.start()], piece]
        position = match.end()
    return "".join([*pieces, text[position:]]), ambiguous


def _looks_like_a_command(text: str, escape: re.Match[str]) -> bool:
    """Whether an uncertain escape stands where mathematics has a command, and not at the end of a line."""
    command = _COMMAND.match(text, escape.start() + 1)
    assert command is not None
    if command.group() in _WORDS or _READS_ON.match(text, command.end()):
        return False
    return _IN_MATHEMATICS.search(text, max(0, escape.start() - 60), escape.start()) is not None


def _kind(text: str, match: re.Match[str]) -> str:
    r"""What an escape is, by itself.

    "text": its backslash is text. "doubled": the backslash of a command, doubled as JSON asks. "row_end": two
    backslashes with no command behind them. "uncertain": see `_UNCERTAIN`. "quote": `\'`. "json": any other of JSON.
    """
    character = match.group()[1:2]
    following = text[match.end() : match.end() + 1]
    if character == "\\":
        if following == "\\":  # four are two that are doubled; three are the end of a row and a command
            return "doubled" if text[match.end() + 1 : match.end() + 2] == "\\" else "row_end"
        return "doubled" if following.isalpha() or (following and following in "()]{},;:!%$#_|") else "row_end"
    if character == "'":
        return "quote"
    if len(match.group()) == 6 or (character and character in '"/'):
        return "json"
    if not character or character not in "nrt":
        # `\b` and `\f` are escapes of JSON, for characters that no text has.
        return "text"
    if character == "r":  # of a line end, or of `\rho`
        return "text" if following.isalpha() else "json"
    command = _COMMAND.match(text, match.start() + 1)
    name = command.group() if command else ""
    return "text" if name in _CERTAIN else "uncertain" if name in _UNCERTAIN else "json"


def _is_garbled(value: Any) -> bool:
    """Whether a string in a value has lost or doubled backslashes, or characters that are no text."""
    values = [value]  # no recursion: the value may be nested deeper than Python's limit
    while values:
        value = values.pop()
        if isinstance(value, dict):
            values += [*value, *value.values()]
        elif isinstance(value, list | tuple | set):
            values += value
        elif isinstance(value, str) and (
            _NO_TEXT.search(value)
            or ("\\" in value and any(pattern.search(value) for pattern in _GARBLED))
            or ("\\n" in value and "\n" not in value and _LINES_DOUBLED_TWICE.search(value))
        ):
            return True
    return False
