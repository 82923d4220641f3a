"""Lines of a CSV file that a spreadsheet opens without running a text of it as a formula."""

import csv
import io
import re
from collections.abc import Iterable
from typing import Any

# Beginnings of a formula in spreadsheets, full-width ones too, and behind a byte-order mark or null bytes, which are no
# part of a cell; and numbers, which are none though they have a sign.
_FORMULA = re.compile("(?s)[\0\ufeff]*[=@\uff1d\uff20]|[\t\r\n]|[-+\uff0d\uff0b].")
_NUMBER = re.compile(r"[-+]?[0-9]+([.,][0-9]+)?([eE][-+]?[0-9]+)?%?")


def csv_line(values: Iterable[Any]) -> str:
    """A row of a CSV."""
    out = io.StringIO(newline="")
    # With this line end, carriage returns inside a text are quoted too.
    csv.writer(out, lineterminator="\r\n").writerow(map(_csv_text, values))
    return out.getvalue().removesuffix("\r\n") + "\n"


def encodable(text: str) -> str:
    """The text with U+FFFD for each half of a surrogate pair, which UTF-8 has no bytes for."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _csv_text(value: Any) -> Any:
    """A cell of a CSV: an apostrophe stands before a text that spreadsheets take for a formula; numbers stay."""
    if not isinstance(value, str):
        return value
    return f"'{encodable(value)}" if _FORMULA.match(value) and not _NUMBER.fullmatch(value) else encodable(value)
