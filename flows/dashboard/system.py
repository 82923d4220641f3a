"""The pages System (resources over time and peak memory) and Logs (the last lines of a log, with a search)."""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import streamlit as st

from nautile.common.metrics import GLOSSARY, metric
from nautile.common.text import duration, size, visible
from nautile.flows.dashboard import cards, figures, shared
from nautile.flows.dashboard.figures import Chart, layer, nominal, quantitative, temporal
from nautile.flows.dashboard.shared import ChosenRun
from nautile.flows.logs import LogFile
from nautile.flows.run_state import CURVES, POINTS
from nautile.store.catalog import CatalogRow
from nautile.store.mirror import open_store

# `memory_bytes` is reported by the training loop; some runs have no other measurement.
CONSTANT = ("system/chips", "system/dollars_per_chip_hour")  # of the cost, and no curves
NAMES = (
    *(name for name in GLOSSARY["System"] if name.startswith("system/") and name not in CONSTANT), "memory_bytes"
)  # fmt: skip


def system(chosen: ChosenRun | None) -> None:
    st.title("System")
    if chosen is None:
        shared.nothing_yet(chosen)
        return
    stages = {row["execution"]: row["label"] for row in chosen.stages if row["execution"] and not row["reused"]}
    labels = list(stages.values())
    requested = st.query_params.get("stage", "")
    picked = st.multiselect(
        "Stages",
        labels,
        default=[requested] if requested in labels else [],
        placeholder="all stages",
        key="stages",
        bind="query-params",
    )
    executions = [execution for execution, label in stages.items() if not picked or label in picked]
    rows = shared.query(CURVES, executions, list(NAMES), POINTS) if executions else []
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


MOST_BYTES = 2_000_000  # searched bytes at the end of a log
MOST_LINES = 500  # lines shown at most


def logs(chosen: ChosenRun | None) -> None:
    st.title("Logs")
    store = open_store()
    rows = {row["label"]: row for row in chosen.stages if row["execution"]} if chosen else {}
    if chosen is None or not rows:
        shared.nothing_yet(chosen, "No stage in this run yet.")
        return
    # By default the running stage, else the last that was not reused.
    running = [label for label, row in rows.items() if row["state"] == "running"]
    own = [label for label, row in rows.items() if not row["reused"]]
    first = (running or own or list(rows))[-1]
    left, right = st.columns([1, 2])
    picked = left.selectbox("Stage", list(rows), index=list(rows).index(first), key="stage", bind="query-params")
    search = right.text_input("Search", placeholder="lines with this text, any case", key="search", bind="query-params")
    row = rows.get(picked, rows[first])
    log = LogFile(chosen.run, *(row[name] for name in ("label", "stage", "key", "execution", "state")))
    path = log.path(store)
    if path is None:
        st.caption("It has no log here: it ran no process, or it ran on another machine.")
        return
    lines, complete = last_lines(path)
    matches = [line for line in lines if search.lower() in line.lower()]
    st.caption(
        f"{shared.STATE_MARKS.get(row['state'], row['state'])} · {len(matches):,} "
        f"{'lines' if complete else 'of the last lines'}{' with this text' if search else ''}"
        + (f", the last {MOST_LINES:,} shown" if len(matches) > MOST_LINES else "")
    )
    if row["error"]:
        st.error(shared.escaped(visible(row["error"])))
    if not lines:
        st.caption("Its log is empty.")
        return
    cards.show_text("\n".join(matches[-MOST_LINES:]))
    # Read when it is clicked: a log of a day's training does not go through every redraw.
    st.download_button("The whole log", data=path.read_bytes, file_name=path.name, mime="text/plain")


def last_lines(path: Path, most: int = MOST_BYTES) -> tuple[list[str], bool]:
    """The lines of the last `most` bytes of a log, control characters replaced; and whether that is the whole log."""
    size = path.stat().st_size
    with path.open("rb") as file:
        file.seek(max(0, size - most))
        text = visible(file.read().decode(errors="replace"))
    lines = text.splitlines()
    return (lines, True) if size <= most else (lines[1:], False)  # the first line may be incomplete
