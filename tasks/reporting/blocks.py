"""The blocks of a report or data card: the contents of a section besides `evals.tables.results.ResultTable`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nautile.evals.tables.results import ResultTable

Points = Sequence[tuple[float, float]]  # (x, y)


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
