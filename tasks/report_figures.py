"""Figures of the report as inline SVG, the same bytes for the same numbers: line charts, and the picture of the run."""

import io
import itertools
import re
from collections.abc import Mapping, Sequence
from html import escape

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
