"""Texts to read: rollouts, traces, training samples, documents kept and rejected; searched and sorted in SQL."""

import json
from typing import Any

import streamlit as st

from flows.dashboard import frame, queries
from flows.dashboard.frame import Chosen


def rollouts(chosen: Chosen | None) -> None:
    """Completions of the reinforcement stages: search, sort by reward, thinking and answer apart."""
    st.title("Rollouts")
    _browse(chosen, ("align", "reason", "self_distill"), "No rollouts in this run yet.", _rollout)


def samples(chosen: Chosen | None) -> None:
    """What the model wrote while it was trained."""
    st.title("Training samples")
    _browse(chosen, ("pretrain",), "No samples in this run yet: `pretrain.sample_every` says when.", _rollout)


def documents(chosen: Chosen) -> None:
    """Distilled documents and rejected ones, with the reasons."""
    _browse(chosen, ("distill",), "No documents in this run yet.", _document)


def _browse(chosen: Chosen | None, stages: tuple[str, ...], none: str, show: Any) -> None:
    labels = {row["execution"]: row["label"] for row in chosen.stages if row["stage"] in stages} if chosen else {}
    labels = {execution: label for execution, label in labels.items() if execution}
    if not labels:
        frame.nothing(none)
        return
    execution = st.segmented_control("Stage", list(labels), format_func=labels.__getitem__, default=next(iter(labels)))
    sets = frame.ask(queries.sample_sets, [execution or next(iter(labels))])
    if not sets:
        frame.nothing(none)
        return
    left, middle, right = st.columns([1, 1, 2])
    name = left.selectbox("Set", list(sets), format_func=lambda one: f"{one} ({sets[one]:,})", index=len(sets) - 1)
    order = middle.selectbox("Order", list(queries.ORDERS))
    search = right.text_input("Search", placeholder="any words in the record")
    page = int(st.session_state.get("page", 0))
    found, rows = frame.ask(queries.texts, [execution], name, search, order, page)
    if not rows and page:
        st.session_state["page"] = page = 0
        found, rows = frame.ask(queries.texts, [execution], name, search, order, page)
    for row in rows:
        with st.container(border=True):
            show(json.loads(row["fields"]))
    _pager(page, found)


def _pager(page: int, found: int) -> None:
    pages = max(1, -(-found // queries.PAGE))
    back, where, on = st.columns([1, 2, 1])
    if back.button("Earlier", disabled=page == 0):
        st.session_state["page"] = page - 1
        st.rerun()
    where.caption(f"page {page + 1} of {pages}, {found:,} found")
    if on.button("Later", disabled=page + 1 >= pages):
        st.session_state["page"] = page + 1
        st.rerun()


def _rollout(fields: dict[str, Any]) -> None:
    said = [
        f"{name} {fields[name]:.4g}" if isinstance(fields[name], float) else f"{name} {fields[name]}"
        for name in ("step", "task", "reward", "advantage", "length", "solve_rate", "truncated", "expected")
        if fields.get(name) is not None
    ]
    said += [f"{name} {value}" for name, value in (fields.get("parts") or {}).items()]
    frame.plain(fields.get("question") or fields.get("prompt") or "")
    reasoning, answer = frame.thought(fields.get("text") or "")
    if reasoning is not None:
        st.caption("thinks")
        frame.plain(reasoning)
    st.caption("answers")
    frame.plain(answer)
    st.caption(", ".join(said).replace("$", r"\$"))


def _document(fields: dict[str, Any]) -> None:
    st.caption(f"{'rejected: ' + fields['rejected'] if fields.get('rejected') else 'kept'}, by {fields.get('teacher')}")
    frame.plain(fields.get("query"))
    if fields.get("reasoning"):
        st.caption("reasoning")
        frame.plain(fields["reasoning"])
    st.caption("answer")
    frame.plain(fields.get("answer"))
