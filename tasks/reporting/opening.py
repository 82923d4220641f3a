"""The first sections of the report: the ladder as a chart, a few problems after each stage, the cost, the stand-ins."""

from collections.abc import Iterator, Sequence
from typing import Any

from nautile.common.text import amount, dollars, duration
from nautile.evals.tables.ladder import gains_in_words, ladder_table, verdict
from nautile.evals.tables.results import MISSING, ResultTable
from nautile.tasks.reporting.blocks import BulletList, IntervalChart, Paragraph, ReportBlock, ReportSection, SideBySide
from nautile.tasks.reporting.data import stand_ins_by_note

Facts = dict[str, Any]
COST, STAND_INS = "Cost", "Stand-ins"  # titles of the detailed sections


def opening(data: Facts) -> list[ReportSection]:
    """The first sections, from the data of `tasks.reporting.data.collect`; sections without content have no blocks."""
    return [
        ReportSection("The ladder", tuple(_ladder(data["ladder"], data["ladder_over_seeds"]))),
        ReportSection("Three problems after each stage", tuple(_problems(data["ladder"], data["problems"]))),
        ReportSection("What it cost", (Paragraph(_cost(data["cost"], data["calls"]), COST),)),
        ReportSection("What is a stand-in here", tuple(_stand_ins(data["stand_ins"]))),
    ]


def about_line(about: Facts) -> str:
    """One line about the run: configuration, seeds, commit, machine, run and time, as far as known."""
    names = {
        "commits": "commit",
        "machines": "machine",
        "run": "run",
    }
    parts = [f"configuration {about['configuration']}"] if "configuration" in about else []
    parts += _seeds_in_words(about.get("seeds", {}))
    for name, words in names.items():
        value = about.get(name)
        values = [value] if isinstance(value, str) else value or []
        parts += [f"{words} {', '.join(str(entry) for entry in values)}"] if values else []
    parts += [f"{about['artifacts']} artifacts, the newest of {about['newest']} UTC"] if "newest" in about else []
    return " · ".join(parts)


def _seeds_in_words(seeds: dict[str, list[int]]) -> list[str]:
    """One number if data, weights and sampling have the same seed, else each by name; evaluation's if it is not 0."""
    shown = {name: values for name, values in seeds.items() if name != "evaluation"}
    first = next(iter(shown.values()), [])
    if shown and all(values == first for values in shown.values()):
        shown = {"": first}
    if (tested := seeds.get("evaluation", [0])) != [0]:
        shown["evaluation"] = tested
    return [f"{name} seed {', '.join(map(str, values))}".strip() for name, values in shown.items()]


def _ladder(ladder: Facts | None, over_seeds: Sequence[Facts]) -> Iterator[ReportBlock]:
    if ladder is None:
        return
    yield Paragraph(verdict(ladder))
    measured = {entry["stage"]: entry["score"] for entry in ladder["stages"] if entry["score"]}
    ours = {
        stage: (100 * score["accuracy"], *(100 * bound for bound in score["interval"]))
        for stage, score in measured.items()
    }
    papers = {entry["stage"]: entry["paper"] for entry in ladder["stages"]}
    yield IntervalChart(
        f"{ladder['title']} solved after each stage",
        tuple(papers),
        {f"this run: {ladder['title']}, 95 % interval over problems": ours} if ours else {},
        {"the paper: GSM8K, 371 M parameters": papers},
        "% right (strict)",
    )
    yield ladder_table(ladder)
    yield Paragraph(gains_in_words(ladder))
    if missing := [stage for stage in papers if stage not in measured]:
        yield Paragraph(f"Not measured: {', '.join(missing)}.")
    if over_seeds:
        yield _over_seeds(over_seeds)


def _over_seeds(rows: Sequence[Facts]) -> ResultTable:
    """The ladder over all seeds of the recipe that the store held when the report was made."""
    cells = []
    for row in rows:
        gain = row["gain"]
        cells.append(
            (
                row["stage"],
                str(len(row["seeds"])),
                f"{100 * row['mean']:.1f}{_bounds(row, '.1f')}",
                f"{100 * row['deviation']:.1f}",
                f"{100 * gain['lead']:+.1f}{_bounds(gain, '+.1f')} over {row['over']}" if gain else MISSING,
                f"{gain['p_corrected']:.3g}" if gain else MISSING,
                MISSING if not gain or gain["detectable"] is None else f"{100 * gain['detectable']:.1f}",
            )
        )
    columns = ("Stage", "Seeds", "% [95 % over seeds]", "Deviation", "Gain, points [95 % over seeds]", "p", "Finds")
    notes = (
        "All seeds of this configuration in the store when the report was made. Deviation: between seeds, in points. "
        "Gains are paired by seed; intervals and p by Student's t, p corrected by Holm for the gains of this table. "
        "Finds: the smallest true gain that so many seeds find in four of five cases, after the correction, in points.",
    )
    return ResultTable("After each stage, over seeds", columns, tuple(cells), notes, tuple(rows))


def _bounds(values: Facts, form: str) -> str:
    return "" if values["low"] is None else f" [{100 * values['low']:{form}}, {100 * values['high']:{form}}]"


def _problems(ladder: Facts | None, problems: Sequence[Facts]) -> Iterator[ReportBlock]:
    if ladder is None:
        return
    stages_with_problem = {row["stage"] for row in problems}
    # The first stage has none before it to compare with.
    untested = [entry["stage"] for entry in ladder["stages"][1:] if not entry["test"]]
    unchanged = [
        entry["stage"] for entry in ladder["stages"] if entry["test"] and entry["stage"] not in stages_with_problem
    ]
    parts = ["For each stage, of the problems that became right there, the one whose prompt has the smallest digest."]
    parts += [f"There are only {len(problems)} of three here."] if len(problems) < 3 else []
    parts += [f"No rows of both evaluations to choose from: {', '.join(untested)}."] if untested else []
    parts += [f"No other verdict changed: {', '.join(unchanged)}."] if unchanged else []
    yield Paragraph(" ".join(parts))
    for number, problem in enumerate(problems, 1):
        which = "the only one that did" if problem["of"] == 1 else f"one of {problem['of']:,} that did"
        instead = "; no other became right" if problem["change"] == "became wrong" else ""
        title = f"{number}. {problem['change'].capitalize()} at {problem['stage']} ({which}{instead})"
        yield SideBySide(title, problem["prompt"], problem["expected"], problem["replies"])


def _cost(total: Facts, calls: Sequence[Facts]) -> str:
    parts = []
    if "run_seconds" in total:
        until = "its end" if total["run_ended"] else "this report"
        parts.append(f"{duration(total['run_seconds'])} from the run's first start to {until}")
    cached = sum(row["cached"] or 0 for row in calls)
    from_cache = f" ({cached:,} answered from the cache)" if cached else ""
    parts.append(f"{total['calls']:,} requests to endpoints{from_cache}")
    if total["calls"]:
        # A total is absent where no call stated it: "not counted" is not 0.
        counted = "tokens_in" in total and "tokens_out" in total
        tokens = f"{amount(total['tokens_in'])} tokens in, {amount(total['tokens_out'])} out" if counted else ""
        parts.append(tokens or "tokens not counted")
        parts.append(f"{dollars(total['dollars'])} certain" if "dollars" in total else "dollars not known")
        if total.get("unknown_dollars"):
            unknown = dollars(total["unknown_dollars"])
            parts.append(f"up to {unknown} unknown, for replies that were cut, late or unreadable")
    return "; ".join(parts) + "."


def _stand_ins(notes: Sequence[Facts]) -> Iterator[ReportBlock]:
    by_note = stand_ins_by_note(notes)
    if not by_note:
        return
    yield BulletList(tuple(f"{note} ({', '.join(labels)})" for note, labels in by_note.items()))
    yield Paragraph("What each stage says of itself:", STAND_INS)
