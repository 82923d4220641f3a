"""Comparison of two evaluations on the questions they share.

Its tests are over problems; the spread over other seeds of a recipe stands beside them if the store has any. The result
is plain data for `nautile compare` and for the flow that runs after a regression.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nautile.common.environment import differences
from nautile.common.errors import ConfigError
from nautile.common.files import read_json
from nautile.evals.running.rows import SampleRow, read_rows
from nautile.evals.scoring.comparison import compare
from nautile.flows.named import named_or_newest
from nautile.flows.run_state import reading
from nautile.flows.sweep.arms import EVALUATE
from nautile.flows.sweep.report import WAYS
from nautile.store.artifacts import Store, short_id
from nautile.tasks.reporting.other_seeds import accuracies_by_seed, spread

SIDES = ("a", "b")
VERDICTS = ("strict", "lenient")


def check_choices(verdict: str, way: str) -> None:
    """Raise `ConfigError` for an unknown `--verdict` or `--way`."""
    if verdict not in VERDICTS:
        raise ConfigError(f"--verdict {verdict}: must be {' or '.join(VERDICTS)}")
    if way not in WAYS:
        raise ConfigError(f"--way {way}: must be {' or '.join(WAYS)}")


def evaluated(store: Store) -> dict[str, str]:
    """Evaluated stage, and label of the evaluation -> id of the newest evaluation."""
    names: dict[str, str] = {}
    # Oldest first, so the newest evaluation of a label is the one that stays.
    for artifact in store.list("evaluation"):
        label = artifact.manifest["label"]
        names |= {label: artifact.id, label.removeprefix(EVALUATE): artifact.id}
    return names


def compare_evaluations(store: Store, a: str, b: str, verdict: str, way: str) -> dict[str, Any]:
    """Compare two evaluations; the result includes what is compared (`a` and `b`) and `warnings`.

    `warnings`: differences in machine or libraries between the two evaluations or their checkpoints. Raises
    `ConfigError` for a name that is not an evaluation.
    """
    check_choices(verdict, way)
    store.refresh()
    labels = evaluated(store)
    a, b = (name if Path(name).is_dir() else labels.get(name, name) for name in (a, b))
    title_a, rows_a = _read_evaluation(store, a, way)
    title_b, rows_b = _read_evaluation(store, b, way)
    warnings = _environment_warnings(store, a, b)
    comparison = compare(rows_a, rows_b, verdict)
    measured = (*comparison["benchmarks"], *comparison["means"])
    spreads = _recipe_seeds(store, a, b, verdict, way, measured)
    return {"a": title_a, "b": title_b, "way": way, "warnings": warnings, **comparison, "recipe_seeds": spreads}


def _recipe_seeds(
    store: Store, a: str, b: str, verdict: str, way: str, measured: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """The spread over the seeds of both recipes by benchmark; empty for a folder outside the store."""
    if Path(a).is_dir() or Path(b).is_dir():
        return {}
    spreads: dict[str, dict[str, Any]] = {name: {} for name in measured}
    with reading(store) as query:
        for side, name in zip(SIDES, (a, b), strict=True):
            manifest = store.get(name).manifest
            accuracies = accuracies_by_seed(query, manifest["run"], verdict, way)
            for benchmark in measured:
                spreads[benchmark][side] = spread(accuracies, manifest["label"], benchmark)
    return spreads


def _environment_warnings(store: Store, a: str, b: str) -> list[str]:
    """Differences between the environments of two evaluations, and between those of their checkpoints, a line each."""
    if Path(a).is_dir() or Path(b).is_dir():
        return []  # a folder outside the store has no record of its environment
    evaluations = [store.get(name) for name in (a, b)]
    # An evaluation of an endpoint's model has no checkpoint, and an input may have been removed since.
    inputs = [evaluation.manifest["inputs"].get("checkpoint") for evaluation in evaluations]
    checkpoints = [store.find(*full_id.split("/")) if full_id else None for full_id in inputs]
    warnings = []
    for verb, pair in (("evaluated", evaluations), ("trained", checkpoints)):
        if parts := differences(*(artifact and artifact.manifest["facts"].get("environment") for artifact in pair)):
            warnings.append(f"{verb} in different environments, where equal recipes may differ: {'; '.join(parts)}")
    return warnings


def _read_evaluation(store: Store, name: str, way: str) -> tuple[str, list[SampleRow]]:
    """The title and the rows of an evaluation, which `name` gives as an artifact id or a folder.

    The title has the ids of the evaluation and of its checkpoint as other commands take them; the model's own name is a
    digest of its weights, so it stands only where there is no checkpoint in the store.
    """
    artifact = None if Path(name).is_dir() else named_or_newest(store, "evaluation", name)
    folder = Path(name) if artifact is None else artifact.path
    rows = folder / WAYS[way]
    if not rows.is_file():
        raise ConfigError(f"{name} has no {WAYS[way]}: it was not evaluated with --way {way}")
    model = str((read_json(folder / "scores.json") or {}).get("model", "unfinished"))
    if artifact is None:
        title = f"{folder.name} ({model})"
    else:
        checkpoint = artifact.manifest["inputs"].get("checkpoint")
        of = short_id(*checkpoint.split("/")) if checkpoint else model
        title = f"{artifact.manifest['label']}, {artifact.id} of {of}"
    return title, read_rows(rows)
