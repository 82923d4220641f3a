"""Tables 1 and 2 as pictures: a line for each row, ours as a dot in its 95 % interval, the paper's figures as ticks.

Plain SVG, the same bytes for the same scores, without a library and without a font of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from evals.tables import paper_figures as paper
from evals.tables.results import ResultTable

_LEFT, _WIDTH, _LINE, _TOP = 240, 520, 26, 64
_OURS = ("#1f5f8b", "#c4572e", "#3f7d4e", "#7a5195", "#8a6d1c")


@dataclass(frozen=True)
class Mark:
    """One figure in percent. `interval`: of one that was measured here; None: the paper's, drawn as a tick."""

    row: int
    series: str
    value: float
    interval: tuple[float, float] | None = None


def picture(table: ResultTable) -> str:
    """An `<svg>` of a table that `table_1` or `table_2` made."""
    rows = [str(one.get("title") or one["benchmark"]) for one in table.data]
    marks = [mark for row, one in enumerate(table.data) for mark in _marks(row, one)]
    return draw(table.title, rows, marks)


def draw(title: str, rows: Sequence[str], marks: Sequence[Mark]) -> str:
    """The picture: 0 to 100 % across, `rows` from the top down, a colour for each series that was measured here."""
    ours = list(dict.fromkeys(mark.series for mark in marks if mark.interval))
    theirs = list(dict.fromkeys(mark.series for mark in marks if not mark.interval))
    height = _TOP + _LINE * len(rows) + 34
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="table-picture" viewBox="0 0 {_LEFT + _WIDTH + 30} {height}" '
        f'role="img" aria-label="{escape(title)}" font-family="system-ui, sans-serif" font-size="12">',
        f'<text x="8" y="18" font-weight="600">{escape(title)}</text>',
        *_legend(ours, theirs),
    ]
    bottom = _TOP + _LINE * len(rows)
    for share in range(0, 101, 20):
        parts.append(f'<path d="M{_x(share)} {_TOP - 6}V{bottom}" stroke="#e2e2e2"/>')
        parts.append(f'<text x="{_x(share)}" y="{bottom + 16}" text-anchor="middle" fill="#666">{share} %</text>')
    for row, name in enumerate(rows):
        parts.append(f'<text x="{_LEFT - 12}" y="{_y(row) + 4}" text-anchor="end">{escape(name)}</text>')
    for mark in sorted(marks, key=lambda mark: mark.interval is not None):  # ours on top
        parts += _measured(mark, ours) if mark.interval else _tick(mark, theirs)
    return "".join([*parts, "</svg>"])


def _marks(row: int, one: dict) -> list[Mark]:
    found = []
    figures = one["paper"] if isinstance(one["paper"], dict) else {"nautile_370m": one["paper"]}
    for model, figure in (figures or {}).items():
        if figure is not None:
            found.append(Mark(row, f"{paper.MODELS[model]} (paper)", figure))
    ours = one["ours"] or {}
    for series, score in (ours if "benchmark" in one else {"ours": ours}).items():
        if score and score.get("accuracy") is not None:
            low, high = score["interval"]
            found.append(Mark(row, series, 100 * score["accuracy"], (100 * low, 100 * high)))
    return found


def _legend(ours: Sequence[str], theirs: Sequence[str]) -> list[str]:
    parts, x = [], 8
    for index, name in enumerate([*ours, *theirs]):
        if index < len(ours):
            parts.append(f'<circle cx="{x + 5}" cy="36" r="4" fill="{_colour(name, ours)}"/>')
        else:
            parts.append(f'<path d="M{x + 5} 30v12" stroke="{_grey(name, theirs)}" stroke-width="2"/>')
        parts.append(f'<text x="{x + 14}" y="40" font-size="11">{escape(name)}</text>')
        x += 26 + 6 * len(name)
    return parts


def _measured(mark: Mark, ours: Sequence[str]) -> list[str]:
    low, high = mark.interval or (mark.value, mark.value)
    colour, y = _colour(mark.series, ours), _y(mark.row) + 3 * (ours.index(mark.series) % 5) - 3
    told = f"{mark.series}: {mark.value:.1f} [{low:.1f}, {high:.1f}]"
    return [
        f'<path d="M{_x(low)} {y}H{_x(high)}" stroke="{colour}" stroke-width="2"/>',
        f'<circle cx="{_x(mark.value)}" cy="{y}" r="4" fill="{colour}"><title>{escape(told)}</title></circle>',
    ]


def _tick(mark: Mark, theirs: Sequence[str]) -> list[str]:
    told = escape(f"{mark.series}: {mark.value:g}")
    width = 3 if theirs.index(mark.series) == 0 else 1.5
    return [
        f'<path d="M{_x(mark.value)} {_y(mark.row) - 8}v16" stroke="{_grey(mark.series, theirs)}" '
        f'stroke-width="{width}"><title>{told}</title></path>'
    ]


def _colour(name: str, ours: Sequence[str]) -> str:
    return _OURS[ours.index(name) % len(_OURS)]


def _grey(name: str, theirs: Sequence[str]) -> str:
    return ("#333", "#c9a227", "#9b6fb5", "#5f9ea0", "#b0a0a0")[theirs.index(name) % 5]


def _x(percent: float) -> float:
    return round(_LEFT + _WIDTH * percent / 100, 1)


def _y(row: int) -> int:
    return _TOP + _LINE * row + _LINE // 2
