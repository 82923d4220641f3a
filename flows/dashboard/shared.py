"""What every page shares: the store, cached answers of the catalog, the chosen run, links, and texts shown safely.

Text from models and the web is only ever shown as plain text: nothing here renders it as HTML or markdown. Where
Streamlit takes nothing but markdown (titles, labels, warnings), a name from outside goes through `quoted`.
"""

import os
import re
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import streamlit as st

from common import text as formats
from common.errors import ConfigError
from flows.dashboard import queries
from flows.dashboard.queries import Row
from store.artifacts import Store
from store.catalog import Catalog, CatalogBusy
from store.mirror import open_store

FRESH_S = 3.0  # an answer of the catalog is shown for so long before it is asked again
PATIENCE_S = 5.0
_ADDRESS = re.compile(r":(?=//)|www(?=\.)|@", re.IGNORECASE)
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
    """A catalog for people: it gives up on a locked file after seconds, not after a minute, and never writes."""

    def ingest(self, *, patience: float = PATIENCE_S) -> int:
        raise ConfigError(f"the catalog {self.path} is of another version: `nautile store rebuild` makes it anew")

    def query(self, sql: str, parameters: Sequence[Any] = (), *, patience: float = PATIENCE_S) -> list[Row]:
        return super().query(sql, parameters, patience=patience)


def store() -> Store:
    """The store that NAUTILE_STORE names."""
    return open_store()


def ask(question: Callable[..., Any], *arguments: Any) -> Any:
    """The answer of a function of `queries`, at most three seconds old. Stops the page while there can be none."""
    try:
        return _answer(str(store().root), question.__name__, _frozen(arguments))
    except CatalogBusy:
        st.info("The catalog is being written to; this page tries again by itself.")
    except ConfigError as error:
        st.error(quoted(str(error)))
    st.stop()


@st.cache_data(ttl=FRESH_S, max_entries=512, show_spinner=False)
def _answer(root: str, question: str, arguments: tuple[Any, ...]) -> Any:
    return getattr(queries, question)(_Patient(open_store(root)), *arguments)


def _frozen(arguments: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(tuple(one) if isinstance(one, list) else one for one in arguments)


def run_titles() -> dict[str, str]:
    """Run -> its title, the newest first."""
    found = ask(queries.runs) if store().catalog_path.exists() else []
    return {row["run"]: run_title(row) for row in found}


def choose_run(titles: dict[str, str]) -> str | None:
    """The run picked in the side bar (the newest at first), or one that the address names; None without any run."""
    asked = st.query_params.get("run", "")
    if asked and asked not in titles and ask(queries.stages, asked):
        titles = {asked: asked, **titles}  # an older one than the list holds
    if not titles:
        return None
    first = list(titles).index(asked) if asked in titles else 0
    # With a key the choice outlives new runs and new states; without one Streamlit would begin anew at the first.
    return st.sidebar.selectbox(
        "Run", list(titles), index=first, format_func=lambda one: titles.get(one, one), key="run"
    )


def chosen_run(run: str | None) -> Chosen | None:
    """The run with its stages as they stand now."""
    return None if run is None else Chosen(run, ask(queries.stages, run))


def run_title(row: Row) -> str:
    state = "running" if row["running"] else "failed" if row["failed"] else "stopped" if row["stopped"] else "done"
    return f"{row['config'] or 'run'} · {row['begun']:%Y-%m-%d %H:%M} · {state}"


def prefect_link(run: str) -> str | None:
    """The page of a run in Prefect's own interface, where PREFECT_UI_URL or PREFECT_API_URL says where that is."""
    base = os.environ.get("PREFECT_UI_URL") or os.environ.get("PREFECT_API_URL", "").removesuffix("/api")
    return f"{base.rstrip('/')}/runs/flow-run/{run}" if base else None


def lineage_link(artifact: str) -> str:
    """The address of an artifact's lineage, seen from any page."""
    return f"lineage?artifact={quote(artifact, safe='')}"


def seconds(value: float | None) -> str:
    return "" if value is None else formats.duration(value)


def dollars(value: float | None) -> str:
    return "" if value is None else formats.dollars(value)


def plain(text: str | None) -> None:
    """A text from outside: shown letter for letter, lines wrapped."""
    st.code(text or "", language=None, wrap_lines=True)


def quoted(text: str) -> str:
    """A text from outside inside markdown: marks of markdown, LaTeX and directives stand for themselves, nothing links.

    Streamlit makes a link of a bare address after all marks are read; an invisible joiner in it leaves it a text.
    """
    apart = _ADDRESS.sub("\\g<0>\N{WORD JOINER}", " ".join(text.split()))
    return "".join(f"\\{mark}" if mark in string.punctuation else mark for mark in apart)


def thought(text: str) -> tuple[str | None, str]:
    """(reasoning, answer) of a completion; reasoning is None where the text has no end of thinking."""
    before, mark, after = text.partition(THINK_END)
    return (before.strip(), after.strip()) if mark else (None, text.strip())


def nothing(what: str) -> None:
    """Says that there is nothing of a kind, and how it comes to be."""
    st.caption(what)
