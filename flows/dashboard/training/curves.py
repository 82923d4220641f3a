"""The pages Training and Reinforcement: curves of pretraining metrics and of the RL stages, with other runs."""

import json
from collections.abc import Sequence

import streamlit as st

from nautile.flows.dashboard import queries, shared
from nautile.flows.dashboard.shared import ChosenRun
from nautile.flows.dashboard.training import charts
from nautile.flows.dashboard.training.charts import Line

# Question -> title -> metrics: the charts of the RL page. The metrics of a chart share a unit and a scale.
HEALTH: dict[str, dict[str, tuple[str, ...]]] = {
    "Does it learn?": {
        "reward": ("reward",),
        "solve rate": ("solve_rate",),
        "guard": ("guard_accuracy",),
        "loss": ("loss",),
        "overall": ("reward_overall",),
        "Marks": ("reward_reason", "reward_answer", "reward_follow"),
        "spread": ("reward_deviation",),
    },
    "Does it stay sound?": {
        "kl": ("kl",),
        "entropy": ("entropy",),
        "length": ("length",),
        "Rollouts that end": ("truncated_share", "finished_thinking_share"),
        "Groups that teach nothing": ("zero_signal_share", "mastered_share", "dropped_share"),
        "unscored": ("unscored",),
        "guard p": ("guard_p",),
        "sampler": ("sampler_gap",),
    },
    "The updates": {
        "rate": ("learning_rate",),
        "gradient": ("grad_norm",),
        "update": ("update_norm",),
        "Norms of g+ and g-": ("norm_positive", "norm_negative"),
        "balance": ("balance_factor",),
        "cosine": ("gradient_cosine",),
        "Log-probability above and below the mean": ("logprob_positive", "logprob_negative"),
        "clip": ("clip_share",),
        "skipped": ("skipped_updates",),
    },
    "Speed": {"rollouts": ("rollout_tokens_per_second",), "updates": ("update_tokens_per_second",)},
}
REINFORCED = ("align", "reason", "self_distill")


def training(chosen: ChosenRun | None) -> None:
    """Draw the curves of the chosen run's pretraining, and of other runs to compare with."""
    st.title("Training")
    lines = _compared_lines(chosen, "pretrain")
    names = _metric_names(lines)
    if chosen is None or not names:
        st.caption("No training metrics in this run yet.")
        return
    metrics = charts.choose_metrics(names, "metrics")
    tokens = charts.tokens_of(list(lines))
    display = charts.settings(bool(lines) and lines.keys() <= tokens.keys())
    _links(chosen, "pretrain", {"Samples": "samples", "Log": "logs", "Memory and cores": "system"})
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
    stages = [stage for stage in REINFORCED if chosen and chosen.executions(stage)]
    if chosen is None or not stages:
        st.caption("No reinforcement stage in this run yet.")
        return
    stage = st.segmented_control("Stage", stages, default=stages[0], key="stage", bind="query-params") or stages[0]
    lines = _compared_lines(chosen, stage)
    names = _metric_names(lines)
    _warn_of_stand_in_judge(list(lines))
    measured: dict[str, dict[str, list[str]]] = {}
    for question, titles in HEALTH.items():
        present = {title: [name for name in metrics if name in names] for title, metrics in titles.items()}
        measured[question] = {title: metrics for title, metrics in present.items() if metrics}
    questions = [question for question, group in measured.items() if group]
    if not questions:
        st.caption("No metrics in this stage yet.")
        return
    # Only the first question by default: a browser takes a second of a core to draw ten charts.
    picked = st.pills(
        "Questions", questions, selection_mode="multi", default=questions[:1], key="questions", bind="query-params"
    )
    display = charts.settings(tokens=False)
    _links(chosen, stage, {"Rollouts": "rollouts", "Log": "logs", "Memory and cores": "system"})

    def rollouts(line: Line) -> str:
        return shared.page_link("rollouts", run=line.run, stage=line.label)

    for question in [question for question in questions if question in picked] or questions[:1]:
        st.subheader(question)
        charts.draw(measured[question], lines, display, rollouts if stage != "self_distill" else None)


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
        other = ChosenRun(run, shared.query(queries.STAGES, run))
        lines |= {
            execution: Line(titles[run], run, stage) for execution in other.executions(stage) if execution not in lines
        }
    return lines
