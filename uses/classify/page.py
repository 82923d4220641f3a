"""The page Classification: rows per label, the model's confidence, abstentions, and examples."""

from typing import Any

import pandas as pd
import streamlit as st

from nautile.common.text import visible
from nautile.flows.dashboard import cards, figures, shared
from nautile.flows.dashboard.figures import Chart, layer, nominal, quantitative
from nautile.flows.dashboard.shared import ChosenRun
from nautile.uses.classify.stage import EXAMPLES
from nautile.uses.labelled.scores import ABSTAINED, LABELLED, NO_TEXT, RECALL, recall_rows

MOST_LABELS = 100  # labels in the chart
LONGEST = 400  # characters of a text
OTHERS = {ABSTAINED: "(abstained)", NO_TEXT: "(no text)"}


def page(chosen: ChosenRun | None) -> None:
    artifact = shared.use_page(chosen, "classify", "labelled", "Classification", "nautile classify CHECKPOINT FILE")
    if artifact is None:
        return
    picked, facts = artifact["id"], shared.artifact_facts(artifact)
    _counts(facts)
    st.link_button("Where these rows come from", shared.lineage_link(picked))
    _labels(facts)
    _confidence(facts["confidence"])
    _examples(picked)


def _counts(facts: dict[str, Any]) -> None:
    columns = st.columns(5 if "accuracy" in facts else 4)
    labelled = facts["rows"] - facts["abstained"] - facts["no_text"]  # a row may have several labels
    columns[0].metric("Rows", f"{facts['rows']:,}")
    share = f"{labelled / facts['rows']:.1%}"
    columns[1].metric("Labelled", f"{labelled:,}", share, delta_color="off", delta_arrow="off")
    multi_label = facts.get("multi_label")
    columns[2].metric("Without any label" if multi_label else "Abstained", f"{facts['abstained']:,}")
    columns[3].metric("Without text, refused", f"{facts['no_text']:,}")
    if "accuracy" in facts:
        accuracy = facts["accuracy"]
        interval = f"{accuracy['low']:.3f} to {accuracy['high']:.3f}"
        title = "Whole set right" if multi_label else "Accuracy"
        columns[4].metric(title, f"{accuracy['value']:.3f}", interval, delta_color="off", delta_arrow="off")
    note = facts["calibration"]
    st.caption(f"{note[0].upper()}{note[1:]}.")
    if rows := recall_rows(facts):
        cards.show([cards.table(RECALL, rows)])


def _labels(facts: dict[str, Any]) -> None:
    st.subheader("Labels")
    ordered = sorted(facts["labelled"].items(), key=lambda pair: -pair[1])
    counts = pd.DataFrame([{"label": visible(label, 60), "rows": count} for label, count in ordered[:MOST_LABELS]])
    # The rows are sorted by count already; Vega-Lite would sort by name.
    label = nominal("label", sort=None, axis={"title": None, "labelLimit": 400})
    Chart(counts, {**layer("bar", x=quantitative("rows", axis=figures.WHOLE), y=label), "height": figures.ROW}).show()
    if len(ordered) > MOST_LABELS:
        st.caption(f"The {MOST_LABELS} most frequent of {len(ordered):,} labels.")


def _confidence(confidence: dict[str, list[int]]) -> None:
    st.subheader("Probability of the likeliest label")
    size = 1 / len(confidence["labelled"])
    bins = [
        {"from": number * size, "to": (number + 1) * size, "rows": count, "outcome": outcome}
        for outcome, counts in confidence.items()
        for number, count in enumerate(counts)
    ]
    bars = layer(
        "bar",
        x=quantitative("from", bin="binned", title="probability", scale={"domain": [0, 1]}),
        x2={"field": "to"},
        y=quantitative("rows", axis=figures.WHOLE),
        color=nominal("outcome", legend=figures.BELOW),
    )
    Chart(pd.DataFrame(bins), {**bars, "height": 220}).show()


def _examples(artifact: str) -> None:
    """Draw the rows of an outcome with the highest and the lowest probability. Texts are escaped cells."""
    st.subheader("Examples")
    rows = shared.artifact_rows(artifact, EXAMPLES)
    if rows is None:
        return
    outcomes = list(dict.fromkeys((row["kind"], row["label"]) for row in rows))
    outcomes.sort(key=lambda outcome: (outcome[0] == LABELLED, outcome))  # first the rows without a label
    titles = {outcome: OTHERS.get(outcome[0]) or shared.escaped(visible(outcome[1], 60)) for outcome in outcomes}
    picked = (
        st.selectbox("Outcome", outcomes, format_func=titles.__getitem__, key="outcome", bind="query-params")
        or outcomes[0]
    )
    cells = [
        (
            row["number"],
            visible(row["likeliest"] or ""),
            "" if row["probability"] is None else f"{row['probability']:.4g}",
            visible(row["text"], LONGEST),
        )
        for row in rows
        if (row["kind"], row["label"]) == picked
    ]
    cards.show([cards.table(("row", "likeliest", "probability", "text"), cells)])
    st.caption("The surest first; of an outcome with many rows, the surest and the least sure.")
