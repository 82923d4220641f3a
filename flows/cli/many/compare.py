"""`nautile compare`: two evaluations, from the store or from folders, on the questions they have in common."""

from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from common.environment import differences
from common.errors import ConfigError
from common.files import read_json
from common.text import visible
from evals.running.rows import SampleRow, read_rows
from evals.scoring.comparison import compare, comparison_table
from flows.cli.inspect import named_or_newest
from flows.cli.tables import query_table
from store.artifacts import Store

WAYS = {"generate": "rows.jsonl", "likelihood": "likelihood.jsonl"}
VERDICTS = ("strict", "lenient")
MAX_CHARACTERS = 600  # of a prompt or an output in the terminal


def compare_evaluations(store: Store, a: str, b: str, verdict: str, way: str) -> dict[str, Any]:
    """The comparison, with the names of both models. Raises `ConfigError` for what is not an evaluation.

    `warnings`: where the two, or their checkpoints, were made on other machines or with other libraries.
    """
    if verdict not in VERDICTS:
        raise ConfigError(f"--verdict {verdict}: must be {' or '.join(VERDICTS)}")
    if way not in WAYS:
        raise ConfigError(f"--way {way}: must be {' or '.join(WAYS)}")
    model_a, rows_a = _read_evaluation(store, a, way)
    model_b, rows_b = _read_evaluation(store, b, way)
    names = {"a": f"{Path(a).name} ({model_a})", "b": f"{Path(b).name} ({model_b})"}
    warnings = _environment_warnings(store, a, b)
    return {**names, "way": way, "warnings": warnings, **compare(rows_a, rows_b, verdict)}


def comparison_view(comparison: dict[str, Any], shown: int) -> RenderableType:
    """The table, and the first `shown` samples whose verdict changed, lost ones first."""
    table = comparison_table(comparison, "A", "B")
    changed = sorted(
        comparison["changed"], key=lambda sample: (sample["change"] != "lost", sample["benchmark"], sample["index"])
    )
    parts: list[RenderableType] = [Text(f"{side.upper()}: {comparison[side]}") for side in ("a", "b")]
    parts += [Text(visible(f"warning: {warning}"), "yellow") for warning in comparison["warnings"]]
    parts.append(query_table(list(table.columns), list(table.rows)))
    parts += [Text(note, "dim") for note in table.notes]
    lost = sum(sample["change"] == "lost" for sample in changed)
    parts.append(Text(f"\n{len(changed):,} samples changed: {lost:,} lost, {len(changed) - lost:,} gained", "bold"))
    for sample in changed[:shown]:
        title = f"\n{sample['change']}: {sample['benchmark']} {sample['index']}"
        parts.append(Text(f"{title}, expected {visible(sample['expected'], 200)}"))
        parts.append(Text(visible(sample["prompt"], MAX_CHARACTERS), "dim"))
        for name in ("a", "b"):
            side = sample[name]
            verdict = "right" if side["strict"] else side["problem"] or "wrong"
            output = visible(side["output"] or side["parsed"] or "", MAX_CHARACTERS)
            parts.append(Text(f"{name.upper()} ({verdict}) {output}"))
    if len(changed) > shown:
        parts.append(Text(f"\n{len(changed) - shown:,} more: --changed N shows more, --json all of them", "dim"))
    return Group(*parts)


def _environment_warnings(store: Store, a: str, b: str) -> list[str]:
    """What differs between the environments that two evaluations, and the checkpoints they read, were made in."""
    if Path(a).is_dir() or Path(b).is_dir():
        return []  # a folder outside the store does not say where it was made
    evaluations = [store.get(name) for name in (a, b)]
    inputs = [evaluation.manifest["inputs"].get("checkpoint") for evaluation in evaluations]
    checkpoints = [store.find(*full_id.split("/")) if full_id else None for full_id in inputs]
    warnings = []
    for verb, pair in (("evaluated", evaluations), ("trained", checkpoints)):
        if parts := differences(*(artifact and artifact.manifest["facts"].get("environment") for artifact in pair)):
            warnings.append(f"{verb} in different environments, where equal recipes may differ: {'; '.join(parts)}")
    return warnings


def _read_evaluation(store: Store, name: str, way: str) -> tuple[str, list[SampleRow]]:
    """Model and rows of an evaluation: an id in the store, or a folder."""
    folder = Path(name)
    if not folder.is_dir():
        folder = named_or_newest(store, "evaluation", name).path
    rows = folder / WAYS[way]
    if not rows.is_file():
        raise ConfigError(f"{name} has no {WAYS[way]}: it was not evaluated with --way {way}")
    model = (read_json(folder / "scores.json") or {}).get("model", "unfinished")
    return str(model), read_rows(rows)
