"""Comparison of two evaluations on the questions they share, and of two runs: settings, scores, curves, time and cost.

Tests are over problems; the spread over other seeds of a recipe stands beside them (`recipe_seeds`) if the store has
any. The result is plain data for `nautile compare`, for the dashboard and for the flow that runs after a regression.
Values that a run has not recorded are None.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nautile.common import environment
from nautile.common.errors import ConfigError
from nautile.common.files import read_json
from nautile.common.metrics import metric
from nautile.common.text import did_you_mean, dollars, duration
from nautile.configs.changes import differences
from nautile.evals.running.rows import WAYS, SampleRow, read_rows
from nautile.evals.scoring.comparison import FORM, compare, whose_gain
from nautile.evals.scoring.intervals import OVER_PROBLEMS
from nautile.evals.scoring.scores import k_of
from nautile.flows.run_state import EVALUATE, NAMES_OF_RUNS, PLAN, STEPS, Query, output_of, reading, run_named
from nautile.store.artifacts import Store, short_id
from nautile.store.catalog import CatalogRow
from nautile.store.named import named_or_newest
from nautile.store.views import SPENT
from nautile.tasks.reporting.other_seeds import (
    Accuracies,
    accuracies_of_recipes,
    recipe_lines,
    recipe_seeds,
    spread,
)

SIDES = ("a", "b")
VERDICTS = ("strict", "lenient")


def check_choices(verdict: str, way: str) -> None:
    """Raise `ConfigError` for an unknown `--verdict` or `--way`."""
    if verdict not in VERDICTS and not k_of(verdict):
        raise ConfigError(f"--verdict {verdict}: must be {' or '.join(VERDICTS)}, or pass@K with --way sampled")
    if way not in WAYS:
        raise ConfigError(f"--way {way}: must be {' or '.join(WAYS)}")
    if k_of(verdict) and way != "sampled":
        raise ConfigError(f"--verdict {verdict}: needs several answers to a question: add --way sampled")


_NEWEST_EVALUATIONS = """
SELECT label, arg_max(id, (created, id)) AS id FROM artifacts WHERE kind = 'evaluation' AND superseded = 0
GROUP BY label ORDER BY max(created)
"""


def evaluated(store: Store) -> dict[str, str]:
    """Evaluated stage, and label of the evaluation -> id of the newest evaluation."""
    with reading(store) as query:
        rows = query(_NEWEST_EVALUATIONS)
    return {name: row["id"] for row in rows for name in (row["label"], row["label"].removeprefix(EVALUATE))}


def runs_named(store: Store, a: str, b: str) -> tuple[str, str] | None:
    """The ids of the two runs that `a` and `b` name (by name or first digits); None if both name evaluations.

    Raises `ConfigError` for a run and an evaluation, and for a name of several runs.
    """
    with reading(store) as query:
        # A run is looked up last: `nautile compare align reason` means stages also where a run is called `reason`.
        runs = {row["run"]: row["name"] for row in query(NAMES_OF_RUNS)}
    labels = evaluated(store)
    ids: list[str | None] = []
    for name in (a, b):
        if Path(name).is_dir() or "/" in name or name in labels:
            ids.append(None)
            continue
        run = run_named(name, runs)
        is_evaluation = bool(name and store.folders("evaluation", name))
        if not run and not is_evaluation and (close := did_you_mean(name, {*labels, *filter(None, runs.values())})):
            raise ConfigError(f"no run, and no stage with an evaluation, {name!r}{close}")
        # Both ids are hexadecimal, so a few digits can be the beginning of a run and of an evaluation.
        if run and is_evaluation:
            raise ConfigError(
                f"{name!r} matches a run and an evaluation: write evaluation/{name}, or give more digits of the run"
            )
        ids.append(run)
    match ids:
        case [None, None]:
            return None
        case [str(first), str(second)]:
            if first == second:
                raise ConfigError(f"{a!r} and {b!r} are the same run: name another run to compare it with")
            return first, second
    run, other = (a, b) if ids[0] else (b, a)
    raise ConfigError(f"{run!r} is a run and {other!r} is not: compare two runs, or two evaluations")


def compare_named(store: Store, a: str, b: str, verdict: str = "strict", way: str = "generate") -> dict[str, Any]:
    """Compare two runs or two evaluations, whichever `a` and `b` name: `compare_runs` (it has `runs`), else
    `compare_evaluations`.
    """
    check_choices(verdict, way)
    with reading(store) as query:
        if runs := runs_named(store, a, b):
            return compare_runs(store, query, *runs, verdict, way)
        return compare_evaluations(store, a, b, verdict, way)


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
    manifests = {side: store.get(name).manifest for side, name in zip(SIDES, (a, b), strict=True)}
    with reading(store) as query:
        by_run = accuracies_of_recipes(query, [own["run"] for own in manifests.values()], verdict, way)
    return {
        benchmark: {side: spread(by_run[own["run"]], own["label"], benchmark) for side, own in manifests.items()}
        for benchmark in measured
    }


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
        if parts := environment.differences(
            *(artifact and artifact.manifest["facts"].get("environment") for artifact in pair)
        ):
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
    by_run = accuracies_of_recipes(query, list(sides.values()), verdict, way)
    recipes = {side: by_run[run] for side, run in sides.items()}
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
        | {field: test.get(field) for field in FORM}
        | {"gain": "the same evaluation" if same else whose_gain(test), "over": comparison["over"]}
        | {"recipe_seeds": recipe_seeds(recipes, label, name)}
        for name, test in (*comparison["benchmarks"].items(), *comparison["means"].items())
    ]
    return rows, None


def _curves(query: Query, labels: list[str], steps: Mapping[str, Mapping[str, CatalogRow]]) -> list[dict[str, Any]]:
    """Last and best values of the metrics that both runs have, in steps that they do not share."""
    executions = {side: {label: row["execution"] for label, row in steps[side].items()} for side in steps}
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


def gain_lines(comparison: dict[str, Any]) -> list[str]:
    """A sentence for each score that differs: which run is better and by how much, or why they are not compared."""
    rows = [row for row in comparison["scores"] if not row["same"]]
    gains = [f"after {row['stage']}, {row['title']}: {row['gain']}" for row in rows]
    return [*gains, *(f"after {row['stage']}: not compared, {row['why']}" for row in comparison["not_compared"])]


def seed_lines(comparison: dict[str, Any]) -> list[str]:
    """What the intervals of the scores are over, and the spread over the seeds of both recipes."""
    rows = [row for row in comparison["scores"] if not row["same"]]
    spreads = [
        line
        for row in comparison["scores"]
        for line in recipe_lines(f"after {row['stage']}, {row['title']}", row["recipe_seeds"])
    ]
    return [*([f"Intervals and p: {OVER_PROBLEMS}."] if rows else []), *spreads]


def step_cells(comparison: dict[str, Any]) -> list[tuple[str, list[str]]]:
    """Rows of each step and of the total: label, then times of A and B and costs of A and B; empty where unknown."""
    forms = (("seconds", duration), ("dollars", dollars))
    rows = []
    for row in comparison["steps"]:
        sides = [row[side] or {} for side in ("a", "b")]
        cells = [form(side[name]) if side.get(name) is not None else "" for name, form in forms for side in sides]
        rows.append((f"{row['label']} (the same)" if row["same"] else row["label"], cells))
    # The total adds the known values of each run on its own, so a step that one run lacks counts for the other.
    totals = []
    for name, form in forms:
        for side in ("a", "b"):
            known = [row[side][name] for row in comparison["steps"] if row[side] and row[side][name] is not None]
            totals.append(form(sum(known)) if known else "")
    return [*rows, ("in all", totals)]
