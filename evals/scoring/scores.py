"""Compute scores from rows: strict and lenient accuracy with intervals, failure counts, composites.

A score also counts what went wrong: questions that could not be asked or graded, parse failures, several answers,
unfinished thinking and truncated completions. A value that was not measured is None. Accuracy among the finished
answers stands beside the share that finished, so that a gain in form is not taken for one in skill.

If several rows ask the same question (TriviaQA has one row per document), the question has one vote, the mean over its
rows: copies of a question are no further evidence and would make the intervals too narrow.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from nautile.evals.benchmarks.registry import BENCHMARKS, composites, parts_of, stand_in_note, title_of
from nautile.evals.running.rows import SampleRow
from nautile.evals.scoring.intervals import wilson, wilson_mean
from nautile.evals.tables import paper_figures as paper

Scores = dict[str, Any]
SCHEMA = 1
NOT_SCREENED = "not screened for"  # mark of a score whose questions may stand in training text


def by_question(rows: Iterable[SampleRow]) -> list[list[SampleRow]]:
    """Group the rows by question (same id and prompt), in the order of first appearance."""
    groups: dict[tuple[str, str, str], list[SampleRow]] = defaultdict(list)
    for row in rows:
        # By id and prompt: TriviaQA repeats a question with each of its documents, which are not shown here.
        groups[row["benchmark"], row["id"], row["prompt_digest"]].append(row)
    return list(groups.values())


def vote(rows: Sequence[SampleRow], verdict: str = "strict") -> float | None:
    """The vote of one question: the mean of its rows' verdicts, or for "pass@K" the estimate from its rows.

    None for "pass@K" of fewer than K rows.
    """
    if k := k_of(verdict):
        return pass_at_k(len(rows), sum(bool(row["strict"]) for row in rows), k)
    return sum(bool(row[verdict]) for row in rows) / len(rows)


def k_of(verdict: str) -> int | None:
    """The K of a verdict "pass@K"; None for any other."""
    found = re.fullmatch(r"pass@([1-9][0-9]{0,5})", verdict)
    return int(found[1]) if found else None


def pass_at_k(samples: int, right: int, k: int) -> float | None:
    """The unbiased estimate of the chance that one of `k` samples is right, if `right` of `samples` are.

    1 - C(samples - right, k) / C(samples, k) (Chen et al. 2021, arXiv:2107.03374). None for fewer than `k` samples.
    """
    return None if samples < k else 1 - math.comb(samples - right, k) / math.comb(samples, k)


def _votes(rows: Iterable[SampleRow], verdict: str = "strict") -> list[float]:
    """The vote of each question that was asked and graded, i.e. not left out."""
    questions = by_question(row for row in rows if row["left_out"] is None)
    return [found for question in questions if (found := vote(question, verdict)) is not None]


def score(name: str, rows: Sequence[SampleRow], bad_rows: int = 0) -> Scores:
    """Score one benchmark from its rows.

    In the result, `n` is the number of questions asked and graded, and `accuracy` the strict accuracy, None for n = 0.
    `rows` and `accuracy_rows` are the same with a vote for each row, as common harnesses count. The argument `bad_rows`
    is the number of invalid records of the benchmark, which were left out.
    """
    asked_rows = [row for row in rows if row["left_out"] is None]
    problems = Counter(row["problem"] for row in asked_rows)
    left_out = Counter(row["left_out"] for row in rows if row["left_out"]) + Counter(bad_row=bad_rows)
    share = _share_of(asked_rows)
    accuracy_rows = _mean([bool(row["strict"]) for row in asked_rows])
    repeats = []
    if accuracy_rows is not None and share["n"] != len(asked_rows):
        by_rows = f"{100 * accuracy_rows:.1f} by rows"
        repeats = [f"{share['n']:,} questions in {len(asked_rows):,} rows, one vote a question; {by_rows}"]
    paper_row = paper.TABLE_2.get(name)
    return {
        "title": title_of(name),
        "stand_in": stand_in_note(name),
        "stands_for": (entry.like or None) if (entry := BENCHMARKS.get(name)) else None,
        "not_screened": screening_note(asked_rows),
        "items": len(rows) + bad_rows,
        **share,
        "rows": len(asked_rows),
        "accuracy_rows": accuracy_rows,
        "chance": sum(row["chance"] for row in asked_rows) / len(asked_rows) if asked_rows else None,
        "no_answer": problems["no_answer"],
        "many_answers": problems["many_answers"],
        "unfinished": problems["unfinished"],
        "truncated": sum(bool(row["truncated"]) for row in asked_rows),
        **finished(asked_rows),
        "left_out": dict(sorted(left_out.items())),
        "tokens_out_mean": _mean([row["tokens_out"] for row in asked_rows if row["tokens_out"] is not None]),
        "paper": dict(paper_row) if paper_row else None,
        "differs": [*differences(name, len(asked_rows)), *repeats],
        "categories": _by_category(asked_rows),
        "instructions": _instruction_level(asked_rows),
        "own_scorer": _agreement(asked_rows),
    }


def composite(name: str, parts: Mapping[str, Sequence[SampleRow]]) -> Scores | None:
    """Mean of the parts' accuracies with its interval; None if no question of a part was asked."""
    strict, lenient = ([_votes(rows, verdict) for rows in parts.values()] for verdict in ("strict", "lenient"))
    if not strict or not all(strict):
        return None
    paper_row = paper.TABLE_2.get(name)
    return {
        "title": title_of(name),
        "parts": list(parts),
        "not_screened": _part_screening(parts),
        "n": sum(map(len, strict)),
        "accuracy": _mean([sum(votes) / len(votes) for votes in strict]),
        "interval": list(wilson_mean(strict)),
        "accuracy_lenient": _mean([sum(votes) / len(votes) for votes in lenient]),
        "paper": dict(paper_row) if paper_row else None,
        "differs": [*differences(name, None), *_part_asked(parts)],
    }


def _part_screening(parts: Mapping[str, Sequence[SampleRow]]) -> str | None:
    return screening_note([row for rows in parts.values() for row in rows if row["left_out"] is None])


def _part_asked(parts: Mapping[str, Sequence[SampleRow]]) -> list[str]:
    """How many questions were asked of the splits of a mean's parts, if not all."""
    asked = sum(row["left_out"] is None for rows in parts.values() for row in rows)
    entries = [entry for part in parts if (entry := BENCHMARKS.get(part))]
    size = sum(entry.size for entry in entries)
    is_whole = asked == size or any(entry.build for entry in entries)  # of a generator any number is all
    return [] if is_whole else [f"{asked:,} of the splits' {size:,} questions"]


def summarise(
    rows: Sequence[SampleRow],
    model: str,
    protocol: Mapping[str, Any],
    column: str = "nautile_370m",
    likelihood_rows: Sequence[SampleRow] = (),
    bad_rows: Mapping[str, int] | None = None,
    sampled_rows: Sequence[SampleRow] = (),
) -> Scores:
    """Build `scores.json`: each benchmark of `rows`, the composites whose parts are all present, the paper's average.

    The average covers all eleven rows of Table 2 (ARC is one of them); it is None if any is missing. `column`: the
    paper's column for this model, "" for none. `likelihood_rows`: rows scored by the likelihood of options. `bad_rows`:
    number of invalid records by benchmark, see `score`. `sampled_rows`: several sampled answers to each question.
    """
    by_name: dict[str, list[SampleRow]] = defaultdict(list)
    for row in rows:
        by_name[row["benchmark"]].append(row)
    means = {
        name: composite(name, {part: by_name[part] for part in parts})
        for name, parts in composites().items()
        if all(part in by_name for part in parts)
    }
    scores = {
        "schema": SCHEMA,
        "model": model,
        "column": column,
        "protocol": dict(protocol),
        "benchmarks": {name: score(name, group, (bad_rows or {}).get(name, 0)) for name, group in by_name.items()},
        "composites": means,
    }
    scores["average"] = _average(scores, by_name)
    if likelihood_rows:
        scores["likelihood"] = likelihood(likelihood_rows)
    if sampled_rows:
        scores["sampled"] = sampled(sampled_rows)
    return scores


def sampled(rows: Sequence[SampleRow]) -> dict[str, Scores]:
    """Score the rows of sampled answers, by benchmark. `accuracy` is mean@k, the mean share right.

    `samples`: most graded answers to a question. `pass_at`: k -> `accuracy`, `interval` and `n` of pass@k, for powers
    of two and `samples`; a question with fewer graded answers than k is left out of it, so that its `n` is smaller.
    """
    by_name: dict[str, list[SampleRow]] = defaultdict(list)
    for row in rows:
        by_name[row["benchmark"]].append(row)
    scores = {}
    for name, group in by_name.items():
        asked_rows = [row for row in group if row["left_out"] is None]
        most = max(map(len, by_question(asked_rows)), default=0)
        ks = sorted({k for k in (2**power for power in range(most.bit_length())) if k <= most} | ({most} - {0}))
        pass_at = {str(k): _pass_share(_votes(asked_rows, f"pass@{k}")) for k in ks}
        about = {"samples": most, "pass_at": pass_at, "differs": differences(name, None)}
        scores[name] = {**score(name, group), **about}
    return scores


def _pass_share(votes: Sequence[float]) -> dict[str, Any]:
    return {"n": len(votes), "accuracy": _mean(votes), "interval": list(wilson(round(sum(votes), 6), len(votes)))}


def likelihood(rows: Sequence[SampleRow]) -> dict[str, Scores]:
    """Score the rows of options' likelihoods, by benchmark and composite.

    `accuracy` chooses options by log-probability per byte, `accuracy_by_sum` by their total log-probability.
    """
    by_name: dict[str, list[SampleRow]] = defaultdict(list)
    for row in rows:
        by_name[row["benchmark"]].append(row)
    scores = {
        name: {**score(name, rows), "accuracy_by_sum": _mean(_votes(rows, "strict_by_sum"))}
        for name, rows in by_name.items()
    }
    for name, parts in composites().items():
        if all(part in by_name for part in parts):
            mean = composite(name, {part: by_name[part] for part in parts})
            if mean:
                scores[name] = {**mean, "accuracy_by_sum": _mean([scores[part]["accuracy_by_sum"] for part in parts])}
    for entry in scores.values():
        entry["differs"] = ["likelihood of each option per byte; the paper generates", *entry["differs"]]
    return scores


def marked_title(score: Mapping[str, Any]) -> str:
    """The title of a score, and in brackets whether it is a stand-in and whether training text was not screened."""
    marks = {"stand-in": score.get("stand_in"), NOT_SCREENED: score.get("not_screened")}
    shown = ", ".join(mark for mark, applies in marks.items() if applies)
    return f"{score['title']} ({shown})" if shown else score["title"]


def screening_note(rows: Sequence[SampleRow]) -> str | None:
    """How many of the questions of `rows` the model's training text was not screened for; None if for all."""
    questions = by_question(rows)
    missed = sum(any(row.get("screened") is False for row in question) for question in questions)
    if not missed:
        return None
    if missed == len(questions):
        return "training text was not screened for it"
    return f"training text was not screened for {missed:,} of its {len(questions):,} questions"


def differences(name: str, count: int | None) -> list[str]:
    """Differences from the paper's protocol, and choices where the paper does not specify it.

    `count`: number of rows that were asked; None for a composite.
    """
    entry = BENCHMARKS.get(name)
    points = [entry.open_point] if entry and entry.open_point else []
    if entry and (entry.hub or entry.path) and count is not None and count != entry.size:
        points.append(f"{count:,} of the split's {entry.size:,} questions")
    return points


def _share_of(rows: Sequence[SampleRow]) -> dict[str, Any]:
    """`_share` of rows, with one vote for each question."""
    return _share(_votes(rows), _votes(rows, "lenient"))


def _share(strict: Sequence[float], lenient: Sequence[float]) -> dict[str, Any]:
    """Accuracies (0..1) with Wilson intervals, from votes by strict and by lenient grading."""
    # Rounded, because a question of three rows has votes such as 1/3, whose sum could exceed n by an error of rounding.
    n, correct, correct_lenient = len(strict), round(sum(strict), 6), round(sum(lenient), 6)
    return {
        "n": n,
        "correct": correct,
        "accuracy": correct / n if n else None,
        "interval": list(wilson(correct, n)) if n else None,
        "correct_lenient": correct_lenient,
        "accuracy_lenient": correct_lenient / n if n else None,
        "interval_lenient": list(wilson(correct_lenient, n)) if n else None,
    }


def finished(rows: Sequence[SampleRow]) -> dict[str, Any]:
    """How many answers ended by themselves (form), and the strict accuracy among them (skill), one vote a question.

    `finished`: the number of rows whose reasoning and answer both ended; None where that was not recorded.
    """
    known = [row for row in rows if row.get("finished") is not None]
    ended = [row for row in known if row["finished"] and row["finished_thinking"]]
    return {
        "finished": len(ended) if known else None,
        "finished_share": len(ended) / len(known) if known else None,
        "accuracy_finished": _mean(_votes(ended)),
    }


def _by_category(rows: Sequence[SampleRow]) -> dict[str, dict[str, Any]]:
    groups: dict[str, list[SampleRow]] = defaultdict(list)
    for row in rows:
        if row["category"] is not None:
            groups[row["category"]].append(row)
    return {category: _share_of(groups[category]) for category in sorted(groups)}


def _instruction_level(rows: Sequence[SampleRow]) -> dict[str, Any] | None:
    """IFEval's instruction-level scores, in total and by type; None for other benchmarks."""
    by_type: dict[str, tuple[list[bool], list[bool]]] = defaultdict(lambda: ([], []))
    for row in rows:
        for result in row.get("instructions", ()):
            strict, lenient = by_type[result["instruction"]]
            # A strict verdict requires finished thinking, and so must the verdicts of its instructions.
            if result["strict"] is not None and result["lenient"] is not None:  # else its checker failed
                strict.append(result["strict"] and row["finished_thinking"])
                lenient.append(result["lenient"])
    if not by_type:
        return None
    totals = [[verdict for pair in by_type.values() for verdict in pair[side]] for side in (0, 1)]
    return {**_share(*totals), "types": {name: _share(*by_type[name]) for name in sorted(by_type)}}


def _agreement(rows: Sequence[SampleRow]) -> dict[str, int] | None:
    """Agreement of the strict verdict with the scorer of the problem generator; None where there is none."""
    both = Counter((bool(row["strict"]), bool(row["own_scorer"])) for row in rows if row.get("own_scorer") is not None)
    if not both:
        return None
    agree = both[True, True] + both[False, False]
    return {"n": both.total(), "agree": agree, "only_ours": both[True, False], "only_own": both[False, True]}


def _average(scores: Scores, rows: Mapping[str, Sequence[SampleRow]]) -> Scores | None:
    """The paper's average over the rows of Table 2; None if one of them was not measured."""
    values, groups = [], []
    for name in paper.TABLE_2:
        entry = scores["composites"].get(name) or scores["benchmarks"].get(name)
        if not entry or entry["accuracy"] is None:
            return None
        values.append(entry["accuracy"])
        groups.append([_votes(rows[part]) for part in parts_of(name)])
    asked = {part: rows[part] for name in paper.TABLE_2 for part in parts_of(name)}
    # Each row of the table has the same weight, however many parts it has.
    weights = [1 / (len(groups) * len(group)) for group in groups for _ in group]
    low, high = wilson_mean([part for group in groups for part in group], weights)
    return {
        "title": "Average",
        "not_screened": _part_screening(asked),
        "n": sum(len(part) for group in groups for part in group),
        "accuracy": _mean(values),
        "interval": [low, high],
        "paper": dict(paper.TABLE_2_AVERAGE),
        "differs": _part_asked(asked),
    }


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
