"""The data card's plots as inline SVG, by matplotlib: the same bytes for the same numbers."""

import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tasks.report_figures import inline

_COLOURS = ("#1f5f8b", "#c4572e", "#3f7d4e", "#7a5195", "#8a6d1c", "#555555")


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
