"""The curve pages: training metrics, and the health of the reinforcement stages; runs can be compared."""

import json
from collections.abc import Sequence

import altair as alt
import pandas as pd
import streamlit as st

from flows.dashboard import queries, shared
from flows.dashboard.shared import ChosenRun
from store.catalog import CatalogRow

DEFAULT_METRICS = ("loss", "validation_loss", "bits_per_byte", "learning_rate", "gradient_norm", "tokens_per_second")
# The charts of the reinforcement page, each of metrics with one unit: title -> (unit, metrics).
HEALTH = {
    "reward": ("reward", ("reward", "reward_deviation", "guard_accuracy")),
    "solve rate": ("share of rollouts", ("solve_rate",)),
    "reward by part": (
        "reward of the part",
        ("reward_reason", "reward_answer", "reward_follow", "reward_overall", "reward_correct"),
    ),
    "gradient norms": ("norm", ("norm_positive", "norm_negative", "grad_norm", "update_norm")),
    "balance factor": ("factor", ("balance_factor",)),
    "cosine of g+ and g-": ("cosine", ("gradient_cosine",)),
    "log-probability above and below the mean": ("nats a token", ("logprob_positive", "logprob_negative")),
    "entropy, KL": ("nats a token", ("entropy", "kl")),
    "sampler gap": ("nats a token", ("sampler_gap",)),
    "groups": ("share of groups", ("zero_signal_share", "mastered_share", "dropped_share")),
    "shares": ("share of rollouts", ("truncated_share", "clip_share", "finished_thinking_share")),
    "length": ("tokens", ("length",)),
    "skipped": ("updates that were not finite", ("skipped_updates",)),
    "unscored": ("rollouts without a score", ("unscored",)),
    "speed": ("tokens/s", ("rollout_tokens_per_second", "update_tokens_per_second")),
    "loss": ("nats a token", ("loss",)),
}
UNITS = {
    "loss": "nats a token",
    "bits_per_byte": "bits a byte",
    "learning_rate": "learning rate",
    "tokens_per_second": "tokens/s",
    "gradient_norm": "norm",
    "update_norm": "norm",
    "step_seconds": "s",
    "step_seconds_p95": "s",
    "memory_bytes": "bytes",
    "share_in_steps": "share of the time",
    "skipped_updates": "updates",
}
REINFORCED = ("align", "reason", "self_distill")
FEW_POINTS = 60  # a curve of at most so many shows its points as well


def training(chosen: ChosenRun | None) -> None:
    """Curves of the chosen run's pretraining, and of other runs to compare with."""
    st.title("Training")
    lines = _compared_lines(chosen, "pretrain")
    names = _metric_names(lines)
    if not names:
        st.caption("No training metrics in this run yet.")
        return
    first = [name for name in DEFAULT_METRICS if name in names]
    shown = st.multiselect("Metrics", names, default=first[:4] or names[:4], key="metrics")
    smoothing, logarithmic = _chart_settings("training", 0.6)
    _charts({name: (unit_of(name), (name,)) for name in shown}, lines, smoothing, logarithmic)


def reinforcement(chosen: ChosenRun | None) -> None:
    """Health of the three reinforcement stages."""
    st.title("Reinforcement")
    stages = [stage for stage in REINFORCED if chosen and chosen.executions(stage)]
    if not stages:
        st.caption("No reinforcement stage in this run yet.")
        return
    stage = st.segmented_control("Stage", stages, default=stages[0], key="reinforced") or stages[0]
    lines = _compared_lines(chosen, stage)
    names = _metric_names(lines)
    _warn_of_stand_in_judge(list(lines))
    smoothing, logarithmic = _chart_settings("reinforcement", 0.0)
    charts = {}
    for title, (unit, metrics) in HEALTH.items():
        if measured := [name for name in metrics if name in names]:
            charts[title] = (unit, measured)
    _charts(charts, lines, smoothing, logarithmic)


def _metric_names(lines: dict[str, str]) -> list[str]:
    return [row["name"] for row in shared.ask(queries.METRIC_NAMES, list(lines))] if lines else []


def unit_of(name: str) -> str:
    """The title of a metric's vertical axis: its unit, or its name if no unit is known."""
    return UNITS.get(name) or UNITS.get(name.removeprefix("validation_")) or name


def _chart_settings(page: str, default: float) -> tuple[float, bool]:
    """Smoothing factor and scale, as chosen on the page."""
    left, right = st.columns([3, 1], vertical_alignment="bottom")
    smoothing_help = "Exponential smoothing factor; the raw curve stays visible in a lighter colour."
    smoothing = left.slider("Smoothing", 0.0, 0.99, default, help=smoothing_help, key=f"smooth-{page}")
    scale_help = "Charts with values of zero or below stay linear."
    return smoothing, right.toggle("Logarithmic", value=False, help=scale_help, key=f"log-{page}")


def _warn_of_stand_in_judge(executions: list[str]) -> None:
    """Name the stand-in if one was the judge, and how well its scores separate right from wrong answers."""
    for row in shared.ask(queries.ARTIFACTS_OF, executions):
        facts = json.loads(row["facts"])
        judge = facts.get("judge") or {}
        if row["kind"] == "checkpoint" and judge.get("stand_in"):
            auc = (facts.get("calibration") or {}).get("auc", {}).get("overall")
            accuracy = f" It prefers a right answer to a wrong one with probability {auc:.2f}." if auc else ""
            st.warning(f"Stand-in: {shared.escaped(str(judge.get('model')))} is the judge, not the paper's.{accuracy}")


def _compared_lines(chosen: ChosenRun | None, stage: str) -> dict[str, str]:
    """Execution -> name of its line, for the chosen run and those picked to compare with."""
    if chosen is None:
        return {}
    titles = {run: title for run, title in shared.run_titles().items() if run != chosen.run}
    picked = st.multiselect("Compare with", list(titles), format_func=lambda run: titles.get(run, run), key="compared")
    lines = {execution: "this run" for execution in chosen.executions(stage)}
    for run in (run for run in picked if run in titles):
        other = ChosenRun(run, shared.ask(queries.STAGES, run))
        lines |= {execution: titles[run] for execution in other.executions(stage) if execution not in lines}
    return lines


def _charts(
    charts: dict[str, tuple[str, Sequence[str]]], lines: dict[str, str], smoothing: float, logarithmic: bool
) -> None:
    """Draw the charts that have points in two columns; `charts`: title -> (unit, metrics)."""
    names = sorted({name for _, metrics in charts.values() for name in metrics})
    rows = shared.ask(queries.CURVES, list(lines), names, queries.POINTS) if names else []
    columns = st.columns(2, gap="large")
    drawn = 0
    for title, (unit, metrics) in charts.items():
        chart_rows = [row for row in rows if row["name"] in metrics]
        if chart_rows:
            with columns[drawn % 2]:
                st.markdown(f"##### {shared.escaped(title)}")
                st.altair_chart(chart(chart_rows, lines, smoothing, logarithmic, unit), width="stretch")
            drawn += 1


def chart(
    rows: Sequence[CatalogRow], lines: dict[str, str], smoothing: float, logarithmic: bool = False, unit: str = ""
) -> alt.LayerChart:
    """A line for each execution, metric and source. Where points were merged, a band shows their extremes."""
    table = pd.DataFrame(rows)
    runs, names, sources = (table[column].nunique() > 1 for column in ("execution", "name", "source"))
    titles = []  # run, metric and source, as far as the chart has several of them
    for row in rows:
        source = row["source"] or ("all sources" if sources and not names else "")
        parts = [lines[row["execution"]] if runs else "", row["name"] if names else "", source if sources else ""]
        titles.append(" · ".join(part for part in parts if part) or row["name"])
    table["line"] = titles
    table["smooth"] = table.groupby("line")["value"].transform(lambda v: v.ewm(alpha=1.0 - smoothing).mean())
    scale = alt.Scale(type="log" if logarithmic and (table["low"] > 0).all() else "linear", zero=False)
    several = table["line"].nunique() > 1
    legend = alt.Legend(
        orient="bottom", title=None, symbolType="stroke", columns=1 if runs else 2, labelLimit=420, symbolOpacity=1
    )
    steps = alt.Axis(title="step", format=",d", tickMinStep=1, labelOverlap=True)
    values = alt.Axis(title=unit or None, format=".4~g", titleLimit=240)
    color = alt.Color("line:N", legend=legend if several else None, scale=alt.Scale(scheme="tableau10"))
    base = alt.Chart(table).encode(x=alt.X("step:Q", axis=steps, scale=alt.Scale(nice=False)), color=color)
    band = base.mark_area(opacity=0.15).encode(
        y=alt.Y("low:Q", scale=scale, axis=values), y2=alt.Y2("high:Q"), tooltip=alt.value(None)
    )
    measured = base.mark_line(opacity=0.25, strokeWidth=1).encode(
        y=alt.Y("value:Q", scale=scale, axis=values), tooltip=alt.value(None)
    )
    line = base.mark_line(point=len(table) / table["line"].nunique() <= FEW_POINTS).encode(
        y=alt.Y("smooth:Q", scale=scale, axis=values),
        tooltip=[
            alt.Tooltip("line:N"),
            alt.Tooltip("step:Q", format=",d"),
            alt.Tooltip("value:Q", title="measured", format=".5g"),
            alt.Tooltip("smooth:Q", title="smoothed", format=".5g"),
            alt.Tooltip("points:Q", title="points in it", format=",d"),
        ],
    )
    return alt.layer(band, measured, line).properties(height=340).interactive(bind_y=False)
