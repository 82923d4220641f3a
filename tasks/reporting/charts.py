"""Figures of the report as inline SVG, the same bytes for the same numbers: line charts, and the picture of the run."""

import io
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

Points = Sequence[tuple[float, float]]

MOST_POINTS = 300
_COLOURS = ("#1f5f8b", "#c4572e", "#3f7d4e", "#7a5195", "#8a6d1c", "#555555")
_BOX_W, _BOX_H, _GAP_X, _GAP_Y = 152, 46, 34, 20


def line_chart(
    title: str, series: Mapping[str, Points], y_label: str = "", log_y: bool = False, x_label: str = "step"
) -> str:
    """An `<svg>` of the series over their steps. Long ones are averaged down to 300 points; empty ones are left out."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib.figure import Figure

    drawn = {name: thinned(points) for name, points in series.items() if points}
    with matplotlib.rc_context({"svg.hashsalt": title, "svg.fonttype": "none", "font.size": 9, "path.simplify": True}):
        figure = Figure(figsize=(4.6, 2.7), layout="constrained")
        axes = figure.subplots()
        for colour, (name, points) in zip(_COLOURS * len(drawn), drawn.items(), strict=False):
            steps, values = zip(*points, strict=True)
            marker = "o" if len(points) < 25 else ""
            axes.plot(steps, values, color=colour, label=name, linewidth=1.3, marker=marker, markersize=3)
        axes.set_title(title, fontsize=10, loc="left")
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        if log_y and all(y > 0 for points in drawn.values() for _, y in points):
            axes.set_yscale("log")
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        if len(drawn) > 1:
            axes.legend(frameon=False, fontsize=8)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return inline(text.getvalue(), title)


def thinned(points: Points, most: int = MOST_POINTS) -> list[tuple[float, float]]:
    """At most `most` points: means of equal stretches, so that noise is smoothed and nothing is picked out."""
    if len(points) <= most:
        return list(points)
    edges = [round(i * len(points) / most) for i in range(most + 1)]
    stretches = [points[a:b] for a, b in itertools.pairwise(edges)]
    return [(sum(x for x, _ in s) / len(s), sum(y for _, y in s) / len(s)) for s in stretches]


def pipeline_picture(boxes: Sequence[tuple[str, str]], arrows: Sequence[tuple[str, str]]) -> str:
    """Boxes (label, second line) joined by arrows (from, to), in columns by how far from the start they are."""
    column = {label: 0 for label, _ in boxes}
    for _ in boxes:  # longest path; the graph is small
        for source, target in arrows:
            column[target] = max(column[target], column[source] + 1)
    rows: dict[int, int] = {}
    at: dict[str, tuple[int, int]] = {}
    for label in sorted(column, key=lambda label: _reach(label, column, arrows)):
        row = rows.get(column[label], 0)
        rows[column[label]] = row + 1
        at[label] = (column[label] * (_BOX_W + _GAP_X) + 4, row * (_BOX_H + _GAP_Y) + 4)
    width = max(x for x, _ in at.values()) + _BOX_W + 8
    height = max(y for _, y in at.values()) + _BOX_H + 8
    parts = [
        f'<svg class="pipeline" viewBox="0 0 {width} {height}" role="img" aria-label="the stages of the run">',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0L8 4L0 8z" fill="#888"/></marker></defs>',
    ]
    for source, target in arrows:
        x1, y1 = at[source][0] + _BOX_W, at[source][1] + _BOX_H // 2
        x2, y2 = at[target][0], at[target][1] + _BOX_H // 2
        bend = x2 - _GAP_X // 2  # level until just before its end, so that a long arrow passes under the boxes between
        curve = f"M{x1} {y1}C{bend} {y1} {bend} {y2} {x2} {y2}"
        parts.append(f'<path d="{curve}" fill="none" stroke="#888" marker-end="url(#tip)"/>')
    for label, second in boxes:
        x, y = at[label]
        parts.append(
            f'<rect x="{x}" y="{y}" width="{_BOX_W}" height="{_BOX_H}" rx="6" fill="#f2f6f8" stroke="#1f5f8b"/>'
        )
        parts.append(f'<text x="{x + 8}" y="{y + 19}" font-size="12" font-weight="600">{escape(label)}</text>')
        parts.append(f'<text x="{x + 8}" y="{y + 36}" font-size="11" fill="#555">{escape(second)}</text>')
    return "".join([*parts, "</svg>"])


def _reach(label: str, column: Mapping[str, int], arrows: Sequence[tuple[str, str]]) -> int:
    """Columns to the nearest reader: what is read next stands on top, what nobody reads at the bottom."""
    return min((column[target] - column[label] for source, target in arrows if source == label), default=len(column))


def inline(svg: str, title: str) -> str:
    """Without the XML prolog, and with identifiers of its own, for several figures share the page."""
    body = svg[svg.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    prefix = re.sub(r"\W+", "", title.lower()) or "figure"
    body = re.sub(r'id="([^"]+)"', rf'id="{prefix}-\1"', body)
    return re.sub(r'(url\(#|href="#)', rf"\1{prefix}-", body)


@dataclass(frozen=True)
class Bars:
    """Counts: `series` maps a name to counts by label. `order`: the labels; numbers on a scale where `numeric`.

    `lines`: marks on that scale, each with what it stands for.
    """

    title: str
    series: Mapping[str, Mapping[str, float]]
    order: tuple[str, ...]
    x_label: str
    y_label: str
    numeric: float = 0.0  # the width of a bin, 0 for labels
    lines: tuple[tuple[float, str], ...] = ()


@dataclass(frozen=True)
class Curve:
    """Values over time, in seconds from the first."""

    title: str
    points: tuple[tuple[float, float], ...]
    y_label: str


def bars_svg(bars: Bars) -> str:
    """An `<svg>` of grouped bars: upright on a scale, lying with their labels at the side otherwise."""
    figure, axes = _figure(bars.title, 2.7 if bars.numeric else max(1.4, 0.6 + 0.3 * len(bars.order)))
    for number, (colour, (name, counts)) in enumerate(zip(_COLOURS, bars.series.items(), strict=False)):
        values = [counts.get(label, 0) for label in bars.order]
        if bars.numeric:
            places = [float(label) + bars.numeric / 2 for label in bars.order]
            axes.bar(places, values, bars.numeric * 0.92, color=colour, label=name, alpha=0.85)
        else:
            places = [at + number * 0.8 / len(bars.series) for at in range(len(bars.order))]
            axes.barh(places, values, 0.8 / len(bars.series), color=colour, label=name)
    if bars.numeric:
        for place, label in bars.lines:
            axes.axvline(place, color="#555555", linewidth=1, linestyle="--")
            axes.annotate(label, (place, 0.97), xycoords=("data", "axes fraction"), rotation=90, fontsize=7, va="top")
        axes.set_xlabel(bars.x_label)
        axes.set_ylabel(bars.y_label)
    else:
        axes.set_yticks(range(len(bars.order)), [_plain(label) for label in bars.order])
        axes.invert_yaxis()
        axes.set_xlabel(bars.y_label)
    if len(bars.series) > 1:
        axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return _drawn(figure, bars.title)


def curve_svg(curve: Curve) -> str:
    """An `<svg>` of one line over the time from its first point."""
    figure, axes = _figure(curve.title, 2.7)
    if curve.points:
        start = curve.points[0][0]
        seconds = [when - start for when, _ in curve.points]
        unit, name = (3600, "hours") if seconds[-1] > 7200 else (60, "minutes") if seconds[-1] > 120 else (1, "seconds")
        marker = "o" if len(seconds) < 25 else ""
        values = [value for _, value in curve.points]
        axes.plot([one / unit for one in seconds], values, color=_COLOURS[0], marker=marker, markersize=3)
        axes.set_xlabel(name)
    axes.set_ylabel(curve.y_label)
    axes.grid(alpha=0.25, linewidth=0.6)
    return _drawn(figure, curve.title)


def _figure(title: str, height: float) -> Any:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6, height), layout="constrained")
    axes = figure.subplots()
    axes.set_title(_plain(title), fontsize=10, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
    return figure, axes


def _drawn(figure: Any, title: str) -> str:
    import matplotlib

    text = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": title, "svg.fonttype": "none"}):
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return inline(text.getvalue(), title)


def _plain(text: str) -> str:
    """Without the dollar signs that matplotlib would read as mathematics."""
    return text.replace("$", r"\$")
