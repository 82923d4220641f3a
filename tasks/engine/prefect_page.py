"""A stage's page in Prefect: what it made, its key facts, the newest metrics, and its curve as a picture.

Facts may hold text from outside (a source's name, a model's): it is shown as code, never as markup. The picture is an
SVG in the page's own text (a data URL), for Prefect's server has no place for files; its pages draw it (3.8.8).
"""

import base64
import logging
import os
from typing import Any
from urllib.parse import urlencode

from common.errors import ConfigError
from common.text import amount, markdown_table, size, visible
from store.artifacts import Artifact, Store
from store.catalog import Catalog, CatalogBusy
from tasks.engine.progress import StageUpdate
from tasks.reporting.charts import line_chart

logger = logging.getLogger(__name__)

# The first of these that was measured more than once is the stage's curve, with what is drawn beside it.
CURVES = ("loss", "reward", "solve_rate")
BESIDE = {"loss": "validation_loss"}
MOST_FACTS, MOST_METRICS = 12, 16
PATIENCE_S = 2.0
_POINTS = """
SELECT name, source, avg(step) AS step, avg(value) AS value FROM (
  SELECT name, coalesce(source, '') AS source, step, value,
         ntile(300) OVER (PARTITION BY name, source ORDER BY step) AS part
  FROM metrics WHERE execution = ? AND name IN (SELECT unnest(?)) AND isfinite(value)
) GROUP BY name, source, part ORDER BY step
"""


def summary(store: Store, update: StageUpdate, outputs: dict[str, str]) -> str:
    """Markdown about a stage that has ended well. `update` is the last that was heard of it."""
    # Matplotlib's font list belongs to the store like everything else: the home folder stays as it is.
    os.environ.setdefault("MPLCONFIGDIR", str(store.root / "cache" / "matplotlib"))
    made = [store.get(artifact_id) for artifact_id in outputs.values()]
    parts = [f"## {update.label}: {update.state}"]
    parts.append(markdown_table(("artifact", "files", "size"), [_made(artifact, update.run_id) for artifact in made]))
    if made and update.state == "done":
        parts += curve(store, made[0].execution, update.label)
    facts = [(f"{a.kind}.{name}", value) for a in made for name, value in _scalars(a.manifest["facts"])]
    if facts:
        parts.append(
            markdown_table(("fact", "value"), [(_code(name), _code(value)) for name, value in facts[:MOST_FACTS]])
        )
    newest = sorted(update.metrics.items())[:MOST_METRICS]
    if newest:
        parts.append(
            markdown_table(("metric", "last value"), [(_code(name), f"{value:.6g}") for name, value in newest])
        )
    pages = {"this stage": stage_page(update.stage, update.run_id), "the run": run_page(update.run_id)}
    links = [f"[{name} in the dashboard]({page})" for name, page in pages.items() if page]
    return "\n\n".join([*parts, " · ".join(links)]).strip() + "\n"


def curve(store: Store, execution: str, title: str) -> list[str]:
    """The picture of the execution's curve as one line of markdown; empty if nothing was measured more than once."""
    wanted = [*CURVES, *BESIDE.values()]
    try:
        rows = Catalog(store).query(_POINTS, [execution, wanted], patience=PATIENCE_S)
    except (CatalogBusy, ConfigError) as error:
        logger.warning("%s has no curve on its page: %s", title, error)
        return []
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        name = f"{row['name']} ({row['source']})" if row["source"] else row["name"]
        lines.setdefault(name, []).append((row["step"], row["value"]))
    first = next((name for name in CURVES if len(lines.get(name, ())) > 1), None)
    if first is None:
        return []
    beside = BESIDE.get(first, first)
    drawn = {name: points for name, points in lines.items() if name == first or name.startswith(beside)}
    picture = base64.b64encode(line_chart(f"{title}: {first}", drawn).encode()).decode()
    return [f"![{first} by step](data:image/svg+xml;base64,{picture})"]


def _made(artifact: Artifact, run: str) -> tuple[str, str, str]:
    page = artifact_page(artifact.id, run)
    name = f"[{artifact.id}]({page})" if page else _code(artifact.id)
    return name, str(len(artifact.manifest["files"])), size(artifact.bytes)


def _scalars(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """Numbers and short texts, at most one level deep; lists and long texts are for `nautile show`."""
    found = []
    for name, value in facts.items():
        inner = value.items() if isinstance(value, dict) else [("", value)]
        for part, one in inner:
            if isinstance(one, (int, float, str)) and one != "" and len(str(one)) <= 80:
                told = amount(one) if isinstance(one, (int, float)) and not isinstance(one, bool) else str(one)
                found.append((f"{name}.{part}".rstrip("."), told))
    return found


def _code(text: object) -> str:
    """Text as code in the cell of a table: nothing in it can end the code, the cell or the line."""
    clean = visible(text).replace("`", "'").replace("|", "¦").replace("\n", " ").strip()
    return f"`{clean}`" if clean else ""


DASHBOARD_URL = "NAUTILE_DASHBOARD_URL"
_PAGES = {"pretrain": "training", "distill": "distillation", "evaluate": "evaluations"}
_PAGES |= dict.fromkeys(("align", "reason", "self_distill"), "reinforcement")


def run_page(run: str) -> str:
    """The overview of a run."""
    return _address("", run=run)


def stage_page(stage: str, run: str) -> str:
    """The page that shows what a stage does."""
    return _address(_PAGES.get(stage, ""), run=run)


def artifact_page(artifact_id: str, run: str) -> str:
    """The lineage of an artifact, with its facts and files."""
    return _address("lineage", run=run, artifact=artifact_id)


def _address(page: str, **asked: str) -> str:
    base = os.environ.get(DASHBOARD_URL, "").rstrip("/")
    return f"{base}/{page}?{urlencode(asked)}" if base else ""
