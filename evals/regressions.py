"""What has got worse from one evaluation to another, by the paired tests of `evals.comparison`.

A benchmark that was not asked on both sides is in no comparison: it can neither fall nor hold, and is only counted.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from evals.comparison import Comparison
from evals.scores import Scores

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
