"""Table 1 and Table 2 with the paper's figures beside ours, as data and as Markdown, HTML or JSON.

A stand-in never appears in the row of the benchmark it imitates, and no difference to the paper is computed from one.
Figures are percent with one decimal (two in Table 1, as in the paper); "—" means not measured.
"""

import html
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from common.text import markdown_table
from evals.benchmarks.catalogue import COMPOSITES
from evals.benchmarks.stand_ins import HELD_OUT
from evals.scoring.scores import Scores, title_of
from evals.tables import paper_figures as paper

MISSING = "—"


@dataclass(frozen=True)
class ResultTable:
    """A table of results. `rows` are formatted; `data` has the same unrounded, one mapping per row, for JSON."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    data: tuple[dict[str, Any], ...] = ()


def table_2(models: Mapping[str, Scores]) -> ResultTable:
    """Table 2: one row per benchmark (then the stand-ins that were run), one column per model.

    `models` maps a column's title to its `scores.json`. A model that fills a column of the paper's table is followed by
    its difference to that column.
    """
    compared = {title: scores.get("column", "nautile_370m") for title, scores in models.items()}
    headings = [part for title, column in compared.items() for part in ((title, "Difference") if column else (title,))]
    columns = ("Benchmark", *headings, *paper.MODELS.values(), "What differs")
    unmeasured = [MISSING] * len(headings)
    rows: list[tuple[str, ...]] = [("Training tokens", *unmeasured, *paper.TRAINING_TOKENS.values(), "")]
    data: list[dict[str, Any]] = []
    for name in (*paper.TABLE_2, "average"):
        figures = paper.TABLE_2_AVERAGE if name == "average" else paper.TABLE_2[name]
        by_title = {title: _score_of(scores, name) for title, scores in models.items()}
        leads = {
            title: _points(score["accuracy"]) - figures[compared[title]]
            for title, score in by_title.items()
            if compared[title] and score and score["accuracy"] is not None
        }
        differs = list(dict.fromkeys(point for score in by_title.values() if score for point in score["differs"]))
        shown = []
        for title, score in by_title.items():
            shown += [with_interval(score), signed(leads.get(title))] if compared[title] else [with_interval(score)]
        rows.append((title_of(name), *shown, *[f"{figure:.1f}" for figure in figures.values()], "; ".join(differs)))
        data.append(_datum(name, by_title, dict(figures), leads, differs))
    for name in stand_ins_in(models):
        by_title = {title: _score_of(scores, name) for title, scores in models.items()}
        note = next(score["stand_in"] for score in by_title.values() if score)
        shown = [
            cell
            for title, score in by_title.items()
            for cell in ((with_interval(score), MISSING) if compared[title] else (with_interval(score),))
        ]
        rows.append((f"{title_of(name)} (stand-in)", *shown, *[MISSING] * len(paper.MODELS), note))
        data.append(_datum(name, by_title, None, {}, [note]))
    notes = (
        "Strict accuracy in percent, zero-shot, with the 95 % interval (Wilson; bootstrap for ARC, the average); the "
        "paper's own figures in its columns. Difference: points above the paper's figure for the same model.",
        "The average is that of all eleven rows and is not formed while one is missing.",
    )
    return ResultTable("Table 2. Benchmarks", columns, tuple(rows), notes, tuple(data))


def _datum(
    name: str,
    ours: Mapping[str, Any],
    figures: dict[str, float] | None,
    leads: Mapping[str, float],
    differs: list[str],
) -> dict[str, Any]:
    return {
        "benchmark": name,
        "title": title_of(name),
        "ours": dict(ours),
        "paper": figures,
        "differences": dict(leads),
        "differs": differs,
    }


def table_1(stages: Mapping[str, Scores], benchmark: str | None = None) -> ResultTable:
    """Table 1: one row per stage (GSM8K after each). `stages` maps pretrain, align, reason, self_distill to scores.

    `benchmark`: our benchmark beside the paper's; None: GSM8K if it was run, else the held-out problems. With another
    benchmark than GSM8K only the gains over the first stage are comparable, and no difference is shown.
    """
    name = benchmark or _reported(stages)
    same = name == "gsm8k"
    base = _score_of(stages.get("pretrain"), name)
    columns = ("Stage", title_of(name), "Gain", "Paper: GSM8K", "Gain", "Difference", "n", "Lenient", "What differs")
    rows, data = [], []
    for stage, figure in paper.TABLE_1.items():
        ours = _score_of(stages.get(stage), name)
        measured = ours is not None and ours["accuracy"] is not None
        based = measured and base is not None and base["accuracy"] is not None
        gain = _points(ours["accuracy"] - base["accuracy"]) if based else None
        difference = _points(ours["accuracy"]) - figure if measured and same else None
        paper_gain = figure - paper.TABLE_1["pretrain"]
        first = stage == "pretrain"
        rows.append(
            (
                paper.TABLE_1_ROWS[stage],
                with_interval(ours, 2),
                MISSING if first else signed(gain, 2),
                f"{figure:.2f}",
                MISSING if first else signed(paper_gain, 2),
                signed(difference, 2),
                f"{ours['n']:,}" if measured else MISSING,
                f"{_points(ours['accuracy_lenient']):.2f}" if measured else MISSING,
                "; ".join(ours["differs"]) if measured and same else MISSING,
            )
        )
        data.append(
            {
                "stage": stage,
                "title": paper.TABLE_1_ROWS[stage],
                "ours": ours,
                "gain": gain,
                "paper": figure,
                "paper_gain": paper_gain,
                "difference": difference,
                "differs": list(ours["differs"]) if measured else [],
            }
        )
    notes = ["Strict accuracy in percent with the 95 % Wilson interval; each row builds on the one above."]
    if not same:
        notes.append(
            f"Ours is {title_of(name)}, not GSM8K: only the direction of the gains is comparable, not the figures."
        )
    return ResultTable("Table 1. After each stage", columns, tuple(rows), tuple(notes), tuple(data))


def to_markdown(table: ResultTable) -> str:
    """Format as a Markdown table under its title, with notes below."""
    return "\n".join([f"**{table.title}**", "", markdown_table(table.columns, table.rows), "", *table.notes, ""])


def to_html(table: ResultTable) -> str:
    """Format as `<table class="results">` with caption and notes; all text escaped, no inline style."""
    head = "".join(f"<th>{html.escape(column)}</th>" for column in table.columns)
    body = "\n".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows)
    notes = "".join(f"<p class='note'>{html.escape(note)}</p>" for note in table.notes)
    return (
        f"<table class='results'>\n<caption>{html.escape(table.title)}</caption>\n<thead><tr>{head}</tr></thead>\n"
        f"<tbody>\n{body}\n</tbody>\n</table>\n{notes}"
    )


def to_json(table: ResultTable) -> dict[str, Any]:
    """Convert to plain data: title, columns, formatted rows, notes, and unrounded `data`."""
    return asdict(table)


def with_interval(score: Scores | None, decimals: int = 1) -> str:
    """`12.3 [10.1, 14.9]` in percent, or a dash."""
    if not score or score["accuracy"] is None:
        return MISSING
    low, high = (100 * bound for bound in score["interval"])
    return f"{_points(score['accuracy']):.{decimals}f} [{low:.{decimals}f}, {high:.{decimals}f}]"


def signed(points: float | None, decimals: int = 1) -> str:
    """`+1.2`, `-0.3`, or a dash."""
    return MISSING if points is None else f"{points:+.{decimals}f}"


def stand_ins_in(models: Mapping[str, Scores]) -> list[str]:
    """Names of the stand-ins that any of `models` has a score for, in order of first appearance."""
    names = [name for scores in models.values() for name, score in scores["benchmarks"].items() if score["stand_in"]]
    return list(dict.fromkeys(names))


def _score_of(scores: Scores | None, name: str) -> Scores | None:
    if scores is None:
        return None
    if name == "average":
        return scores["average"]
    return scores["composites"].get(name) if name in COMPOSITES else scores["benchmarks"].get(name)


def _reported(stages: Mapping[str, Scores]) -> str:
    """The benchmark of Table 1: the first of GSM8K, the held-out problems and GSM-Symbolic that any stage has."""
    order = ("gsm8k", HELD_OUT, "gsm_symbolic")
    return next((name for name in order if any(name in scores["benchmarks"] for scores in stages.values())), "gsm8k")


def _points(share: float) -> float:
    return 100 * share
