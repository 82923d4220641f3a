"""Evaluations: Table 1 and Table 2 beside the paper's, each benchmark's history with intervals, and its samples."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import altair as alt
import pandas as pd
import streamlit as st

from common.errors import ConfigError
from common.files import read_json
from evals.tables.results import ResultTable, table_1, table_2
from flows.dashboard import queries
from flows.dashboard import samples as texts
from flows.dashboard import shared as frame
from flows.dashboard.queries import Row
from flows.dashboard.shared import Chosen

VERDICTS = {True: "right", False: "wrong", None: "not asked"}
WHICH = ("any", "right", "wrong", "strict and lenient differ", "unfinished")
STAGES = ("pretrain", "align", "reason", "self_distill")

Scores = dict[str, Any]


def page(chosen: Chosen | None) -> None:
    st.title("Evaluations")
    found = frame.ask(queries.evaluations) if frame.store().catalog_path.exists() else []
    found = [{**row, "scores": scores} for row in found if (scores := _scores_of(row["id"]))]
    if not found:
        frame.nothing("No evaluation in the store yet.")
        return
    labels = {row["execution"]: row["label"] for row in chosen.stages} if chosen else {}
    mine = {labels[row["execution"]].partition(":")[2]: row for row in found if row["execution"] in labels}
    _table_1({stage: mine[stage]["scores"] for stage in STAGES if stage in mine})
    st.subheader("Every benchmark over time")
    st.caption("Strict accuracy with its 95 % interval, after each stage; dashed: chance.")
    _history(found)
    rows = list(mine.values()) or found
    row = _picked(rows, {row["id"]: label for label, row in mine.items()})
    _show(table_2({str(row["scores"].get("model") or row["id"]): row["scores"]}))
    st.link_button("Where these scores come from", frame.lineage_link(row["id"]))
    _samples(row)


def _picked(rows: Sequence[Row], stages: dict[str, str]) -> Row:
    titles = {row["id"]: " · ".join(part for part in (stages.get(row["id"]), row["id"]) if part) for row in rows}
    picked = st.selectbox("Evaluation", list(titles), format_func=lambda one: titles.get(one, one), key="evaluation")
    return next((row for row in rows if row["id"] == picked), rows[0])


def _scores_of(artifact: str) -> Scores:
    """`scores.json` of an evaluation; empty if it is not there."""
    try:
        return _read(str(frame.store().get(artifact).path))
    except ConfigError:
        return {}  # removed since; the catalog will hear of it


@st.cache_data(max_entries=512, show_spinner=False)
def _read(folder: str) -> Scores:
    return read_json(Path(folder) / "scores.json") or {}


def _table_1(stages: dict[str, Scores]) -> None:
    if not stages:
        frame.nothing("This run has evaluated nothing yet.")
        return
    _show(table_1(stages))


def _show(table: ResultTable) -> None:
    """A table of the paper as a grid, whose cells are never markup; the notes below."""
    st.subheader(table.title)
    columns: list[str] = []
    for name in table.columns:
        columns.append(f"{name} ({columns[-1]})" if name in columns else name)
    rows = [dict(zip(columns, row, strict=True)) for row in table.rows]
    st.dataframe(rows, hide_index=True, width="stretch", height="content")
    for note in table.notes:
        st.caption(frame.quoted(note))


def _history(found: Sequence[Row]) -> None:
    points = [
        {
            "benchmark": name,
            "evaluation": row["id"],
            "made": row["created"],
            "after": (row["label"] or "").partition(":")[2] or "by itself",
            "title": f"{score['title']} (stand-in)" if score.get("stand_in") else score["title"],
            "stand_in": score.get("stand_in") or "",
            "accuracy": score["accuracy"],
            "low": score["interval"][0],
            "high": score["interval"][1],
            "chance": score.get("chance") or None,
            "n": score["n"],
        }
        for row in found
        for name, score in row["scores"].get("benchmarks", {}).items()
        if score.get("accuracy") is not None
    ]
    if not points:
        frame.nothing("No score was measured.")
        return
    columns = st.columns(2, gap="large")
    for place, name in enumerate(sorted({point["benchmark"] for point in points})):
        mine = [point for point in points if point["benchmark"] == name]
        with columns[place % 2]:
            st.markdown(f"##### {frame.quoted(mine[0]['title'])}")
            if mine[0]["stand_in"]:
                st.caption(f"Stand-in: {frame.quoted(mine[0]['stand_in'])}")
            st.altair_chart(history(mine), width="stretch")


def history(points: Sequence[Row]) -> alt.LayerChart:
    """One benchmark: a line for each stage it was measured after, with intervals."""
    percent = alt.Axis(format="%", title="accuracy, strict")
    table = pd.DataFrame(points).sort_values("made")
    # A place for each, in their order: on a scale of time those of one run would fall together.
    table["when"] = pd.to_datetime(table["made"]).dt.strftime("%b %d %H:%M:%S")
    places = list(dict.fromkeys(table["when"]))
    made = alt.X("when:O", sort=places, title="evaluated (UTC)", axis=alt.Axis(labelAngle=0, labelOverlap=True))
    legend = alt.Legend(orient="bottom", title=None, symbolOpacity=1, columns=4)
    colors = alt.Color("after:N", sort=list(STAGES), legend=legend, scale=alt.Scale(scheme="tableau10"))
    base = alt.Chart(table).encode(x=made, color=colors)
    bars = base.mark_rule(strokeWidth=1.5).encode(y=alt.Y("low:Q", axis=percent), y2="high:Q")
    told = [
        alt.Tooltip(f"{name}:{kind}", **{"format": form} if form else {})
        for name, kind, form in (
            ("evaluation", "N", ""),
            ("after", "N", ""),
            ("accuracy", "Q", ".1%"),
            ("low", "Q", ".1%"),
            ("high", "Q", ".1%"),
            ("n", "Q", ",d"),
        )
    ]
    dots = base.mark_point(filled=True, size=60).encode(y="accuracy:Q", tooltip=told)
    line = base.mark_line(opacity=0.4).encode(y="accuracy:Q")
    chance = alt.Chart(table).mark_rule(strokeDash=[4, 3], color="#888888").encode(y="max(chance):Q")
    return alt.layer(bars, line, dots, chance).properties(height=300)


def _samples(row: Row) -> None:
    names = frame.ask(queries.sample_sets, [row["execution"]])
    if not names:
        return
    st.subheader("Samples")
    left, middle, right = st.columns([1, 1, 2])
    name = left.selectbox("Benchmark", list(names), format_func=lambda one: f"{one} ({names.get(one, 0):,})", key="of")
    which = middle.selectbox("Verdict", WHICH, key="verdict")
    search = right.text_input("Search", placeholder="any words in the record", key="search-evaluation")
    texts.pages("evaluation", _sample, queries.texts, [row["execution"]], name, search, "as they came", which=which)


def _sample(fields: dict[str, Any]) -> None:
    strict, lenient = (VERDICTS.get(fields.get(name), "unclear") for name in ("strict", "lenient"))
    st.text(f"strict: {strict} · lenient: {lenient} · problem: {fields.get('problem') or 'none'}")
    frame.plain(fields.get("prompt"))
    reasoning, answer = frame.thought(str(fields.get("output") or ""))
    left, middle, right = st.columns([3, 2, 1])
    with left:
        st.caption("thinks")
        frame.plain(reasoning if reasoning is not None else answer)
    with middle:
        st.caption("answers" if reasoning is not None else "answers: its thinking did not end")
        frame.plain(answer if reasoning is not None else "")
    with right:
        st.caption("expected")
        frame.plain(str(fields.get("expected")))
