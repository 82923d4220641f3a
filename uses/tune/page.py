"""The page Tuning: scores with baselines, learning curves over shots, confusion, calibration, and wrong rows."""

from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet
import streamlit as st

from nautile.common.errors import ConfigError
from nautile.common.files import read_json
from nautile.flows.dashboard import cards, figures, shared
from nautile.flows.dashboard.figures import Chart, layer, nominal, quantitative
from nautile.flows.dashboard.shared import ChosenRun
from nautile.store.mirror import open_store
from nautile.uses.labelled.scores import RECALL, TITLES, arm_rows, recall_rows

WRONG = 50  # rows shown
LONGEST = 300  # characters of a text
RATE: dict[str, Any] = {"axis": {"format": ".0%"}, "scale": {"domain": [0, 1]}}


def page(chosen: ChosenRun | None) -> None:
    artifact = shared.use_page(chosen, "tune", "tuning", "Tuning", "nautile tune CONFIG")
    if artifact is None:
        return
    picked = artifact["id"]
    try:
        folder = str(open_store().get(picked).path)
    except ConfigError as error:  # removed since the catalog was updated
        st.error(shared.escaped(str(error)))
        return
    report = _read_report(folder, shared.execution_of(folder))
    if not report:
        st.caption("Its files are not on this machine.")
        return
    _scores(report)
    st.link_button("Where these scores come from", shared.lineage_link(picked))
    if report["form"] == "label":
        _labels(report, folder)


@st.cache_data(max_entries=64, show_spinner=False)
def _read_report(folder: str, execution: str) -> dict[str, Any]:
    return read_json(Path(folder) / "tuning.json") or {}


@st.cache_data(max_entries=8, show_spinner=False)
def _wrong_rows(folder: str, execution: str) -> pd.DataFrame:
    """The wrongly labelled rows, highest probability first."""
    table = pyarrow.parquet.read_table(Path(folder) / "rows.parquet").to_pandas()
    wrong = table[table["label"] != table["given"]].sort_values("probability", ascending=False).head(WRONG)
    return wrong.assign(text=wrong["text"].str.slice(0, LONGEST))


def _scores(report: dict[str, Any]) -> None:
    columns, rows = arm_rows(report)
    cards.show([cards.table(columns, rows)])
    counts, data = report["rows"], report["data"]
    st.caption(
        f"{counts['train']:,} rows for training, {counts['validation']:,} for calibration, {counts['test']:,} for "
        f"testing. Left out: {data['duplicates']:,} duplicates, {data['contradictory']:,} rows of texts with several "
        f"labels, {sum(data['leaked'].values()):,} rows that another split has."
    )
    for note in report["notes"]:
        st.caption(shared.escaped(note))


def _labels(report: dict[str, Any], folder: str) -> None:
    st.subheader("Learning curves")
    learning_curves(report).show()
    left, right = st.columns([3, 2], gap="large")
    with left:
        if "confusion" in report:
            st.subheader("Confusion")
            confusion_chart(report).show()
        if rows := recall_rows(report):
            cards.show([cards.table(RECALL, rows)])
    with right:
        st.subheader("Calibration")
        confidence, accuracy = quantitative("confidence", **RATE), quantitative("accuracy", **RATE)
        line = layer({"type": "line", "strokeDash": [4, 3]}, x=confidence, y=accuracy)
        # The diagonal of perfect calibration has data of its own, two points.
        line["data"] = {"values": [{"confidence": end, "accuracy": end} for end in (0, 1)]}
        count = quantitative("count", title="rows", legend={"orient": "bottom"})
        dots = layer({"type": "circle", "opacity": 1}, x=confidence, y=accuracy, size=count)
        Chart(pd.DataFrame(report["reliability"]), {"layer": [line, dots]}).show()
    st.subheader("Wrong, the surest first")
    st.dataframe(_wrong_rows(folder, shared.execution_of(folder)), hide_index=True, width="stretch")


def learning_curves(report: dict[str, Any]) -> Chart:
    """Accuracy with its interval over the number of shots, with a line per arm; "all" is the last."""
    points = [
        {
            "arm": TITLES[arm["arm"]],
            "shots": str(arm["shots"] or "all"),
            "order": arm["shots"] or float("inf"),
            **arm["accuracy"],
        }
        for arm in report["arms"]
    ]
    order = [point["shots"] for point in sorted(points, key=lambda point: point["order"])]
    frame = pd.DataFrame(points).drop(columns="order")
    base = {
        "x": {"field": "shots", "type": "ordinal", "sort": list(dict.fromkeys(order)), "title": "shots of each label"},
        "color": nominal("arm", legend={**figures.BELOW, "columns": 2, "labelLimit": 300}),
    }
    spans = layer("rule", **base, y=quantitative("low", title="accuracy", **RATE), y2={"field": "high"})
    lines = layer({"type": "line", "point": True}, **base, y=quantitative("value", title="accuracy", **RATE))
    return Chart(frame, {"layer": [spans, lines]})


def confusion_chart(report: dict[str, Any]) -> Chart:
    """Confusion matrix: test rows by true and predicted label, shaded by the share of the true label's rows."""
    names = report["labels"]
    cells = [
        {"right": names[i], "given": names[j], "rows": count, "share": count / max(1, sum(row))}
        for i, row in enumerate(report["confusion"])
        for j, count in enumerate(row)
    ]
    cell = layer(
        "rect",
        x=nominal("given", sort=names),
        y=nominal("right", sort=names),
        color=quantitative(
            "share", scale={"scheme": figures.shade("blues", "darkblue"), "domain": [0, 1]}, title="share"
        ),
        tooltip=[nominal("right"), nominal("given"), quantitative("rows"), quantitative("share", format=".0%")],
    )
    return Chart(pd.DataFrame(cells), cell)
