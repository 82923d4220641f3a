"""A table as files: the same figures for a page, a document, a program and the eye."""

from pathlib import Path

from common.files import write_json, write_text
from evals.tables.results import ResultTable, to_html, to_json, to_markdown


def write_table(folder: Path, name: str, table: ResultTable, svg: str) -> None:
    """`name`.json, .md, .html and .svg, each whole or not at all."""
    write_json(folder / f"{name}.json", to_json(table))
    write_text(folder / f"{name}.md", to_markdown(table))
    write_text(folder / f"{name}.html", to_html(table))
    write_text(folder / f"{name}.svg", svg)
