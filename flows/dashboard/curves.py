"""Line charts of metrics with smoothing, a choice of axes, and links from a point to the texts of its step."""

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import pandas as pd
import streamlit as st
from markupsafe import Markup

from nautile.common.csv_lines import csv_line
from nautile.common.metrics import metric
from nautile.common.text import counted, size, visible
from nautile.configs.changes import differences
from nautile.configs.keys import classified_fields
from nautile.evals.scoring.over_seeds import summary
from nautile.flows.dashboard import cards, figures, queries, shared
from nautile.flows.dashboard.figures import Chart, layer, nominal, quantitative
from nautile.flows.dashboard.shared import ChosenRun
from nautile.flows.run_state import CURVES, POINTS, STEPS, warnings_of
from nautile.store.catalog import CatalogRow
from nautile.tasks.engine.stage import declared, stages_with

FEW_POINTS = 60  # a curve with at most this many points also shows the points
SMOOTHED_FROM = 50  # minimum points for a moving average, which hides more than it shows with fewer
SMOOTHING = 0.6  # TensorBoard's default
LONG_NAME = 20  # characters in a legend
# Metrics that are shown by default, if present: first those of RL, then those of pretraining.
MAIN = (
    *("reward", "solve_rate", "guard_accuracy", "kl"),
    *("loss", "validation_loss", "bits_per_byte", "learning_rate"),
)
AT_FIRST = 4
AXES = ("step", "tokens", "time")
DIRECTIONS = ("vertical", "horizontal")
_HOURS_FROM = 3 * 3600.0  # seconds; a shorter time axis is in minutes


SPREAD = (  # what a chart of groups shows
    "Each line is the mean over the runs of a group, and the band one standard deviation between them to both sides. "
    "A step is shown where all of them have measured it."
)
MOST_ROWS = 1_000_000  # rows of a CSV file, more than a spreadsheet opens


@dataclass(frozen=True)
class Line:
    """An execution in the charts: its name in the legend, the run and step of its texts, and its group."""

    name: str
    run: str
    label: str
    group: str = ""  # the value of the setting by which runs are grouped


@dataclass(frozen=True)
class Display:
    """Display settings of the curves, as chosen on the page."""

    smoothing: float = 0.0
    logarithmic: Sequence[str] = ()  # of DIRECTIONS
    axis: str = "step"


def settings(tokens: bool) -> Display:
    """Draw the display controls, which are bound to the page's address. `tokens`: offer an axis of tokens."""
    left, middle, right = st.columns([3, 2, 2], vertical_alignment="bottom")
    smoothing_help = (
        f"Exponential moving average; the measured curve stays visible behind it. Curves of fewer than {SMOOTHED_FROM} "
        "points, schedules, counts and validation are never smoothed."
    )
    smoothing = left.slider(
        "Smoothing", 0.0, 0.99, SMOOTHING, help=smoothing_help, key="smoothing", bind="query-params"
    )
    axes = [name for name in AXES if tokens or name != "tokens"]
    axis = middle.segmented_control("Horizontal axis", axes, default="step", key="axis", bind="query-params") or "step"
    scale_help = "Vertical: charts with values of zero or below stay linear. Horizontal: the point at zero is left out."
    logarithmic = right.segmented_control(
        "Logarithmic", DIRECTIONS, selection_mode="multi", help=scale_help, key="log", bind="query-params"
    )
    return Display(smoothing, logarithmic, axis)


def choose_metrics(names: Sequence[str], key: str) -> list[str]:
    """The metrics picked on the page, by default the main ones: a browser takes long to draw all."""
    first = [name for name in MAIN if name in names][:AT_FIRST] or list(names[:AT_FIRST])
    titles = {name: metric(name).title for name in names}
    return st.multiselect(
        "Metrics",
        list(names),
        default=first,
        format_func=lambda name: titles.get(name, name),
        key=key,
        bind="query-params",
    )


def draw(
    charts: Mapping[str, Sequence[str]],
    lines: Mapping[str, Line],
    display: Display,
    link: Callable[[Line], str] | None = None,
    tokens: Mapping[str, float] | None = None,
) -> None:
    """Draw a table of last values, then the charts with points in two columns. Constant metrics are listed in a line.

    Lines with a group are drawn as one line for each group (`grouped`).
    `charts`: title -> metrics of one unit, which share a scale; a single metric has its title from the glossary.
    `link`: line -> address of its texts; a click on a point opens those of its step.
    """
    names = list(dict.fromkeys(name for metrics in charts.values() for name in metrics))
    executions = list(lines)
    rows = shared.query(CURVES, executions, names, POINTS) if names else []
    if groups := any(line.group for line in lines.values()):
        rows, lines = grouped(rows, lines)
        link, tokens = None, None
        st.caption(SPREAD)
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
            if not groups:
                _warn(chart_rows, lines)
            figure = chart(chart_rows, lines, display, link, tokens or {}, groups)
            # The last row of each line stays. Screen readers get these numbers in place of the picture.
            last = {(row["execution"], row["name"], row["source"]): row for row in chart_rows}
            several = lines if len({row["execution"] for row in last.values()}) > 1 else {}
            ends = [
                " ".join(filter(None, (several[row["execution"]].name if several else "", metric(row["name"]).title)))
                + f" {row['source']} {row['value']:.4g}".replace("  ", " ")
                for row in last.values()
            ]
            alt = f"{heading} to step {max(row['step'] for row in chart_rows):,}. Last: {'; '.join(ends[:6])}."
            if "transform" in figure.spec:
                figure.show_with_legend(alt, f"chart-{'-'.join(names)}-{title}")
            else:
                figure.show(alt)
        chart_count += 1
    if constant:
        st.caption(shared.escaped("The same at every step: " + "; ".join(constant) + "."))
    if rows:
        # Read when it is clicked: it has every point, the charts one of each bucket of steps.
        st.download_button(
            "All points as CSV",
            data=lambda: csv_of(executions, names),
            file_name="curves.csv",
            mime="text/csv",
            key=f"csv-{'-'.join(names)}",  # a page draws several groups of charts
            help="Each chart has its picture as PNG, and its table, in the menu at its upper right corner.",
        )


def _warn(rows: Sequence[CatalogRow], lines: Mapping[str, Line]) -> None:
    """Draw the warnings about the curves of one chart; of several runs with the name of each."""
    for execution, found in warnings_of(rows).items():
        name = f"{lines[execution].name}: " if len(lines) > 1 else ""
        for warning in found:
            st.warning(shared.escaped(name + warning.text))


def csv_of(executions: Sequence[str], names: Sequence[str]) -> bytes:
    """All measured points of metrics as a CSV file: run, step of the run, metric, source, step, value, time (UTC)."""
    rows = shared.fetch(queries.MEASURED, list(executions), list(names), MOST_ROWS)
    return "".join([csv_line(rows[0] if rows else []), *(csv_line(row.values()) for row in rows)]).encode()


def grouped(rows: Sequence[CatalogRow], lines: Mapping[str, Line]) -> tuple[list[CatalogRow], dict[str, Line]]:
    """The rows and lines of curves, with one in place of the executions of each group.

    `value` is the mean over the executions, `low` and `high` are a standard deviation below and above (the value where
    there is one execution), `points` counts the executions. Buckets that some execution lacks are left out: the mean
    would jump there.
    """
    values: dict[tuple[str, str, str, float], dict[str, CatalogRow]] = {}
    for row in rows:
        place = (lines[row["execution"]].group, row["name"], row["source"], row["bucket"])
        values.setdefault(place, {})[row["execution"]] = row
    # Of each curve: the executions that have it at all.
    have: dict[tuple[str, str, str], set[str]] = {}
    for (group, name, source, _), own in values.items():
        have.setdefault((group, name, source), set()).update(own)
    merged: list[CatalogRow] = []
    for (group, name, source, bucket), own in values.items():
        if len(own) < len(have[group, name, source]):
            continue
        over = summary({execution: row["value"] for execution, row in own.items()})
        half = over.deviation or 0.0
        step, at = (max(row[column] for row in own.values()) for column in ("step", "at"))
        where = {"execution": group, "name": name, "source": source, "bucket": bucket, "step": step, "at": at}
        spread = {"value": over.mean, "low": over.mean - half, "high": over.mean + half, "points": len(own)}
        merged.append(where | spread)
    merged.sort(key=lambda row: (row["execution"], row["name"], row["source"], row["step"]))
    counts = Counter(line.group for line in lines.values())
    return merged, {
        line.group: Line(f"{line.group} ({counted(counts[line.group], 'run')})", line.group, line.label)
        for line in lines.values()
    }


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
    groups: bool = False,
) -> Chart:
    """A chart with a line per execution, metric and source. A band shows the extremes of merged points.

    Several runs (or `groups` of runs) differ by colour, which stays with a run, and the metrics and sources of one by
    dashes. The legend of several lines hides them (`figures.legend_that_hides`).
    """
    table = pd.DataFrame(rows)
    runs, names, sources = (table[column].nunique() > 1 for column in ("execution", "name", "source"))
    titles = []  # run, metric and source, as far as the chart has several of them
    for row in rows:
        source = row["source"] or ("all sources" if sources and not names else "")
        title = metric(row["name"]).title
        parts = [lines[row["execution"]].name if runs else "", title if names else "", source if sources else ""]
        titles.append(" · ".join(part for part in parts if part) or title)
    table["line"] = titles
    present = set(table["execution"])
    who = named_apart({execution: line for execution, line in lines.items() if execution in present})
    table["who"] = table["execution"].map(who) if runs else table["line"]
    titles_of = (metric(row["name"]).title if names else "" for row in rows)
    sources_of = ((row["source"] or "all sources") if sources else "" for row in rows)
    table["rest"] = [" · ".join(filter(None, pair)) for pair in zip(titles_of, sources_of, strict=True)]
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
    if "horizontal" in display.logarithmic:
        table = table[table["x"] > 0]
    colours: figures.Spec = figures.COLOURS
    if runs:
        own = figures.colours_of([lines[execution].run for execution in who], _colours())
        colours = {"domain": list(who.values()), "range": [own[lines[execution].run] for execution in who]}
    return _layers(table, x_title, entry.unit, display, colours, groups)


@st.cache_resource
def _colours() -> dict[str, int]:
    """Run -> place of its colour, for all sessions of this server."""
    return {}


def named_apart(lines: Mapping[str, Line]) -> dict[str, str]:
    """Execution -> its name in a legend; of two with the same name, with the first digits of the run."""
    names = Counter(line.name for line in lines.values())
    return {
        execution: line.name if names[line.name] == 1 else f"{line.name} · {line.run[:8]}"
        for execution, line in lines.items()
    }


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


def _layers(
    table: pd.DataFrame, x_title: str, unit: str, display: Display, colours: figures.Spec, groups: bool
) -> Chart:
    """The layers of a chart: band of extremes, measured curve, smoothed curve, points with tooltips and links.

    `colours`: the scale of the column `who`.
    """
    # One value of zero would make a logarithmic chart empty without a word.
    positive = bool((table["low"] > 0).all())
    scale = {"type": "log" if "vertical" in display.logarithmic and positive else "linear", "zero": False}
    form = "~%" if unit == "share" else ".3~s" if unit == "bytes" else ".4~g"
    values = {"scale": scale, "axis": {"title": unit or None, "format": form, "titleLimit": 240}}
    whole = figures.WHOLE if x_title == "step" else {"format": "~s"}
    log = "horizontal" in display.logarithmic
    x_scale = {"nice": False, "type": "log" if log else "linear"}
    x = quantitative("x", axis={"title": x_title, "labelOverlap": True, **whole}, scale=x_scale)
    shown = list(dict.fromkeys(table["who"]))
    # Two long names beside each other do not fit on a phone, whose edge would cut the second.
    columns = 1 if "range" in colours or max(map(len, shown)) > LONG_NAME else 2
    legend = {**figures.BELOW, "symbolType": "stroke", "columns": columns, "labelLimit": 420}
    legend["symbolOpacity"] = 1  # else that of the band
    several = len(shown) > 1
    domain = {"domain": shown} | colours
    color = nominal("who", scale=domain, legend=legend if several else None)
    base = {"x": x, "color": color, "detail": nominal("line"), "tooltip": {"value": None}}
    if "range" in colours and table["rest"].nunique() > 1:
        base["strokeDash"] = nominal("rest", legend={**figures.BELOW, "symbolType": "stroke"})
    y = quantitative("smooth", **values)
    # The scale of the colours has all lines: one that is hidden would else leave the legend, and could not come back.
    shows = figures.legend_that_hides(shown)
    # Built from the back to the front: the band and the faint measured curve are inserted below the line.
    layers = [{**layer("line", **base, y=y), "params": [figures.ZOOM, *([shows] if several else [])]}]
    if (table["smooth"] != table["value"]).any():
        faint = {"type": "line", "opacity": 0.25, "strokeWidth": 1}
        layers.insert(0, layer(faint, **base, y=quantitative("value", **values)))
    if (table["low"] != table["high"]).any():
        band = {"type": "area", "opacity": 0.15}
        under = {name: channel for name, channel in base.items() if name != "strokeDash"}
        layers.insert(0, layer(band, **under, y=quantitative("low", **values), y2={"field": "high"}))
    few = len(table) / max(1, table["line"].nunique()) <= FEW_POINTS
    tooltip = [
        nominal("line"),
        quantitative("step", format=",d"),
        quantitative("value", title=f"measured, {unit}" if unit else "measured", format=".5~g"),
        quantitative("smooth", title="smoothed", format=".5~g"),
        quantitative("points", title="runs in it" if groups else "points in it", format=",d"),
    ]
    # Invisible points still catch the mouse: they carry the tooltip and the link of a long curve.
    points = {"type": "point", "filled": True, "size": 30 if few else 60, "opacity": 1 if few else 0}
    linked = {"href": nominal("link")} if "link" in table else {}
    layers.append(layer(points, **base | {"tooltip": tooltip}, y=y, **linked))
    # The height is that of the curves alone: the legend, however long, stands below it.
    spec: figures.Spec = {"layer": layers, "height": 260, "autosize": {"type": "fit-x", "contains": "padding"}}
    spec["padding"] = {"right": 10, "left": 0, "top": 5, "bottom": 5}  # half of the last label is beyond the plot
    if several:
        spec["transform"] = [{"filter": {"param": "shown"}}]
    return Chart(table, spec)


def training(chosen: ChosenRun | None) -> None:
    """Draw the curves of a stage that is no reinforcement, pretraining first, and of other runs to compare with."""
    st.title("Training")
    stage = _choose_stage(chosen, "training")
    lines = _compared_lines(chosen, stage) if stage else {}
    names = metric_names(lines)
    if chosen is None or stage is None or not names:
        shared.nothing_yet(chosen, "No training metrics in this run yet.")
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
        shared.nothing_yet(chosen, "No reinforcement stage in this run yet.")
        return
    lines = _compared_lines(chosen, described.name)
    names = metric_names(lines)
    _warn_of_stand_in_judge(list(lines))
    if rewards := shared.rewards_of(list(lines)):
        st.caption(rewards)
    measured: dict[str, dict[str, list[str]]] = {}
    for curve in described.curves:
        if present := [name for name in curve.metrics if name in names]:
            measured.setdefault(curve.question, {})[curve.title[:1].upper() + curve.title[1:]] = present
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


def metric_names(lines: Mapping[str, Line]) -> list[str]:
    """The metrics of the lines' executions, without those of the machine."""
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
    titles = choose_compared(chosen)
    return lines_of(titles, choose_groups(list(titles)), stage)


def choose_compared(chosen: ChosenRun) -> dict[str, str]:
    """Draw the choice of other runs, which the address keeps; run -> title of the chosen one and of those."""
    requested = shared.runs_in_address("compared")
    wanted = [*requested, *st.session_state.get("compared", [])]
    titles = {run: title for run, title in shared.offered_runs("compared", wanted).items() if run != chosen.run}
    picked = []
    if titles:
        # In the address by id, not bound: titles change with the state of a run.
        picked = st.multiselect(
            "Compare with",
            list(titles),
            [run for run in requested if run in titles],
            format_func=lambda run: titles.get(run, run),
            key="compared",
        )
        if picked != st.query_params.get_all("compared"):
            st.query_params["compared"] = picked
    # A run that was chosen may have disappeared from the list since.
    return {chosen.run: "this run"} | shared.run_names([run for run in picked if run in titles])


def lines_of(titles: Mapping[str, str], groups: Mapping[str, str], stage: str, label: str = "") -> dict[str, Line]:
    """Execution -> its line, of the steps of a stage (or with a label) of runs (id -> title), by their `groups`.

    An execution that several runs share is one line, that of the first.
    """
    lines: dict[str, Line] = {}
    for run, title in titles.items():
        for row in shared.query(STEPS, run):
            own = row["label"] == label if label else row["stage"] == stage
            if own and row["execution"] and row["execution"] not in lines:
                lines[row["execution"]] = Line(title, run, row["label"], groups.get(run, ""))
    return lines


def choose_groups(runs: Sequence[str]) -> dict[str, str]:
    """Draw the choice of a setting to group runs by, where they differ; run -> its value, empty without a choice."""
    if len(runs) < 2:
        return {}
    fields = settings_that_differ(shared.query(queries.WHOLE_SETTINGS, list(runs)))
    field = st.selectbox(
        "Group by",
        [EACH, *fields],
        key="group",
        bind="query-params",
        help="The mean over the runs with the same value of a setting, such as runs that differ in their seed alone.",
    )
    if not field or field == EACH:
        return {}
    rows = shared.query(queries.RUN_SETTINGS, [queries.json_path(field)], list(runs))
    values = {row["run"]: row["chosen"][0] for row in rows}
    return {run: f"{field} {visible(values.get(run) or 'not set', 60)}" for run in runs}


EACH = "each run alone"


def settings_that_differ(rows: Sequence[CatalogRow]) -> list[str]:
    """The fields in which the settings of runs differ, of rows with a column `settings`; fields in a key come first."""
    settings = [json.loads(row["settings"]) | {"name": ""} for row in rows]
    changes = (change for other in settings[1:] for change in differences(settings[0], other))
    fields = dict.fromkeys(change.field for change in changes if _PATH.fullmatch(change.field))
    semantic = set(classified_fields()[0])
    return sorted(fields, key=lambda field: field not in semantic)


_PATH = re.compile(r"[a-z][a-z0-9_]*(\.[a-z0-9_]+)*")  # of a field, which goes into a JSON path
