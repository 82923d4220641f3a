"""What stands behind a score, as tables: what went wrong and how often, both ways to ask, categories, instructions."""

from collections.abc import Iterator
from typing import Any

from evals.scoring.scores import Scores
from evals.tables.results import MISSING, ResultTable, with_interval

_LEVELS = ("prompt", "instruction")


def breakdown(scores: Scores) -> list[ResultTable]:
    """The tables that `scores.json` has anything for, the counts first."""
    found = [counts_table(scores), ways_table(scores), *category_tables(scores), *instruction_tables(scores)]
    return [table for table in found if table is not None and table.rows]


def counts_table(scores: Scores) -> ResultTable:
    """One row a benchmark: both verdicts, and every reason for which a reply was no answer."""
    names = ("no_answer", "many_answers", "unfinished", "truncated")
    columns = (
        "Benchmark",
        "Asked",
        "Strict",
        "Lenient",
        "Not parsed",
        "Several answers",
        "Unfinished",
        "Cut",
        "Left out",
    )
    rows, data = [], []
    for name, one in scores["benchmarks"].items():
        left_out = sum(one["left_out"].values())
        told = [f"{one[problem]:,}" for problem in names]
        rows.append(
            (one["title"], f"{one['n']:,}", with_interval(one), with_interval(_lenient(one)), *told, f"{left_out:,}")
        )
        kept = ("n", "accuracy", "interval", "accuracy_lenient", "interval_lenient", *names)
        data.append({"benchmark": name, **{key: one[key] for key in kept}, "left_out": one["left_out"]})
    notes = (
        "Strict: exactly one candidate answer, thinking finished. Lenient: the last candidate counts. Percent with "
        "the 95 % Wilson interval. Cut: the limit of tokens came first. Left out: could not be asked, and in no score.",
    )
    return ResultTable("What was answered, and what was not", columns, tuple(rows), notes, tuple(data))


def ways_table(scores: Scores) -> ResultTable | None:
    """The generated answers beside the likelihood of the options, where both were asked for."""
    weighed = scores.get("likelihood") or {}
    rows, data = [], []
    for name, one in weighed.items():
        generated = scores["benchmarks"].get(name) or scores["composites"].get(name)
        by_sum = _percent(one["accuracy_by_sum"])
        chance = _percent(one.get("chance"))
        rows.append((one["title"], with_interval(generated), with_interval(one), by_sum, chance, f"{one['n']:,}"))
        data.append({"benchmark": name, "generated": generated and generated["accuracy"], "likelihood": one})
    columns = ("Benchmark", "Generated, strict", "Likelihood per byte", "Likelihood, sum", "Chance", "n")
    notes = ("Likelihood: the option that is likeliest after the bare question, no letters and no chat template.",)
    return ResultTable("Two ways to ask", columns, tuple(rows), notes, tuple(data)) if rows else None


def category_tables(scores: Scores) -> Iterator[ResultTable]:
    """Of each benchmark with several categories (MMLU's subjects, say), one row a category."""
    for one in scores["benchmarks"].values():
        if len(one["categories"]) > 1:
            yield _shares(f"{one['title']} by category", "Category", one["categories"])


def instruction_tables(scores: Scores) -> Iterator[ResultTable]:
    """IFEval's four scores, and its instruction level by type."""
    for one in scores["benchmarks"].values():
        if found := one["instructions"]:
            yield _shares(f"{one['title']}: both levels", "Level", dict(zip(_LEVELS, (one, found), strict=True)))
            yield _shares(f"{one['title']} by instruction", "Instruction", found["types"])


def _shares(title: str, what: str, groups: dict[str, dict[str, Any]]) -> ResultTable:
    rows = tuple(
        (name, f"{one['n']:,}", with_interval(one), with_interval(_lenient(one))) for name, one in groups.items()
    )
    kept = ("n", "correct", "accuracy", "interval", "correct_lenient", "accuracy_lenient", "interval_lenient")
    data = tuple({what.lower(): name, **{key: one[key] for key in kept}} for name, one in groups.items())
    lenient = "Loose" if "instruction" in title or "levels" in title else "Lenient"
    return ResultTable(title, (what, "n", "Strict", lenient), rows, (), data)


def _lenient(one: dict[str, Any]) -> dict[str, Any]:
    return {"accuracy": one["accuracy_lenient"], "interval": one["interval_lenient"]}


def _percent(share: float | None) -> str:
    return MISSING if share is None else f"{100 * share:.1f}"
