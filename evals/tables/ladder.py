"""The ladder: accuracy after each stage of Table 1, with a paired test of each stage's gain on the same problems."""

from collections.abc import Mapping, Sequence
from typing import Any

from nautile.common.errors import ConfigError
from nautile.evals.benchmarks.registry import stand_in_note, title_of
from nautile.evals.benchmarks.titles import TABLE_1
from nautile.evals.running.rows import SampleRow
from nautile.evals.scoring.comparison import Comparison, compare
from nautile.evals.scoring.intervals import OVER_PROBLEMS
from nautile.evals.scoring.scores import Scores
from nautile.evals.tables import paper_figures as paper
from nautile.evals.tables.results import (
    MISSING,
    ResultTable,
    finished_in_words,
    not_screened,
    number,
    signed,
    table_1_benchmark,
    with_interval,
)

Ladder = dict[str, Any]
RowsByStage = Mapping[str, Sequence[SampleRow]]


def ladder(stages: Mapping[str, Scores], rows: RowsByStage) -> Ladder | None:
    """The ladder as plain data; None if no stage was evaluated on a benchmark of Table 1.

    `stages`: `scores.json` by stage. `rows`: of these evaluations, as far as they exist. In the result, each entry of
    `stages` has `score` (None: not measured), `over` (the nearest earlier stage that was measured) and `test`, the
    comparison with that stage on common problems. `total` compares the last stage with the first. Shares are 0 to 1,
    the paper's figures percent.
    """
    known = paper.ladder_rows(stages)
    stages = {stage: stages[stage] for stage in known if stage in stages}
    name = table_1_benchmark(stages)
    if name is None:
        return None
    rows_by_stage = {stage: [row for row in rows.get(stage, ()) if row["benchmark"] == name] for stage in stages}
    entries: list[dict[str, Any]] = []
    measured: list[str] = []
    for stage, (title, figure) in known.items():
        score = stages[stage]["benchmarks"].get(name) if stage in stages else None
        if score and score["accuracy"] is None:
            score = None  # all its questions were left out
        # The nearest stage before that has a score: a stage that was not evaluated is stepped over.
        over = measured[-1] if score and measured else None
        entry: dict[str, Any] = {"stage": stage, "title": title, "paper": figure, "over": over}
        entry["score"] = score and {field: score[field] for field in ("n", "accuracy", "interval")}
        if score:
            entry["score"] |= {field: score.get(field) for field in ("finished_share", "accuracy_finished")}
        entry["test"] = _test(rows_by_stage, over, stage, name)
        entries.append(entry)
        measured += [stage] if score else []
    # With two stages the total would repeat the only gain.
    total: dict[str, Any] | None = {"stage": measured[-1], "over": measured[0]} if len(measured) > 2 else None
    if total:
        total |= {"test": _test(rows_by_stage, total["over"], total["stage"], name)}
    about = {"benchmark": name, "title": title_of(name), "stand_in": stand_in_note(name)}
    scores = {stage: scores["benchmarks"].get(name) for stage, scores in stages.items()}
    return about | {"not_screened": not_screened(scores), "stages": entries, "total": total}


def common_problems(before: Sequence[SampleRow], after: Sequence[SampleRow]) -> Comparison | None:
    """Compare two evaluations on their common problems; None if there are none."""
    try:
        return compare(before, after)
    except ConfigError:
        return None


def _test(rows: RowsByStage, over: str | None, stage: str, name: str) -> dict[str, Any] | None:
    comparison = common_problems(rows[over], rows[stage]) if over else None
    return comparison and comparison["benchmarks"][name]


def ladder_table(ladder: Ladder) -> ResultTable:
    """A table with one row per stage; a dash for what was not measured."""
    columns = (
        "Stage", ladder["title"], "Gain over the stage before", "p",
        "Became right", "Became wrong", "Problems", "Paper: GSM8K",
    )  # fmt: skip
    names = [entry["stage"] for entry in ladder["stages"]]
    rows, partial = [], False
    for index, entry in enumerate(ladder["stages"]):
        score, test = entry["score"], entry["test"]
        tested: tuple[str, ...] = (MISSING,) * 4
        if test:
            # A gain is over the problems of both evaluations, of which one may have asked more.
            partial |= test["n"] != score["n"]
            counts = f"{test['only_b']:,}", f"{test['only_a']:,}"
            over = "" if entry["over"] == names[index - 1] else f" over {entry['over']}"
            tested = (gain_with_interval(test) + over, p_value(test), *counts)
        n = f"{score['n']:,}" if score else MISSING
        rows.append((entry["stage"], with_interval(score), *tested, n, number(entry["paper"])))
    notes = [
        "Strict accuracy in percent with the 95 % Wilson interval. Gain over the stage before on the same problems, "
        "with the paired 95 % interval (Agresti and Min); p: McNemar's exact test, two-sided. Intervals and p: "
        f"{OVER_PROBLEMS}."
    ]
    forms = [
        f"{entry['stage']} {words}"
        for entry in ladder["stages"]
        if entry["score"] and (words := finished_in_words(entry["score"]))
    ]
    if forms:
        notes.append(f"Form and skill: {'; '.join(forms)}.")
    if any(entry["over"] and not entry["test"] for entry in ladder["stages"]):
        notes.append("A gain is missing where there are no rows of both evaluations with common problems.")
    if partial:
        notes.append("Some problems were asked after only one of two stages: gains are over those asked after both.")
    if ladder["benchmark"] != TABLE_1[0]:
        notes.append(
            f"Ours is {ladder['title']}, not GSM8K: the direction of the gains can be compared, not the figures."
        )
    notes += [f"{ladder['title']}: {note}." for note in ladder["not_screened"]]
    return ResultTable("After each stage", columns, tuple(rows), tuple(notes), tuple(ladder["stages"]))


def gains_in_words(ladder: Ladder) -> str:
    """Sentences about which gains are beyond chance, which are not, and which are unknown."""
    gains = [entry for entry in ladder["stages"] if entry["over"]]
    if not gains:
        return "Fewer than two stages were evaluated: there is no gain to judge."
    tested = [entry for entry in gains if entry["test"]]
    groups = {
        "Gains beyond chance, their 95 % interval above zero": [e for e in tested if e["test"]["low"] > 0],
        "Losses beyond chance, their 95 % interval below zero": [e for e in tested if e["test"]["high"] < 0],
        "Within chance": [e for e in tested if e["test"]["low"] <= 0 <= e["test"]["high"]],
        "Not compared, for lack of rows of both evaluations": [e for e in gains if not e["test"]],
    }
    parts = [f"{words}: {', '.join(map(_stage_gain, entries))}." for words, entries in groups.items() if entries]
    if tested and not any(entry["test"]["low"] > 0 for entry in tested):
        parts.insert(0, "No gain is beyond chance.")
    total = ladder["total"]
    if total and total["test"]:
        test = total["test"]
        parts.append(f"From {total['over']} to {total['stage']}: {gain_with_interval(test)} points, p {p_value(test)}.")
    parts.append("An interval says what other problems could change, not what another seed of training could.")
    return " ".join(parts)


def verdict(ladder: Ladder) -> str:
    """Two sentences: how far it came from the first stage to the last, and which stages gained beyond chance."""
    measured = [entry for entry in ladder["stages"] if entry["score"]]
    if len(measured) < 2:
        return "Fewer than two stages were evaluated. Whether training helped is not known."
    first, last = measured[0], measured[-1]
    total = ladder["total"] or {"test": last["test"]}
    shares = f"{100 * first['score']['accuracy']:.1f} % after {first['stage']}"
    shares += f" and {100 * last['score']['accuracy']:.1f} % after {last['stage']}"
    gain = f" ({gain_with_interval(total['test'])} points on the same problems)" if total["test"] else ""
    gains = [entry for entry in measured if entry["over"]]
    above = [entry["stage"] for entry in gains if entry["test"] and entry["test"]["low"] > 0]
    below = [entry["stage"] for entry in gains if entry["test"] and entry["test"]["high"] < 0]
    others = [entry["stage"] for entry in gains if entry["stage"] not in (*above, *below)]
    groups = {"gained beyond chance": above, "lost beyond chance": below, "within chance or not compared": others}
    parts = [f"{words}: {', '.join(stages)}" for words, stages in groups.items() if stages]
    suffix = f", on a stand-in ({ladder['title']})" if ladder["stand_in"] else ""
    suffix += "".join(f"; {note}" for note in ladder["not_screened"])
    second = "; ".join(parts)
    return f"{ladder['title']} solved: {shares}{gain}. {second[:1].upper()}{second[1:]}{suffix}."


def _stage_gain(entry: Mapping[str, Any]) -> str:
    return f"{entry['stage']} {gain_with_interval(entry['test'])}" if entry["test"] else str(entry["stage"])


def p_value(test: Mapping[str, float]) -> str:
    """A p-value with two digits, or "<0.0001"."""
    return "<0.0001" if test["p"] < 1e-4 else f"{test['p']:.2g}"


def gain_with_interval(test: Mapping[str, float]) -> str:
    """`+1.2 [-0.4, 2.8]`, in points."""
    return f"{signed(100 * test['lead'])} [{signed(100 * test['low'])}, {signed(100 * test['high'])}]"
