"""The pages Training and Reinforcement: curves of pretraining metrics and of the RL stages, with other runs."""

import json
from collections.abc import Sequence

import streamlit as st

from nautile.flows.dashboard import queries, shared
from nautile.flows.dashboard.shared import ChosenRun
from nautile.flows.dashboard.training import charts
from nautile.flows.dashboard.training.charts import Line
from nautile.flows.run_state import STEPS
from nautile.tasks.engine.stage import declared, stages_with


def training(chosen: ChosenRun | None) -> None:
    """Draw the curves of a stage that is no reinforcement, pretraining first, and of other runs to compare with."""
    st.title("Training")
    stage = _choose_stage(chosen, "training")
    lines = _compared_lines(chosen, stage) if stage else {}
    names = _metric_names(lines)
    if chosen is None or stage is None or not names:
        st.caption("No training metrics in this run yet.")
        return
    metrics = charts.choose_metrics(names, "metrics")
    tokens = charts.tokens_of(list(lines))
    display = charts.settings(bool(lines) and lines.keys() <= tokens.keys())
    _links(chosen, stage, {"Samples": "samples", "Log": "logs", "Memory and cores": "system"})
    charts.draw(
        {name: (name,) for name in metrics},
        lines,
        display,
        lambda line: shared.page_link("samples", run=line.run),
        tokens,
    )


def reinforcement(chosen: ChosenRun | None) -> None:
    """Draw the curves of an RL stage, grouped by question."""
    st.title("Reinforcement")
    stage = _choose_stage(chosen, "reinforcement")
    described = declared(stage) if stage else None
    if chosen is None or described is None:
        st.caption("No reinforcement stage in this run yet.")
        return
    lines = _compared_lines(chosen, described.name)
    names = _metric_names(lines)
    _warn_of_stand_in_judge(list(lines))
    # The questions in the order of the stage's curves, each with the charts that something was measured for.
    measured: dict[str, dict[str, list[str]]] = {}
    for curve in described.curves:
        if present := [name for name in curve.metrics if name in names]:
            measured.setdefault(curve.question, {})[curve.title] = present
    questions = list(measured)
    if not questions:
        st.caption("No metrics in this stage yet.")
        return
    # Only the first question by default: a browser takes a second of a core to draw ten charts.
    picked = st.pills(
        "Questions", questions, selection_mode="multi", default=questions[:1], key="questions", bind="query-params"
    )
    display = charts.settings(tokens=False)
    _links(chosen, described.name, {"Rollouts": "rollouts", "Log": "logs", "Memory and cores": "system"})

    def rollouts(line: Line) -> str:
        return shared.page_link("rollouts", run=line.run, stage=line.label)

    for question in [question for question in questions if question in picked] or questions[:1]:
        st.subheader(question)
        charts.draw(measured[question], lines, display, rollouts if "rollouts" in described.outputs else None)


def _choose_stage(chosen: ChosenRun | None, page: str) -> str | None:
    """The stage of the run that the page shows, picked by the reader if there are several; None if there is none."""
    stages = [stage for stage in stages_with(lambda stage: stage.page == page) if chosen and chosen.executions(stage)]
    if not stages:
        return None
    if len(stages) == 1 and page == "training":
        return stages[0]
    return st.segmented_control("Stage", stages, default=stages[0], key="stage", bind="query-params") or stages[0]


def _links(chosen: ChosenRun, stage: str, pages: dict[str, str]) -> None:
    """Draw links to the other pages about a stage."""
    with st.container(horizontal=True, vertical_alignment="center"):
        for title, address in pages.items():
            st.link_button(title, shared.page_link(address, run=chosen.run, stage=stage))
        st.caption("A click on a point opens the texts of its step.")


def _metric_names(lines: dict[str, Line]) -> list[str]:
    rows = shared.query(queries.METRIC_NAMES, list(lines)) if lines else []
    return [row["name"] for row in rows if not row["name"].startswith("system/")]


def _warn_of_stand_in_judge(executions: Sequence[str]) -> None:
    """Warn if the judge was a stand-in, with the AUC of its scores for right against wrong answers."""
    for row in shared.query(queries.ARTIFACTS_OF, list(executions)):
        facts = json.loads(row["facts"])
        if row["kind"] == "checkpoint" and shared.nested(facts, "judge", "stand_in"):
            auc, model = shared.nested(facts, "calibration", "auc", "overall"), shared.nested(facts, "judge", "model")
            measured = isinstance(auc, (int, float))
            accuracy = f" It prefers a right answer to a wrong one with probability {auc:.2f}." if measured else ""
            st.warning(f"Stand-in: {shared.escaped(str(model))} is the judge, not the paper's.{accuracy}")


def _compared_lines(chosen: ChosenRun | None, stage: str) -> dict[str, Line]:
    """Execution -> its line, for the chosen run and the runs picked for comparison."""
    if chosen is None:
        return {}
    titles = {run: title for run, title in shared.run_titles().items() if run != chosen.run}
    picked = []
    if titles:
        # In the address by id, not bound: titles change with the state of a run.
        requested = [run for run in st.query_params.get_all("compared") if run in titles]
        picked = st.multiselect(
            "Compare with", list(titles), requested, format_func=lambda run: titles.get(run, run), key="compared"
        )
        if picked != st.query_params.get_all("compared"):
            st.query_params["compared"] = picked
    lines = {execution: Line("this run", chosen.run, stage) for execution in chosen.executions(stage)}
    # A run that was chosen may have disappeared from the list since.
    for run in (run for run in picked if run in titles):
        other = ChosenRun(run, shared.query(STEPS, run))
        lines |= {
            execution: Line(titles[run], run, stage) for execution in other.executions(stage) if execution not in lines
        }
    return lines
