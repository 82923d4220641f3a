"""Line charts of metrics with smoothing, a choice of axes, and links from a point to the texts of its step."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import pandas as pd
import streamlit as st
from markupsafe import Markup

from nautile.common.metrics import metric
from nautile.common.text import size
from nautile.flows.dashboard import cards, figures, queries, shared
from nautile.flows.dashboard.figures import Chart, layer, nominal, quantitative
from nautile.flows.dashboard.shared import ChosenRun
from nautile.flows.run_state import STEPS
from nautile.store.catalog import CatalogRow
from nautile.tasks.engine.stage import declared, stages_with

FEW_POINTS = 60  # a curve with at most this many points also shows the points
SMOOTHED_FROM = 50  # minimum points for a moving average, which hides more than it shows with fewer
SMOOTHING = 0.6  # TensorBoard's default
# Metrics that are shown by default, if present: first those of RL, then those of pretraining.
MAIN = (
    *("reward", "solve_rate", "guard_accuracy", "kl"),
    *("loss", "validation_loss", "bits_per_byte", "learning_rate"),
)
AT_FIRST = 4
AXES = ("step", "tokens", "time")
_HOURS_FROM = 3 * 3600.0  # seconds; a shorter time axis is in minutes


@dataclass(frozen=True)
class Line:
    """An execution in the charts: its name in the legend, and the run and step of its texts."""

    name: str
    run: str
    label: str


@dataclass(frozen=True)
class Display:
    """Display settings of the curves, as chosen on the page."""

    smoothing: float = 0.0
    logarithmic: bool = False
    axis: str = "step"


def settings(tokens: bool) -> Display:
    """Draw the display controls, which are bound to the page's address. `tokens`: offer an axis of tokens."""
    left, middle, right = st.columns([3, 2, 1], vertical_alignment="bottom")
    smoothing_help = (
        f"Exponential moving average; the measured curve stays visible behind it. Curves of fewer than {SMOOTHED_FROM} "
        "points, schedules, counts and validation are never smoothed."
    )
    smoothing = left.slider(
        "Smoothing", 0.0, 0.99, SMOOTHING, help=smoothing_help, key="smoothing", bind="query-params"
    )
    axes = [name for name in AXES if tokens or name != "tokens"]
    axis = middle.segmented_control("Horizontal axis", axes, default="step", key="axis", bind="query-params") or "step"
    scale_help = "Charts with values of zero or below stay linear."
    logarithmic = right.toggle("Logarithmic", value=False, help=scale_help, key="log", bind="query-params")
    return Display(smoothing, logarithmic, axis)


def choose_metrics(names: Sequence[str], key: str) -> list[str]:
    """The metrics picked on the page, by default the main ones: a browser takes long to draw all."""
    first = [name for name in MAIN if name in names][:AT_FIRST] or list(names[:AT_FIRST])
    titles = {name: metric(name).title for name in names}
    return st.multiselect(
        "Metrics", list(names), default=first, format_func=lambda name: titles.get(name, name), key=key
    )


def draw(
    charts: Mapping[str, Sequence[str]],
    lines: Mapping[str, Line],
    display: Display,
    link: Callable[[Line], str] | None = None,
    tokens: Mapping[str, float] | None = None,
) -> None:
    """Draw a table of last values, then the charts with points in two columns. Constant metrics are listed in a line.

    `charts`: title -> metrics of one unit, which share a scale; a single metric has its title from the glossary.
    `link`: line -> address of its texts; a click on a point opens those of its step.
    """
    names = list(dict.fromkeys(name for metrics in charts.values() for name in metrics))
    rows = shared.query(queries.CURVES, list(lines), names, queries.POINTS) if names else []
    if rows:
        cards.show([last_values(rows, names, lines)])  # read before a browser has drawn the first chart
    columns = st.columns(2, gap="large")
    constant, chart_count = [], 0
    for title, metrics in charts.items():
        chart_rows = [row for row in rows if row["name"] in metrics]
        if not chart_rows:
            continue
        # A learning rate that never changes fills no chart: it is a sentence below.
        if len(chart_rows) > 1 and len({(row["low"], row["high"]) for row in chart_rows}) == 1:
            constant.append(f"{metric(metrics[0]).title} {chart_rows[0]['value']:.4g}")
            continue
        with columns[chart_count % 2]:
            entries = {row["name"]: metric(row["name"]) for row in chart_rows}
            heading = title if len(entries) > 1 else next(iter(entries.values())).title
            helps = [
                f"**{shared.escaped(entry.title)}** ({shared.escaped(name)}): {entry.help}"
                for name, entry in entries.items()
                if entry.what
            ]
            st.markdown(f"##### {shared.escaped(heading)}", help="  \n".join(helps) or None)
            figure = chart(chart_rows, lines, display, link, tokens or {})
            # The last row of each line stays. Screen readers get these numbers in place of the picture.
            last = {(row["execution"], row["name"], row["source"]): row for row in chart_rows}
            ends = [f"{metric(row['name']).title} {row['source']} {row['value']:.4g}" for row in last.values()]
            alt = f"{heading} to step {max(row['step'] for row in chart_rows):,}. Last: {'; '.join(ends[:6])}."
            figure.show(alt)
        chart_count += 1
    if constant:
        st.caption(shared.escaped("The same at every step: " + "; ".join(constant) + "."))


def last_values(rows: Sequence[CatalogRow], names: Sequence[str], lines: Mapping[str, Line]) -> Markup:
    """A table with a row per execution: last, lowest and highest value of its metrics, over all sources."""
    measured = {row["name"] for row in rows}
    entries = {name: metric(name) for name in names if name in measured}
    body = []
    for execution, line in lines.items():
        cells: list[str] = [line.name]
        for name, entry in entries.items():
            points = [row for row in rows if row["execution"] == execution and row["name"] == name]
            # Over all sources (data sets, workers), where it was measured.
            whole = [row for row in points if not row["source"]]
            if not points:
                cells.append("")
                continue
            low, high = min(row["low"] for row in points), max(row["high"] for row in points)
            last = _value(whole[-1]["value"], entry.unit) if whole else "by source"
            same = whole and low == high
            cells.append(last if same else f"{last} ({_value(low, entry.unit)} to {_value(high, entry.unit)})")
        if any(cells[1:]):
            body.append(cells)
    return cards.table(["last (lowest to highest)", *(entry.title for entry in entries.values())], body)


def _value(value: float, unit: str) -> str:
    if unit == "share":
        return f"{value:.1%}"
    return size(value) if unit == "bytes" else f"{value:.4g}"


def chart(
    rows: Sequence[CatalogRow],
    lines: Mapping[str, Line],
    display: Display = Display(),
    link: Callable[[Line], str] | None = None,
    tokens: Mapping[str, float] | None = None,
) -> Chart:
    """A chart with a line per execution, metric and source. A band shows the extremes of merged points."""
    table = pd.DataFrame(rows)
    runs, names, sources = (table[column].nunique() > 1 for column in ("execution", "name", "source"))
    titles = []  # run, metric and source, as far as the chart has several of them
    for row in rows:
        source = row["source"] or ("all sources" if sources and not names else "")
        title = metric(row["name"]).title
        parts = [lines[row["execution"]].name if runs else "", title if names else "", source if sources else ""]
        titles.append(" · ".join(part for part in parts if part) or title)
    table["line"] = titles
    table["x"], x_title = _positions(table, display.axis, tokens or {})
    # `adjust=True`, pandas' default, corrects the bias of the first points, as TensorBoard does.
    table["smooth"] = table.groupby("line", group_keys=False)["value"].transform(
        lambda values: values.ewm(alpha=1.0 - display.smoothing).mean() if len(values) >= SMOOTHED_FROM else values
    )
    entry = metric(rows[0]["name"])
    if not entry.smooth or not display.smoothing:
        table["smooth"] = table["value"]
    if link is not None:
        addresses = {execution: f"{link(lines[execution])}&step=" for execution in set(table["execution"])}
        table["link"] = table["execution"].map(addresses) + table["step"].astype(str)
    return _layers(table, x_title, entry.unit, display, runs)


def _positions(table: pd.DataFrame, axis: str, tokens: Mapping[str, float]) -> tuple[pd.Series, str]:
    """The x positions of all points, and the title of the axis."""
    # Only if the factor is known for all lines; else two lines would have two meanings of the axis.
    if axis == "tokens" and set(table["execution"]) <= tokens.keys():
        return table["step"] * table["execution"].map(tokens), "tokens"
    if axis == "time":
        seconds = table["at"] - table.groupby("execution")["at"].transform("min")
        long = seconds.max() > _HOURS_FROM
        return seconds / (3600 if long else 60), f"{'hours' if long else 'minutes'} since the first point"
    return table["step"], "step"


def _layers(table: pd.DataFrame, x_title: str, unit: str, display: Display, runs: bool) -> Chart:
    """The layers of a chart: band of extremes, measured curve, smoothed curve, points with tooltips and links."""
    # One value of zero would make a logarithmic chart empty without a word.
    positive = bool((table["low"] > 0).all())
    scale = {"type": "log" if display.logarithmic and positive else "linear", "zero": False}
    form = "~%" if unit == "share" else ".3~s" if unit == "bytes" else ".4~g"
    values = {"scale": scale, "axis": {"title": unit or None, "format": form, "titleLimit": 240}}
    whole = figures.WHOLE if x_title == "step" else {"format": "~s"}
    x = quantitative("x", axis={"title": x_title, "labelOverlap": True, **whole}, scale={"nice": False})
    legend = {**figures.BELOW, "symbolType": "stroke", "columns": 1 if runs else 2, "labelLimit": 420}
    count = table["line"].nunique()
    several = count > 1
    color = nominal("line", scale=figures.COLOURS, legend={**legend, "symbolOpacity": 1} if several else None)
    base = {"x": x, "color": color, "tooltip": {"value": None}}
    y = quantitative("smooth", **values)
    # Built from the back to the front: the band and the faint measured curve are inserted below the line.
    layers = [{**layer("line", **base, y=y), "params": [figures.ZOOM]}]
    if (table["smooth"] != table["value"]).any():
        faint = {"type": "line", "opacity": 0.25, "strokeWidth": 1}
        layers.insert(0, layer(faint, **base, y=quantitative("value", **values)))
    if (table["low"] != table["high"]).any():
        band = {"type": "area", "opacity": 0.15}
        layers.insert(0, layer(band, **base, y=quantitative("low", **values), y2={"field": "high"}))
    few = len(table) / table["line"].nunique() <= FEW_POINTS
    tooltip = [
        nominal("line"),
        quantitative("step", format=",d"),
        quantitative("value", title=f"measured, {unit}" if unit else "measured", format=".5~g"),
        quantitative("smooth", title="smoothed", format=".5~g"),
        quantitative("points", title="points in it", format=",d"),
    ]
    # Invisible points still catch the mouse: they carry the tooltip and the link of a long curve.
    points = {"type": "point", "filled": True, "size": 30 if few else 60, "opacity": 1 if few else 0}
    linked = {"href": nominal("link")} if "link" in table else {}
    layers.append(layer(points, **base | {"tooltip": tooltip}, y=y, **linked))
    # The height is of the curves and the legend together, so a longer legend must not take it from the curves.
    legend_rows = math.ceil(count / legend["columns"]) if several else 0
    return Chart(table, {"layer": layers, "height": 300 + figures.LEGEND_ROW * legend_rows})


def training(chosen: ChosenRun | None) -> None:
    """Draw the curves of a stage that is no reinforcement, pretraining first, and of other runs to compare with."""
    st.title("Training")
    stage = _choose_stage(chosen, "training")
    lines = _compared_lines(chosen, stage) if stage else {}
    names = _metric_names(lines)
    if chosen is None or stage is None or not names:
        st.caption("No training metrics in this run yet.")
        return
    metrics = choose_metrics(names, "metrics")
    # Tokens per training step, of those whose speed and step time were measured.
    tokens = {row["execution"]: row["tokens"] for row in shared.query(queries.TOKENS_A_STEP, list(lines))}
    display = settings(bool(lines) and lines.keys() <= tokens.keys())
    _links(chosen, stage, {"Samples": "samples", "Log": "logs", "Memory and cores": "system"})
    draw(
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
    if rewards := shared.rewards_of(list(lines)):
        st.caption(rewards)
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
    display = settings(tokens=False)
    _links(chosen, described.name, {"Rollouts": "rollouts", "Log": "logs", "Memory and cores": "system"})

    def rollouts(line: Line) -> str:
        return shared.page_link("rollouts", run=line.run, stage=line.label)

    for question in [question for question in questions if question in picked] or questions[:1]:
        st.subheader(question)
        draw(measured[question], lines, display, rollouts if "rollouts" in described.outputs else None)


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
    for row, facts in shared.facts_of(executions):
        if row["kind"] == "checkpoint" and shared.nested(facts, "judge", "stand_in"):
            auc, model = shared.nested(facts, "calibration", "auc", "overall"), shared.nested(facts, "judge", "model")
            measured = isinstance(auc, (int, float))
            accuracy = f" It prefers a right answer to a wrong one with probability {auc:.2f}." if measured else ""
            st.warning(f"Stand-in: {shared.escaped(str(model))} is the judge, not the paper's.{accuracy}")


def _compared_lines(chosen: ChosenRun | None, stage: str) -> dict[str, Line]:
    """Execution -> its line, for the chosen run and the runs picked for comparison."""
    if chosen is None:
        return {}
    wanted = [*st.query_params.get_all("compared"), *st.session_state.get("compared", [])]
    titles = {run: title for run, title in shared.offered_runs("compared", wanted).items() if run != chosen.run}
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
