"""Compare two models on the same questions: paired tests, regressions, and the samples whose verdict changed.

Only questions that both models were asked, with the same prompt, are compared; the others are counted. McNemar's exact
test tells whether a lead on one benchmark could be chance. A mean of benchmarks has a paired bootstrap, which resamples
the two verdicts on a question together.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from nautile.common.errors import ConfigError
from nautile.evals.benchmarks.registry import composites, parts_of, title_of
from nautile.evals.running.rows import SampleRow
from nautile.evals.scoring.intervals import LEVEL, OVER_PROBLEMS, holm, paired, paired_bootstrap
from nautile.evals.scoring.scores import Scores, by_question, finished, k_of, marked_title, screening_note, vote
from nautile.evals.tables import paper_figures as paper
from nautile.evals.tables.results import ResultTable, finished_in_words, signed

Comparison = dict[str, Any]
Votes = tuple[list[float], list[float]]
FORM = ("finished_share", "accuracy_finished")


def compare(a: Sequence[SampleRow], b: Sequence[SampleRow], verdict: str = "strict", seed: int = 0) -> Comparison:
    """Compare `b` with `a` by `verdict` ("strict", "lenient", "pass@K"): benchmarks, their means, changed samples.

    Of sampled answers a question's vote is the share of those that are right, and none of them counts as changed.
    Raises `ConfigError` if they have no question in common, or none with K graded answers on both sides.
    """
    rows_b = {_question(row): row for row in b if row["left_out"] is None}
    pairs = [(row, rows_b[_question(row)]) for row in a if row["left_out"] is None and _question(row) in rows_b]
    if not pairs:
        raise ConfigError("the two evaluations have no question in common: nothing to compare")
    by_name: dict[str, Votes] = defaultdict(lambda: ([], []))
    too_few = 0  # questions with fewer graded answers than a verdict "pass@K" needs
    for question in by_question(row for row, _ in pairs):  # one vote each, however many rows ask it
        # The questions are grouped by the rows of `a`; `b` has a row for each of them, because only pairs are left.
        votes = vote(question, verdict), vote([rows_b[_question(row)] for row in question], verdict)
        if votes[0] is None or votes[1] is None:
            too_few += 1
            continue
        before, after = by_name[question[0]["benchmark"]]
        before.append(votes[0])
        after.append(votes[1])
    if not by_name:
        raise ConfigError(f"--verdict {verdict}: no question has so many graded answers in both evaluations")
    notes = [_screening(side) for side in zip(*pairs, strict=True)]
    return {
        "verdict": verdict,
        "over": "problems",
        "common": len(pairs),
        "only_in_a": len(a) - len(pairs),
        "only_in_b": len(b) - len(pairs),
        "too_few_answers": too_few,
        "benchmarks": {
            name: _titled(name, notes)
            | {"a": sum(a) / len(a), "b": sum(b) / len(b), **asdict(paired(a, b))}
            | _form([pair for pair in pairs if pair[0]["benchmark"] == name])
            for name, (a, b) in by_name.items()
        },
        "means": {
            name: _titled(name, notes, weights) | _mean_of(weights, by_name, seed)
            for name, weights in mean_weights(by_name.keys()).items()
        },
        "changed": [
            _changed(row_a, row_b, verdict)
            for row_a, row_b in pairs
            if "sample" not in row_a and not k_of(verdict) and bool(row_a[verdict]) != bool(row_b[verdict])
        ],
    }


def _form(pairs: Sequence[tuple[SampleRow, SampleRow]]) -> dict[str, dict[str, float | None]]:
    """Form and skill of both sides on the common rows: the share that finished, and the accuracy among those."""
    sides = {side: finished([pair[place] for pair in pairs]) for place, side in enumerate(("a", "b"))}
    return {name: {side: own[name] for side, own in sides.items()} for name in FORM}


def _screening(rows: Iterable[SampleRow]) -> dict[str, str]:
    """Benchmark -> its note on questions that training text was not screened for, of those that have one."""
    by_name: dict[str, list[SampleRow]] = defaultdict(list)
    for row in rows:
        by_name[row["benchmark"]].append(row)
    return {name: note for name, group in by_name.items() if (note := screening_note(group))}


def _titled(name: str, notes: Sequence[Mapping[str, str]], parts: Iterable[str] = ()) -> dict[str, Any]:
    """The title of a benchmark or a mean, and the notes of both sides on its screening, where they have some."""
    about = {
        side: "; ".join(dict.fromkeys(own[part] for part in (name, *parts) if part in own))
        for side, own in zip(("a", "b"), notes, strict=True)
    }
    about = {side: note for side, note in about.items() if note}
    return {"title": marked_title({"title": title_of(name), "not_screened": about}), "not_screened": about}


def comparison_table(comparison: Comparison, a: str, b: str) -> ResultTable:
    """The table of a comparison: one row per benchmark, then the means. `a` and `b`: names of the models."""
    columns = ("Benchmark", "n", a, b, f"{b} leads by", f"Only {a}", f"Only {b}", "p")
    rows = []
    tests = (*comparison["benchmarks"].values(), *comparison["means"].values())
    for test in tests:
        lead = f"{signed(100 * test['lead'])} [{100 * test['low']:.1f}, {100 * test['high']:.1f}]"
        counts = [f"{test[side]:,}" if side in test else "" for side in ("only_a", "only_b")]  # a mean has none
        percents = f"{100 * test['a']:.1f}", f"{100 * test['b']:.1f}"
        rows.append((test["title"], f"{test['n']:,}", *percents, lead, *counts, f"{test['p']:.3g}"))
    notes = [
        f"{comparison['verdict'].capitalize()} accuracy in percent over the {comparison['common']:,} common rows; "
        "n: questions, each with one vote. Lead in points with its 95 % interval; p: McNemar's exact test, two-sided "
        f"(a paired bootstrap for means). Both: {OVER_PROBLEMS}."
    ]
    sides = {"a": a, "b": b}
    notes += [
        f"{test['title']}: {note} ({sides[side]})." for test in tests for side, note in test["not_screened"].items()
    ]
    for test in comparison["benchmarks"].values():
        words = [finished_in_words({name: test[name][side] for name in FORM}) for side in sides]
        if all(words):
            notes.append(f"{test['title']}: of {a}'s answers {words[0]}; of {b}'s {words[1]}.")
    if comparison["too_few_answers"]:
        notes.append(f"{comparison['too_few_answers']:,} questions have too few graded answers and are left out.")
    if comparison["only_in_a"] or comparison["only_in_b"]:
        notes.append(
            f"Left out: {comparison['only_in_a']:,} rows only in the first evaluation, "
            f"{comparison['only_in_b']:,} only in the second."
        )
    return ResultTable("Compared on the same questions", columns, tuple(rows), tuple(notes), ())


def _question(row: SampleRow) -> tuple[str, int, str, int | None]:
    return row["benchmark"], row["index"], row["prompt_digest"], row.get("sample")


def mean_weights(measured: Collection[str]) -> dict[str, dict[str, float]]:
    """Name -> benchmark -> weight, of each composite whose parts are all measured, and so of the paper's average."""
    means = {
        name: {part: 1 / len(parts) for part in parts}
        for name, parts in composites().items()
        if all(part in measured for part in parts)
    }
    # The average of the paper has one share for each row of its table, which a composite divides among its parts.
    rows = {name: parts_of(name) for name in paper.TABLE_2}
    if all(part in measured for parts in rows.values() for part in parts):
        means["average"] = {part: 1 / (len(rows) * len(parts)) for parts in rows.values() for part in parts}
    return means


def _mean_of(weights: Mapping[str, float], by_name: Mapping[str, Votes], seed: int) -> dict[str, Any]:
    lead, low, high, p = paired_bootstrap([by_name[name] for name in weights], list(weights.values()), seed)
    a, b = (
        sum(weight * sum(by_name[name][side]) / len(by_name[name][side]) for name, weight in weights.items())
        for side in (0, 1)
    )
    n = sum(len(by_name[name][0]) for name in weights)
    return {"parts": list(weights), "n": n, "a": a, "b": b, "lead": lead, "low": low, "high": high, "p": p}


def _changed(row_a: SampleRow, row_b: SampleRow, verdict: str) -> dict[str, Any]:
    shared = {name: row_a.get(name) for name in ("benchmark", "index", "id", "category", "prompt", "expected")}
    sides = {
        side: {name: row.get(name) for name in ("output", "parsed", "problem", "strict", "lenient")}
        for side, row in (("a", row_a), ("b", row_b))
    }
    return {**shared, "change": "lost" if row_a[verdict] else "gained", **sides}


def regressed(comparison: Comparison, rule: str = "interval", margin: float = 0.0) -> list[dict[str, Any]]:
    """Find regressions: benchmarks whose lead, with its whole 95 % interval, is below -`margin` (0..1); worst first.

    With `rule` "holm" the exact p, corrected for the number of benchmarks, must also be below 0.05: with twenty
    unchanged benchmarks the plain rule reports a regression in two of five comparisons.
    """
    tests = comparison["benchmarks"]
    p_values = holm({name: test["p"] for name, test in tests.items()}) if rule == "holm" else dict.fromkeys(tests, 0.0)
    names = [name for name, test in tests.items() if test["high"] < -margin and p_values[name] < LEVEL]
    fields = ("title", "n", "a", "b", "lead", "low", "high", "p")
    return sorted(
        ({"benchmark": name, **{field: tests[name][field] for field in fields}} for name in names),
        key=lambda regression: regression["lead"],
    )


def protocol_differences(a: Scores, b: Scores) -> list[str]:
    """Names of the benchmarks that only one of two `scores.json` has a score for, sorted."""
    return sorted(scored_benchmarks(a) ^ scored_benchmarks(b))


def scored_benchmarks(scores: Scores) -> set[str]:
    """Names of the benchmarks that were measured (accuracy is not None)."""
    return {name for name, score in scores["benchmarks"].items() if score["accuracy"] is not None}


def best_of(candidates: Sequence[Scores], benchmarks: set[str]) -> int | None:
    """Index of the scores with the highest mean strict accuracy over `benchmarks`; of equal ones the last (newest).

    Scores without one of the benchmarks are not considered. None if no candidate is left.
    """
    means = {
        index: sum(scores["benchmarks"][name]["accuracy"] for name in benchmarks) / len(benchmarks)
        for index, scores in enumerate(candidates)
        if benchmarks and benchmarks <= scored_benchmarks(scores)
    }
    return max(means, key=lambda index: (means[index], index), default=None)


def whose_gain(test: Mapping[str, Any], a: str = "A", b: str = "B") -> str:
    """Which of two models is better by a paired test, in words: only if the 95 % interval of its lead excludes 0."""
    lead, low, high = (100 * test[name] for name in ("lead", "low", "high"))
    if low > 0 or high < 0:
        better, sign = (b, 1) if low > 0 else (a, -1)
        low, high = sorted((sign * low, sign * high))
        return f"{better} is better by {sign * lead:.1f} points [{low:.1f}, {high:.1f}] over problems"
    if lead == 0:
        return f"both score the same, [{low:.1f}, {high:.1f}]"
    ahead = b if lead > 0 else a
    return f"no difference shown: {ahead} is {abs(lead):.1f} points ahead, which may be chance"
