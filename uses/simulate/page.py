"""The page Surveys: simulated distributions by group with those of humans and baselines, and their scores."""

from pathlib import Path
from typing import Any

import pandas as pd
import streamlit as st

from nautile.common.errors import ConfigError
from nautile.common.files import read_json
from nautile.flows.dashboard import cards, figures, shared
from nautile.flows.dashboard.figures import Chart, layer, nominal, quantitative
from nautile.flows.dashboard.shared import ChosenRun
from nautile.store.mirror import open_store
from nautile.uses.simulate.tables import ARMS, NOT_FOR, NOTHING_TO_COMPARE, people_counts, score_rows

SHOWN = ("model", "humans", "overall", "regression", "forest", "majority", "uniform")
SHORT = {"model": "the model", "overall": "all humans"}


def page(chosen: ChosenRun | None) -> None:
    st.title("Surveys")
    artifact = shared.choose_artifact("opinions", "Simulated survey", "survey")
    if artifact is None:
        st.caption("No simulated survey in the store yet: `nautile simulate SURVEY CHECKPOINT` makes one.")
        return
    picked = artifact["id"]
    try:
        folder = str(open_store().get(picked).path)
        summary = _read_summary(folder, shared.execution_of(folder))
    except ConfigError as error:  # removed since the catalog was updated
        st.error(shared.escaped(str(error)))
        return
    if not summary:
        st.caption("Its files are not on this machine.")
        return
    st.subheader(shared.escaped(summary["title"]))
    left_out = f", {summary['left_out']:,} too long" if summary["left_out"] else ""
    st.text(f"{summary['model']} · {summary['personas']:,} personas from {summary['personas_source']}{left_out}")
    st.warning(NOT_FOR[0])
    if summary["compared"]:
        cards.show([cards.table(*score_rows(summary))])
        st.caption(shared.escaped(f"Humans: {summary['humans']['kind']}. {summary['humans']['source']}"))
    else:
        st.info(NOTHING_TO_COMPARE)
    st.link_button("Where these figures come from", shared.lineage_link(picked))
    _question(summary)


@st.cache_data(max_entries=64, show_spinner=False)
def _read_summary(folder: str, execution: str) -> dict[str, Any]:
    return read_json(Path(folder) / "summary.json") or {}


def _question(summary: dict[str, Any]) -> None:
    """Draw the chosen question: a chart for everybody and for each group, with model, humans and baselines."""
    questions = {question["name"]: question for question in summary["questions"]}
    picked = st.selectbox("Question", list(questions), key="question", bind="query-params")
    question = questions.get(picked) or next(iter(questions.values()))
    cards.show_text(question["text"])
    known = [name for name in SHOWN if any(name in cell["arms"] for cell in question["cells"])]
    default_arms = [name for name in ("model", "humans", "overall", "uniform") if name in known]
    # The default arms cannot be deselected, so that figures of the model are never shown without a baseline.
    others = [name for name in known if name not in default_arms]
    extra = st.multiselect("Also show", others, format_func=ARMS.__getitem__, key="arms", bind="query-params")
    columns = st.columns(2, gap="large")
    for index, cell in enumerate(question["cells"]):
        with columns[index % 2]:
            who = f"{cell['by']}: {cell['group']}" if cell["by"] else "everybody"
            st.markdown(f"##### {shared.escaped(who)}")
            st.caption(people_counts(cell))
            distribution(question, cell, [*default_arms, *extra]).show()


def distribution(question: dict[str, Any], cell: dict[str, Any], arms: list[str]) -> Chart:
    """Chart of the shares of the options per arm, as dots with their intervals, if they have any."""
    points = [
        {
            "option": option,
            "arm": SHORT.get(arm, arm),
            "share": fields["shares"][i],
            "low": fields["low"][i] if "low" in fields else None,
            "high": fields["high"][i] if "high" in fields else None,
        }
        for arm in arms
        if (fields := cell["arms"].get(arm))
        for i, option in enumerate(question["options"])
    ]
    order = [SHORT.get(arm, arm) for arm in arms]
    legend_names = [SHORT.get(arm, arm) for arm in arms if cell["arms"].get(arm)]
    largest = max((point["high"] or point["share"] for point in points), default=1.0)
    # Slightly wider than the largest value, so that its dot is not cut in half.
    share = {"axis": {"format": ".0%", "title": None}, "scale": {"domain": [0, min(1.0, 1.05 * largest)]}}
    legend = {**figures.BELOW, "values": legend_names, "columns": 2}
    base = {
        "y": nominal("option", sort=question["options"], title=None, axis={"labelLimit": 240}),
        "yOffset": nominal("arm", sort=order),
        # An arm has its colour in every group's chart, also where a group lacks another arm.
        "color": nominal("arm", legend=legend, scale={**figures.COLOURS, "domain": order}),
    }
    tooltip = [
        nominal("option"),
        nominal("arm"),
        *(quantitative(field, format=".1%") for field in ("share", "low", "high")),
    ]
    span = layer({"type": "rule", "strokeWidth": 1.5}, **base, x=quantitative("low", **share), x2={"field": "high"})
    dots = layer(
        {"type": "point", "filled": True, "size": 60}, **base, x=quantitative("share", **share), tooltip=tooltip
    )
    return Chart(pd.DataFrame(points), {"layer": [span, dots], "height": {"step": 16}})
