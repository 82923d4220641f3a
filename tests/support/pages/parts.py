"""What a page of the dashboard shows as HTML, read from Streamlit's test client: its tables, and its literal texts."""

import re
from html import unescape
from typing import Any


def _inner(html: str, tag: str) -> list[str]:
    return re.findall(rf"<{tag}\b[^>]*>(.*?)</{tag}>", html, re.DOTALL)


def _plain(html: str) -> str:
    return unescape(re.sub(r"<[^>]*>", "", html))


def cells(table: str) -> list[list[str]]:
    """The rows of cells of a table in HTML."""
    return [[_plain(cell) for cell in _inner(row, "t[hd]")] for row in _inner(table, "tr")]


def tables(shown: Any) -> list[list[list[str]]]:
    """The page's tables, each as its rows of cells, the headings first."""
    return [cells(table) for element in shown.get("html") for table in _inner(element.proto.body, "table")]


def literals(shown: Any) -> list[str]:
    """The page's texts that are shown literally, commands among them."""
    return [_plain(text) for element in shown.get("html") for text in _inner(element.proto.body, "pre")]
