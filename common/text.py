"""Format values for terminals and reports, build Markdown tables, and escape untrusted text."""

import difflib
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any
from urllib.parse import quote

# Control characters other than tab and line feed, the overrides and isolates of text direction, and halves of surrogate
# pairs, which no output in UTF-8 can hold: JSON and names of files may have them.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")

_HALF_PAIR = re.compile("[\ud800-\udfff]")

_BREAK = re.compile(r"[\n\u2028\u2029]")

# Characters that begin inline markup, links (also bare addresses) and formulas in Markdown.
_MARKUP = re.compile(r"[\\`*_$@]|\](?=[(\[:])|~(?=~)|(?<=\w):(?=//)|(?<=\bwww)\.", re.IGNORECASE)
_BLOCK = re.compile(r"^(\d*)([.)+=#-])(?=[ =#-]|$)")  # list, heading, heading underline or rule, at the start of a line


def has_half_pair(text: str) -> bool:
    """Whether a text has half a surrogate pair, which JSON can hold and UTF-8 cannot."""
    return not text.isascii() and _HALF_PAIR.search(text) is not None


def visible(text: object, most: int | None = None) -> str:
    """Replace what does not belong in an output (`_CONTROL`) in untrusted text by U+FFFD; cut to `most` characters."""
    clean = _CONTROL.sub("\N{REPLACEMENT CHARACTER}", str(text).replace("\r\n", "\n"))
    return clean if most is None or len(clean) <= most else f"{clean[:most]} […]"


def controls_escaped(json_text: str) -> str:
    """JSON with its control characters written as escapes, of which JSON itself requires only a part."""
    # They stand in strings alone, where the escape has the same meaning.
    return _CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", json_text)


def one_line(text: object) -> str:
    """`visible`, and line breaks replaced too: for names, which could otherwise forge lines of an output."""
    return _BREAK.sub("\N{REPLACEMENT CHARACTER}", visible(text))


def first_line(error: BaseException) -> str:
    """The first line of an error's message; the name of its type if the message is empty."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def most_common_reasons(reasons: Counter[Any]) -> str:
    """The four most frequent of some reasons with their counts, for messages: `3 too_long, 1 empty`."""
    return ", ".join(f"{count} {reason}" for reason, count in reasons.most_common(4))


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A suffix for messages, ` (did you mean 'reason'?)`, if one of the known names resembles `name`; else ""."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.7)
    return f" (did you mean {close[0]!r}?)" if close else ""


def as_file_name(text: str) -> str:
    """Encode `text` as a file or object name: characters other than letters, digits and `_.-` become ~ and a code."""
    # `quote` leaves ~ as it is, and here it begins a code: unencoded, "a~2Fb" and "a/b" would share a name.
    name = quote(text, safe="").replace("~", "%7E").replace("%", "~")
    return name if name[:1] not in ("", ".") else f"~2E{name[1:]}"


def fenced(text: str) -> str:
    """Put `text` into a Markdown code block with a fence longer than any run of backticks in it."""
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall(r"`+", text)), default=0))
    return f"{fence}\n{text}\n{fence}"


def markdown_text(value: object) -> str:
    """Escape untrusted text as one line of Markdown that shows it literally, without markup, links or HTML.

    Pipes are escaped by `markdown_table`.
    """
    # The ampersand first: it begins what the other two become.
    text = " ".join(visible(value).split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    text = _MARKUP.sub(r"\\\g<0>", text)
    return _BLOCK.sub(r"\g<1>\\\g<2>", text)


def markdown_table(header: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown pipe table without a final newline; pipes and line breaks in cells are escaped."""
    lines = [header, ["---"] * len(header), *rows]
    cells = ([str(value).replace("|", "\\|").replace("\n", " ") for value in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def amount(value: float) -> str:
    """Format a count: 950, 12,400, 3.10 M; below 100 with one decimal, below 1 with two significant digits."""
    if abs(value) >= 1e9:
        return f"{value / 1e9:.2f} G"
    if abs(value) >= 1e6:
        return f"{value / 1e6:.2f} M"
    if abs(value) >= 100 or float(value).is_integer():  # which NaN is not
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 1 else f"{value:.2g}"


def counted(count: int, noun: str) -> str:
    """A count with its noun, which takes an s unless there is one: `1 step`, `1,200 steps`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def duration(seconds: float) -> str:
    """Format seconds: 4.2 s, 58 s, 2 min 5 s, 1 h 3 min."""
    if seconds < 59.5:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes, remaining_seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {remaining_seconds} s"


def size(count: float) -> str:
    """Format a number of bytes in decimal units: 812 B, 4.1 MB."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count} B"


def chips_text(hours: float | None, cost: float | None) -> str:
    """Hours of accelerators and their dollars, as far as they are known; "" on a CPU."""
    if hours is None:
        return ""
    counted_hours = f"{hours:,.1f} chip-hours" if hours >= 0.95 else f"{60 * hours:.0f} chip-minutes"
    return f"{counted_hours}, {'price not known' if cost is None else dollars(cost)}"


def dollars(value: float) -> str:
    """Format money: $0.0123 below one dollar, $1,234.50 above."""
    return f"${value:,.4f}" if 0 < value < 1 else f"${value:,.2f}"
