"""The ladder of a run: accuracy after each stage with 95 % intervals, and whether the stages made the model better."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pandas as pd
import streamlit as st

from nautile.common.errors import ConfigError
from nautile.common.files import read_json
from nautile.evals.running.rows import read_rows
from nautile.evals.tables.ladder import Ladder, common_problems, gain_with_interval, ladder, p_value
from nautile.evals.tables.paper_figures import TABLE_1
from nautile.flows.dashboard import shared
from nautile.flows.dashboard.figures import Chart, layer, nominal, quantitative, shade
from nautile.flows.dashboard.shared import ChosenRun
from nautile.flows.run_state import output_of
from nautile.store.mirror import open_store

Folders = dict[str, str]  # stage -> folder of the evaluation after it


def evaluation_folders(chosen: ChosenRun) -> Folders:
    """Stage -> folder of the run's evaluation of it, for the stages of the paper's Table 1."""
    folders = {}
    for row in chosen.stages:
        stage = row["label"].partition(":")[2]
        if row["stage"] != "evaluate" or stage not in TABLE_1 or "evaluation" not in chosen.outputs(row):
            continue
        # Not by the id in the outputs: a forced run has perhaps made another evaluation of the same id since.
        with suppress(ConfigError):  # damaged, or not to be had from the remote
            if artifact := output_of(open_store(), row, "evaluation"):
                folders[stage] = str(artifact.path)
    return folders


def ladder_of(folders: Folders) -> Ladder | None:
    """The ladder of the evaluations in these folders; cached."""
    return _ladder(folders, [shared.execution_of(folder) for folder in folders.values()])


@st.cache_data(max_entries=256, show_spinner=False)
def _ladder(folders: Folders, executions: list[str]) -> Ladder | None:
    # `executions` are part of the cache key.
    scores = {stage: read_json(Path(folder) / "scores.json") for stage, folder in folders.items()}
    files = {stage: Path(folder) / "rows.jsonl" for stage, folder in folders.items()}
    rows = {stage: read_rows(file) for stage, file in files.items() if file.exists()}
    return ladder({stage: score for stage, score in scores.items() if score}, rows)


def last_score(run_ladder: Ladder | None) -> tuple[str, Mapping[str, Any]] | None:
    """The last evaluated stage, and its score; None without any."""
    measured = [entry for entry in run_ladder["stages"] if entry["score"]] if run_ladder else []
    return (measured[-1]["stage"], measured[-1]["score"]) if measured else None


def difference(before: str, after: str, benchmark: str) -> dict[str, Any] | None:
    """The paired test of two evaluations on their common problems, by their folders; None if they have none. Cached."""
    return _difference(before, after, benchmark, [shared.execution_of(folder) for folder in (before, after)])


@st.cache_data(max_entries=256, show_spinner=False)
def _difference(before: str, after: str, benchmark: str, executions: list[str]) -> dict[str, Any] | None:
    # `executions` are part of the cache key.
    files = [Path(folder) / "rows.jsonl" for folder in (before, after)]
    if not all(file.exists() for file in files):
        return None
    comparison = common_problems(*(read_rows(file) for file in files))
    return comparison["benchmarks"].get(benchmark) if comparison else None


def verdict(run_ladder: Ladder | None) -> str:
    """One sentence: whether the stages after pretraining made the model better."""
    last = last_score(run_ladder)
    if run_ladder is None or last is None:
        return "No stage has been evaluated yet, so it is not known whether the model got better."
    stage, score = last
    figure = f"{100 * score['accuracy']:.1f} % of {score['n']:,} problems are right after {stage}"
    measured = [entry for entry in run_ladder["stages"] if entry["score"]]
    # With all four stages the ladder has a total. With fewer, the last measured stage is compared with the first.
    total = run_ladder["total"] or (
        {"over": measured[0]["stage"], "test": measured[-1]["test"]} if measured[1:] else None
    )
    if total is None:
        return f"{figure}; no earlier stage was evaluated, so there is no gain to judge yet."
    test = total["test"]
    if not test:
        return f"{figure}. Whether that is a gain over {total['over']} is unknown: their answers were not stored."
    # The sentence says what the interval allows and no more: a gain whose interval contains zero is not called one.
    if test["low"] > 0:
        words = "Better than its start"
    elif test["high"] < 0:
        words = "Worse than its start"
    else:
        words = "No change from its start beyond chance"
    return f"{words}: {figure}, {gain_with_interval(test)} points over {total['over']} (p {p_value(test)})."


def picture(run_ladder: Ladder) -> Chart:
    """Chart of the accuracy after each stage with its 95 % interval, and of the paper's figures for its model."""
    rows = []
    for entry in run_ladder["stages"]:
        score = entry["score"]
        row = {"stage": entry["stage"], "paper": entry["paper"] / 100, "what": entry["title"]}
        if score:
            low, high = score["interval"]
            text = f"{100 * score['accuracy']:.1f} %"
            row |= {"accuracy": score["accuracy"], "low": low, "high": high, "n": score["n"], "text": text}
        rows.append(row)
    table = pd.DataFrame(rows, columns=["stage", "what", "paper", "accuracy", "low", "high", "n", "text"])
    x = nominal("stage", sort=list(table["stage"]), title=None, axis={"labelAngle": 0, "labelFontSize": 12})
    tooltip = [
        nominal("what", title="row of Table 1"),
        quantitative("accuracy", format=".1%"),
        quantitative("low", title="95 % interval over problems from", format=".1%"),
        quantitative("high", title="to", format=".1%"),
        quantitative("n", title="problems", format=",d"),
        quantitative("paper", title="the paper, GSM8K", format=".1%"),
    ]
    share = {"format": "%", "title": "right, strict", "tickCount": 4}
    base = {"x": x, "tooltip": tooltip}
    # A stage that was not evaluated has a place on the axis and no bar: a bar of height zero would be read as 0 %.
    measured = {"transform": [{"filter": "isValid(datum.accuracy)"}]}
    span = layer(
        {"type": "rule", "strokeWidth": 2, "color": shade("#0b4fa8", "#ffffff")},
        **base,
        y=quantitative("low"),
        y2={"field": "high"},
    )
    labels = layer(
        {"type": "text", "dy": -7, "fontWeight": "bold", "fontSize": 12},
        x=x,
        y=quantitative("high"),
        text=nominal("text"),
    )
    layers = [
        layer(
            {"type": "bar", "color": shade("#9cc2f0", "#2f6fb5"), "size": 44},
            **base,
            y=quantitative("accuracy", axis=share),
        ),
        {**span, **measured},
        layer(
            {"type": "tick", "color": shade("#7a4b00", "#f0b458"), "thickness": 2, "width": 44},
            **base,
            y=quantitative("paper"),
        ),
        {**labels, **measured},
    ]
    return Chart(table, {"layer": layers, "height": 150})


def show(run_ladder: Ladder | None) -> None:
    """Draw the chart with its caption; the page shows the verdict above."""
    st.markdown("##### After each stage")
    if run_ladder is None:
        st.caption("The ladder appears once a stage was evaluated on the held-out problems or GSM8K.")
        return
    picture(run_ladder).show(verdict(run_ladder))
    stand_in = f" Stand-in: {run_ladder['stand_in']}." if run_ladder["stand_in"] else ""
    stand_in += "".join(f" {run_ladder['title']}: {note}." for note in run_ladder["not_screened"])
    st.caption(
        shared.escaped(
            f"{run_ladder['title']}: right after each stage, with 95 % intervals over problems. Brown: the "
            f"paper's 371 M model on GSM8K.{stand_in}"
        )
    )
