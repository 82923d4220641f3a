"""The page System: machine resources used by the run's stages over time, and the peak memory of each stage."""

from collections.abc import Sequence

import pandas as pd
import streamlit as st

from nautile.common.metrics import GLOSSARY, metric
from nautile.common.text import duration, size
from nautile.flows.dashboard import cards, figures, queries, shared
from nautile.flows.dashboard.figures import Chart, layer, nominal, quantitative, temporal
from nautile.flows.dashboard.shared import ChosenRun
from nautile.store.catalog import CatalogRow

# `memory_bytes` is reported by the training loop; some runs have no other measurement.
NAMES = (*(name for name in GLOSSARY["System"] if name.startswith("system/")), "memory_bytes")


def page(chosen: ChosenRun | None) -> None:
    st.title("System")
    if chosen is None:
        st.caption("No run in the store yet.")
        return
    stages = {row["execution"]: row["label"] for row in chosen.stages if row["execution"] and not row["reused"]}
    labels = list(stages.values())
    requested = st.query_params.get("stage", "")
    picked = st.multiselect(
        "Stages", labels, default=[requested] if requested in labels else [], placeholder="all stages", key="stages"
    )
    executions = [execution for execution, label in stages.items() if not picked or label in picked]
    rows = shared.query(queries.CURVES, executions, list(NAMES), queries.POINTS) if executions else []
    if not rows:
        st.caption("Nothing was measured over time here: stages that end within seconds leave only their peak.")
    columns = st.columns(2, gap="large") if rows else []  # empty columns leave a gap on a phone
    for place, measured in enumerate(dict.fromkeys(row["name"] for row in rows)):
        with columns[place % 2]:
            entry, own = metric(measured), [row for row in rows if row["name"] == measured]
            st.markdown(f"##### {shared.escaped(entry.title)}", help=f"`{measured}`: {entry.help}")
            highest = max(row["high"] for row in own)
            text = f"{entry.title} over time, at most {highest:,.4g} {entry.unit}"
            over_time(own, stages).show(text)
    _peaks(chosen)


def over_time(rows: Sequence[CatalogRow], stages: dict[str, str]) -> Chart:
    """A metric over time, with a line per stage and worker. The workers of a stage share a colour."""
    entry = metric(rows[0]["name"])
    table = pd.DataFrame(rows)
    table["when"] = pd.to_datetime(table["at"], unit="s")
    table["stage"] = table["execution"].map(stages)
    table["line"] = table["stage"] + table["source"].map(lambda source: f" · {source}" if source else "")
    form = ".3~s" if entry.unit == "bytes" else ".4~g"
    legend = {**figures.BELOW, "columns": 2, "labelLimit": 140, "symbolOpacity": 1}
    stage = nominal("stage", sort=list(stages.values()), scale=figures.COLOURS)
    stage["legend"] = legend if table["stage"].nunique() > 1 else None
    tooltip = [nominal("line"), temporal("when"), quantitative("value", format=form), quantitative("high", format=form)]
    line = layer(
        {"type": "line", "point": {"size": 18, "filled": True}},
        x=temporal("when", title="time (UTC)", axis=figures.clock(table["when"], 5)),
        y=quantitative("value", axis={"title": entry.unit, "format": form}, scale={"zero": True}),
        color=stage,
        detail=nominal("line"),
        tooltip=tooltip,
    )
    return Chart(table, {**line, "height": 380})


def _peaks(chosen: ChosenRun) -> None:
    st.subheader("Largest process of each stage")
    rows = [
        (
            row["label"],
            size(row["peak_bytes"]) if row["peak_bytes"] else "not measured",
            "reused" if row["reused"] else duration(row["seconds"]) if row["seconds"] is not None else "not ended",
            row["host"] or "",
            cards.link(shared.page_link("logs", run=chosen.run, stage=row["label"]), "log"),
        )
        for row in chosen.stages
    ]
    cards.show([cards.table(("stage", "memory", "time", "machine", "log"), rows)])
