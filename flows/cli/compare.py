"""`nautile compare`: two evaluations in the store, or folders of such, on the questions that both were asked."""

from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from common.errors import ConfigError
from common.files import read_json
from common.text import visible
from evals.running.rows import SampleRow, read_rows
from evals.scoring.comparison import compare, comparison_table
from evals.tables.results import ResultTable
from flows.cli.tables import query_table
from store.artifacts import Store

WAYS = {"generate": "rows.jsonl", "likelihood": "likelihood.jsonl"}
VERDICTS = ("strict", "lenient")
LONGEST = 600


def compared(store: Store, a: str, b: str, verdict: str, way: str) -> dict[str, Any]:
    """The comparison, with the names of both models. Raises `ConfigError` for what is no evaluation."""
    if verdict not in VERDICTS:
        raise ConfigError(f"--verdict: {verdict!r} is none; there are {', '.join(VERDICTS)}")
    if way not in WAYS:
        raise ConfigError(f"--way: {way!r} is none; there are {', '.join(WAYS)}")
    sides = [_evaluation(store, name, way) for name in (a, b)]
    found = compare(*(rows for _, rows in sides), verdict)
    return {"a": _named(a, sides[0][0]), "b": _named(b, sides[1][0]), "way": way, **found}


def view(found: dict[str, Any], shown: int) -> RenderableType:
    """The table, and the first `shown` samples whose verdict changed, those lost first."""
    table: ResultTable = comparison_table(found, "A", "B")
    changed = sorted(found["changed"], key=lambda one: (one["change"] != "lost", one["benchmark"], one["index"]))
    parts: list[RenderableType] = [Text(f"{side.upper()}: {found[side]}") for side in ("a", "b")]
    parts.append(query_table(list(table.columns), list(table.rows)))
    parts += [Text(note, "dim") for note in table.notes]
    lost = sum(one["change"] == "lost" for one in changed)
    parts.append(Text(f"\n{len(changed):,} samples changed: {lost:,} lost, {len(changed) - lost:,} gained", "bold"))
    for one in changed[:shown]:
        parts.append(
            Text(f"\n{one['change']}: {one['benchmark']} {one['index']}, expected {visible(one['expected'], 200)}")
        )
        parts.append(Text(visible(one["prompt"], LONGEST), "dim"))
        parts += [Text(f"{side.upper()} {_said(one[side])}") for side in ("a", "b")]
    if len(changed) > shown:
        parts.append(Text(f"\n{len(changed) - shown:,} more: --changed N shows more, --json all", "dim"))
    return Group(*parts)


def _said(side: dict[str, Any]) -> str:
    verdict = "right" if side["strict"] else side["problem"] or "wrong"
    return f"({verdict}) {visible(side['output'] or side['parsed'] or '', LONGEST)}"


def _named(asked: str, model: str) -> str:
    return f"{Path(asked).name} ({model})"


def _evaluation(store: Store, name: str, way: str) -> tuple[str, list[SampleRow]]:
    """Model and rows of an evaluation: an id in the store, or a folder."""
    folder = Path(name)
    if not folder.is_dir():
        artifact = store.get(name)
        if artifact.kind != "evaluation":
            raise ConfigError(f"{artifact.id} is no evaluation: `nautile artifacts evaluation` lists them")
        folder = artifact.path
    rows = folder / WAYS[way]
    if not rows.is_file():
        raise ConfigError(f"{name}: no {WAYS[way]} there: an evaluation that was asked by `{way}` is meant")
    model = (read_json(folder / "scores.json") or {}).get("model", "unfinished")
    return str(model), read_rows(rows)
