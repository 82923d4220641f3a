"""A browser for texts: rollouts, traces, training samples, distilled documents. Searched and sorted in SQL.

While a stage runs, its samples are in the catalog; once its artifacts are published, their files can be read too.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import streamlit as st

from common.errors import ConfigError
from flows.dashboard import queries, shared
from flows.dashboard.shared import ChosenRun
from store.mirror import open_store

Fields = dict[str, Any]
KINDS = ("rollouts", "traces", "documents")
ROLLOUT_ORDERS = tuple(queries.ORDERS)
NUMBERS = ("step", "round", "task", "source", "reward", "advantage", "length", "solve_rate", "truncated", "expected")


@dataclass(frozen=True)
class TextBrowser:
    """What one browser shows: the stages, the choices it offers, and how it draws a record.

    empty: the caption without any text; which: the filters to choose from, none without.
    """

    name: str
    stages: tuple[str, ...]
    empty: str
    show: Callable[[Fields], None]
    orders: tuple[str, ...] = ROLLOUT_ORDERS
    which: tuple[str, ...] = ()


def rollouts(chosen: ChosenRun | None) -> None:
    """Completions of the reinforcement stages, and the traces of the last one."""
    st.title("Rollouts and traces")
    stages = ("align", "reason", "self_distill")
    browse(chosen, TextBrowser("rollouts", stages, "No rollouts in this run yet.", _show_rollout))


def training_samples(chosen: ChosenRun | None) -> None:
    """What the model generated during pretraining."""
    st.title("Training samples")
    empty = "No samples in this run yet: `pretrain.sample_every` sets when they are taken."
    orders = ("as they came", "newest step first")
    browse(chosen, TextBrowser("samples", ("pretrain",), empty, _show_rollout, orders))


def documents(chosen: ChosenRun) -> None:
    """Distilled documents, and the rejected ones with their reasons."""
    empty, which = "No documents in this run yet.", ("any", "rejected", "kept")
    browse(chosen, TextBrowser("documents", ("distill",), empty, _show_document, ("as they came",), which))


def browse(chosen: ChosenRun | None, browser: TextBrowser) -> None:
    """Draw the choice of stage and set, the search, and a page of records."""
    rows = [row for row in chosen.stages if row["stage"] in browser.stages and row["execution"]] if chosen else []
    sets = {row["execution"]: _sets(row["execution"]) for row in rows}
    labels = {row["execution"]: shared.escaped(row["label"]) for row in rows if sets[row["execution"]]}
    if not labels:
        st.caption(browser.empty)
        return
    first = next(iter(labels))
    picked = st.segmented_control(
        "Stage",
        list(labels),
        format_func=lambda execution: labels.get(execution, execution),
        default=first,
        key=f"stage-{browser.name}",
    )
    execution = picked if picked in labels else first
    columns = st.columns([2, 2, 2, 3] if browser.which else [2, 2, 3])
    titles = sets[execution]
    name = columns[0].selectbox(
        "Set", list(titles), format_func=lambda name: titles.get(name, name), key=f"set-{execution}"
    )
    order = columns[1].selectbox("Order", browser.orders, key=f"order-{browser.name}")
    which = columns[2].selectbox("Which", browser.which, key=f"which-{browser.name}") if browser.which else "any"
    search = columns[-1].text_input("Search", placeholder="any text in the record", key=f"search-{browser.name}")
    path = _files(execution).get(name)
    if path:
        source, parameters = queries.FILE_LINES, (queries.file_pattern(path), queries.FILE_ROWS)
    else:
        source, parameters = queries.SAMPLES, ([execution], name)
    sql = queries.texts(source, order, which)
    show_pages(browser.name, browser.show, sql, *parameters, search, search, files=path is not None)


def show_pages(name: str, show: Callable[[Fields], None], sql: str, *parameters: Any, files: bool = False) -> None:
    """Draw one page of the texts of `queries.texts`, with buttons to turn it. A changed query starts at the first."""
    key, identity = f"page-{name}", (sql, repr(parameters))
    page = int(st.session_state[key][1]) if st.session_state.get(key, (None, 0))[0] == identity else 0
    rows = shared.ask(sql, *parameters, queries.PAGE, page * queries.PAGE, files=files)
    if not rows and page:  # there are fewer texts than before
        page = 0
        rows = shared.ask(sql, *parameters, queries.PAGE, 0, files=files)
    count = rows[0]["total"] if rows else 0
    last = max(1, -(-count // queries.PAGE))
    left, middle, right = st.columns([1, 4, 1], vertical_alignment="center")
    middle.caption(f"{count:,} texts, page {page + 1:,} of {last:,}")
    step = int(right.button("Next", disabled=page + 1 >= last, key=f"later-{name}", width="stretch"))
    step -= int(left.button("Previous", disabled=page == 0, key=f"earlier-{name}", width="stretch"))
    if step:
        st.session_state[key] = (identity, page + step)
        st.rerun(scope="fragment")
    for row in rows:
        fields = json.loads(row["fields"])
        with st.container(border=True):
            show(fields if isinstance(fields, dict) else {"text": json.dumps(fields)})


def _sets(execution: str) -> dict[str, str]:
    """Name -> title of the sample sets and files of an execution, numbered sets latest first."""
    counts = {row["set"]: row["texts"] for row in shared.ask(queries.SAMPLE_SETS, [execution])}

    def number(name: str) -> tuple[str, int]:
        stem, _, digits = name.rpartition("-")
        return (stem, int(digits)) if digits.isdigit() else (name, -1)

    sets = {name: f"{name} ({counts[name]:,})" for name in sorted(counts, key=number, reverse=True)}
    return sets | {name: f"file {name}" for name in _files(execution)}


def _files(execution: str) -> dict[str, Path]:
    """The JSON Lines files in the artifacts of an execution; links are not followed."""
    files: dict[str, Path] = {}
    for row in shared.ask(queries.ARTIFACTS_OF, [execution]):
        if row["kind"] in KINDS:
            try:
                folder = open_store().get(row["id"]).path
            except ConfigError:
                continue  # removed since the catalog was updated
            files |= {path.name: path for path in sorted(folder.glob("*.jsonl")) if not path.is_symlink()}
    return files


def _show_rollout(fields: Fields) -> None:
    numbers = [(name, fields[name]) for name in NUMBERS if fields.get(name) is not None]
    values = [f"{name} {f'{value:.4g}' if isinstance(value, float) else value}" for name, value in numbers]
    parts = fields.get("parts")
    values += [f"{name} {value}" for name, value in (parts if isinstance(parts, dict) else {}).items()]
    st.text(" · ".join(values))
    shared.show_text(fields.get("question") or fields.get("prompt") or "")
    reasoning, answer = shared.split_thinking(str(fields.get("text") or ""))
    if reasoning is None:
        st.caption("text (its thinking does not end)")
        shared.show_text(answer)
        return
    _side_by_side(reasoning, answer)


def _show_document(fields: Fields) -> None:
    reason, provenance = fields.get("rejected") or fields.get("reason"), fields.get("provenance")
    teacher = fields.get("teacher") or (provenance.get("teacher") if isinstance(provenance, dict) else None)
    st.text(f"{f'rejected: {reason}' if reason else 'kept'}, by {teacher or 'an unnamed teacher'}")
    shared.show_text(fields.get("query"))
    if fields.get("answer") is None and fields.get("reply"):
        st.caption("raw reply")
        shared.show_text(fields["reply"])
        return
    _side_by_side(fields.get("reasoning"), fields.get("answer"))


def _side_by_side(reasoning: str | None, answer: str | None) -> None:
    left, right = st.columns([3, 2])
    with left:
        st.caption("reasoning")
        shared.show_text(reasoning)
    with right:
        st.caption("answer")
        shared.show_text(answer)
