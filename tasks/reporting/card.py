"""Render the cards of models and data sets: a Markdown page with YAML front matter, in which all values are escaped.

A template's `{{ value }}` is shown literally, whatever it contains; None is shown as "not recorded". Intended markup
goes through a filter: `table`, `rows`, `code`, `fenced`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from nautile.common.text import dollars, duration, fenced, markdown_table, markdown_text, visible
from nautile.evals.tables.results import ResultTable, to_markdown
from nautile.tasks.reporting.render import TEMPLATES, template_environment

NOT_RECORDED = "not recorded"


class Markup(str):
    """Markdown that is not escaped."""


def card(template: str, front_matter: Mapping[str, Any], facts: Mapping[str, Any], folder: Path = TEMPLATES) -> str:
    """Render a template of `folder` with `facts`, after `front_matter` as YAML."""
    from huggingface_hub.utils import yaml_dump

    environment = template_environment(autoescape=False, folder=folder, finalize=_escaped)
    environment.filters |= {
        "table": _table,
        "rows": _rows,
        # Chr 39 is the apostrophe: a backtick would end the code.
        "code": lambda text: Markup(f"`{' '.join(visible(text).replace('`', chr(39)).split())}`"),
        "fenced": lambda text: Markup(fenced(visible(text))),
        "number": lambda value: None if value is None else f"{value:,}",
        "dollars": lambda value: None if value is None else dollars(value).removeprefix("$") + " dollars",
        "duration": lambda value: None if value is None else duration(value),
        "words": lambda name: str(name).replace("_", " "),
    }
    # `finalize` escapes every `{{ value }}`, so the filters above mark what is already Markdown.
    page = environment.get_template(template).render(facts)
    return f"---\n{yaml_dump(dict(front_matter), sort_keys=False)}---\n\n{page.strip()}\n"


def without_none(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that have a value; a front matter leaves out unknown ones."""
    return {name: value for name, value in fields.items() if value not in (None, [], "")}


def languages(counts: Iterable[Mapping[str, int]], configured: Iterable[str]) -> list[str]:
    """Language codes: the configured ones, and those of at least 1 % of the documents in any of `counts`."""
    codes = set(configured)
    for by_code in counts:
        total = sum(by_code.values())
        codes |= {code for code, count in by_code.items() if code.isalpha() and 100 * count >= total}
    return sorted(codes)


def _escaped(value: Any) -> str:
    if value is None:
        return NOT_RECORDED
    return value if isinstance(value, Markup) else Markup(markdown_text(value))


def _table(table: ResultTable) -> Markup:
    """A table of results with all text escaped."""
    escaped = replace(
        table,
        title=markdown_text(table.title),
        columns=tuple(map(markdown_text, table.columns)),
        rows=tuple(tuple(map(markdown_text, row)) for row in table.rows),
        notes=("\n\n".join(map(markdown_text, table.notes)),),
    )
    return Markup(to_markdown(escaped).strip())


def _rows(rows: Sequence[Sequence[Any]], *columns: str) -> Markup:
    """A table of `rows` under `columns`, every cell escaped unless it is markup."""
    return Markup(markdown_table(columns, [[_escaped(cell) for cell in row] for row in rows]))
