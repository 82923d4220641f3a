"""The page in Prefect about a finished stage (artifacts, facts, newest metrics, curve), and links to the dashboard.

Facts may hold text from outside (names of sources or models): it is shown as code, never as markup. The curve is an SVG
inside the page (a data URL), because Prefect's server stores no files; its user interface renders it (Prefect 3.8.8).
"""

import base64
import logging
import os
from typing import Any
from urllib.parse import urlencode

from nautile.common.errors import ConfigError
from nautile.common.text import amount, markdown_table, size, visible
from nautile.store.artifacts import Store
from nautile.store.catalog import Catalog, CatalogBusy
from nautile.tasks.engine.catalogue import page_of
from nautile.tasks.engine.progress import StageUpdate
from nautile.tasks.reporting.blocks import LineChart
from nautile.tasks.reporting.charts import svg

logger = logging.getLogger(__name__)

# The first of these metrics with more than one value is the stage's curve.
CURVES = ("loss", "reward", "solve_rate")
DRAWN_WITH = {"loss": "validation_loss"}  # metric -> a second one in the same chart
MOST_FACTS, MOST_METRICS = 12, 16
LONGEST_FACT = 80  # characters
PATIENCE_S = 2.0
# At most 300 points of each curve, averaged by the database: a training has a row for every step.
_POINTS = """
SELECT name, source, avg(step) AS step, avg(value) AS value FROM (
  SELECT name, coalesce(source, '') AS source, step, value,
         ntile(300) OVER (PARTITION BY name, source ORDER BY step) AS part
  FROM metrics WHERE execution = ? AND name IN (SELECT unnest(?)) AND isfinite(value)
) GROUP BY name, source, part ORDER BY step
"""

DASHBOARD_URL = "NAUTILE_DASHBOARD_URL"  # the environment variable; no links without it


def summary(store: Store, update: StageUpdate, outputs: dict[str, str]) -> str:
    """The page about a stage that succeeded, as Markdown; `update` is its last."""
    artifacts = [store.get(artifact_id) for artifact_id in outputs.values()]
    rows = []
    for artifact in artifacts:
        page = _dashboard("lineage", run=update.run_id, artifact=artifact.id)
        name = f"[{artifact.id}]({page})" if page else _code(artifact.id)
        rows.append((name, str(len(artifact.manifest["files"])), size(artifact.bytes)))
    parts = [f"## {update.label}: {update.state}", markdown_table(("artifact", "files", "size"), rows)]
    if artifacts and update.state == "done":
        parts += curve(store, artifacts[0].recorded_execution, update.label)

    # Tables of facts and of the newest metrics, limited to what a page can show.
    facts = [(f"{a.kind}.{name}", value) for a in artifacts for name, value in _short_facts(a.manifest["facts"])]
    if facts:
        cells = [(_code(name), _code(value)) for name, value in facts[:MOST_FACTS]]
        parts.append(markdown_table(("fact", "value"), cells))
    if update.metrics:
        cells = [(_code(name), f"{value:.6g}") for name, value in sorted(update.metrics.items())[:MOST_METRICS]]
        parts.append(markdown_table(("metric", "last value"), cells))

    stage_page = _dashboard(page_of(update.stage), run=update.run_id)
    pages = {"this stage": stage_page, "the run": run_page(update.run_id)}
    links = [f"[{name} in the dashboard]({page})" for name, page in pages.items() if page]
    return "\n\n".join([*parts, " · ".join(links)]).strip() + "\n"


def curve(store: Store, execution: str, title: str) -> list[str]:
    """The execution's curve as a line of Markdown with an image; empty if no metric has more than one value."""
    metrics = [*CURVES, *DRAWN_WITH.values()]
    try:
        rows = Catalog(store).query(_POINTS, [execution, metrics], patience=PATIENCE_S)
    except (CatalogBusy, ConfigError) as error:
        logger.warning("the page of %s has no curve: %s", title, error)
        return []
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        name = f"{row['name']} ({row['source']})" if row["source"] else row["name"]
        lines.setdefault(name, []).append((row["step"], row["value"]))
    metric = next((name for name in CURVES if len(lines.get(name, ())) > 1), None)
    if metric is None:
        return []
    # The metric without a source, and its companion for every source: `loss` beside `validation_loss (web)`.
    second = DRAWN_WITH.get(metric, metric)
    series = {name: points for name, points in lines.items() if name == metric or name.startswith(second)}
    picture = base64.b64encode(svg(LineChart(f"{title}: {metric}", series, "")).encode()).decode()
    return [f"![{metric} by step](data:image/svg+xml;base64,{picture})"]


def _short_facts(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """Numbers and short texts, at most one level deep; `nautile show` prints lists and long texts."""
    rows = []
    for name, fact in facts.items():
        inner = fact.items() if isinstance(fact, dict) else [("", fact)]
        for part, value in inner:
            if isinstance(value, (int, float, str)) and value != "" and len(str(value)) <= LONGEST_FACT:
                shown = str(value) if isinstance(value, (bool, str)) else amount(value)
                rows.append((f"{name}.{part}".rstrip("."), shown))
    return rows


def _code(text: object) -> str:
    """Text as inline code in a table cell; no character in it can end the code, the cell or the line."""
    clean = visible(text).replace("`", "'").replace("|", "¦").replace("\n", " ").strip()
    return f"`{clean}`" if clean else ""


def run_page(run: str) -> str:
    """Address of the dashboard's overview of a run; empty without a dashboard."""
    return _dashboard("", run=run)


def _dashboard(page: str, **query: str) -> str:
    base = os.environ.get(DASHBOARD_URL, "").rstrip("/")
    return f"{base}/{page}?{urlencode(query)}" if base else ""
