"""Tables that break a score down: failure counts, generation against likelihood, categories, instructions."""

from typing import Any

from nautile.evals.scoring.scores import Scores, marked_title
from nautile.evals.tables.results import MISSING, ResultTable, with_interval


def breakdown(scores: Scores) -> list[ResultTable]:
    """Build the tables that `scores.json` has data for, the counts first."""
    tables = [counts_table(scores), ways_table(scores)]
    by_benchmark = scores["benchmarks"].values()
    for score in by_benchmark:
        if len(score["categories"]) > 1:  # such as MMLU's subjects
            tables.append(_shares(f"{marked_title(score)} by category", "Category", score["categories"]))
    for score in by_benchmark:
        if level := score["instructions"]:  # IFEval's: both levels with both verdicts, and its types of instruction
            tables.append(
                _shares(f"{marked_title(score)}: both levels", "Level", {"prompt": score, "instruction": level})
            )
            tables.append(_shares(f"{marked_title(score)} by instruction", "Instruction", level["types"]))
    return [table for table in tables if table is not None and table.rows]


def counts_table(scores: Scores) -> ResultTable:
    """One row per benchmark: both verdicts, and each reason why a reply counted as no answer."""
    names = ("no_answer", "many_answers", "unfinished", "truncated")
    columns = (
        "Benchmark", "Asked", "Strict", "Lenient", "Not parsed", "Several answers", "Unfinished", "Cut", "Left out",
    )  # fmt: skip
    rows, data = [], []
    for name, score in scores["benchmarks"].items():
        left_out = sum(score["left_out"].values())
        counts = [f"{score[problem]:,}" for problem in names]
        verdicts = with_interval(score), with_interval(_lenient(score))
        has_repeats = score["rows"] != score["n"]
        size = f"{score['n']:,} ({score['rows']:,} rows)" if has_repeats else f"{score['n']:,}"
        rows.append((marked_title(score), size, *verdicts, *counts, f"{left_out:,}"))
        fields = ("n", "rows", "accuracy", "accuracy_rows", "interval", "accuracy_lenient", "interval_lenient", *names)
        data.append({"benchmark": name, **{key: score.get(key) for key in fields}, "left_out": score["left_out"]})
    notes = (
        "Strict: exactly one candidate answer, thinking finished. Lenient: the last candidate counts. Percent with "
        "the 95 % Wilson interval over problems, one vote a question. Cut: the token limit was reached. Left out: "
        "could not be asked, was an invalid record or could not be graded; not in the score.",
    )
    return ResultTable("Answers and failures", columns, tuple(rows), notes, tuple(data))


def ways_table(scores: Scores) -> ResultTable | None:
    """Generated answers beside the likelihood of the options, if both were evaluated."""
    likelihood = scores.get("likelihood") or {}
    rows, data = [], []
    for name, score in likelihood.items():
        # Likelihood may be all that was evaluated; the cell is then a dash.
        generated = scores["benchmarks"].get(name) or scores["composites"].get(name)
        shares = (score["accuracy_by_sum"], score.get("chance"))
        percents = [MISSING if share is None else f"{100 * share:.1f}" for share in shares]
        rows.append((marked_title(score), with_interval(generated), with_interval(score), *percents, f"{score['n']:,}"))
        data.append({"benchmark": name, "generated": generated and generated["accuracy"], "likelihood": score})
    columns = ("Benchmark", "Generated, strict", "Likelihood per byte", "Likelihood, sum", "Chance", "n")
    notes = ("Likelihood: the most likely option after the bare question, no letters and no chat template.",)
    return ResultTable("Generation and likelihood", columns, tuple(rows), notes, tuple(data)) if rows else None


def _shares(title: str, heading: str, groups: dict[str, dict[str, Any]]) -> ResultTable:
    """A table of scores by group; `heading`: that of the column of groups."""
    rows = tuple(
        (name, f"{score['n']:,}", with_interval(score), with_interval(_lenient(score)))
        for name, score in groups.items()
    )
    fields = ("n", "correct", "accuracy", "interval", "correct_lenient", "accuracy_lenient", "interval_lenient")
    data = tuple({heading.lower(): name, **{key: score[key] for key in fields}} for name, score in groups.items())
    lenient = "Loose" if "instruction" in title or "levels" in title else "Lenient"
    return ResultTable(title, (heading, "n", "Strict", lenient), rows, (), data)


def _lenient(score: dict[str, Any]) -> dict[str, Any]:
    return {"accuracy": score["accuracy_lenient"], "interval": score["interval_lenient"]}
