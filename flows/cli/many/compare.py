"""`nautile compare`: compare two evaluations on the questions they share, or two runs.

Its tests are over problems; the spread over other seeds of a recipe stands beside them if the store has any.

An evaluation is named by a folder, an artifact id, or the evaluated stage (its newest evaluation); a run by its id or
name.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from nautile.common.environment import differences
from nautile.common.errors import ConfigError
from nautile.common.files import read_json
from nautile.common.text import dollars, duration, visible
from nautile.configs.changes import Change, describe_changes
from nautile.evals.running.rows import SampleRow, read_rows
from nautile.evals.scoring.comparison import compare, comparison_table, whose_gain
from nautile.evals.scoring.intervals import OVER_PROBLEMS
from nautile.evals.scoring.scores import title_of
from nautile.flows.cli.inspect import named_or_newest
from nautile.flows.cli.runs import reading
from nautile.flows.cli.tables import FittingTable, query_table
from nautile.flows.cli.terminal import run_named
from nautile.flows.run_state import MOST_SEARCHED, RUNS
from nautile.flows.sweep.arms import EVALUATE
from nautile.flows.sweep.report import WAYS
from nautile.store.artifacts import Store, short_id
from nautile.tasks.reporting.other_seeds import accuracies_by_seed, recipe_lines, spread

SIDES = ("a", "b")
VERDICTS = ("strict", "lenient")
MAX_CHARACTERS = 600  # of a prompt or an output in the terminal


def runs_named(store: Store, a: str, b: str) -> tuple[str, str] | None:
    """The ids of the two runs that `a` and `b` name (by name or first digits); None if both name evaluations.

    Raises `ConfigError` for a run and an evaluation, and for a name of several runs.
    """
    with reading(store) as query:
        # Two readings of a name are possible. A folder, an id with a slash and the name of a stage are evaluations; a
        # run is looked up last, so that `nautile compare align reason` means stages even where a run is called
        # `reason`.
        runs = {row["run"]: row["name"] for row in query(RUNS, MOST_SEARCHED)}
    labels = _evaluated(store)
    ids: list[str | None] = []
    for name in (a, b):
        if Path(name).is_dir() or "/" in name or name in labels:
            ids.append(None)
            continue
        run = run_named(name, runs)
        # Both ids are hexadecimal, so a few digits can be the beginning of a run and of an evaluation.
        if run and any(key.startswith(name) for _, key, _, _ in store.folders("evaluation")):
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


def check_choices(verdict: str, way: str) -> None:
    """Raise `ConfigError` for an unknown `--verdict` or `--way`."""
    if verdict not in VERDICTS:
        raise ConfigError(f"--verdict {verdict}: must be {' or '.join(VERDICTS)}")
    if way not in WAYS:
        raise ConfigError(f"--way {way}: must be {' or '.join(WAYS)}")


def _evaluated(store: Store) -> dict[str, str]:
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
    labels = _evaluated(store)
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


def comparison_view(comparison: dict[str, Any], shown: int) -> RenderableType:
    """The table of tests, and the first `shown` samples whose verdict changed, lost ones first."""
    table = comparison_table(comparison, "A", "B")
    # Lost samples are what an operator looks for after a training that went wrong.
    changed = sorted(
        comparison["changed"], key=lambda sample: (sample["change"] != "lost", sample["benchmark"], sample["index"])
    )
    parts: list[RenderableType] = [Text(f"{side.upper()}: {comparison[side]}") for side in ("a", "b")]
    parts += [Text(visible(f"warning: {warning}"), "yellow") for warning in comparison["warnings"]]
    parts.append(query_table(list(table.columns), list(table.rows)))
    parts += [Text(note, "dim") for note in table.notes]
    tests = (*comparison["benchmarks"].items(), *comparison["means"].items())
    parts += [Text(f"{test['title']}: {whose_gain(test)}", "bold") for _, test in tests]
    spreads = comparison["recipe_seeds"].items()
    parts += [Text(line) for name, sides in spreads for line in recipe_lines(title_of(name), sides)]
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


def run_comparison_view(comparison: dict[str, Any]) -> RenderableType:
    """Settings, scores, curves, time and cost of two runs, as tables."""
    runs = comparison["runs"]
    parts: list[RenderableType] = [
        Text(visible(f"{side.upper()}: {runs[side]['name']}, run {runs[side]['run'][:8]}, {runs[side]['begun'][:16]}"))
        for side in SIDES
    ]
    if comparison["settings"] is None:
        parts.append(Text("settings: unknown, because one of the runs is older than their record", "yellow"))
    else:
        changes = [Change(**change) for change in comparison["settings"]]
        parts.append(Text(f"settings, A -> B: {describe_changes(changes, None) or 'no differences'}", "bold"))
    scores = FittingTable("after", "benchmark", "n", "A %", "B %", "p")
    for row in comparison["scores"]:
        shares = [f"{100 * row[side]:.1f}" for side in SIDES]
        p = "the same" if row["same"] else f"{row['p']:.3g}"
        scores.add_row(row["stage"], row["title"], f"{row['n']:,}", *shares, p)
    curves = FittingTable("step", "metric", "A last", "B last", "A best", "B best")
    for row in comparison["curves"]:
        # Only metrics with a better direction have a best value. The others (a learning rate, a count) are in `--json`
        # and on the dashboard.
        if row["a"]["best"] is not None:
            values = [f"{row[side][which]:.4g}" for which in ("last", "best") for side in SIDES]
            curves.add_row(row["stage"], row["title"], *values)
    steps = FittingTable("step", "A time", "B time", "A paid", "B paid")
    for label, cells in step_cells(comparison):
        steps.add_row(label, *cells)
    for heading, table in (
        ("Scores on the same questions", scores),
        ("Curves", curves),
        ("Time and cost (of reused steps: when they were made)", steps),
    ):
        if table.rows:
            parts += [Text(), Text(heading, "bold"), table]
        if table is scores:
            parts += [Text(visible(line), "bold") for line in gain_lines(comparison)]
            parts += [Text(visible(line)) for line in seed_lines(comparison)]
    return Group(*parts)


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
        sides = [row[side] or {} for side in SIDES]
        cells = [form(side[name]) if side.get(name) is not None else "" for name, form in forms for side in sides]
        rows.append((f"{row['label']} (the same)" if row["same"] else row["label"], cells))
    # The total adds the known values of each run on its own, so a step that one run lacks counts for the other.
    totals = []
    for name, form in forms:
        for side in SIDES:
            known = [row[side][name] for row in comparison["steps"] if row[side] and row[side][name] is not None]
            totals.append(form(sum(known)) if known else "")
    return [*rows, ("in all", totals)]


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
