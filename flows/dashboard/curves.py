"""Curves: training with smoothing and comparison between runs, and the health of the reinforcement stages."""

import json
from collections.abc import Sequence

import altair as alt
import pandas as pd
import streamlit as st

from flows.dashboard import queries
from flows.dashboard import shared as frame
from flows.dashboard.queries import Row
from flows.dashboard.shared import Chosen

FIRST = ("loss", "validation_loss", "bits_per_byte", "learning_rate", "gradient_norm", "tokens_per_second")
# What an RL practitioner looks at first, grouped into charts of one axis: title -> (unit, metrics).
HEALTH = {
    "reward": ("reward", ("reward", "reward_deviation", "guard_accuracy")),
    "solve rate": ("share of rollouts", ("solve_rate",)),
    "reward by part": (
        "reward of the part",
        ("reward_reason", "reward_answer", "reward_follow", "reward_overall", "reward_correct"),
    ),
    "gradient norms": ("norm", ("norm_positive", "norm_negative", "grad_norm", "update_norm")),
    "balance factor": ("factor", ("balance_factor",)),
    "entropy, KL": ("nats a token", ("entropy", "kl")),
    "sampler gap": ("nats a token", ("sampler_gap",)),
    "shares": (
        "share of rollouts",
        ("zero_signal_share", "truncated_share", "clip_share", "finished_thinking_share"),
    ),
    "length": ("tokens", ("length",)),
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
SPARSE = 60  # so few points are drawn as points too


def training(chosen: Chosen | None) -> None:
    """Curves of the chosen run's pretraining, and of others beside it."""
    st.title("Training")
    lines = _compared(chosen, "pretrain")
    names = frame.ask(queries.metric_names, list(lines)) if lines else []
    if not names:
        frame.nothing("No training metrics in this run yet.")
        return
    first = [name for name in FIRST if name in names]
    shown = st.multiselect("Metrics", names, default=first[:4] or names[:4], key="metrics")
    smooth, logarithmic = _how("training", 0.6)
    _charts({name: (unit_of(name), (name,)) for name in shown}, lines, smooth, logarithmic)


def reinforcement(chosen: Chosen | None) -> None:
    """Health of the three reinforcement stages."""
    st.title("Reinforcement")
    there = [stage for stage in REINFORCED if chosen and chosen.executions(stage)]
    if not there:
        frame.nothing("No reinforcement stage in this run yet.")
        return
    stage = st.segmented_control("Stage", there, default=there[0], key="reinforced") or there[0]
    lines = _compared(chosen, stage)
    names = set(frame.ask(queries.metric_names, list(lines)))
    _judge(list(lines))
    smooth, logarithmic = _how("reinforcement", 0.0)
    groups = {title: (unit, tuple(n for n in some if n in names)) for title, (unit, some) in HEALTH.items()}
    _charts({title: one for title, one in groups.items() if one[1]}, lines, smooth, logarithmic)


def unit_of(name: str) -> str:
    """What the vertical axis of a metric says; its own name where no unit is known."""
    return UNITS.get(name) or UNITS.get(name.removeprefix("validation_")) or name


def _how(page: str, smoothing: float) -> tuple[float, bool]:
    left, right = st.columns([3, 1], vertical_alignment="bottom")
    told = "each point is so much of the one before it; what was measured stays behind it, pale"
    smooth = left.slider("Smoothing", 0.0, 0.99, smoothing, help=told, key=f"smooth-{page}")
    told = "a chart with values of zero or below stays linear"
    return smooth, right.toggle("Logarithmic", value=False, help=told, key=f"log-{page}")


def _judge(executions: list[str]) -> None:
    """Says so where a stand-in judged, and how far its scores tell right from wrong."""
    for row in frame.ask(queries.made, executions):
        facts = json.loads(row["facts"])
        judge = facts.get("judge") or {}
        if row["kind"] == "checkpoint" and judge.get("stand_in"):
            auc = (facts.get("calibration") or {}).get("auc", {}).get("overall")
            near = f" Of a right and a wrong answer it prefers the right one with probability {auc:.2f}." if auc else ""
            st.warning(f"Stand-in: {frame.quoted(str(judge.get('model')))} is the judge, not the paper's.{near}")


def _compared(chosen: Chosen | None, stage: str) -> dict[str, str]:
    """Execution -> what its line is called: of the chosen run, and of those picked to compare with."""
    if chosen is None:
        return {}
    titles = {run: title for run, title in frame.run_titles().items() if run != chosen.run}
    picked = st.multiselect("Compare with", list(titles), format_func=lambda run: titles.get(run, run), key="compared")
    lines = {execution: "this run" for execution in chosen.executions(stage)}
    for run in (run for run in picked if run in titles):
        theirs = Chosen(run, frame.ask(queries.stages, run))
        lines |= {execution: titles[run] for execution in theirs.executions(stage) if execution not in lines}
    return lines


def _charts(
    groups: dict[str, tuple[str, Sequence[str]]], lines: dict[str, str], smooth: float, logarithmic: bool
) -> None:
    names = sorted({name for _, some in groups.values() for name in some})
    rows = frame.ask(queries.curves, list(lines), names) if names else []
    columns = st.columns(2, gap="large")
    drawn = 0
    for title, (unit, some) in groups.items():
        mine = [row for row in rows if row["name"] in some]
        if mine:
            with columns[drawn % 2]:
                st.markdown(f"##### {frame.quoted(title)}")
                st.altair_chart(chart(mine, lines, smooth, logarithmic, unit), width="stretch")
            drawn += 1


def chart(
    rows: Sequence[Row], lines: dict[str, str], smooth: float, logarithmic: bool = False, unit: str = ""
) -> alt.LayerChart:
    """A line for each execution, metric and source; thinned points keep their extremes as a band."""
    table = pd.DataFrame(rows)
    runs, names, sources = (table[column].nunique() > 1 for column in ("execution", "name", "source"))
    table["line"] = [_line_name(row, lines, runs, names, sources) for row in rows]
    table["smooth"] = table.groupby("line")["value"].transform(lambda v: v.ewm(alpha=1.0 - smooth).mean())
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
    line = base.mark_line(point=len(table) / table["line"].nunique() <= SPARSE).encode(
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


def _line_name(row: Row, lines: dict[str, str], runs: bool, names: bool, sources: bool) -> str:
    """As much of run, metric and source as tells the lines of a chart apart; `runs` etc.: there are several."""
    source = row["source"] or ("all sources" if sources and not names else "")
    parts = [lines[row["execution"]] if runs else "", row["name"] if names else "", source if sources else ""]
    return " · ".join(part for part in parts if part) or row["name"]
