"""Two models on the same questions: paired tests, and the samples whose verdict changed.

Only questions that both were asked, with the same prompt, are compared; the others are counted. McNemar's exact test
says whether a lead on one benchmark could be chance; a mean of benchmarks has a paired bootstrap, which draws a
question's two verdicts together.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from common.errors import ConfigError
from evals.benchmarks.catalogue import COMPOSITES
from evals.running.rows import Row
from evals.scoring.intervals import paired, paired_bootstrap
from evals.scoring.scores import Scores, title_of
from evals.tables import paper_figures as paper
from evals.tables.results import ResultTable, signed

Comparison = dict[str, Any]
Verdicts = tuple[list[bool], list[bool]]
_CHANGES = ("gained", "lost")


def compare(a: Sequence[Row], b: Sequence[Row], verdict: str = "strict", seed: int = 0) -> Comparison:
    """How `b` differs from `a`, by `verdict` ("strict" or "lenient"): benchmarks, means of them, changed samples.

    Raises `ConfigError` where no question was asked of both.
    """
    pairs = _common(a, b)
    if not pairs:
        raise ConfigError("the two evaluations have no question in common: nothing to compare")
    by_name: dict[str, Verdicts] = defaultdict(lambda: ([], []))
    for one, other in pairs:
        before, after = by_name[one["benchmark"]]
        before.append(bool(one[verdict]))
        after.append(bool(other[verdict]))
    return {
        "verdict": verdict,
        "common": len(pairs),
        "only_in_a": len(a) - len(pairs),
        "only_in_b": len(b) - len(pairs),
        "benchmarks": {name: _tested(name, *verdicts) for name, verdicts in by_name.items()},
        "means": _means(by_name, seed),
        "changed": [
            _changed(one, other, verdict) for one, other in pairs if bool(one[verdict]) != bool(other[verdict])
        ],
    }


def comparison_table(found: Comparison, a: str, b: str) -> ResultTable:
    """One row a benchmark, then the means; `a` and `b` name the models."""
    columns = ("Benchmark", "n", a, b, f"{b} leads by", f"Only {a}", f"Only {b}", "p")
    rows = []
    for name, one in found["benchmarks"].items():
        lead = f"{signed(100 * one['lead'])} [{100 * one['low']:.1f}, {100 * one['high']:.1f}]"
        counts = (f"{one['only_a']:,}", f"{one['only_b']:,}", f"{one['p']:.3g}")
        rows.append((title_of(name), f"{one['n']:,}", _percent(one["a"]), _percent(one["b"]), lead, *counts))
    for name, one in found["means"].items():
        lead = f"{signed(100 * one['lead'])} [{100 * one['low']:.1f}, {100 * one['high']:.1f}]"
        rows.append(
            (title_of(name), f"{one['n']:,}", _percent(one["a"]), _percent(one["b"]), lead, "", "", f"{one['p']:.3g}")
        )
    notes = [
        f"{found['verdict'].capitalize()} accuracy in percent over the {found['common']:,} questions both were asked. "
        "Lead in points with its 95 % interval; p: McNemar's exact test, two-sided (a paired bootstrap for means)."
    ]
    if found["only_in_a"] or found["only_in_b"]:
        notes.append(f"Left out: {found['only_in_a']:,} rows of the first alone, {found['only_in_b']:,} of the second.")
    return ResultTable("Compared on the same questions", columns, tuple(rows), tuple(notes), ())


def _common(a: Sequence[Row], b: Sequence[Row]) -> list[tuple[Row, Row]]:
    """Rows of the same question, asked of both with the same prompt."""
    others = {(row["benchmark"], row["index"], row["prompt_digest"]): row for row in b if row["left_out"] is None}
    keys = [(row["benchmark"], row["index"], row["prompt_digest"]) for row in a]
    return [(row, others[key]) for row, key in zip(a, keys, strict=True) if row["left_out"] is None and key in others]


def _tested(name: str, before: list[bool], after: list[bool]) -> dict[str, Any]:
    tested = asdict(paired(before, after))
    return {"title": title_of(name), "a": sum(before) / len(before), "b": sum(after) / len(after), **tested}


def _means(by_name: Mapping[str, Verdicts], seed: int) -> dict[str, dict[str, Any]]:
    """The composites whose parts are there, and the paper's average where all its rows are."""
    found = {}
    for name, parts in COMPOSITES.items():
        if set(parts) <= set(by_name):
            found[name] = _mean_of({part: 1 / len(parts) for part in parts}, by_name, seed)
    rows = {name: COMPOSITES.get(name, (name,)) for name in paper.TABLE_2}
    if all(part in by_name for parts in rows.values() for part in parts):
        weights = {part: 1 / (len(rows) * len(parts)) for parts in rows.values() for part in parts}
        found["average"] = _mean_of(weights, by_name, seed)
    return found


def _mean_of(weights: Mapping[str, float], by_name: Mapping[str, Verdicts], seed: int) -> dict[str, Any]:
    lead, low, high, p = paired_bootstrap([by_name[name] for name in weights], list(weights.values()), seed)
    a, b = (
        sum(weight * sum(by_name[name][side]) / len(by_name[name][side]) for name, weight in weights.items())
        for side in (0, 1)
    )
    n = sum(len(by_name[name][0]) for name in weights)
    return {"parts": list(weights), "n": n, "a": a, "b": b, "lead": lead, "low": low, "high": high, "p": p}


def _changed(one: Row, other: Row, verdict: str) -> dict[str, Any]:
    shared = {name: one.get(name) for name in ("benchmark", "index", "id", "category", "prompt", "expected")}
    sides = {
        side: {name: row.get(name) for name in ("output", "parsed", "problem", "strict", "lenient")}
        for side, row in (("a", one), ("b", other))
    }
    return {**shared, "change": _CHANGES[bool(one[verdict])], **sides}


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


LEVEL = 0.05


def fallen(found: Comparison, rule: str = "interval", margin: float = 0.0) -> list[dict[str, Any]]:
    """The benchmarks of a comparison whose lead (a share) lies beyond its 95 % interval below -`margin`, worst first.

    With `rule` "holm" the exact p must besides be under 0.05 after Holm's step-down correction for the number of
    benchmarks: of twenty that have not changed, the plain rule names some in two comparisons of five.
    """
    tested = found["benchmarks"]
    sure = _holm({name: one["p"] for name, one in tested.items()}) if rule == "holm" else set(tested)
    names = [name for name, one in tested.items() if one["high"] < -margin and name in sure]
    kept = ("title", "n", "a", "b", "lead", "low", "high", "p")
    return sorted(
        ({"benchmark": name, **{field: tested[name][field] for field in kept}} for name in names),
        key=lambda one: one["lead"],
    )


def unmatched(a: Scores, b: Scores) -> list[str]:
    """Benchmarks that only one of two `scores.json` has a score for, by name."""
    return sorted(scored(a) ^ scored(b))


def scored(scores: Scores) -> set[str]:
    """The benchmarks that were measured: their accuracy is not None."""
    return {name for name, one in scores["benchmarks"].items() if one["accuracy"] is not None}


def best(candidates: Sequence[Scores], asked: set[str]) -> int | None:
    """The place of the one with the highest mean strict accuracy over `asked`; the newest (last) of equals.

    One that lacks a score there is no candidate, for a missing score is not zero. None: there is none.
    """
    means = {
        place: sum(one["benchmarks"][name]["accuracy"] for name in asked) / len(asked)
        for place, one in enumerate(candidates)
        if asked and asked <= scored(one)
    }
    return max(means, key=lambda place: (means[place], place), default=None)


def _holm(p_values: Mapping[str, float]) -> set[str]:
    sure = set()
    for rank, name in enumerate(sorted(p_values, key=lambda name: p_values[name])):
        if p_values[name] >= LEVEL / (len(p_values) - rank):
            break
        sure.add(name)
    return sure
