"""Table 1 and Table 2 with the paper's figures beside ours, and tables that break a score down, in several formats.

A stand-in has a row of its own, never that of the benchmark it imitates, and is not compared with the paper. Figures
are percent with one decimal (two in Table 1, as in the paper); "—" means not measured.
"""

import html
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from nautile.common.text import markdown_table
from nautile.evals.benchmarks.registry import parts_of, title_of
from nautile.evals.benchmarks.titles import TABLE_1
from nautile.evals.scoring.scores import Scores, marked_title
from nautile.evals.tables import paper_figures as paper

MISSING = "—"
GAIN = "Gain over pretrain"


@dataclass(frozen=True)
class ResultTable:
    """A table of results. `rows` are formatted; `data` has the unrounded values, one mapping per row, for JSON."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    data: tuple[dict[str, Any], ...] = ()


def table_2(models: Mapping[str, Scores]) -> ResultTable:
    """Table 2: one row per benchmark (then those that were run and are not the paper's), one column per model.

    `models` maps the title of a column to its `scores.json`. If a model corresponds to a column of the paper's table,
    the difference from that column follows.
    """
    compared = {title: scores.get("column", "nautile_370m") for title, scores in models.items()}
    headings = [part for title, column in compared.items() for part in ((title, "Difference") if column else (title,))]
    columns = ("Benchmark", *headings, *paper.MODELS.values(), "What differs")
    unmeasured = [MISSING] * len(headings)
    rows: list[tuple[str, ...]] = [("Training tokens", *unmeasured, *paper.TRAINING_TOKENS.values(), "")]
    data: list[dict[str, Any]] = []
    papers = {**paper.TABLE_2, "average": paper.TABLE_2_AVERAGE}
    measured_names = [name for scores in models.values() for name in (*scores["benchmarks"], *scores["composites"])]
    parts = {part for name in papers for part in parts_of(name)}
    for name in dict.fromkeys((*papers, *(name for name in measured_names if name not in parts))):
        figures = papers.get(name)  # None: a stand-in, or a plug-in's benchmark
        by_title = {title: _score_of(scores, name) for title, scores in models.items()}
        measured = {title: score for title, score in by_title.items() if score}
        leads = {
            title: 100 * score["accuracy"] - figures[compared[title]]
            for title, score in measured.items()
            if figures and compared[title] and score["accuracy"] is not None
        }
        points = [point for score in measured.values() for point in score["differs"]]
        stand_in = next((score.get("stand_in") for score in measured.values()), None)
        differs = list(dict.fromkeys(points)) if figures else [stand_in or "not in the paper"]
        differs += not_screened(measured)
        title = f"{title_of(name)} (stand-in)" if stand_in else title_of(name)
        our_cells = []
        for model, score in by_title.items():
            # A model with a column in the paper has a second cell, its difference from that column.
            our_cells += [with_interval(score), signed(leads.get(model))] if compared[model] else [with_interval(score)]
        paper_cells = [f"{figure:.1f}" for figure in figures.values()] if figures else [MISSING] * len(paper.MODELS)
        rows.append((title, *our_cells, *paper_cells, "; ".join(differs)))
        data.append(
            {
                "benchmark": name,
                "title": title_of(name),
                "ours": by_title,
                "paper": figures and dict(figures),
                "differences": leads,
                "differs": differs,
            }
        )
    notes = (
        "Strict accuracy in percent, zero-shot, with the 95 % interval over problems (Wilson; for ARC and the average "
        "Wilson's intervals of their parts, combined); the paper's own figures in its columns. Difference: points "
        "above the paper's figure for the same model.",
        "The average is over all eleven rows; there is none while a row is missing.",
    )
    return ResultTable("Table 2. Benchmarks", columns, tuple(rows), notes, tuple(data))


def table_1(stages: Mapping[str, Scores], benchmark: str | None = None) -> ResultTable:
    """Table 1: one row per stage (GSM8K after each). `stages` maps pretrain, align, reason, self_distill to scores.

    `benchmark`: our benchmark beside the paper's GSM8K; None: GSM8K if it was run, else the held-out problems. With a
    benchmark other than GSM8K only the gains over the first stage are comparable, and no difference is shown.
    """
    papers_own = TABLE_1[0]
    name = benchmark or table_1_benchmark(stages) or papers_own
    is_same = name == papers_own
    base = _score_of(stages.get("pretrain"), name)
    if base is not None and base["accuracy"] is None:
        base = None  # all its questions were left out
    columns = (
        "Stage", title_of(name), GAIN, "Paper: GSM8K", f"Paper: {GAIN.lower()}",
        "Difference", "n", "Lenient", "What differs",
    )  # fmt: skip
    rows, data = [], []
    for stage, (title, figure) in paper.ladder_rows(stages).items():
        ours = _score_of(stages.get(stage), name)
        measured = ours if ours is not None and ours["accuracy"] is not None else None
        gain = 100 * (measured["accuracy"] - base["accuracy"]) if measured and base else None
        difference = 100 * measured["accuracy"] - figure if measured and is_same and figure is not None else None
        paper_gain = None if figure is None else figure - paper.TABLE_1["pretrain"]
        first = stage == "pretrain"
        differs = [*measured["differs"], *not_screened({stage: measured})] if measured else []
        rows.append(
            (
                title,
                with_interval(ours, 2),
                MISSING if first else signed(gain, 2),
                number(figure),
                MISSING if first else signed(paper_gain, 2),
                signed(difference, 2),
                f"{measured['n']:,}" if measured else MISSING,
                f"{100 * measured['accuracy_lenient']:.2f}" if measured else MISSING,
                "; ".join(differs) if measured and is_same else MISSING,
            )
        )
        data.append(
            {
                "stage": stage,
                "title": title,
                "ours": ours,
                "gain": gain,
                "paper": figure,
                "paper_gain": paper_gain,
                "difference": difference,
                "differs": differs,
            }
        )
    notes = [
        "Strict accuracy in percent with the 95 % Wilson interval over problems; each row builds on the one above."
    ]
    ours_by_stage = {stage: _score_of(scores, name) for stage, scores in stages.items()}
    notes += [f"{title_of(name)}: {note}." for note in not_screened(ours_by_stage)]
    if not is_same:
        notes.append(
            f"Ours is {title_of(name)}, not GSM8K: only the direction of the gains is comparable, not the figures."
        )
    return ResultTable("Table 1. After each stage", columns, tuple(rows), tuple(notes), tuple(data))


def table_1_benchmark(stages: Mapping[str, Scores]) -> str | None:
    """The benchmark of Table 1: GSM8K if any stage was evaluated on it, else the held-out problems; None: neither."""
    reported = (name for name in TABLE_1 if any(name in s["benchmarks"] for s in stages.values()))
    return next(reported, None)


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
    """`12.3 [10.1, 14.9]` in percent, with the interval over problems, or a dash."""
    if not score or score["accuracy"] is None:
        return MISSING
    low, high = (100 * bound for bound in score["interval"])
    return f"{100 * score['accuracy']:.{decimals}f} [{low:.{decimals}f}, {high:.{decimals}f}]"


def signed(points: float | None, decimals: int = 1) -> str:
    """`+1.2`, `-0.3`, or a dash."""
    return MISSING if points is None else f"{points:+.{decimals}f}"


def number(figure: float | None) -> str:
    """A figure of the paper with two decimals, or a dash."""
    return MISSING if figure is None else f"{figure:.2f}"


def not_screened(scores: Mapping[str, Scores | None]) -> list[str]:
    """A line for each note on questions that training text was not screened for. `scores`: by model or stage."""
    models: dict[str, list[str]] = {}
    for model, score in scores.items():
        if score and (note := score.get("not_screened")):
            models.setdefault(note, []).append(model)
    return [f"{note} ({', '.join(names)})" for note, names in models.items()]


def _score_of(scores: Scores | None, name: str) -> Scores | None:
    if scores is None:
        return None
    if name == "average":
        return scores["average"]
    return scores["composites"].get(name) or scores["benchmarks"].get(name)


def breakdown(scores: Scores) -> list[ResultTable]:
    """Build the tables that `scores.json` has data for, the counts first."""
    tables = [counts_table(scores), sampled_table(scores), ways_table(scores)]
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
        "Benchmark", "Asked", "Strict", "Lenient", "Finished", "Strict of finished", "Not parsed", "Several answers",
        "Unfinished", "Cut", "Left out",
    )  # fmt: skip
    rows, data = [], []
    for name, score in scores["benchmarks"].items():
        left_out = sum(score["left_out"].values())
        counts = [f"{score[problem]:,}" for problem in names]
        verdicts = with_interval(score), with_interval(_lenient(score))
        has_repeats = score["rows"] != score["n"]
        size = f"{score['n']:,} ({score['rows']:,} rows)" if has_repeats else f"{score['n']:,}"
        rows.append((marked_title(score), size, *verdicts, *_form_cells(score), *counts, f"{left_out:,}"))
        fields = (
            *("n", "rows", "accuracy", "accuracy_rows", "interval", "accuracy_lenient", "interval_lenient"),
            *("finished", "finished_share", "accuracy_finished", *names),
        )
        data.append({"benchmark": name, **{key: score.get(key) for key in fields}, "left_out": score["left_out"]})
    notes = (
        "Strict: exactly one candidate answer, thinking finished. Lenient: the last candidate counts. Percent with "
        "the 95 % Wilson interval over problems, one vote a question. Finished: the reasoning and the answer ended, "
        "which is form; strict of finished is skill. Cut: the token limit was reached. Left out: "
        "could not be asked, was an invalid record or could not be graded; not in the score.",
    )
    return ResultTable("Answers and failures", columns, tuple(rows), notes, tuple(data))


def sampled_table(scores: Scores) -> ResultTable | None:
    """mean@k and pass@k of sampled answers, if they were asked for."""
    by_benchmark = scores.get("sampled") or {}
    if not by_benchmark:
        return None
    ks = sorted({int(k) for score in by_benchmark.values() for k in score["pass_at"]} - {1})
    rows, data, fewer = [], [], []
    for name, score in by_benchmark.items():
        passes = [score["pass_at"].get(str(k)) for k in ks]
        left_out = sum(score["left_out"].values())
        counts = f"{score['n']:,}", f"{score['samples']:,}"
        shares = [with_interval(score), *map(with_interval, passes), *_form_cells(score)]
        rows.append((marked_title(score), *counts, *shares, f"{left_out:,}"))
        data.append({"benchmark": name, **{key: score[key] for key in ("n", "samples", "accuracy", "pass_at")}})
        fewer += [
            f"{score['title']}: {score['n'] - own['n']:,} questions have fewer than {k} graded answers, and are not in "
            f"pass@{k}."
            for k, own in zip(ks, passes, strict=True)
            if own and own["n"] < score["n"]
        ]
    columns = ("Benchmark", "n", "Samples", "mean@k", *(f"pass@{k}" for k in ks), "Finished", "Strict of finished",
               "Left out")  # fmt: skip
    heat = scores["protocol"].get("sample_temperature")
    notes = (
        f"Sampled at temperature {heat:g}, strict. mean@k: the share right of a question's answers, over questions. "
        "pass@k: the chance that one of k is right, by the unbiased estimate (Chen et al. 2021). Intervals over "
        "problems. Left out: answers that could not be asked for or graded.",
        *fewer,
    )
    return ResultTable("Sampled answers", columns, tuple(rows), notes, tuple(data))


def _form_cells(score: Scores) -> tuple[str, str]:
    shares = (score.get("finished_share"), score.get("accuracy_finished"))
    first, second = (MISSING if share is None else f"{100 * share:.1f}" for share in shares)
    return first, second


def finished_in_words(score: Mapping[str, Any]) -> str:
    """`91.2 % finished, 45.1 % of these right`; "" where it was not recorded."""
    share, accuracy = score.get("finished_share"), score.get("accuracy_finished")
    if share is None:
        return ""
    return f"{100 * share:.1f} % finished" + ("" if accuracy is None else f", {100 * accuracy:.1f} % of these right")


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
