"""Render sections as one self-contained HTML page and as Markdown, and a table of results as files.

All text is escaped by the templates or by the functions for tables and figures. The page loads nothing: it has no
external script, font or image, and its content security policy forbids them.
"""

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from nautile.common.files import write_json, write_text
from nautile.common.text import fenced
from nautile.evals.tables.results import ResultTable, to_html, to_json, to_markdown
from nautile.evals.tables.svg import table_figure
from nautile.tasks.reporting.blocks import ReportBlock, ReportSection
from nautile.tasks.reporting.charts import svg

TEMPLATES = Path(__file__).parent


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
