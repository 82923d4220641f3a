"""A page of the dashboard in Streamlit's test client, and what it shows as HTML: its tables, and its literal texts."""

import re
from html import unescape
from typing import Any

import pytest
from streamlit.testing.v1 import AppTest

from nautile.store.artifacts import Store
from nautile.store.catalog import Catalog


def _draw(page: str, of_a_run: bool) -> None:
    """Draw one page as app.py does. Runs inside Streamlit."""
    from nautile.flows.dashboard import shared
    from nautile.flows.dashboard.pages import PAGES

    PAGES[page].draw(shared.chosen_run(shared.choose_run()) if of_a_run else None)


def page_of(store: Store, page: str, patch: pytest.MonkeyPatch, of_a_run: bool = True, **address: str) -> AppTest:
    """The page over a store with these parameters in its address, not drawn yet."""
    if store.root.exists():
        Catalog(store).ingest()
    patch.setenv("NAUTILE_STORE", str(store.root))
    shown = AppTest.from_function(_draw, kwargs={"page": page, "of_a_run": of_a_run}, default_timeout=240)
    for name, value in address.items():
        shown.query_params[name] = value
    return shown


def shown_page(store: Store, page: str, patch: pytest.MonkeyPatch, of_a_run: bool = True, **address: str) -> AppTest:
    """The page of `page_of`, drawn without a fault."""
    shown = page_of(store, page, patch, of_a_run, **address).run()
    assert not shown.exception
    return shown


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
