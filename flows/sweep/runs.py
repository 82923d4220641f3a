"""Comparison of two runs: settings that differ, paired tests of scores, last and best metric values, time and cost.

The result is plain data for `nautile compare` and for the dashboard. Values that a run has not recorded are None. Tests
are over problems; where the store has other seeds of a run's recipe, their spread is beside them (`recipe_seeds`).
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from nautile.common.errors import ConfigError
from nautile.common.metrics import metric
from nautile.configs.changes import differences
from nautile.evals.running.rows import read_rows
from nautile.evals.scoring.comparison import compare, whose_gain
from nautile.flows.run_state import PLAN, STEPS, Query, output_of
from nautile.flows.sweep.arms import EVALUATE
from nautile.flows.sweep.report import WAYS
from nautile.store.artifacts import Store
from nautile.store.catalog import CatalogRow
from nautile.store.views import SPENT
from nautile.tasks.reporting.other_seeds import Accuracies, accuracies_by_seed, recipe_seeds

# Metrics with a best value -> whether higher is better. Others (norms, schedules) have only a last value.
BEST = {
    "loss": False,
    "validation_loss": False,
    "bits_per_byte": False,
    "validation_bits_per_byte": False,
    "reward": True,
    "reward_correct": True,
    "solve_rate": True,
    "guard_accuracy": True,
}
_VALUES = """
SELECT execution, name, arg_max(value, step) AS last, max(step) AS step, min(value) AS low, max(value) AS high,
    arg_min(step, value) AS low_step, arg_max(step, value) AS high_step
FROM metrics WHERE list_contains(?, execution) AND isfinite(value) AND coalesce(source, '') = ''
    AND NOT starts_with(name, 'system/')
GROUP BY ALL
"""


def compare_runs(
    store: Store, query: Query, a: str, b: str, verdict: str = "strict", way: str = "generate"
) -> dict[str, Any]:
    """Compare the runs with the ids `a` and `b`. Raises `ConfigError` if one of them has no step."""
    sides = {"a": a, "b": b}
    steps = {side: {row["label"]: row for row in query(STEPS, run)} for side, run in sides.items()}
    for side, run in sides.items():
        if not steps[side]:
            raise ConfigError(f"run {run[:8]} has begun no step: there is nothing to compare")
    plans = {side: next(iter(query(PLAN, run)), {}) for side, run in sides.items()}
    labels = list(dict.fromkeys(label for side in steps.values() for label in side))
    runs = {}
    for side, run in sides.items():
        own = steps[side].values()
        config = plans[side].get("config") or next((row["config"] for row in own if row["config"]), None)
        begun = min(row["begun"] for row in own).isoformat()
        runs[side] = {"run": run, "config": config, "name": plans[side].get("name") or config or "run", "begun": begun}
    recipes = {side: accuracies_by_seed(query, run, verdict, way) for side, run in sides.items()}
    scores = {
        label: _scores(store, label, steps, verdict, way, recipes) for label in labels if label.startswith(EVALUATE)
    }
    return {
        "runs": runs,
        "settings": _settings(plans),
        "scores": [row for rows, _ in scores.values() for row in rows],
        "not_compared": [
            {"stage": label.removeprefix(EVALUATE), "why": why} for label, (_, why) in scores.items() if why
        ],
        "curves": _curves(query, labels, steps),
        "steps": _steps(query, labels, steps),
    }


def _settings(plans: Mapping[str, CatalogRow]) -> list[dict[str, Any]] | None:
    """The settings that differ: field, before (A), after (B). None if a run has not recorded its settings."""
    if not all(plan.get("settings") for plan in plans.values()):
        return None
    # A run's name is in its settings, and always differs.
    before, after = ({**json.loads(plan["settings"]), "name": ""} for plan in plans.values())
    return [asdict(change) for change in differences(before, after)]


def _scores(
    store: Store,
    label: str,
    steps: Mapping[str, Mapping[str, CatalogRow]],
    verdict: str,
    way: str,
    recipes: Mapping[str, Accuracies],
) -> tuple[list[dict[str, Any]], str | None]:
    """A row per benchmark and mean of an evaluation that both runs have; or the reason why they are not compared."""
    paths = []
    for side in ("a", "b"):
        row = steps[side].get(label)
        if row is None:
            return [], f"run {side.upper()} has not begun this evaluation"
        try:
            artifact = output_of(store, row, "evaluation")
        except ConfigError as error:
            return [], str(error)
        if artifact is None or not (artifact.path / WAYS[way]).is_file():
            return [], f"run {side.upper()} has no answers in the mode {way!r}"
        paths.append(artifact.path / WAYS[way])
    try:
        comparison = compare(read_rows(paths[0]), read_rows(paths[1]), verdict)
    except ConfigError as error:
        return [], str(error)
    same = paths[0] == paths[1]
    rows = [
        {"stage": label.removeprefix(EVALUATE), "benchmark": name, "same": same}
        | {field: test[field] for field in ("title", "not_screened", "n", "a", "b", "lead", "low", "high", "p")}
        | {"gain": "the same evaluation" if same else whose_gain(test), "over": comparison["over"]}
        | {"recipe_seeds": recipe_seeds(recipes, label, name)}
        for name, test in (*comparison["benchmarks"].items(), *comparison["means"].items())
    ]
    return rows, None


def _curves(query: Query, labels: list[str], steps: Mapping[str, Mapping[str, CatalogRow]]) -> list[dict[str, Any]]:
    """Last and best values of the metrics that both runs have, in steps that they do not share."""
    executions = {side: {label: row["execution"] for label, row in steps[side].items()} for side in steps}
    # A step that both runs reuse has one curve; there is nothing to compare.
    shared = [label for label in labels if executions["a"].get(label) == executions["b"].get(label)]
    own = sorted({e for side in executions.values() for label, e in side.items() if e and label not in shared})
    values = {(row["execution"], row["name"]): row for row in query(_VALUES, own)} if own else {}
    rows = []
    for label in labels:
        sides = [executions[side].get(label) for side in ("a", "b")]
        for name in sorted({name for execution, name in values if execution == sides[0]}):
            pair = [values.get((execution or "", name)) for execution in sides]
            if not all(pair):
                continue
            highest = BEST.get(name)
            best = None if highest is None else ("high", "high_step") if highest else ("low", "low_step")
            a, b = (
                {"last": row["last"], "step": row["step"]}
                | dict(zip(("best", "best_step"), (row[end] for end in best) if best else (None, None), strict=True))
                for row in pair
                if row
            )
            rows.append({"stage": label, "metric": name, "title": metric(name).title, "a": a, "b": b})
    return rows


def _steps(query: Query, labels: list[str], steps: Mapping[str, Mapping[str, CatalogRow]]) -> list[dict[str, Any]]:
    """Time and cost of each step, for a reused step those of its execution. `same`: both runs use one execution."""
    executions = sorted({row["execution"] for side in steps.values() for row in side.values() if row["execution"]})
    spent = {row["execution"]: row for row in query(SPENT, executions)}
    rows = []
    for label in labels:
        sides: dict[str, dict[str, Any] | None] = {}
        for side in ("a", "b"):
            row = steps[side].get(label)
            sides[side] = row and {
                "state": row["state"],
                **{name: spent.get(row["execution"], {}).get(name) for name in ("seconds", "dollars")},
            }
        pair = [steps[side][label]["execution"] for side in ("a", "b") if label in steps[side]]
        rows.append({"label": label, "same": len(pair) == 2 and pair[0] == pair[1] is not None, **sides})
    return rows
