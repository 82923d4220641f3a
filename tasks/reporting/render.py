"""Sections drawn twice: one self-contained HTML page, and Markdown for the terminal.

All text is escaped by the template or by the table writer; the page fetches nothing (no script, font or image from
elsewhere, and its content policy forbids them).
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from common.text import fenced
from evals.tables.results import ResultTable, to_html, to_markdown
from tasks.reporting.charts import Bars, Curve, bars_svg, curve_svg, line_chart, pipeline_picture
from tasks.reporting.sections import Block, Chart, Drawing, Paragraph, Picture, ReportSection, Samples


def html_page(title: str, subtitle: str, sections: Sequence[ReportSection]) -> str:
    """The whole page."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    drawn = [{"title": section.title, "runs": _runs(section.blocks)} for section in sections]
    return environment.get_template("report.html.j2").render(title=title, subtitle=subtitle, sections=drawn)


def markdown(title: str, subtitle: str, sections: Sequence[ReportSection]) -> str:
    """The same in Markdown; a chart becomes the first, best and last value of its lines."""
    lines = [f"# {title}", "", subtitle, ""]
    for section in sections:
        lines += [f"## {section.title}", ""]
        for block in section.blocks:
            drawn = list(_markdown(block))
            lines += [*drawn, ""] if drawn else []
    return "\n".join(lines)


def _runs(blocks: Sequence[Block]) -> list[tuple[str, list[Any]]]:
    """Neighbours of one kind together, so that charts stand side by side; drawn, where the template cannot draw."""
    return [
        (kind, [_drawn(block) for block in run])
        for kind, run in groupby(blocks, key=lambda block: type(block).__name__)
    ]


def _drawn(block: Block) -> Any:
    if isinstance(block, Chart):
        return Markup(line_chart(block.title, block.series, block.y_label, block.log_y, block.x_label))
    if isinstance(block, Bars):
        return Markup(bars_svg(block))
    if isinstance(block, Curve):
        return Markup(curve_svg(block))
    if isinstance(block, Picture):
        return Markup(pipeline_picture(block.boxes, block.arrows))
    if isinstance(block, Drawing):
        return Markup(block.svg)
    return Markup(to_html(block)) if isinstance(block, ResultTable) else block


def _markdown(block: Block) -> Iterator[str]:
    if isinstance(block, Paragraph):
        yield block.text
    elif isinstance(block, ResultTable):
        yield to_markdown(block)
    elif isinstance(block, Chart):
        yield f"**{block.title}** ({block.y_label})"
        yield ""
        for name, points in block.series.items():
            if points:
                values = [value for _, value in points]
                ends = f"{values[0]:.4g} at step {points[0][0]:g}, {values[-1]:.4g} at step {points[-1][0]:g}"
                yield f"- {name}: {ends}; lowest {min(values):.4g}, highest {max(values):.4g}"
    elif isinstance(block, Bars):
        yield f"**{block.title}**"
        yield ""
        for label in block.order:
            counts = ", ".join(f"{name} {found.get(label, 0):g}" for name, found in block.series.items())
            yield f"- {label}: {counts}"
    elif isinstance(block, Curve) and block.points:
        took = block.points[-1][0] - block.points[0][0]
        yield f"**{block.title}**: {block.points[-1][1]:.4g} {block.y_label} after {took:.0f} s"
    elif isinstance(block, Samples):
        yield f"### {block.title}"
        for row in block.rows:
            yield ""
            expected = f"; expected: {_fenced_inline(row['expected'])}" if row.get("expected") else ""
            yield f"{row['verdict']}{expected}"
            yield ""
            yield fenced(f"{row['prompt']}\n→\n{row['text']}")


def _fenced_inline(text: str) -> str:
    return f"`{text.replace('`', chr(39)).replace(chr(10), ' ')}`"
