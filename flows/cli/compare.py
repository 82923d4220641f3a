"""`nautile compare`: compare two evaluations on the questions they share, or two runs.

Its tests are over problems; the spread over other seeds of a recipe stands beside them if the store has any.

An evaluation is named by a folder, an artifact id, or the evaluated stage (its newest evaluation); a run by its id or
name.
"""

from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from nautile.common.text import visible
from nautile.configs.changes import Change, describe_changes
from nautile.evals.benchmarks.registry import title_of
from nautile.evals.scoring.comparison import comparison_table, whose_gain
from nautile.flows.render import FittingTable, query_table
from nautile.flows.sweep.comparisons import SIDES, gain_lines, seed_lines, step_cells
from nautile.tasks.reporting.other_seeds import recipe_lines

MAX_CHARACTERS = 600  # of a prompt or an output in the terminal


def comparison_view(comparison: dict[str, Any], shown: int) -> RenderableType:
    """The table of tests, and the first `shown` samples whose verdict changed, lost ones first."""
    table = comparison_table(comparison, "A", "B")
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
        # The others (a learning rate, a count) are in `--json` and on the dashboard.
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
