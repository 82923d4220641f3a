"""The page Extraction: counts of extracted rows, and the refused replies with their reasons and texts."""

import pandas as pd
import streamlit as st

from nautile.common.text import visible
from nautile.flows.dashboard import cards, figures, shared
from nautile.flows.dashboard.figures import Chart, layer, nominal, quantitative
from nautile.flows.dashboard.shared import ChosenRun
from nautile.uses.extract.stage import REASONS, REFUSED

MOST_ROWS = 100  # refused rows shown per reason
LONGEST = 400  # characters of a text or a reply


def page(chosen: ChosenRun | None) -> None:
    artifact = shared.use_page(
        chosen, "extract", "extracted", "Extraction", "nautile extract CHECKPOINT FILE --schema S.json"
    )
    if artifact is None:
        return
    picked, facts = artifact["id"], shared.artifact_facts(artifact)
    left, middle, right = st.columns(3)
    left.metric("Rows", f"{facts['rows']:,}")
    share = f"{facts['extracted'] / facts['rows']:.1%}"
    middle.metric("Extracted", f"{facts['extracted']:,}", share, delta_color="off", delta_arrow="off")
    right.metric("Spans in their texts", f"{facts['spans']:,}")
    st.link_button("Where these rows come from", shared.lineage_link(picked))
    if not facts["refused"]:
        st.caption("Nothing was refused.")
        return
    st.subheader("Refused, by reason")
    counts = pd.DataFrame([{"reason": REASONS[reason], "rows": count} for reason, count in facts["refused"].items()])
    reason = nominal("reason", sort="-x", axis={"title": None, "labelLimit": 400})
    Chart(counts, {**layer("bar", x=quantitative("rows", axis=figures.WHOLE), y=reason), "height": figures.ROW}).show()
    _rows(picked, list(facts["refused"]))


def _rows(artifact: str, reasons: list[str]) -> None:
    """Draw the refused rows of a reason. Texts and replies are escaped cells."""
    reason = st.selectbox("Reason", reasons, format_func=REASONS.__getitem__, key="reason", bind="query-params")
    rows = shared.artifact_rows(artifact, REFUSED)
    if rows is None:
        return
    parts = ("detail", "text", "reply")
    cells = [
        [row["number"], *(visible(row[part] or "", LONGEST) for part in parts)]
        for row in rows
        if row["reason"] == (reason or reasons[0])
    ]
    cards.show([cards.table(("row", *parts), cells[:MOST_ROWS])])
    if len(cells) > MOST_ROWS:
        st.caption(f"The first {MOST_ROWS} of {len(cells):,}; all are in {REFUSED} of the artifact.")
