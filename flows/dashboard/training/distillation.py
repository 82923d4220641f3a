"""The page Distillation: cost of the calls and the budget, documents by teacher, reasons for rejection, documents."""

import json
from typing import Any

import pandas as pd
import streamlit as st

from nautile.common.text import dollars
from nautile.flows.dashboard import cards, figures, queries, shared
from nautile.flows.dashboard.figures import Chart, layer, nominal, quantitative
from nautile.flows.dashboard.shared import ChosenRun
from nautile.flows.dashboard.training import samples
from nautile.store.catalog import CatalogRow


def page(chosen: ChosenRun | None) -> None:
    st.title("Distillation")
    executions = chosen.executions("distill") if chosen else []
    if chosen is None or not executions:
        settings = chosen.state.settings if chosen and chosen.state else {}
        has_none = "distill" in settings and settings["distill"] is None
        st.caption("This run's configuration has no [distill]." if has_none else "No distillation in this run yet.")
        return
    artifacts = [row for row in shared.query(queries.ARTIFACTS_OF, executions) if row["kind"] == "documents"]
    newest = artifacts[-1] if artifacts else {"facts": "{}", "config": "{}"}
    facts, section = json.loads(newest["facts"]), json.loads(newest["config"]).get("distill", {})
    if not artifacts and chosen.state:
        # It has published nothing yet, so its limits are those of the run's settings.
        section = chosen.state.settings.get("distill") or {}
    if facts.get("stand_in"):
        st.warning(f"Stand-in: {shared.escaped(str(facts['stand_in']))}")
    _cost(executions, section)
    if facts:
        _mix(facts)
    st.subheader("Documents")
    samples.documents(chosen)


def _cost(executions: list[str], section: dict[str, Any]) -> None:
    rows = shared.query(queries.CALLS, executions)
    # A call without a known price is not free: it has no dollars, and without any priced call the sum is "not known".
    costs = [row["dollars"] for row in rows if row["dollars"] is not None]
    budget = section.get("budget_dollars")
    columns = st.columns(4)
    unknown = sum(row["unknown_dollars"] or 0.0 for row in rows)
    more = f"at most {dollars(unknown)} more for replies that were cut, late or unreadable" if unknown else None
    columns[0].metric("paid", dollars(sum(costs)) if costs else "not known", more, delta_color="off")
    columns[1].metric("budget", dollars(budget) if budget else "no limit")
    columns[2].metric("attempts", f"{sum(row['attempts'] for row in rows):,}")
    columns[3].metric("completion tokens", f"{sum(row['tokens_out'] or 0 for row in rows):,}")
    if budget and costs:
        st.progress(min(1.0, sum(costs) / budget), text=f"{sum(costs) / budget:.0%} of the budget")
    if any(costs):
        st.markdown("##### Cost by teacher")
        cost_chart(rows, budget).show()
    st.dataframe(rows, hide_index=True, width="stretch", column_config=_CALLS, alt="Calls by stage and endpoint")
    with st.expander("Attempts by status"):
        statuses = shared.query(queries.CALL_STATUSES, executions)
        counts = ((row["endpoint"], row["status"], f"{row['attempts']:,}") for row in statuses)
        cards.show([cards.table(("endpoint", "status", "attempts"), counts)])


_CALLS = {
    **{
        name: st.column_config.NumberColumn(title, format="localized")
        for name, title in (
            ("attempts", "attempts"),
            ("tokens_in", "prompt tokens"),
            ("tokens_out", "completion tokens"),
        )
    },
    "remembered": st.column_config.NumberColumn("cached", help="Answered from the reply cache, without a call."),
    "dollars": st.column_config.NumberColumn("cost, $", format="%.4f"),
    "unknown_dollars": st.column_config.NumberColumn(
        "not certain, $", format="%.4f", help="The most that replies may have cost that were cut, late or unreadable."
    ),
    "median_s": st.column_config.NumberColumn("median, s", format="%.2f"),
    "p95_s": st.column_config.NumberColumn("95th percentile, s", format="%.2f"),
}


def cost_chart(rows: list[CatalogRow], budget: float | None) -> Chart:
    """Stacked bars of dollars per endpoint and purpose, and a line at the budget."""
    costs = [{**row, "dollars": row["dollars"] or 0.0, "purpose": row["purpose"] or "call"} for row in rows]
    dollars_axis = {"title": "dollars", "format": "$~g"}
    bars = layer(
        "bar",
        x=quantitative("dollars", aggregate="sum", axis=dollars_axis),
        y=nominal("endpoint", title=None),
        color=nominal("purpose", legend=figures.BELOW),
        tooltip=[
            nominal("endpoint"),
            nominal("purpose"),
            quantitative("dollars", aggregate="sum", title="dollars", format="$.4f"),
        ],
    )
    layers = [bars]
    if budget:  # marks without a value are unnamed groups for screen readers
        limit = {"data": {"values": [{"budget": budget, "label": "budget"}]}}
        red = figures.shade("#b00020", "#ff8182")
        rule = layer({"type": "rule", "color": red, "strokeDash": [4, 3]}, x=quantitative("budget"))
        mark = {"type": "text", "color": red, "align": "right", "dx": -4, "baseline": "top"}
        words = layer(mark, x=quantitative("budget"), y={"value": 0}, text=nominal("label"))
        layers += [{**limit, **rule}, {**limit, **words}]
    return Chart(pd.DataFrame(costs), {"layer": layers, "height": figures.ROW})


def _mix(facts: dict[str, Any]) -> None:
    left, right = st.columns(2, gap="large")
    teachers = [
        {"teacher": name, "outcome": outcome, "documents": count}
        for name, counts in facts.get("teachers", {}).items()
        for outcome, count in (("kept", counts["kept"]), ("rejected", counts["asked"] - counts["kept"]))
    ]
    count = quantitative("documents", axis={**figures.WHOLE, "title": "documents"})
    with left:
        st.subheader("Mix of teachers")
        color = nominal("outcome", legend=figures.BELOW)
        bars = layer("bar", x=count, y=nominal("teacher", title=None), color=color)
        Chart(pd.DataFrame(teachers), {**bars, "height": figures.ROW}).show()
    rejected = [{"reason": reason, "documents": count} for reason, count in facts.get("rejected", {}).items()]
    with right:
        st.subheader("Rejected, by reason")
        if rejected:
            bars = layer("bar", x=count, y=nominal("reason", sort="-x", title=None))
            Chart(pd.DataFrame(rejected), {**bars, "height": figures.ROW}).show()
        else:
            st.caption("None.")
