"""The evaluations page: Tables 1 and 2 with the paper's figures, each benchmark's history, and samples."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import altair as alt
import pandas as pd
import streamlit as st

from common.errors import ConfigError
from common.files import read_json
from evals.tables.results import ResultTable, table_1, table_2
from flows.dashboard import queries, shared
from flows.dashboard.shared import ChosenRun
from flows.dashboard.training import samples
from store.catalog import CatalogRow
from store.mirror import open_store

VERDICTS = {True: "right", False: "wrong", None: "not asked"}
WHICH = ("any", "right", "wrong", "strict and lenient differ", "unfinished")
STAGES = ("pretrain", "align", "reason", "self_distill")


def page(chosen: ChosenRun | None) -> None:
    st.title("Evaluations")
    rows = shared.ask(queries.EVALUATIONS)
    evaluations = [{**row, "scores": scores} for row in rows if (scores := _scores_of(row["id"]))]
    if not evaluations:
        st.caption("No evaluation in the store yet.")
        return
    labels = {row["execution"]: row["label"] for row in chosen.stages} if chosen else {}
    by_stage = {labels[row["execution"]].partition(":")[2]: row for row in evaluations if row["execution"] in labels}
    scores = {stage: by_stage[stage]["scores"] for stage in STAGES if stage in by_stage}
    if scores:
        _show_table(table_1(scores))
    else:
        st.caption("This run has no evaluation yet.")
    st.subheader("Benchmarks over time")
    st.caption("Strict accuracy with its 95 % interval after each stage. Dashed: chance level.")
    _history(evaluations)
    rows = {row["id"]: row for row in by_stage.values() or evaluations}
    stages = {row["id"]: stage for stage, row in by_stage.items()}
    titles = {name: " · ".join(part for part in (stages.get(name), name) if part) for name in rows}
    picked = st.selectbox("Evaluation", list(rows), format_func=lambda name: titles.get(name, name), key="evaluation")
    row = rows.get(picked) or next(iter(rows.values()))
    _show_table(table_2({str(row["scores"].get("model") or row["id"]): row["scores"]}))
    st.link_button("Where these scores come from", shared.lineage_link(row["id"]))
    _samples(row)


def _scores_of(artifact: str) -> dict[str, Any]:
    """`scores.json` of an evaluation; empty if there is none."""
    try:
        return _read_scores(str(open_store().get(artifact).path))
    except ConfigError:
        return {}  # removed since the catalog was updated


@st.cache_data(max_entries=512, show_spinner=False)
def _read_scores(folder: str) -> dict[str, Any]:
    return read_json(Path(folder) / "scores.json") or {}


def _show_table(table: ResultTable) -> None:
    """A table of the paper as a grid, whose cells are never markup, with its notes."""
    st.subheader(table.title)
    columns: list[str] = []
    for name in table.columns:
        columns.append(f"{name} ({columns[-1]})" if name in columns else name)
    rows = [dict(zip(columns, row, strict=True)) for row in table.rows]
    st.dataframe(rows, hide_index=True, width="stretch", height="content")
    for note in table.notes:
        st.caption(shared.escaped(note))


def _history(evaluations: Sequence[CatalogRow]) -> None:
    """A chart for each benchmark that was measured."""
    points = [
        {
            "benchmark": name,
            "evaluation": row["id"],
            "made": row["created"],
            "after": (row["label"] or "").partition(":")[2] or "no stage",
            "title": f"{score['title']} (stand-in)" if score.get("stand_in") else score["title"],
            "stand_in": score.get("stand_in") or "",
            "accuracy": score["accuracy"],
            "low": score["interval"][0],
            "high": score["interval"][1],
            "chance": score.get("chance") or None,
            "n": score["n"],
        }
        for row in evaluations
        for name, score in row["scores"].get("benchmarks", {}).items()
        if score.get("accuracy") is not None
    ]
    if not points:
        st.caption("No score was measured yet.")
        return
    columns = st.columns(2, gap="large")
    for index, name in enumerate(sorted({point["benchmark"] for point in points})):
        own = [point for point in points if point["benchmark"] == name]
        with columns[index % 2]:
            st.markdown(f"##### {shared.escaped(own[0]['title'])}")
            if own[0]["stand_in"]:
                st.caption(f"Stand-in: {shared.escaped(own[0]['stand_in'])}")
            st.altair_chart(history(own), width="stretch")


def history(points: Sequence[CatalogRow]) -> alt.LayerChart:
    """The history of one benchmark: a line with intervals for each stage after which it was measured."""
    percent = alt.Axis(format="%", title="accuracy, strict")
    table = pd.DataFrame(points).sort_values("made")
    # Evaluations are spaced evenly in their order: on a time scale those of one run would overlap.
    table["when"] = pd.to_datetime(table["made"]).dt.strftime("%b %d %H:%M:%S")
    times = list(dict.fromkeys(table["when"]))
    time_axis = alt.X("when:O", sort=times, title="evaluated (UTC)", axis=alt.Axis(labelAngle=0, labelOverlap=True))
    legend = alt.Legend(orient="bottom", title=None, symbolOpacity=1, columns=4)
    colors = alt.Color("after:N", sort=list(STAGES), legend=legend, scale=alt.Scale(scheme="tableau10"))
    base = alt.Chart(table).encode(x=time_axis, color=colors)
    bars = base.mark_rule(strokeWidth=1.5).encode(y=alt.Y("low:Q", axis=percent), y2="high:Q")
    tooltip = [
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
    dots = base.mark_point(filled=True, size=60).encode(y="accuracy:Q", tooltip=tooltip)
    line = base.mark_line(opacity=0.4).encode(y="accuracy:Q")
    chance = alt.Chart(table).mark_rule(strokeDash=[4, 3], color="#888888").encode(y="max(chance):Q")
    return alt.layer(bars, line, dots, chance).properties(height=300)


def _samples(row: CatalogRow) -> None:
    counts = {row["set"]: row["texts"] for row in shared.ask(queries.SAMPLE_SETS, [row["execution"]])}
    if not counts:
        return
    st.subheader("Samples")
    left, middle, right = st.columns([1, 1, 2])
    name = left.selectbox(
        "Benchmark", list(counts), format_func=lambda name: f"{name} ({counts.get(name, 0):,})", key="of"
    )
    which = middle.selectbox("Verdict", WHICH, key="verdict")
    search = right.text_input("Search", placeholder="any text in the record", key="search-evaluation")
    sql = queries.texts(queries.SAMPLES, which=which)
    samples.show_pages("evaluation", _show_sample, sql, [row["execution"]], name, search, search)


def _show_sample(fields: dict[str, Any]) -> None:
    strict, lenient = (VERDICTS.get(fields.get(name), "unclear") for name in ("strict", "lenient"))
    st.text(f"strict: {strict} · lenient: {lenient} · problem: {fields.get('problem') or 'none'}")
    shared.show_text(fields.get("prompt"))
    reasoning, answer = shared.split_thinking(str(fields.get("output") or ""))
    left, middle, right = st.columns([3, 2, 1])
    with left:
        st.caption("reasoning")
        shared.show_text(reasoning if reasoning is not None else answer)
    with middle:
        st.caption("answer" if reasoning is not None else "no answer: the thinking does not end")
        shared.show_text(answer if reasoning is not None else "")
    with right:
        st.caption("expected")
        shared.show_text(str(fields.get("expected")))
