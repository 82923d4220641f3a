"""Render sections as one self-contained HTML page and as Markdown, and a table of results as files.

All text is escaped by the templates or by the functions for tables and figures. The page loads nothing: it has no
external script, font or image, and its content security policy forbids them.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import singledispatch
from itertools import groupby
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from nautile.common.figures import COLOURS, PIXEL, draw
from nautile.common.files import write_json, write_text
from nautile.common.text import fenced
from nautile.evals.tables.results import ResultTable, to_html, to_json, to_markdown
from nautile.evals.tables.svg import table_figure

Points = Sequence[tuple[float, float]]  # (x, y)
TEMPLATES = Path(__file__).parent
MOST_POINTS = 300
_WIDTH, _HEIGHT = 4.6, 2.7  # inches
_BOX_WIDTH, _BOX_HEIGHT, _GAP_X, _GAP_Y = 152, 46, 34, 20  # pixels


@dataclass(frozen=True)
class Paragraph:
    text: str
    see: str = ""  # title of a section to link to, if the report has it


@dataclass(frozen=True)
class BulletList:
    items: tuple[str, ...]


@dataclass(frozen=True)
class Pipeline:
    """The steps of a run as boxes (label, second line) joined by arrows (from, to)."""

    boxes: tuple[tuple[str, str], ...]
    arrows: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class TableFigure:
    """A table of results as a figure: an `<svg>` by `evals.tables.svg`."""

    svg: str


@dataclass(frozen=True)
class LineChart:
    """Values over steps, one line for each name in `series`."""

    title: str
    series: Mapping[str, Points]
    y_label: str
    x_label: str = "step"


@dataclass(frozen=True)
class BarChart:
    """Counts: `series` maps a name to counts by label, `order` has the labels.

    `bin_width` above 0: the labels are numbers, the lower edges of bins on a scale; `lines` are marked positions on
    that scale, each with a label.
    """

    title: str
    series: Mapping[str, Mapping[str, float]]
    order: tuple[str, ...]
    x_label: str
    y_label: str
    bin_width: float = 0.0
    lines: tuple[tuple[float, str], ...] = ()


@dataclass(frozen=True)
class IntervalChart:
    """Values at labels, each with its interval: `series` maps a name to (value, low, high) by label.

    `reference`: values to compare with, in grey. A label without a value has no mark.
    """

    title: str
    order: tuple[str, ...]
    series: Mapping[str, Mapping[str, tuple[float, float, float]]]
    reference: Mapping[str, Mapping[str, float]]
    y_label: str


@dataclass(frozen=True)
class TimeChart:
    """One value over time; `points` are (seconds since the epoch, value)."""

    title: str
    points: tuple[tuple[float, float], ...]
    y_label: str


@dataclass(frozen=True)
class Samples:
    """Texts to read. Rows have `verdict`, `good`, `prompt`, `text` and sometimes `expected`."""

    title: str
    rows: Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class SideBySide:
    """One prompt with the replies of several models.

    Replies have `name`, `verdict`, `good` (None: there is no reply), `reasoning` and `answer`.
    """

    title: str
    prompt: str
    expected: str
    replies: Sequence[Mapping[str, Any]]


ReportBlock = (
    Paragraph
    | BulletList
    | Pipeline
    | TableFigure
    | ResultTable
    | LineChart
    | BarChart
    | IntervalChart
    | TimeChart
    | Samples
    | SideBySide
)


@dataclass(frozen=True)
class ReportSection:
    """A section of a report. `folded`: the page shows only its title until it is opened; print shows open sections."""

    title: str
    blocks: tuple[ReportBlock, ...]
    folded: bool = False


def html_page(title: str, subtitle: str, sections: Sequence[ReportSection]) -> str:
    """Render the HTML page."""
    environment = template_environment(autoescape=True)
    environment.filters |= {"table": lambda table: Markup(to_html(table)), "svg": lambda block: Markup(svg(block))}
    # Numbered: a title may hold characters that an anchor may not.
    anchors = {section.title: f"s{number}" for number, section in enumerate(sections, 1)}
    template = environment.get_template("report.html.j2")
    return template.render(title=title, subtitle=subtitle, sections=sections, anchors=anchors)


def markdown(title: str, subtitle: str, sections: Sequence[ReportSection]) -> str:
    """Render the report as Markdown; a line chart becomes the first, last, lowest and highest value of each line."""
    environment = template_environment(autoescape=False)
    environment.filters |= {"table": to_markdown, "fenced": fenced, "inline_code": _inline_code}
    # Anchors of headings as GitHub and most other renderers generate them.
    anchors = {section.title: section.title.lower().replace(" ", "-") for section in sections}
    template = environment.get_template("report.md.j2")
    text = template.render(title=title, subtitle=subtitle, sections=sections, anchors=anchors)
    return text.rstrip("\n") + "\n"


def write_table(folder: Path, name: str, table: ResultTable) -> None:
    """Write `name`.json, .md, .html and .svg, each atomically."""
    write_json(folder / f"{name}.json", to_json(table))
    write_text(folder / f"{name}.md", to_markdown(table))
    write_text(folder / f"{name}.html", to_html(table))
    write_text(folder / f"{name}.svg", table_figure(table))


def template_environment(autoescape: bool, folder: Path = TEMPLATES, **options: Any) -> Environment:
    """The Jinja environment of all templates of a folder; a name without a value is an error."""
    environment = Environment(
        loader=FileSystemLoader(folder),
        autoescape=autoescape,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        **options,
    )
    environment.filters["runs"] = _group_by_kind
    return environment


def _group_by_kind(blocks: Sequence[ReportBlock]) -> list[tuple[str, list[ReportBlock]]]:
    """Group neighbouring blocks of the same kind (class name), so that charts can share a line."""
    return [(kind, list(group)) for kind, group in groupby(blocks, key=lambda block: type(block).__name__)]


def _inline_code(text: str) -> str:
    return f"`{text.replace('`', chr(39)).replace(chr(10), ' ')}`"


@singledispatch
def svg(block: ReportBlock) -> str:
    """The `<svg>` of a block. Raises `TypeError` for a block that is not a figure."""
    raise TypeError(f"{type(block).__name__} is not a figure")


@svg.register
def _(block: TableFigure) -> str:
    return block.svg


@svg.register
def _(block: LineChart) -> str:
    """Series over steps. Long ones are averaged down to 300 points; empty ones are left out."""
    series = {name: thinned(points) for name, points in block.series.items() if points}

    def paint(figure: Any) -> None:
        axes = _axes(figure, block.title)
        for colour, (name, points) in zip(itertools.cycle(COLOURS), series.items(), strict=False):
            steps, values = zip(*points, strict=True)
            _line(axes, steps, values, color=colour, label=name)
        axes.set_xlabel(block.x_label)
        axes.set_ylabel(block.y_label)
        axes.xaxis.get_major_locator().set_params(integer=True)  # no ticks at fractions of a step
        if len(series) > 1:
            axes.legend(frameon=False, fontsize=8)

    return draw(block.title, (_WIDTH, _HEIGHT), paint)


def thinned(points: Points) -> list[tuple[float, float]]:
    """Reduce to at most `MOST_POINTS` points, each the mean of equally many, which also smooths noise."""
    if len(points) <= MOST_POINTS:
        return list(points)
    edges = [round(i * len(points) / MOST_POINTS) for i in range(MOST_POINTS + 1)]
    segments = [points[a:b] for a, b in itertools.pairwise(edges)]
    return [(sum(x for x, _ in s) / len(s), sum(y for _, y in s) / len(s)) for s in segments]


@svg.register
def _(block: TimeChart) -> str:
    def paint(figure: Any) -> None:
        axes = _axes(figure, block.title)
        axes.set_ylabel(block.y_label)
        if not block.points:
            return
        start, end = block.points[0][0], block.points[-1][0]
        length = end - start
        unit, name = (3600, "hours") if length > 7200 else (60, "minutes") if length > 120 else (1, "seconds")
        _line(axes, [(time - start) / unit for time, _ in block.points], [value for _, value in block.points])
        axes.set_xlabel(name)

    return draw(block.title, (_WIDTH, _HEIGHT), paint)


@svg.register
def _(block: BarChart) -> str:
    """A histogram with vertical bars, or horizontal bars with a label each."""

    def paint(figure: Any) -> None:
        axes = _axes(figure, block.title)
        if block.bin_width:
            _histogram(axes, block)
        else:
            _labelled_bars(axes, block)
        if len(block.series) > 1:
            axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))

    height = _HEIGHT if block.bin_width else max(1.4, 0.6 + 0.3 * len(block.order))
    return draw(block.title, (_WIDTH, height), paint)


def _histogram(axes: Any, block: BarChart) -> None:
    centres = [float(label) + block.bin_width / 2 for label in block.order]
    for colour, (name, counts) in zip(COLOURS, block.series.items(), strict=False):
        values = [counts.get(label, 0) for label in block.order]
        axes.bar(centres, values, block.bin_width * 0.92, color=colour, label=name, alpha=0.85)
    for x, label in block.lines:
        axes.axvline(x, color="#555555", linewidth=1, linestyle="--")
        style = {"xytext": (-2, 0), "textcoords": "offset points", "ha": "right", "va": "top"}
        axes.annotate(label, (x, 0.97), xycoords=("data", "axes fraction"), rotation=90, fontsize=7, **style)
    axes.set_xlabel(block.x_label)
    axes.set_ylabel(block.y_label)


def _labelled_bars(axes: Any, block: BarChart) -> None:
    # The bars of a label share 0.8 of its row; the rest separates it from the next.
    thickness = 0.8 / len(block.series)
    for number, (colour, (name, counts)) in enumerate(zip(COLOURS, block.series.items(), strict=False)):
        rows = [row + number * thickness for row in range(len(block.order))]
        axes.barh(rows, [counts.get(label, 0) for label in block.order], thickness, color=colour, label=name)
    middle = (len(block.series) - 1) / 2 * thickness
    axes.set_yticks([row + middle for row in range(len(block.order))], block.order)
    axes.invert_yaxis()
    axes.set_xlabel(block.y_label)


@svg.register
def _(block: IntervalChart) -> str:
    """Dots with intervals and their values as text; the reference as grey diamonds on a dashed line."""
    offset = 0.08 if block.reference else 0.0  # so that no dot hides a reference

    def paint(figure: Any) -> None:
        axes = _axes(figure, block.title)
        for name, values in block.reference.items():
            places = [index + offset for index, label in enumerate(block.order) if label in values]
            heights = [values[label] for label in block.order if label in values]
            style = {"color": "#999999", "linestyle": "--", "marker": "D", "markersize": 5, "linewidth": 1}
            axes.plot(places, heights, label=name, **style)
            _label_values(axes, places, heights, on_left=False, colour="#777777")
        for colour, (name, measured) in zip(COLOURS, block.series.items(), strict=False):
            # NaN interrupts the line at a missing label, where it would look like a value.
            places = [index - offset for index in range(len(block.order))]
            triples = [measured.get(label, (math.nan,) * 3) for label in block.order]
            heights = [value for value, _, _ in triples]
            ends = [[value - low for value, low, _ in triples], [high - value for value, _, high in triples]]
            style = {"color": colour, "marker": "o", "markersize": 7, "linewidth": 1.2, "capsize": 4}
            axes.errorbar(places, heights, yerr=ends, label=name, elinewidth=1.8, **style)
            _label_values(axes, places, heights, on_left=True, colour=colour)
        axes.set_xticks(range(len(block.order)), block.order, fontsize=10)
        axes.set_xlim(-0.5, len(block.order) - 0.5)
        axes.set_ylabel(block.y_label)
        axes.grid(axis="y", alpha=0.25, linewidth=0.6)
        if block.series or block.reference:
            figure.legend(loc="outside lower left", ncols=2, frameon=False, fontsize=9)

    return draw(block.title, (6.2, 3.5), paint, "interval-chart")


def _label_values(axes: Any, places: Sequence[float], heights: Sequence[float], on_left: bool, colour: str) -> None:
    """Write the values beside their marks, on the side away from the other series."""
    align, shift = ("right", -8) if on_left else ("left", 8)
    for place, height in zip(places, heights, strict=True):
        if math.isnan(height):
            continue
        style: dict[str, Any] = {"fontsize": 9, "color": colour, "ha": align, "va": "center"}
        style["bbox"] = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}  # keeps the line from crossing it
        axes.annotate(f"{height:.1f}", (place, height), (shift, 0), textcoords="offset points", **style)


@svg.register
def _(block: Pipeline) -> str:
    """Boxes joined by arrows, in columns by their distance from the start."""
    corners = _box_corners(block)
    width = max(x for x, _ in corners.values()) + _BOX_WIDTH + 8
    height = max(y for _, y in corners.values()) + _BOX_HEIGHT + 8

    def paint(figure: Any) -> None:
        from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
        from matplotlib.path import Path

        figure.set_layout_engine("none")
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set_axis_off()
        axes.set(xlim=(0, width), ylim=(height, 0))  # pixels, the origin at the top left
        for source, target in block.arrows:
            x1, y1 = corners[source][0] + _BOX_WIDTH, corners[source][1] + _BOX_HEIGHT / 2
            x2, y2 = corners[target][0], corners[target][1] + _BOX_HEIGHT / 2
            bend = x2 - _GAP_X / 2  # horizontal until just before its end, so that long arrows pass between the rows
            curve = Path([(x1, y1), (bend, y1), (bend, y2), (x2, y2)], [Path.MOVETO, *[Path.CURVE4] * 3])
            style: dict[str, Any] = {"arrowstyle": "-|>", "mutation_scale": 7, "shrinkA": 0, "shrinkB": 0}
            axes.add_patch(FancyArrowPatch(path=curve, color="#888888", linewidth=0.75, fill=False, **style))
        for label, second_line in block.boxes:
            x, y = corners[label]
            box = FancyBboxPatch(
                (x, y),
                _BOX_WIDTH,
                _BOX_HEIGHT,
                "round,pad=0,rounding_size=6",
                facecolor="#f2f6f8",
                edgecolor=COLOURS[0],
            )
            axes.add_patch(box)
            axes.text(x + 8, y + 19, label, fontsize=8.5, fontweight="bold")
            axes.text(x + 8, y + 36, second_line, fontsize=8, color="#555555")

    return draw("the steps of the run", (width * PIXEL, height * PIXEL), paint, "pipeline")


def _box_corners(block: Pipeline) -> dict[str, tuple[int, int]]:
    """The top left corner of every box, in pixels. A box is in the column after the last box that it reads from."""
    column = {label: 0 for label, _ in block.boxes}
    for _ in block.boxes:  # longest paths by relaxation; the graph is small
        for source, target in block.arrows:
            column[target] = max(column[target], column[source] + 1)

    def distance_to_reader(label: str) -> int:
        readers = (column[target] - column[label] for source, target in block.arrows if source == label)
        return min(readers, default=len(column))

    rows: dict[int, int] = {}
    corners = {}
    # Within a column, boxes with the nearest readers are on top, those without readers at the bottom.
    for label in sorted(column, key=distance_to_reader):
        row = rows.get(column[label], 0)
        rows[column[label]] = row + 1
        corners[label] = (column[label] * (_BOX_WIDTH + _GAP_X) + 4, row * (_BOX_HEIGHT + _GAP_Y) + 4)
    return corners


def _axes(figure: Any, title: str) -> Any:
    """Axes in the style of all charts."""
    axes = figure.subplots()
    axes.set_title(title, fontsize=10, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
    return axes


def _line(axes: Any, x: Sequence[float], y: Sequence[float], **style: Any) -> None:
    """A line with a grid; the points are marked if there are few."""
    style = {"color": COLOURS[0], "linewidth": 1.3, "marker": "o" if len(x) < 25 else "", "markersize": 3} | style
    axes.plot(x, y, **style)
    axes.grid(alpha=0.25, linewidth=0.6)
