"""Sentences and cells of comparisons, of two runs and of a sweep's arms: for the terminal and for the dashboard."""

from typing import Any

from nautile.common.text import dollars, duration
from nautile.evals.scoring.intervals import OVER_PROBLEMS
from nautile.tasks.reporting.other_seeds import recipe_lines, spread_in_words


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


def run_title(row: dict[str, Any]) -> str:
    """The arm of a row, and its seed if it has one."""
    return row["arm"] if row["seed"] is None else f"{row['arm']} seed {row['seed']}"


def note(report: dict[str, Any]) -> str:
    """The explanation below the tables of a report: what the intervals and tests are over, and the correction."""
    rows = [row for metric in report["metrics"] for row in metric["arms"]]
    tests = sum(row["p"] is not None for row in rows)
    parts = []
    if any(row["seeds"] > 1 for row in rows):
        parts.append(
            "With several seeds, over seeds: the mean and its t interval; the lead is paired by seed, tested by "
            "Student's t, and never surer than the problems allow. Finds: the smallest true lead that so many seeds "
            "find in four of five cases, after the correction, if they spread as these do."
        )
    if any(row["seeds"] == 1 for row in rows):
        parts.append(
            f"With one seed, {OVER_PROBLEMS}: Wilson's interval and McNemar's exact test, two-sided, paired by "
            "question (for a mean of benchmarks, their intervals combined, and a paired bootstrap)."
        )
    several = "test" if tests == 1 else "tests"
    tested = f"; p is corrected by Holm for the {tests} {several} of this report, * below 0.05" if tests else ""
    return " ".join(parts) + f" Intervals are of 95 %, not corrected{tested}."


def spread_lines(metric: dict[str, Any]) -> list[str]:
    """A line for each arm with one seed whose recipe has others in the store: how far they spread."""
    rows = [row for row in metric["arms"] if row["recipe_seeds"]]
    return [spread_in_words(row["arm"], row["recipe_seeds"]) for row in rows]


def metric_heads(metric: dict[str, Any], first: str) -> list[str]:
    """The columns of `metric_cells`."""
    over = " or ".join(sorted({row["over"] for row in metric["arms"] if row["over"]})) or "problems"
    return ["arm", "seeds", "n", f"% [95 % over {over}]", f"against {first}, points [95 %]", "p, Holm", "finds"]


def metric_cells(row: dict[str, Any], first: str) -> list[str]:
    """The cells of an arm under one benchmark."""
    arm = row["arm"] if row["after"] is None else f"{row['arm']} (after {row['after']})"
    if row["accuracy"] is None:
        return [arm, "", "", "not measured", "", "", ""]
    score = f"{100 * row['accuracy']:.1f}{_interval(row['low'], row['high'], '.1f')}"
    lead, p, finds = "", "", ""
    if row["lead"] is not None:
        lead = f"{100 * row['lead']:+.1f}{_interval(row['lead_low'], row['lead_high'], '+.1f')}"
        if row["seeds"] > 1:
            lead += f", {row['common_seeds']} seeds" if row["lead_over"] == "seeds" else ", one seed"
        p = f"{row['p_corrected']:.3g}" + (" *" if row["significant"] else "")
        finds = "" if row["detectable"] is None else f"{100 * row['detectable']:.1f}"
    elif row["same"]:
        lead = "the same evaluation"
    elif row["arm"] != first:
        lead = "no question in common"
    return [arm, str(row["seeds"]), f"{row['n']:,}", score, lead, p, finds]


def _interval(low: float | None, high: float | None, form: str) -> str:
    return "" if low is None or high is None else f" [{100 * low:{form}}, {100 * high:{form}}]"


def run_cells(row: dict[str, Any]) -> list[str]:
    """The cells of one run. "Own" time and cost are of the steps that no run above has; unknown values are empty."""
    amounts = []
    for name, form in (("seconds", duration), ("dollars", dollars)):
        own = f" ({form(row[f'own_{name}'])})" if row[f"own_{name}"] is not None else ""
        amounts.append("" if row[name] is None else form(row[name]) + own)
    return [run_title(row), row["state"], f"{row['made']} of {row['steps']}", *amounts, (row["run"] or "")[:8]]
