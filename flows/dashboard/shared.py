"""Shared by all pages: the store, cached catalog queries, the chosen run, links, and safe display of text.

Text from models and the web is only shown as plain text, never rendered as HTML or Markdown. Where Streamlit accepts
only Markdown (titles, labels, warnings), such text is passed through `escaped`.
"""

import json
import math
import os
import re
import string
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from nautile.common.errors import ConfigError
from nautile.common.files import read_json
from nautile.common.text import visible
from nautile.configs.changes import describe_changes, read_changes
from nautile.flows.dashboard import queries
from nautile.flows.listings import listed_artifacts, listed_runs
from nautile.flows.operate import run_actions
from nautile.flows.run_state import (
    LIVE,
    RUNS,
    STEPS,
    RunState,
    newest_with_content,
    questions_by_run,
    run_state,
    state_of,
)
from nautile.store.catalog import Catalog, CatalogBusy, CatalogReader, CatalogRow, query_files
from nautile.store.manifest import MANIFEST
from nautile.store.mirror import open_store
from nautile.tasks.engine.progress import RateMeter

CACHE_S = 3.0  # how long the result of a catalog query is reused
PATIENCE_S = 5.0
_ADDRESS = re.compile(r":(?=//)|www(?=\.)|@", re.IGNORECASE)
LONGEST_CHANGES = 48  # characters of the changes in the title of a run
THINK_END = "<|think_end|>"
# State -> sign, words, text colour, background. Each pair of colours has a contrast of at least 4.5 to 1; on a dark
# page they change places (`coloured`).
LOOKS = {
    "done": ("✓", "done", "#116329", "#e6f4ea"),
    "reused": ("=", "reused", "#3b4a5a", "#e8edf2"),
    "running": ("▸", "running", "#0b4fa8", "#e3eefc"),
    "waiting": ("…", "waiting", "#7a4b00", "#fff1cf"),
    "failed": ("✗", "failed", "#a40e26", "#fde7e9"),
    "cancelled": ("■", "cancelled", "#57434a", "#efe6ea"),
    "interrupted": ("■", "interrupted", "#57434a", "#efe6ea"),
    "silent": ("?", "nothing heard", "#57434a", "#efe6ea"),
    "coming": ("○", "to come", "#5c6370", "#f6f7f8"),
    "not started": ("○", "not started", "#5c6370", "#f6f7f8"),
}
STATE_MARKS = {state: f"{sign} {words}" for state, (sign, words, _, _) in LOOKS.items()}

OTHER_LOOK = ("#333333", "#ffffff")  # text colour and background of a state that has no entry in LOOKS


@dataclass(frozen=True)
class ChosenRun:
    """The run that the pages show, and the last attempt at each of its stages."""

    run: str
    stages: list[CatalogRow]
    state: RunState | None = None  # None for runs that the chosen one is compared with

    @staticmethod
    def outputs(row: CatalogRow) -> dict[str, str]:
        """Kind -> id of the artifacts of a row of `stages`."""
        return json.loads(row["outputs"] or "{}")

    def executions(self, *stages: str) -> list[str]:
        """The executions of the run's stages with these names (without names: all), including reused ones."""
        return [row["execution"] for row in self.stages if row["execution"] and (not stages or row["stage"] in stages)]


class ReadOnlyCatalog(Catalog):
    """A catalog that is never updated from here."""

    def ingest(self, *, patience: float = PATIENCE_S, most_s: float = math.inf) -> int:
        raise ConfigError(f"the catalog {self.path} is of another version: run `nautile store rebuild`")


_reader: ContextVar[CatalogReader | None] = ContextVar("reader", default=None)


@contextmanager
def one_connection() -> Iterator[CatalogReader]:
    """Share one connection for all queries of the block (one draw of a page): opening one takes longer than a query.

    Queries raise `CatalogBusy` after `PATIENCE_S` if the file is locked, because a user waits for the page.
    """
    if reader := _reader.get():
        yield reader
        return
    with ReadOnlyCatalog(open_store()).reading(patience=PATIENCE_S) as reader:
        token = _reader.set(reader)
        try:
            yield reader
        finally:
            _reader.reset(token)


def query(sql: str, *parameters: Any, files: bool = False) -> list[CatalogRow]:
    """Run one of `queries`, with results cached for `CACHE_S`; no rows without a catalog. Stops the page on an error.

    `files`: the query reads a file instead of a table.
    """
    try:
        return fetch(sql, *parameters, files=files)
    except CatalogBusy:
        st.info("The catalog is being written to; this page will try again.")
    except ConfigError as error:
        st.error(escaped(str(error)))
    st.stop()


def fetch(sql: str, *parameters: Any, files: bool = False) -> list[CatalogRow]:
    """Like `query`, but raises `CatalogBusy` and `ConfigError`."""
    store = open_store()
    return _cached(str(store.root), sql, list(parameters), files) if store.catalog_path.exists() else []


@st.cache_data(ttl=CACHE_S, max_entries=512, show_spinner=False)
def _cached(root: str, sql: str, parameters: list[Any], files: bool) -> list[CatalogRow]:
    if files:
        return query_files(sql, parameters)
    with one_connection() as reader:
        return reader(sql, *parameters)


def with_states(rows: Sequence[CatalogRow]) -> list[CatalogRow]:
    """The rows of runs, each with its `current_state` (`run_state.state_of`)."""
    store = open_store()
    waiting = questions_by_run(store)
    return [row | {"current_state": state_of(row, store, waiting)} for row in rows]


def live_runs() -> list[str]:
    """The runs that work or wait for an answer, however many have begun since."""
    rows = query(queries.LIVE_RUNS, list(questions()))
    return [row["run"] for row in with_states(rows) if row["current_state"] in LIVE]


def run_titles(search: str = "", wanted: Sequence[str] = ()) -> tuple[dict[str, str], int]:
    """Run id -> its title: the newest `LISTED` that fit the search, and the `wanted` ones; and how many fit it."""
    rows = listed_runs(open_store(), query, search, limit=queries.LISTED)
    total = rows[0]["total"] if rows else 0
    listed = {row["run"] for row in rows}
    more = [row for run in dict.fromkeys(wanted) if run not in listed for row in query(queries.ONE_RUN, run)]
    return {row["run"]: _title(row) for row in [*with_states(more), *rows]}, total


def run_names(runs: Sequence[str]) -> dict[str, str]:
    """Run -> its name, with when it began where another of the runs has the same one: for legends and tables."""
    rows = {row["run"]: row for row in query(queries.RUN_NAMES, list(runs))} if runs else {}
    names = {run: visible(rows[run]["name"] or run[:8], 60) if run in rows else run[:8] for run in runs}
    count = Counter(names.values())
    return {
        run: name if count[name] == 1 or run not in rows else f"{name} · {rows[run]['begun']:%b %d %H:%M}"
        for run, name in names.items()
    }


def offered_runs(key: str, wanted: Sequence[str] = (), place: DeltaGenerator | None = None) -> dict[str, str]:
    """Run id -> title of the runs that a picker offers, the `wanted` ones among them.

    Where the store has more than a picker can list, a field above it searches the others.
    """
    _, total = run_titles()
    if total <= queries.LISTED:
        return run_titles("", wanted)[0]
    search = (place or st).text_input(
        "Find a run",
        key=f"find-{key}",
        placeholder=f"name, setting, tag, note: {total:,} runs",
        help=f"The list has the newest {queries.LISTED} that fit. Each word must be in the run's id, name, changed "
        "settings, state, tags or note.",
    )
    titles, fitting = run_titles(search, wanted)
    (place or st).caption(
        f"{fitting:,} fit" + (f", the newest {queries.LISTED} are listed" if fitting > queries.LISTED else "")
    )
    return titles


def _title(row: CatalogRow) -> str:
    """The title of a run in the picker, which is narrow: first the sign of its state and its name."""
    sign = LOOKS.get(row["current_state"], ("?",))[0]
    changes = visible(describe_changes(read_changes(row["changes"])), LONGEST_CHANGES)
    parts = [f"{sign} {row['name'] or row['config'] or 'run'}", f"{row['begun']:%b %d %H:%M}", changes]
    return visible(" · ".join(part for part in parts if part))


def runs_in_address(parameter: str, place: DeltaGenerator | None = None) -> list[str]:
    """The runs that a parameter of the address names, by the beginning of the id; warns of those not in the store."""
    runs = []
    for name in dict.fromkeys(st.query_params.get_all(parameter)):
        found = [name] if query(STEPS, name) else [row["run"] for row in query(queries.RUNS_BEGINNING, name)]
        if len(found) == 1:
            runs += found
        else:
            warn_of_address("several runs that begin with" if found else "no run", name, place)
    return runs


def warn_of_address(has: str, name: str, place: DeltaGenerator | None = None) -> None:
    """Warn that the address names what is not shown: the store `has` "no run", "no sweep" … of this name."""
    (place or st).warning(f"This store has {has} {escaped(name)}, which the address names.")


def choose_run() -> str | None:
    """The run picked in the sidebar, by default the one in the address, else the newest with content.

    None without runs. It is written to the address, so that a reload and a shared link show the same run.
    """
    requested = next(iter(runs_in_address("run", st.sidebar)), "")
    titles = offered_runs("run", [requested] if requested else [], st.sidebar)
    if requested and requested not in titles and query(STEPS, requested):
        titles = {requested: requested, **titles}  # not a pipeline's run
    if not titles:
        return None
    if requested in titles:
        first = requested
    else:
        newest = newest_with_content(query(RUNS, queries.LISTED))
        first = newest["run"] if newest and newest["run"] in titles else next(iter(titles))
    # Without a key, Streamlit resets the selection whenever a run begins or changes its state.
    run = st.sidebar.selectbox(
        "Run", list(titles), index=list(titles).index(first), format_func=lambda run: titles.get(run, run), key="run"
    )
    if st.query_params.get("run") != run:
        st.query_params["run"] = run
    return run


def chosen_run(run: str | None) -> ChosenRun | None:
    """The run with its current state and stages."""
    if run is None:
        return None
    store = open_store()
    summary = next(iter(query(queries.ONE_RUN, run)), None)
    state = run_state(store, query, summary, questions(), _seconds_left) if summary else None
    return ChosenRun(run, query(STEPS, run), state)


def nothing_yet(chosen: ChosenRun | None, text: str = "") -> None:
    """Say what a page waits for: `text` about the chosen run, or that the store has none."""
    none = f"There is no run in {escaped(str(open_store().root))} yet: `nautile run` starts one."
    st.caption(text if chosen else none)


@st.cache_resource
def _meters() -> dict[str, RateMeter]:
    """Key of a running step -> its progress rate, shared by all sessions."""
    return {}


def _seconds_left(key: str, done: float, total: float) -> float | None:
    """Seconds left of a running step by its recent rate; None while the rate is unknown."""
    meters = _meters()
    # Keys of finished steps are never removed one by one; to measure a rate anew takes a few redraws.
    if len(meters) > 64:
        meters.clear()
    meter = meters.setdefault(key, RateMeter())
    meter.add(time.monotonic(), done, "")
    return meter.left_s(done, total)


def coloured(text: str, ground: str) -> str:
    """The CSS of a box with a text colour and a background, which change places on a dark page."""
    return (
        f"color:light-dark({text},{ground});background:light-dark({ground},{text});"
        f"border-color:light-dark({text},{ground})"
    )


def prefect_link(run: str) -> str | None:
    """The address of a run in Prefect's UI, if PREFECT_UI_URL or PREFECT_API_URL is set."""
    base = os.environ.get("PREFECT_UI_URL") or os.environ.get("PREFECT_API_URL", "").removesuffix("/api")
    # Without `/v2` the server shows the page of its earlier UI, whatever the default (Prefect 3.8.8): it forwards only
    # its root to the newer one. Prefect Cloud, for which the key is, has only one.
    root = base.rstrip("/") if "PREFECT_API_KEY" in os.environ else f"{base.rstrip('/').removesuffix('/v2')}/v2"
    return f"{root}/runs/flow-run/{run}" if base else None


def choose_artifact(
    kind: str,
    label: str,
    key: str,
    first: Sequence[str] = (),
    replaced: bool = False,
    begin: str = "",
    placeholder: str | None = None,
) -> CatalogRow | None:
    """The artifact of `kind` ("": of any) picked on the page, at first `begin`; None if none is there, or is picked.

    The newest `LISTED` are offered; where there are more, a field above the list searches the others. Artifacts of the
    executions in `first` come first. `replaced`: offer those too that a forced run has replaced. With a
    `placeholder` none is picked at first.
    """

    def rows_of(search: str) -> list[CatalogRow]:
        return listed_artifacts(query, search, kind=kind or None, replaced=replaced, first=first, limit=queries.LISTED)

    rows = rows_of("")
    if not rows:
        return None
    if (total := rows[0]["total"]) > queries.LISTED:
        search = st.text_input(
            "Find an artifact",
            key=f"find-{key}",
            placeholder=f"id, stage or run: the list has {queries.LISTED} of {total:,}",
        )
        rows = rows_of(search)
        if not rows:
            st.caption("No artifact fits the search.")
            return None
    by_id = {row["id"]: row for row in rows}
    index = list(by_id).index(begin) if begin in by_id else None if placeholder else 0
    picked = st.selectbox(label, list(by_id), index=index, placeholder=placeholder, key=key)
    # One that is not listed any more is the one before a new search.
    return by_id.get(picked, rows[0]) if picked else None


def search_rows(
    name: str, sql: str, *parameters: Any, size: int, files: bool = False, unit: str = "texts"
) -> list[CatalogRow]:
    """Draw the paging buttons of a query with a `total`, `LIMIT` and `OFFSET`; returns the rows of the page shown."""

    def page_of(limit: int, offset: int) -> list[CatalogRow]:
        return query(sql, *parameters, limit, offset, files=files)

    return paged_rows(name, page_of, (sql, *parameters), size=size, unit=unit)


def paged_rows(
    name: str,
    page_of: Callable[[int, int], list[CatalogRow]],
    search: Sequence[Any],
    *,
    size: int,
    unit: str,
) -> list[CatalogRow]:
    """Draw the paging buttons of a list; returns the rows of the page shown.

    `page_of`: (limit, offset) -> rows, each with the `total`. `search`: what it looks for.
    """
    # The page number belongs to one search: another one begins at page 1.
    key, identity = f"page-{name}", repr(search)
    page = int(st.session_state[key][1]) if st.session_state.get(key, (None, 0))[0] == identity else 0

    def turn(to: int) -> None:
        st.session_state[key] = (identity, to)

    rows = page_of(size, page * size)
    if not rows and page:  # there are fewer rows than before
        page = 0
        rows = page_of(size, 0)
    count = rows[0]["total"] if rows else 0
    last = max(1, -(-count // size))
    if last == 1:
        st.caption(f"{count:,} {unit.removesuffix('s') if count == 1 else unit}")
        return rows
    with st.container(horizontal=True, vertical_alignment="center", horizontal_alignment="distribute"):
        st.button("Previous", disabled=page == 0, key=f"earlier-{name}", on_click=turn, args=(page - 1,))
        st.caption(f"{count:,} {unit}, page {page + 1:,} of {last:,}", width="content")
        st.button("Next", disabled=page + 1 >= last, key=f"later-{name}", on_click=turn, args=(page + 1,))
    return rows


def use_page(chosen: ChosenRun | None, stage: str, kind: str, title: str, made_by: str) -> CatalogRow | None:
    """Begin the page of a use of a model: title and artifact picker; without artifacts, the command `made_by`."""
    st.title(title)
    own = chosen.executions(stage) if chosen else []
    artifact = choose_artifact(kind, title, title.lower(), own)
    if artifact is None:
        st.caption(f"No {title.lower()} in the store yet: `{made_by}` makes one.")
    return artifact


def facts_of(executions: Sequence[str]) -> list[tuple[CatalogRow, dict[str, Any]]]:
    """The artifacts of executions, oldest first, each with the facts of its manifest."""
    return [(row, json.loads(row["facts"])) for row in query(queries.ARTIFACTS_OF, list(executions))]


def artifact_facts(artifact: CatalogRow) -> dict[str, Any]:
    """The facts of an artifact's manifest, from the catalog."""
    return next(facts for row, facts in facts_of([artifact["execution"]]) if row["kind"] == artifact["kind"])


def rewards_of(executions: Sequence[str]) -> str:
    """A sentence about the rewards that stages were given by name; empty if they have none, as before they end."""
    names = {str(facts["reward"]) for _, facts in facts_of(executions) if "reward" in facts}
    return f"The reward is {escaped(', '.join(sorted(names)))}." if names else ""


def nested(value: Any, *names: str) -> Any:
    """The value at a path in JSON data; None if a part of the path is missing, as in facts of another version."""
    for name in names:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def questions() -> dict[str, dict[str, Any]]:
    """The notes of the runs that wait for an approval: run -> note."""
    return questions_by_run(open_store())


@st.cache_data(ttl=CACHE_S, show_spinner=False)
def queued_runs() -> list[dict[str, Any]] | None:
    """The runs that wait in the server of `nautile up` for a process; None if it does not answer."""
    return run_actions.queued_runs(open_store())


def artifact_folder(artifact: str) -> str | None:
    """The folder with the files of an artifact; None if it was removed after the last update of the catalog."""
    try:
        return str(open_store().get(artifact).path)
    except ConfigError:
        return None


def execution_of(folder: str) -> str:
    """The execution that made the artifact in `folder`, for the key of a cache of its content; empty if unknown.

    A folder is named by the key of its artifact: after a forced run another artifact has the same path.
    """
    manifest = read_json(Path(folder) / MANIFEST)
    return str(manifest.get("execution", "")) if isinstance(manifest, dict) else ""


def artifact_rows(artifact: str, name: str) -> list[dict[str, Any]] | None:
    """The rows of a JSON Lines file in an artifact; None, with a message on the page, if the artifact was removed."""
    try:
        path = open_store().get(artifact).path / name
    except ConfigError as error:
        st.error(escaped(str(error)))
        return None
    lines = query(queries.FILE_LINES, *queries.lines_of(path), files=True)
    if len(lines) == queries.FILE_ROWS < (rows := line_count(path)):
        st.caption(f"The first {len(lines):,} of {rows:,} rows in the file {escaped(name)}.")
    return [json.loads(line["fields"]) for line in lines]


def line_count(path: Path) -> int:
    """The number of lines of a file."""
    return _line_count(str(path), path.stat().st_size)


@st.cache_data(max_entries=64, show_spinner=False)
def _line_count(path: str, size: int) -> int:
    with Path(path).open("rb") as file:
        return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))


def lineage_link(artifact: str) -> str:
    """The address of an artifact's lineage, relative to any page."""
    return page_link("lineage", artifact=artifact)


def page_link(address: str, **parameters: object) -> str:
    """The address of a page with query parameters, relative to any page. Parameters of value None are left out."""
    present = {name: str(value) for name, value in parameters.items() if value is not None}
    return f"{address}?{urlencode(present, quote_via=quote, safe='')}"


def escaped(text: str) -> str:
    """Escape untrusted text for use in Markdown: no markup, LaTeX, directive or link takes effect.

    Streamlit turns bare addresses into links after it has processed escapes; an invisible word joiner prevents that.
    """
    joined = _ADDRESS.sub("\\g<0>\N{WORD JOINER}", " ".join(text.split()))
    return "".join(f"\\{character}" if character in string.punctuation else character for character in joined)


def split_thinking(text: str) -> tuple[str | None, str]:
    """(reasoning, answer) of a completion; reasoning is None if the thinking does not end."""
    before, mark, after = text.partition(THINK_END)
    return (before.strip(), after.strip()) if mark else (None, text.strip())
