"""Draw Tables 1 and 2: one line per row, our scores as dots with 95 % intervals, the paper's figures as ticks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nautile.common.figures import COLOURS, PIXEL, draw
from nautile.evals.tables import paper_figures as paper
from nautile.evals.tables.results import ResultTable

_PAPER_COLOURS = ("#333333", "#c9a227", "#9b6fb5", "#5f9ea0", "#b0a0a0")
_WIDTH, _ROW, _FRAME = 790, 26, 110  # pixels: width of the figure; height of a row; of title, axis and legend


@dataclass(frozen=True)
class Mark:
    """One score in percent. `interval`: of our measurement; None: a figure of the paper, drawn as a tick."""

    row: int
    series: str
    value: float
    interval: tuple[float, float] | None = None


def table_figure(table: ResultTable) -> str:
    """An `<svg>` of a table by `table_1` or `table_2`; the x axis is 0 to 100 %, and every mark has a tooltip."""
    names = [str(row.get("title") or row["benchmark"]) for row in table.data]
    marks = [mark for index, row in enumerate(table.data) for mark in _marks(index, row)]
    marks.sort(key=lambda mark: mark.interval is not None)  # ours last, on top
    size = (_WIDTH * PIXEL, (_FRAME + _ROW * len(names)) * PIXEL)
    tooltips = {}
    for index, mark in enumerate(marks):
        if mark.interval is None:
            tooltips[f"mark-{index}"] = f"{mark.series}: {mark.value:g}"
        else:
            low, high = mark.interval
            tooltips[f"mark-{index}"] = f"{mark.series}: {mark.value:.1f} [{low:.1f}, {high:.1f}]"
    return draw(table.title, size, lambda figure: _paint(figure, table.title, names, marks), "table-figure", tooltips)


def _paint(figure: Any, title: str, names: Sequence[str], marks: Sequence[Mark]) -> None:
    axes = figure.subplots()
    axes.set_title(title, loc="left", fontweight="bold")
    axes.set_xlim(0, 100)
    axes.set_xticks(range(0, 101, 20), [f"{share} %" for share in range(0, 101, 20)])
    axes.set_ylim(len(names) - 0.5, -0.5)  # the first row on top
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(length=0)
    axes.grid(axis="x", color="#e2e2e2", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)
    ours = list(dict.fromkeys(mark.series for mark in marks if mark.interval))
    papers = list(dict.fromkeys(mark.series for mark in marks if not mark.interval))
    handles = {}
    for index, mark in enumerate(marks):
        if mark.interval:
            # Several of our models in one row are drawn slightly apart, so that no dot hides another.
            order = ours.index(mark.series)
            colour, y = COLOURS[order % len(COLOURS)], mark.row + 0.12 * (order % 5 - 1)
            axes.plot(mark.interval, (y, y), color=colour, linewidth=1.5)
            (line,) = axes.plot(mark.value, y, "o", color=colour, markersize=6, linestyle="none")
        else:
            order = papers.index(mark.series)
            colour, width = _PAPER_COLOURS[order % len(_PAPER_COLOURS)], 1.2 if order else 2.2
            (line,) = axes.plot((mark.value,) * 2, (mark.row - 0.3, mark.row + 0.3), color=colour, linewidth=width)
        # The id by which the page finds the mark for its tooltip.
        line.set_gid(f"mark-{index}")
        handles[mark.series] = line
    if series_names := [*ours, *papers]:
        # Under the axes, in as many columns as fit the width of the figure.
        style = {"loc": "outside lower left", "frameon": False, "fontsize": 8, "handlelength": 1}
        for columns in range(min(4, len(series_names)), 0, -1):
            legend = figure.legend([handles[name] for name in series_names], series_names, ncols=columns, **style)
            if columns == 1 or legend.get_window_extent().width <= figure.bbox.width:
                break
            legend.remove()


def _marks(index: int, row: dict[str, Any]) -> list[Mark]:
    """The marks of a row of `ResultTable.data`; the paper has one figure in Table 1, one per model in Table 2."""
    marks = []
    figures = row["paper"] if isinstance(row["paper"], dict) else {"nautile_370m": row["paper"]}
    for model, figure in (figures or {}).items():
        if figure is not None:
            marks.append(Mark(index, f"{paper.MODELS[model]} (paper)", figure))
    ours = row["ours"] or {}
    for series, score in (ours if "benchmark" in row else {"ours": ours}).items():
        if score and score.get("accuracy") is not None:
            low, high = score["interval"]
            marks.append(Mark(index, series, 100 * score["accuracy"], (100 * low, 100 * high)))
    return marks
