"""Evaluations: Table 1 and Table 2 as the run made them, each benchmark's history with intervals, and its samples."""

import json
from typing import Any

import altair as alt
import pandas as pd
import streamlit as st

from flows.dashboard import frame, queries
from flows.dashboard.frame import Chosen
from store.artifacts import Artifact
from store.durable import read_json

VERDICTS = {True: "right", False: "wrong", None: "not asked"}


def page(chosen: Chosen | None) -> None:
    st.title("Evaluations")
    found = frame.store().list("evaluation")
    if not found:
        frame.nothing("No evaluation in the store yet.")
        return
    labels = {row["execution"]: row["label"] for row in chosen.stages} if chosen else {}
    mine = [one for one in found if one.execution in labels]
    st.subheader("This run, after each stage")
    st.dataframe(_stages(mine, labels), hide_index=True, width="stretch")
    st.subheader("Every benchmark over time")
    _history(found)
    st.subheader("Table 2")
    picked = st.selectbox("Evaluation", [one.id for one in reversed(mine or found)])
    artifact = next(one for one in found if one.id == picked)
    table = artifact.path / "table2.md"
    if table.is_file():
        st.markdown(table.read_text(encoding="utf-8"))
    _samples(artifact)


def scores_of(artifact: Artifact) -> dict[str, dict[str, Any]]:
    """`scores.json` by benchmark; empty if it is not there."""
    return (read_json(artifact.path / "scores.json") or {}).get("benchmarks", {})


def _stages(found: list[Artifact], labels: dict[str, str]) -> list[dict[str, Any]]:
    rows = []
    for artifact in found:
        row: dict[str, Any] = {"after": labels[artifact.execution].partition(":")[2], "evaluation": artifact.id}
        for name, score in scores_of(artifact).items():
            row[name] = _figure(score)
        rows.append(row)
    return rows


def _figure(score: dict[str, Any]) -> str:
    if score.get("accuracy") is None:
        return ""
    low, high = score["interval"]
    return f"{100 * score['accuracy']:.1f} [{100 * low:.1f}, {100 * high:.1f}]"


def _history(found: list[Artifact]) -> None:
    rows = [
        {
            "evaluation": artifact.id,
            "made": artifact.manifest["created"],
            "benchmark": name,
            "accuracy": score["accuracy"],
            "low": score["interval"][0],
            "high": score["interval"][1],
        }
        for artifact in found
        for name, score in scores_of(artifact).items()
        if score.get("accuracy") is not None
    ]
    if not rows:
        frame.nothing("No score was measured.")
        return
    base = alt.Chart(pd.DataFrame(rows)).encode(x=alt.X("made:T", title=None), color="benchmark:N")
    percent = alt.Axis(format="%")
    bars = base.mark_rule().encode(y=alt.Y("low:Q", axis=percent, title="strict, 95 %"), y2="high:Q")
    dots = base.mark_line(point=True).encode(y="accuracy:Q", tooltip=["evaluation", "benchmark", "accuracy"])
    st.altair_chart((bars + dots).properties(height=300), width="stretch")


def _samples(artifact: Artifact) -> None:
    names = frame.ask(queries.sample_sets, [artifact.execution])
    if not names:
        return
    left, middle, right = st.columns([1, 1, 2])
    name = left.selectbox("Benchmark", list(names), format_func=lambda one: f"{one} ({names[one]:,})")
    wanted = middle.selectbox("Verdict", ["any", "right", "wrong", "strict and lenient differ", "unfinished"])
    search = right.text_input("Search", placeholder="any words in the record", key="evaluation-search")
    _, rows = frame.ask(queries.verdicts, [artifact.execution], name, search, wanted)
    for row in rows:
        fields = json.loads(row["fields"])
        with st.container(border=True):
            strict, lenient = VERDICTS[fields.get("strict")], VERDICTS[fields.get("lenient")]
            st.caption(f"strict: {strict}, lenient: {lenient}, problem: {fields.get('problem') or 'none'}")
            frame.plain(fields.get("prompt"))
            st.caption("expected")
            frame.plain(str(fields.get("expected")))
            st.caption("said")
            frame.plain(fields.get("output"))
