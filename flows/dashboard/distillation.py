"""Distillation: the mix of teachers, what the calls cost against the budget, why documents were rejected."""

from typing import Any

import altair as alt
import pandas as pd
import streamlit as st

from flows.dashboard import frame, queries, texts
from flows.dashboard.frame import Chosen


def page(chosen: Chosen | None) -> None:
    st.title("Distillation")
    executions = chosen.executions("distill") if chosen else []
    if chosen is None or not executions:
        frame.nothing("No distillation in this run yet.")
        return
    manifest = _manifest(executions)
    facts, section = manifest.get("facts", {}), manifest.get("config", {}).get("distill", {})
    if facts.get("stand_in"):
        st.warning(f"Stand-in: {facts['stand_in']}")
    _cost(executions, section)
    if facts:
        _mix(facts)
    st.subheader("Documents")
    texts.documents(chosen)


def _manifest(executions: list[str]) -> dict[str, Any]:
    """The manifest of the newest documents of these executions; empty while none are published."""
    found = [one for one in frame.store().list("documents", superseded=True) if one.execution in executions]
    return found[-1].manifest if found else {}


def _cost(executions: list[str], section: dict[str, Any]) -> None:
    rows = frame.ask(queries.calls, executions)
    spent = [row["dollars"] for row in rows if row["dollars"] is not None]
    budget = section.get("budget_dollars")
    columns = st.columns(3)
    columns[0].metric("paid", frame.dollars(sum(spent)) if spent else "nothing known")
    columns[1].metric("budget", frame.dollars(budget) if budget else "no limit")
    columns[2].metric("attempts", f"{sum(row['attempts'] for row in rows):,}")
    if budget and spent:
        st.progress(min(1.0, sum(spent) / budget))
    st.dataframe(rows, hide_index=True, width="stretch")
    with st.expander("Answers by status"):
        st.dataframe(frame.ask(queries.call_statuses, executions), hide_index=True, width="stretch")


def _mix(facts: dict[str, Any]) -> None:
    left, right = st.columns(2)
    teachers = [
        {"teacher": name, "outcome": outcome, "documents": count}
        for name, one in facts.get("teachers", {}).items()
        for outcome, count in (("kept", one["kept"]), ("rejected", one["asked"] - one["kept"]))
    ]
    with left:
        st.subheader("Mix of teachers")
        bars = alt.Chart(pd.DataFrame(teachers)).mark_bar().encode(x="documents:Q", y="teacher:N", color="outcome:N")
        st.altair_chart(bars, width="stretch")
    rejected = [{"reason": reason, "documents": count} for reason, count in facts.get("rejected", {}).items()]
    with right:
        st.subheader("Rejected, by reason")
        if rejected:
            bars = alt.Chart(pd.DataFrame(rejected)).mark_bar().encode(x="documents:Q", y=alt.Y("reason:N", sort="-x"))
            st.altair_chart(bars, width="stretch")
        else:
            st.caption("None.")
