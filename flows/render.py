"""Rich for the terminal: a console without control characters, and tables that become paragraphs where too wide."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from nautile.common.text import visible

READABLE = 32  # minimum width of a column with folded text, in characters


class CleanConsole(Console):
    """A Rich console that replaces terminal escapes and direction overrides in everything it prints.

    Commands print names, notes, errors and documents that anyone may have written: an escape in one could retitle the
    terminal, write to the clipboard or hide a line. Rich removes a few control characters only. Its own, such as those
    that move the cursor in a live display, are segments of another kind.
    """

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """As Rich does, with every text cleaned."""
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable():
                yield segment
            else:
                yield Segment(visible(segment.text), segment.style)


def relative(path: Path) -> Path:
    """The path relative to the current folder, if it is inside it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def text_table(*columns: str) -> Table:
    """An empty table without borders: sizes, counts and times are right-aligned, texts wrap."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in columns:
        right = name in ("size", "files", "time")
        table.add_column(name, justify="right" if right else "left", no_wrap=right, overflow="fold")
    return table


class FittingTable:
    """A table that becomes a paragraph per row, with a line per column, if it is wider than the terminal.

    In a paragraph a value is never wrapped, so that paths and commands can be copied: print it with `crop=False`.
    `whole`: a column whose values are not wrapped in the table either. `least`: the columns that matter least, which
    are left out before the table becomes paragraphs: the first of them first.
    """

    def __init__(self, *columns: str, whole: str | None = None, least: Sequence[str] = ()) -> None:
        self.columns, self.whole, self.least = columns, whole, least
        self.rows: list[list[str]] = []

    def add_row(self, *values: object) -> None:
        """Add a row; None is shown as an empty cell."""
        self.rows.append(["" if value is None else visible(value) for value in values])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        # The table fits if each column has its full width or at least READABLE characters, plus 2 of padding.
        columns = zip(self.columns, *self.rows, strict=True)
        widths = [max(cell_len(line) for cell in column for line in (cell.splitlines() or [""])) for column in columns]
        minimum_widths = [
            width if name == self.whole else min(width, READABLE)
            for name, width in zip(self.columns, widths, strict=True)
        ]
        width_of = dict(zip(self.columns, minimum_widths, strict=True))
        left_out: list[str] = []
        for name in ("", *self.least):
            left_out += [name] if name else []
            shown = [place for place, column in enumerate(self.columns) if column not in left_out]
            if self.rows and sum(width_of[self.columns[place]] + 2 for place in shown) > options.max_width:
                continue
            table = text_table(*(self.columns[place] for place in shown))
            for row in self.rows:
                table.add_row(*(Text(row[place]) for place in shown))
            yield table
            if left_out:
                yield Text(f"too narrow for: {', '.join(left_out)} (`--json` has them)", style="dim")
            return
        # Too wide: the column's name stands in front of each value, as in `psql` after `\x`.
        indent = 2 + max(map(cell_len, self.columns))
        for number, row in enumerate(self.rows):
            for name, value in zip(self.columns, row, strict=True):
                indented = value.replace("\n", f"\n{' ' * indent}")
                yield Text.assemble((f"{name:<{indent}}", "bold"), indented, no_wrap=True, overflow="ignore")
            if number + 1 < len(self.rows):
                yield Text()


def query_table(columns: list[str], rows: list[tuple[Any, ...]]) -> FittingTable:
    """A table of a query's rows; None is shown as an empty cell."""
    table = FittingTable(*columns)
    for row in rows:
        table.add_row(*row)
    return table
