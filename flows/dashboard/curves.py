"""Curves: training with smoothing and comparison between runs, and the health of the reinforcement stages."""

from collections.abc import Sequence

import altair as alt
import pandas as pd
import streamlit as st

from flows.dashboard import frame, queries
from flows.dashboard.frame import Chosen
from flows.dashboard.queries import Row

FIRST = ("loss", "validation_loss", "bits_per_byte", "learning_rate", "gradient_norm", "tokens_per_second")
# What an RL practitioner looks at first, grouped into charts of one axis.
HEALTH = {
    "reward": ("reward", "reward_deviation", "guard_accuracy", "solve_rate"),
    "reward by part": ("reward_reason", "reward_answer", "reward_follow", "reward_correct"),
    "gradient norms": ("norm_positive", "norm_negative", "grad_norm", "update_norm"),
    "balance factor": ("balance_factor",),
    "entropy, KL": ("entropy", "kl"),
    "sampler gap": ("sampler_gap",),
    "shares": ("zero_signal_share", "truncated_share", "clip_share", "finished_thinking_share"),
    "length": ("length",),
    "unscored": ("unscored",),
    "tokens a second": ("rollout_tokens_per_second", "update_tokens_per_second"),
    "loss": ("loss",),
}
REINFORCED = ("align", "reason", "self_distill")


def training(chosen: Chosen | None) -> None:
    """Curves of the chosen run's pretraining, and of others beside it."""
    st.title("Training")
    lines = _compared(chosen, "pretrain")
    names = frame.ask(queries.metric_names, list(lines)) if lines else []
    if not names:
        frame.nothing("No training metrics in this run yet.")
        return
    first = [name for name in FIRST if name in names]
    shown = st.multiselect("Metrics", names, default=first[:4] or names[:4])
    smooth = st.slider("Smoothing", 0.0, 0.99, 0.6, help="each point is so much of the one before it; 0: as measured")
    logarithmic = st.toggle("Logarithmic", value=False)
    if shown:
        _charts({name: (name,) for name in shown}, lines, smooth, logarithmic)


def reinforcement(chosen: Chosen | None) -> None:
    """Health of the three reinforcement stages."""
    st.title("Reinforcement")
    there = [stage for stage in REINFORCED if chosen and chosen.executions(stage)]
    if not there:
        frame.nothing("No reinforcement stage in this run yet.")
        return
    stage = st.segmented_control("Stage", there, default=there[0]) or there[0]
    lines = _compared(chosen, stage)
    names = set(frame.ask(queries.metric_names, list(lines)))
    smooth = st.slider("Smoothing", 0.0, 0.99, 0.0, help="each point is so much of the one before it; 0: as measured")
    groups = {title: tuple(n for n in wanted if n in names) for title, wanted in HEALTH.items()}
    _charts({title: some for title, some in groups.items() if some}, lines, smooth, logarithmic=False)


def _compared(chosen: Chosen | None, stage: str) -> dict[str, str]:
    """Execution -> what its line is called: of the chosen run, and of those picked to compare with."""
    if chosen is None:
        return {}
    others = [row for row in frame.ask(queries.runs) if row["run"] != chosen.run]
    titles = {row["run"]: frame.run_title(row) for row in others}
    picked = st.multiselect("Compare with", list(titles), format_func=titles.__getitem__, key=f"with-{stage}")
    lines = {execution: "this run" for execution in chosen.executions(stage)}
    for run in picked:
        theirs = Chosen(run, frame.ask(queries.stages, run))
        lines |= {execution: titles[run] for execution in theirs.executions(stage) if execution not in lines}
    return lines


def _charts(groups: dict[str, Sequence[str]], lines: dict[str, str], smooth: float, logarithmic: bool) -> None:
    names = sorted({name for some in groups.values() for name in some})
    rows = frame.ask(queries.curves, list(lines), names)
    columns = st.columns(2)
    for place, (title, some) in enumerate(groups.items()):
        mine = [row for row in rows if row["name"] in some]
        if mine:
            with columns[place % 2]:
                st.subheader(title)
                st.altair_chart(chart(mine, lines, smooth, logarithmic), width="stretch")


def chart(rows: Sequence[Row], lines: dict[str, str], smooth: float, logarithmic: bool = False) -> alt.LayerChart:
    """A line for each execution, metric and source; thinned points keep their extremes as a band."""
    table = pd.DataFrame(rows)
    runs, names = table["execution"].nunique() > 1, table["name"].nunique() > 1
    table["line"] = [_line_name(row, lines, runs, names) for row in rows]
    table["smooth"] = table.groupby("line")["value"].transform(lambda v: v.ewm(alpha=1.0 - smooth).mean())
    scale = alt.Scale(type="log" if logarithmic and (table["low"] > 0).all() else "linear", zero=False)
    several = alt.Legend(orient="bottom", title=None, symbolType="stroke") if table["line"].nunique() > 1 else None
    base = alt.Chart(table).encode(x=alt.X("step:Q", title=None))
    band = base.mark_area(opacity=0.15).encode(
        color=alt.Color("line:N", legend=None),
        y=alt.Y("low:Q", scale=scale, title=None),
        y2=alt.Y2("high:Q"),
        tooltip=alt.value(None),
    )
    line = base.mark_line().encode(
        color=alt.Color("line:N", legend=several),
        y=alt.Y("smooth:Q", scale=scale, title=None),
        tooltip=["line:N", "step:Q", alt.Tooltip("value:Q", format=".5g"), alt.Tooltip("points:Q")],
    )
    layers = (band + line).resolve_legend(color="independent")
    return layers.properties(height=280).interactive(bind_y=False)


def _line_name(row: Row, lines: dict[str, str], runs: bool, names: bool) -> str:
    """As much of run, metric and source as tells the lines of a chart apart; `runs`, `names`: there are several."""
    parts = [lines[row["execution"]] if runs else "", row["name"] if names else "", row["source"]]
    return " · ".join(part for part in parts if part) or row["name"]
