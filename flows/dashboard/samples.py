"""Texts to read: rollouts, traces, training samples, documents kept and rejected; searched and sorted in SQL.

While a stage runs its samples are in the catalog; once its artifacts are published their files can be read too.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import streamlit as st

from common.errors import ConfigError
from flows.dashboard import queries
from flows.dashboard import shared as frame
from flows.dashboard.queries import Row
from flows.dashboard.shared import Chosen

Fields = dict[str, Any]
KINDS = ("rollouts", "traces", "documents")
ROLLOUT_ORDERS = tuple(queries.ORDERS)
NUMBERS = ("step", "round", "task", "source", "reward", "advantage", "length", "solve_rate", "truncated", "expected")


@dataclass(frozen=True)
class Part:
    """What one browser shows: of which stages, in which orders, with which choices, and how a record is drawn."""

    name: str
    stages: tuple[str, ...]
    nothing: str
    show: Callable[[Fields], None]
    orders: tuple[str, ...] = ROLLOUT_ORDERS
    which: tuple[str, ...] = ()


def rollouts(chosen: Chosen | None) -> None:
    """Completions of the reinforcement stages and the traces of the last: search, sort by reward, thought apart."""
    st.title("Rollouts and traces")
    stages = ("align", "reason", "self_distill")
    browse(chosen, Part("rollouts", stages, "No rollouts in this run yet.", _rollout))


def samples(chosen: Chosen | None) -> None:
    """What the model wrote while it was trained."""
    st.title("Training samples")
    none = "No samples in this run yet: `pretrain.sample_every` says when."
    browse(chosen, Part("samples", ("pretrain",), none, _rollout, ("as they came", "newest step first")))


def documents(chosen: Chosen) -> None:
    """Distilled documents and rejected ones, with the reasons."""
    none, which = "No documents in this run yet.", ("any", "rejected", "kept")
    browse(chosen, Part("documents", ("distill",), none, _document, ("as they came",), which))


def browse(chosen: Chosen | None, part: Part) -> None:
    """The choice of stage and set, the search, and a page of records."""
    there = [row for row in chosen.stages if row["stage"] in part.stages and row["execution"]] if chosen else []
    labels = {row["execution"]: row["label"] for row in there}
    sets = {execution: _sets(execution) for execution in labels}
    labels = {execution: label for execution, label in labels.items() if sets[execution]}
    if not labels:
        frame.nothing(part.nothing)
        return
    first = next(iter(labels))
    told = {execution: frame.quoted(label) for execution, label in labels.items()}
    picked = st.segmented_control(
        "Stage", list(labels), format_func=lambda one: told.get(one, one), default=first, key=f"stage-{part.name}"
    )
    execution = picked if picked in labels else first
    columns = st.columns([2, 2, 2, 3] if part.which else [2, 2, 3])
    names = sets[execution]
    name = columns[0].selectbox("Set", list(names), format_func=lambda one: names.get(one, one), key=f"set-{execution}")
    order = columns[1].selectbox("Order", part.orders, key=f"order-{part.name}")
    which = columns[2].selectbox("Which", part.which, key=f"which-{part.name}") if part.which else "any"
    search = columns[-1].text_input("Search", placeholder="any words in the record", key=f"search-{part.name}")
    if name in _files(execution):
        pages(part.name, part.show, queries.file_texts, str(_files(execution)[name]), search, order, which=which)
    else:
        pages(part.name, part.show, queries.texts, [execution], name, search, order, which=which)


def pages(name: str, show: Callable[[Fields], None], question: Any, *asked: Any, which: str) -> None:
    """One page of what `question` finds, with the buttons to turn it; another question begins at the first page."""
    key, about = f"page-{name}", (question.__name__, repr(asked), which)
    page = int(st.session_state[key][1]) if st.session_state.get(key, (None, 0))[0] == about else 0
    found, rows = frame.ask(question, *asked, page, which)
    if not rows and page:
        page = 0
        found, rows = frame.ask(question, *asked, page, which)
    last = max(1, -(-found // queries.PAGE))
    back, where, on = st.columns([1, 4, 1], vertical_alignment="center")
    where.caption(f"{found:,} found, page {page + 1:,} of {last:,}")
    step = int(on.button("Later", disabled=page + 1 >= last, key=f"later-{name}", width="stretch"))
    step -= int(back.button("Earlier", disabled=page == 0, key=f"earlier-{name}", width="stretch"))
    if step:
        st.session_state[key] = (about, page + step)
        st.rerun(scope="fragment")
    for row in rows:
        with st.container(border=True):
            show(_fields(row))


def _fields(row: Row) -> Fields:
    told = json.loads(row["fields"])
    return told if isinstance(told, dict) else {"text": json.dumps(told)}


def _sets(execution: str) -> dict[str, str]:
    """Name -> what it is called, of the sets of samples and of the files that an execution has left."""
    counted = frame.ask(queries.sample_sets, [execution])
    sets = {name: f"{name} ({counted[name]:,})" for name in sorted(counted, key=_by_number, reverse=True)}
    return sets | {name: f"file {name}" for name in _files(execution)}


def _by_number(name: str) -> tuple[str, int]:
    stem, _, number = name.rpartition("-")
    return (stem, int(number)) if number.isdigit() else (name, -1)


def _files(execution: str) -> dict[str, Path]:
    """The files of JSON lines in the artifacts of an execution; links are left alone."""
    found: dict[str, Path] = {}
    for row in frame.ask(queries.made, [execution]):
        if row["kind"] in KINDS:
            try:
                folder = frame.store().get(row["id"]).path
            except ConfigError:
                continue  # removed since; the catalog will hear of it
            found |= {path.name: path for path in sorted(folder.glob("*.jsonl")) if not path.is_symlink()}
    return found


def _said(fields: Fields, names: Sequence[str]) -> str:
    said = [
        f"{name} {fields[name]:.4g}" if isinstance(fields[name], float) else f"{name} {fields[name]}"
        for name in names
        if fields.get(name) is not None
    ]
    parts = fields.get("parts")
    return " · ".join(said + [f"{name} {value}" for name, value in (parts if isinstance(parts, dict) else {}).items()])


def _rollout(fields: Fields) -> None:
    st.text(_said(fields, NUMBERS))
    frame.plain(fields.get("question") or fields.get("prompt") or "")
    reasoning, answer = frame.thought(str(fields.get("text") or ""))
    if reasoning is None:
        st.caption("writes, without an end of thinking")
        frame.plain(answer)
        return
    left, right = st.columns([3, 2])
    with left:
        st.caption("thinks")
        frame.plain(reasoning)
    with right:
        st.caption("answers")
        frame.plain(answer)


def _document(fields: Fields) -> None:
    reason, provenance = fields.get("rejected") or fields.get("reason"), fields.get("provenance")
    teacher = fields.get("teacher") or (provenance.get("teacher") if isinstance(provenance, dict) else None)
    st.text(f"{f'rejected: {reason}' if reason else 'kept'}, by {teacher or 'an unnamed teacher'}")
    frame.plain(fields.get("query"))
    if fields.get("answer") is None and fields.get("reply"):
        st.caption("reply, as it came")
        frame.plain(fields["reply"])
        return
    left, right = st.columns([3, 2])
    with left:
        st.caption("reasoning")
        frame.plain(fields.get("reasoning"))
    with right:
        st.caption("answer")
        frame.plain(fields.get("answer"))
