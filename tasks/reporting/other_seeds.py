"""The accuracies of a run's recipe under all seeds that the catalog knows, to stand beside a result of one seed.

A recipe is the configuration as a run's plan records it, without the seeds of training and the fields that no key
contains (`configs.keys.recipe`). Only the catalog is asked: the metrics that each evaluation wrote.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from nautile.configs.base import TRAINING_SEEDS
from nautile.evals.scoring.intervals import holm
from nautile.evals.scoring.over_seeds import lead, summary_of_shares
from nautile.evals.tables.ladder import Ladder
from nautile.store.catalog import CatalogRow
from nautile.store.views import SCORES

Accuracies = dict[str, dict[str, dict[str, float]]]  # label of the evaluation -> benchmark or mean -> seed -> share
# Another verdict of sampled answers, pass@K, has its own name.
FIGURES = {
    ("strict", "generate"): "accuracy",
    ("lenient", "generate"): "accuracy_lenient",
    ("strict", "sampled"): "sampled",
}
LIKELIHOOD = "likelihood"  # has one verdict
# The accuracies of all runs with the recipe of one of some runs (`mine`), oldest first. (runs, figure)
_OF_RECIPES = f"""
WITH recipes AS MATERIALIZED (
    SELECT run, started, recipe, settings FROM plans WHERE recipe IS NOT NULL
    QUALIFY row_number() OVER (PARTITION BY run ORDER BY started DESC, time DESC) = 1),
chosen AS MATERIALIZED (
    SELECT mine.run AS mine, other.run, other.started, other.settings->>'seed' AS seed,
        other.settings->>'seeds' AS parts
    FROM recipes mine JOIN recipes other ON other.recipe = mine.recipe WHERE list_contains(?, mine.run))
SELECT mine, s.label, s.benchmark, s.execution, chosen.seed, chosen.parts, s.value
FROM chosen JOIN {SCORES.of("run IN (SELECT run FROM chosen)")} s USING (run)
WHERE s.figure = ? ORDER BY chosen.started, s.started
"""


def accuracies_by_seed(
    query: Callable[..., list[CatalogRow]], run: str | None, verdict: str = "strict", way: str = "generate"
) -> Accuracies:
    """The accuracies of the recipe of `run` by evaluation, benchmark and seed; empty if its plan is not recorded."""
    return accuracies_of_recipes(query, [run], verdict, way)[run]


def accuracies_of_recipes(
    query: Callable[..., list[CatalogRow]], runs: Sequence[str | None], verdict: str = "strict", way: str = "generate"
) -> dict[str | None, Accuracies]:
    """Run -> `accuracies_by_seed`, by one query."""
    figure = FIGURES.get((verdict, way), LIKELIHOOD if way == LIKELIHOOD else verdict)
    rows: dict[str | None, list[CatalogRow]] = {run: [] for run in runs}
    for row in query(_OF_RECIPES, [run for run in rows if run], figure):
        rows[row["mine"]].append(row)
    return {run: _by_seed(own) for run, own in rows.items()}


def _by_seed(rows: Sequence[CatalogRow]) -> Accuracies:
    # (label, benchmark) -> seed -> (execution, share)
    measured: dict[tuple[str, str], dict[str, tuple[str, float]]] = {}
    for row in rows:
        # The newest run of a seed counts; an older one may be of an earlier version of the code.
        by_seed = measured.setdefault((row["label"], row["benchmark"]), {})
        # The parts of a seed that `[seeds]` sets on their own make it another one.
        parts = json.loads(row["parts"] or "{}")
        own = [f"{name} {parts[name]}" for name in TRAINING_SEEDS if parts.get(name) is not None]
        seed = ", ".join([row["seed"] or "0", *own])
        by_seed[seed] = row["execution"], row["value"]
    accuracies: Accuracies = {}
    for (label, name), by_seed in measured.items():
        # Seeds that share an evaluation (none of what it depends on is drawn by them) are one measurement.
        first = {execution: seed for seed, (execution, _) in reversed(by_seed.items())}
        accuracies.setdefault(label, {})[name] = {seed: by_seed[seed][1] for seed in reversed(first.values())}
    return accuracies


def spread(accuracies: Accuracies, label: str, benchmark: str) -> dict[str, Any] | None:
    """Mean and spread over the seeds of a recipe: the fields of a `SeedSummary`; None unless there are two."""
    by_seed = accuracies.get(label, {}).get(benchmark, {})
    names = sorted(by_seed, key=lambda name: (len(name), name))  # as numbers
    return {**asdict(summary_of_shares(by_seed)), "seeds": names} if len(names) > 1 else None


def ladder_over_seeds(accuracies: Accuracies, ladder: Ladder) -> list[dict[str, Any]]:
    """The stages of a ladder over the seeds of its recipe; empty unless a stage has two.

    Each row has `stage`, the fields of `spread`, `over` (the stage before) and `gain`, the fields of a `SeedLead` over
    it with `p_corrected` by Holm for the number of gains (None: fewer than two seeds have both).
    """
    accuracy = {
        entry["stage"]: accuracies.get(f"evaluate:{entry['stage']}", {}).get(ladder["benchmark"], {})
        for entry in ladder["stages"]
        if entry["score"]
    }
    pairs = {
        entry["stage"]: (accuracy[entry["over"]], accuracy[entry["stage"]], entry["score"]["n"])
        for entry in ladder["stages"]
        if entry["over"] and len(accuracy[entry["over"]].keys() & accuracy[entry["stage"]].keys()) > 1
    }
    gains = {stage: lead(before, after, len(pairs), problems) for stage, (before, after, problems) in pairs.items()}
    corrected = holm({stage: gain.p for stage, gain in gains.items() if gain.p is not None})
    rows = []
    for entry in ladder["stages"]:
        stage = entry["stage"]
        if over_seeds := spread(accuracies, f"evaluate:{stage}", ladder["benchmark"]):
            gain = {**asdict(gains[stage]), "p_corrected": corrected[stage]} if stage in gains else None
            rows.append({"stage": stage, **over_seeds, "over": entry["over"], "gain": gain})
    return rows


def recipe_seeds(recipes: Mapping[str, Accuracies], label: str, benchmark: str) -> dict[str, dict[str, Any] | None]:
    """`spread` for each side of a comparison."""
    return {side: spread(accuracies, label, benchmark) for side, accuracies in recipes.items()}


def recipe_lines(title: str, sides: Mapping[str, Mapping[str, Any] | None]) -> list[str]:
    """A sentence for each side of a comparison whose recipe has several seeds. `title`: of the benchmark."""
    return [f"{title}, {spread_in_words(side.upper(), over_seeds)}" for side, over_seeds in sides.items() if over_seeds]


def spread_in_words(name: str, spread: Mapping[str, Any]) -> str:
    """One sentence about the seeds of a recipe, from the fields of a `SeedSummary`."""
    interval = ""
    if spread["low"] is not None:
        interval = f" [{100 * spread['low']:.1f}, {100 * spread['high']:.1f}]"
    return (
        f"{name}: {len(spread['seeds'])} seeds of this recipe in the store, mean {100 * spread['mean']:.1f} %"
        f"{interval} over seeds, standard deviation {100 * spread['deviation']:.1f} points"
    )
