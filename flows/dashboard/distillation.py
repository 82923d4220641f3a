"""Distillation: the mix of teachers, what the calls cost against the budget, why documents were rejected."""

import json
from typing import Any

import altair as alt
import pandas as pd
import streamlit as st

from flows.dashboard import queries
from flows.dashboard import samples as texts
from flows.dashboard import shared as frame
from flows.dashboard.queries import Row
from flows.dashboard.shared import Chosen


def page(chosen: Chosen | None) -> None:
    st.title("Distillation")
    executions = chosen.executions("distill") if chosen else []
    if chosen is None or not executions:
        frame.nothing("No distillation in this run yet.")
        return
    manifest = _manifest(executions)
    facts, section = manifest.get("facts", {}), manifest.get("config", {}).get("distill", {})
    if facts.get("stand_in"):
        st.warning(f"Stand-in: {frame.quoted(str(facts['stand_in']))}")
    _cost(executions, section)
    if facts:
        _mix(facts)
    st.subheader("Documents")
    texts.documents(chosen)


def _manifest(executions: list[str]) -> dict[str, Any]:
    """Facts and configuration of the newest documents of these executions; empty while none are published."""
    found = [row for row in frame.ask(queries.made, executions) if row["kind"] == "documents"]
    return {name: json.loads(found[-1][name]) for name in ("facts", "config")} if found else {}


def _cost(executions: list[str], section: dict[str, Any]) -> None:
    rows = frame.ask(queries.calls, executions)
    spent = [row["dollars"] for row in rows if row["dollars"] is not None]
    budget = section.get("budget_dollars")
    columns = st.columns(4)
    columns[0].metric("paid", frame.dollars(sum(spent)) if spent else "nothing known")
    columns[1].metric("budget", frame.dollars(budget) if budget else "no limit")
    columns[2].metric("attempts", f"{sum(row['attempts'] for row in rows):,}")
    columns[3].metric("tokens written", f"{sum(row['tokens_out'] or 0 for row in rows):,}")
    if budget and spent:
        st.progress(min(1.0, sum(spent) / budget), text=f"{sum(spent) / budget:.0%} of the budget")
    if any(spent):
        st.markdown("##### Cost by teacher")
        st.altair_chart(cost_chart(rows, budget), width="stretch")
    st.dataframe(rows, hide_index=True, width="stretch", column_config=_CALLS)
    with st.expander("Answers by status"):
        st.dataframe(frame.ask(queries.call_statuses, executions), hide_index=True, width="stretch")


_CALLS = {
    **{
        name: st.column_config.NumberColumn(title, format="localized")
        for name, title in (("attempts", "attempts"), ("tokens_in", "tokens read"), ("tokens_out", "tokens written"))
    },
    "remembered": st.column_config.NumberColumn("from memory", help="answered without a call"),
    "dollars": st.column_config.NumberColumn("cost, $", format="%.4f"),
    "median_s": st.column_config.NumberColumn("median, s", format="%.2f"),
    "p95_s": st.column_config.NumberColumn("95th percentile, s", format="%.2f"),
}


def cost_chart(rows: list[Row], budget: float | None) -> alt.LayerChart:
    """A bar for each endpoint by purpose, and a line where the budget of them all ends."""
    told = [{**row, "dollars": row["dollars"] or 0.0, "purpose": row["purpose"] or "call"} for row in rows]
    bars = (
        alt.Chart(pd.DataFrame(told))
        .mark_bar()
        .encode(
            x=alt.X("sum(dollars):Q", axis=alt.Axis(title="dollars", format="$~g")),
            y=alt.Y("endpoint:N", title=None),
            color=alt.Color("purpose:N", legend=alt.Legend(orient="bottom", title=None)),
            tooltip=["endpoint:N", "purpose:N", alt.Tooltip("sum(dollars):Q", title="dollars", format="$.4f")],
        )
    )
    limit = pd.DataFrame([{"budget": budget, "told": "budget"}] if budget else [], columns=["budget", "told"])
    rule = alt.Chart(limit).mark_rule(color="#b00020", strokeDash=[4, 3]).encode(x="budget:Q")
    label = (
        alt.Chart(limit)
        .mark_text(color="#b00020", align="right", dx=-4, baseline="top")
        .encode(x="budget:Q", y=alt.value(0), text="told:N")
    )
    return alt.layer(bars, rule, label).properties(height=alt.Step(28))


def _mix(facts: dict[str, Any]) -> None:
    left, right = st.columns(2, gap="large")
    teachers = [
        {"teacher": name, "outcome": outcome, "documents": count}
        for name, one in facts.get("teachers", {}).items()
        for outcome, count in (("kept", one["kept"]), ("rejected", one["asked"] - one["kept"]))
    ]
    whole = alt.Axis(tickMinStep=1, format=",d", title="documents")
    with left:
        st.subheader("Mix of teachers")
        color = alt.Color("outcome:N", legend=alt.Legend(orient="bottom", title=None))
        bars = alt.Chart(pd.DataFrame(teachers)).mark_bar()
        bars = bars.encode(x=alt.X("documents:Q", axis=whole), y=alt.Y("teacher:N", title=None), color=color)
        st.altair_chart(bars.properties(height=alt.Step(28)), width="stretch")
    rejected = [{"reason": reason, "documents": count} for reason, count in facts.get("rejected", {}).items()]
    with right:
        st.subheader("Rejected, by reason")
        if rejected:
            bars = alt.Chart(pd.DataFrame(rejected)).mark_bar()
            bars = bars.encode(x=alt.X("documents:Q", axis=whole), y=alt.Y("reason:N", sort="-x", title=None))
            st.altair_chart(bars.properties(height=alt.Step(28)), width="stretch")
        else:
            st.caption("None.")
