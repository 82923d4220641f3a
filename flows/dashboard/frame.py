"""What every page shares: the store, cached answers of the catalog, the chosen run, links, and texts shown safely.

Text from models and the web is only ever shown as plain text: nothing here renders it as HTML or markdown.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import streamlit as st

from flows.dashboard import queries
from flows.dashboard.queries import Row
from store.artifacts import Store
from store.catalog import Catalog, CatalogBusy
from tasks.wording import duration

FRESH_S = 3.0  # an answer of the catalog is shown for so long before it is asked again
PATIENCE_S = 5.0
THINK_END = "<|think_end|>"
STATE_MARKS = {
    "running": "▸ running",
    "done": "✓ done",
    "reused": "= reused",
    "failed": "✗ failed",
    "cancelled": "■ cancelled",
    "interrupted": "■ interrupted",
}


@dataclass(frozen=True)
class Chosen:
    """The run that the pages are about, and the last attempt at each of its stages."""

    run: str
    stages: list[Row]

    def executions(self, *stages: str) -> list[str]:
        """The executions behind the run's stages of these names (all without a name), reused ones included."""
        return [row["execution"] for row in self.stages if row["execution"] and (not stages or row["stage"] in stages)]

    def label_of(self, execution: str) -> str:
        return next((row["label"] for row in self.stages if row["execution"] == execution), execution[:8])


class _Patient(Catalog):
    """A catalog for people: it gives up on a locked file after seconds, not after a minute."""

    def query(self, sql: str, parameters: Sequence[Any] = (), *, patience: float = PATIENCE_S) -> list[Row]:
        return super().query(sql, parameters, patience=patience)


def store() -> Store:
    """The store that NAUTILE_STORE names."""
    return Store()


def ask(question: Callable[..., Any], *arguments: Any) -> Any:
    """The answer of a function of `queries`, at most three seconds old. Stops the page while the catalog is locked."""
    try:
        return _answer(str(store().root), question.__name__, _frozen(arguments))
    except CatalogBusy:
        st.info("The catalog is being written to; this page tries again by itself.")
        st.stop()


@st.cache_data(ttl=FRESH_S, max_entries=512, show_spinner=False)
def _answer(root: str, question: str, arguments: tuple[Any, ...]) -> Any:
    return getattr(queries, question)(_Patient(Store(root)), *arguments)


def _frozen(arguments: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(tuple(one) if isinstance(one, list) else one for one in arguments)


def choose_run() -> Chosen | None:
    """The run picked in the side bar (the newest at first), or one that the address names; None without any run."""
    found = ask(queries.runs) if store().catalog_path.exists() else []
    if not found:
        return None
    by_id = {row["run"]: row for row in found}
    asked = st.query_params.get("run", "")
    first = list(by_id).index(asked) if asked in by_id else 0
    run = st.sidebar.selectbox("Run", list(by_id), index=first, format_func=lambda one: run_title(by_id[one]))
    return Chosen(run, ask(queries.stages, run))


def run_title(row: Row) -> str:
    state = "running" if row["running"] else "failed" if row["failed"] else "stopped" if row["stopped"] else "done"
    return f"{row['config'] or 'run'} · {row['begun']:%Y-%m-%d %H:%M} · {state}"


def prefect_link(run: str) -> str | None:
    """The page of a run in Prefect's own interface, where PREFECT_UI_URL or PREFECT_API_URL says where that is."""
    base = os.environ.get("PREFECT_UI_URL") or os.environ.get("PREFECT_API_URL", "").removesuffix("/api")
    return f"{base.rstrip('/')}/runs/flow-run/{run}" if base else None


def seconds(value: float | None) -> str:
    return "" if value is None else duration(value)


def dollars(value: float | None) -> str:
    return "" if value is None else f"${value:,.4f}" if 0 < value < 1 else f"${value:,.2f}"


def plain(text: str | None) -> None:
    """A text from outside: shown letter for letter, lines wrapped."""
    st.code(text or "", language=None, wrap_lines=True)


def thought(text: str) -> tuple[str | None, str]:
    """(reasoning, answer) of a completion; reasoning is None where the text has no end of thinking."""
    before, mark, after = text.partition(THINK_END)
    return (before.strip(), after.strip()) if mark else (None, text.strip())


def nothing(what: str) -> None:
    """Says that there is nothing of a kind, and how it comes to be."""
    st.caption(what)
