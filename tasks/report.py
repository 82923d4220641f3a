"""The `report` stage: from all artifacts of a run to one `report`.

It writes report.html, report.md and report.json, and the paper's two tables as files. Curves, endpoint calls and
durations come from the catalog, for the executions that published these artifacts.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from nautile.common.curve_checks import curve_warnings
from nautile.common.errors import ConfigError
from nautile.common.files import write_json, write_text
from nautile.common.text import amount, chips_text, dollars, duration, size, visible
from nautile.configs.evaluation import ReportConfig
from nautile.configs.rewards import DEFAULT_REWARD
from nautile.configs.stages import STAGES, TRAINED
from nautile.configs.vendors import is_judge
from nautile.data.bpe_training import bytes_per_token_rows
from nautile.data.tokens.source_reading import COLUMNS, READING, SourceReading, reading_rows
from nautile.evals.scoring.scores import marked_title
from nautile.evals.tables.ladder import gains_in_words, ladder_table, verdict
from nautile.evals.tables.results import MISSING, ResultTable, breakdown, table_1, table_2
from nautile.evals.tables.svg import table_figure
from nautile.store.layout import StagingFiles
from nautile.store.manifest import short_commit
from nautile.store.mirror import open_store
from nautile.tasks.engine.job import Job
from nautile.tasks.engine.stage import Stage, declared, stage
from nautile.tasks.reporting.about import about_line
from nautile.tasks.reporting.data import collect, read_inputs, stand_ins_by_note
from nautile.tasks.reporting.render import (
    BulletList,
    IntervalChart,
    LineChart,
    Paragraph,
    Pipeline,
    Points,
    ReportBlock,
    ReportSection,
    Samples,
    SideBySide,
    TableFigure,
    html_page,
    markdown,
    write_table,
)

Facts = dict[str, Any]
TITLE = "Nautile"
LONGEST_OVERLAP = 160  # characters of an overlapping text
COST, STAND_INS = "Cost", "Stand-ins"  # titles of the detailed sections


@stage("report", version=5, outputs=("report",), rehearsal=lambda settings: {})
def report(job: Job) -> None:
    """Collect the data of the run, compose the sections, render them as a page and as Markdown."""
    if not job.inputs:
        raise ConfigError("stage report: no inputs; run at least one other stage first")
    config = job.part("report", ReportConfig)
    # The store whose `staging/KEY` this is: a stage is not told of the store.
    store = open_store(StagingFiles(job.staging).store_root)
    inputs = read_inputs(store, job.inputs)
    data = collect(store, inputs, config.samples)
    sections = compose(data)
    kinds = Counter(item.artifact.kind for item in inputs)
    configuration = data["about"].get("configuration")
    title, subtitle = f"{TITLE}: {configuration}" if configuration else TITLE, about_line(data["about"])
    folder = job.output("report")
    write_json(folder / "report.json", {"title": TITLE, **data})
    for name, table in zip(("table1", "table2"), paper_tables(data["scores"]), strict=True):
        write_table(folder, name, table)
    write_text(folder / "report.md", markdown(title, subtitle, sections))
    write_text(folder / "report.html", html_page(title, subtitle, sections))
    job.describe("report", sections=[section.title for section in sections], inputs=dict(sorted(kinds.items())))


def opening(data: Facts) -> list[ReportSection]:
    """The first sections, from the data of `tasks.reporting.data.collect`; sections without content have no blocks."""
    return [
        ReportSection("The ladder", tuple(_ladder_opening(data["ladder"], data["ladder_over_seeds"]))),
        ReportSection("Three problems after each stage", tuple(_three_problems(data["ladder"], data["problems"]))),
        ReportSection("What it cost", (Paragraph(_cost_line(data["cost"], data["calls"]), COST),)),
        ReportSection("What is a stand-in here", tuple(_stand_ins_list(data["stand_ins"]))),
    ]


def _ladder_opening(ladder: Facts | None, over_seeds: Sequence[Facts]) -> Iterator[ReportBlock]:
    if ladder is None:
        return
    yield Paragraph(verdict(ladder))
    measured = {entry["stage"]: entry["score"] for entry in ladder["stages"] if entry["score"]}
    ours = {
        stage: (100 * score["accuracy"], *(100 * bound for bound in score["interval"]))
        for stage, score in measured.items()
    }
    order = [entry["stage"] for entry in ladder["stages"]]
    papers = {entry["stage"]: entry["paper"] for entry in ladder["stages"] if entry["paper"] is not None}
    yield IntervalChart(
        f"{ladder['title']} solved after each stage",
        tuple(order),
        {f"this run: {ladder['title']}, 95 % interval over problems": ours} if ours else {},
        {"the paper: GSM8K, 371 M parameters": papers},
        "% right (strict)",
    )
    yield ladder_table(ladder)
    yield Paragraph(gains_in_words(ladder))
    if missing := [stage for stage in order if stage not in measured]:
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
    columns = (
        "Stage",
        "Seeds",
        "% [95 % over seeds]",
        "Deviation",
        "Over the stage before, points [95 % over seeds]",
        "p",
        "Finds",
    )
    notes = (
        "All seeds of this configuration in the store when the report was made. Deviation: between seeds, in points. "
        "Gains are paired by seed; intervals and p by Student's t, p corrected by Holm for the gains of this table. "
        "Finds: the smallest true gain that so many seeds find in four of five cases, after the correction, in points.",
    )
    return ResultTable("After each stage, over seeds", columns, tuple(cells), notes, tuple(rows))


def _bounds(values: Facts, form: str) -> str:
    return "" if values["low"] is None else f" [{100 * values['low']:{form}}, {100 * values['high']:{form}}]"


def _three_problems(ladder: Facts | None, problems: Sequence[Facts]) -> Iterator[ReportBlock]:
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


def _cost_line(total: Facts, calls: Sequence[Facts]) -> str:
    parts = []
    if "run_seconds" in total:
        until = "its end" if total["run_ended"] else "this report"
        parts.append(f"{duration(total['run_seconds'])} from the run's first start to {until}")
    if used := chips_text(total.get("chip_hours"), total.get("chip_dollars")):
        parts.append(used)
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


def _stand_ins_list(notes: Sequence[Facts]) -> Iterator[ReportBlock]:
    by_note = stand_ins_by_note(notes)
    if not by_note:
        return
    yield BulletList(tuple(f"{note} ({', '.join(labels)})" for note, labels in by_note.items()))
    yield Paragraph("What each stage says of itself:", STAND_INS)


def compose(data: Facts) -> list[ReportSection]:
    """The sections that have any content, from the data of `tasks.reporting.data.collect`."""
    # The opening shows the results; the details are folded.
    details = [
        ReportSection("The run", tuple(_run(data["stages"]))),
        ReportSection("Results", tuple(_results(data["scores"]))),
        *_stage_sections(data),
        ReportSection("Kept out of training", tuple(_kept_out(data["screening"]))),
        ReportSection(COST, tuple(_cost(data["cost"], data["calls"]))),
        ReportSection("Samples", tuple(Samples(group["title"], group["rows"]) for group in data["samples"])),
        ReportSection(STAND_INS, tuple(_stand_ins(data["stand_ins"]))),
        ReportSection("Lineage", tuple(_lineage(data["lineage"]))),
    ]
    sections = [*opening(data), *(replace(section, folded=True) for section in details)]
    return [section for section in sections if section.blocks]


def _stage_sections(data: Facts) -> Iterator[ReportSection]:
    """A section for each `heading` that stages declare: its facts and judges, its curves, its figures."""
    described = [found for found in map(declared, STAGES) if found and found.heading]
    for heading in dict.fromkeys(found.heading for found in described):
        under = {found.name: found for found in described if found.heading == heading}
        stages = [row for row in data["stages"] if row["stage"] in under]
        before = _each(stages, _tokenizer, _readings, _validation, _without_update, _reward, _judge, _calibrations)
        after = _each(stages, _curricula, _counts, _distillation)
        charts: tuple[ReportBlock, ...] = (*_curve_warnings(data["curves"], under), *_charts(data["curves"], under))
        yield ReportSection(heading, (*before, *charts, *after))


def _each(stages: Sequence[Facts], *parts: Callable[[Facts], Iterable[ReportBlock]]) -> Iterator[ReportBlock]:
    return (block for part in parts for row in stages for block in part(row))


def _run(stages: Sequence[Facts]) -> Iterator[ReportBlock]:
    if not stages:
        return
    boxes = tuple((row["label"], _duration(row["seconds"])) for row in stages)
    yield Pipeline(boxes, tuple((source, row["label"]) for row in stages for source in row["reads"]))
    rows = tuple((row["label"], _duration(row["seconds"]), ", ".join(row["artifacts"].values())) for row in stages)
    yield ResultTable("What ran", ("Stage", "Time", "Artifacts"), rows)


def _results(scores: Mapping[str, Facts]) -> Iterator[ReportBlock]:
    if not scores:
        return
    first, second = paper_tables(scores)
    yield first
    yield TableFigure(table_figure(first))
    if "GSM8K" not in first.columns[1]:
        yield Paragraph(
            "The paper's column is GSM8K by its model of 371 million parameters. Ours is this run's model on held-out "
            "reasoning-gym problems: a stand-in that shows the pipeline at work, and not comparable with the paper's."
        )
    # A table of all benchmarks by stage; not every stage was evaluated on each of them.
    names = list(dict.fromkeys(name for result in scores.values() for name in result["benchmarks"]))
    titles: dict[str, str] = {}
    for name in names:
        score = next(result["benchmarks"][name] for result in scores.values() if name in result["benchmarks"])
        titles[name] = marked_title(score)
    rows = tuple(
        (titles[name], *(_cell(result["benchmarks"].get(name)) for result in scores.values())) for name in names
    )
    yield ResultTable("Every benchmark after every stage", ("Benchmark", *scores), rows, (_HOW,))
    yield second
    yield TableFigure(table_figure(second))
    for name in _last_and_others(scores):
        for table in breakdown(scores[name]):
            yield replace(table, title=f"{name}: {table.title}")


def paper_tables(scores: Mapping[str, Facts]) -> tuple[ResultTable, ResultTable]:
    """Table 1 over the stages; Table 2 of the last stage's model and of the models behind endpoints."""
    columns = {f"Ours ({name})" if name in TRAINED else name: scores[name] for name in _last_and_others(scores)}
    return table_1(scores), table_2(columns)


def _last_and_others(scores: Mapping[str, Facts]) -> list[str]:
    stages = [name for name in scores if name in TRAINED]
    return [*stages[-1:], *(name for name in scores if name not in TRAINED)]


_HOW = "Strict accuracy in percent, zero-shot, with the 95 % Wilson interval over problems and the number of questions."


def _cell(score: Facts | None) -> str:
    if not score or score.get("accuracy") is None:
        return MISSING
    low, high = score["interval"]
    return f"{100 * score['accuracy']:.1f} [{100 * low:.1f}, {100 * high:.1f}] of {score['n']:,}"


def _curve_warnings(
    curves: Mapping[str, Mapping[str, Mapping[str, Points]]], stages: Mapping[str, Stage]
) -> Iterator[Paragraph]:
    """What the curves of these stages do that they should not (`common.curve_checks`)."""
    for label, measured in curves.items():
        if label.partition(":")[0] in stages:
            yield from (Paragraph(f"{label}: {warning.text}") for warning in curve_warnings(measured))


def _charts(
    curves: Mapping[str, Mapping[str, Mapping[str, Points]]], stages: Mapping[str, Stage]
) -> Iterator[LineChart]:
    """The curves that these stages declare, of what was measured; `curves`: label -> metric -> source -> points."""
    for label, measured in curves.items():
        stage = stages.get(label.partition(":")[0])
        for curve in stage.curves if stage else ():
            chosen = [metric for metric in curve.metrics if metric in measured and curve.in_report]
            series = {}
            for metric in chosen:
                # A chart of one metric needs no name beside each line, only the source where there are several.
                words = _words(metric) if len(chosen) > 1 else ""
                for source, points in measured[metric].items():
                    series[", ".join(filter(None, (words, source))) or "all"] = points
            if any(len(points) > 1 for points in series.values()):
                yield LineChart(f"{label}: {curve.title}", series, curve.unit)


def _without_update(row: Facts) -> Iterator[Paragraph]:
    if reason := row["facts"].get("checkpoint", {}).get("no_update"):
        yield Paragraph(f"{row['label']} made no update, so its model is the one that it began with: {reason}.")


def _reward(row: Facts) -> Iterator[Paragraph]:
    """The name of a reward other than the paper's: then the reward and the share that is right are different things."""
    if (name := row["facts"].get("checkpoint", {}).get("reward", DEFAULT_REWARD)) != DEFAULT_REWARD:
        yield Paragraph(f"{row['label']}: the reward is {name}, and not whether the answer is right (the solve rate).")


def _judge(row: Facts) -> Iterator[Paragraph]:
    """What is said of a judge: that it is a stand-in, with its measured AUC, and whether it sees the right answers."""
    facts = row["facts"].get("checkpoint", {})
    judge, auc = facts.get("judge"), facts.get("calibration", {}).get("auc", {}).get("overall")
    if judge and judge.get("stand_in"):
        measured = (
            f"; on answers of known quality its AUC was {auc:.2f}, where 0.5 is chance" if auc is not None else ""
        )
        kind, quality = "a small stand-in", "Its rewards exercise the pipeline and are a weak signal."
        if is_judge(judge.get("kind")):
            kind = "a program that checks arithmetic, the answer and its form, as a stand-in for an LLM judge"
            quality = "It does not see the right answers: it checks the steps, and that the answer follows from them."
            if judge.get("reference"):
                quality = "It is shown the right answers, and gives no mark that it cannot verify."
        yield Paragraph(f"{row['label']}: the judge is {judge['model']}, {kind}{measured}. {quality}")
    elif judge and judge.get("reference"):
        yield Paragraph(f"{row['label']}: the judge {judge['model']} is shown the right answer where one is known.")


_CALIBRATED = (
    ("answers marked", "items", ""),
    ("of them unscored", "unscored", ""),
    ("agreement with what is known", "agreement", "share of right and wrong answers on their side of 50"),
    ("mark of right answers", "mean_right", "overall, 0 to 100"),
    ("mark of wrong answers", "mean_wrong", "overall, 0 to 100"),
    ("spread", "spread", "standard deviation of the overall mark"),
    ("different marks", "distinct", ""),
    ("bias by length", "length_bias", "points that meaningless words add to a right answer"),
    ("bias by position", "position_bias", "points that the result at the front adds to a right answer"),
)


def _calibrations(row: Facts) -> Iterator[ResultTable]:
    """The judge's marks on answers of known quality, beside those of compared endpoints."""
    calibration = row["facts"].get("calibration")
    if not calibration:
        return
    # A column for the judge and for each compared endpoint; first the AUC of each mark, then the other figures.
    measured = [calibration, *calibration.get("compared", ())]
    rows = [
        (
            f"chance to mark right above wrong: {mark}",
            *(_value(other.get("auc", {}).get(mark)) for other in measured),
            "0.5 is chance",
        )
        for mark in calibration.get("auc", {})
    ]
    rows += [
        (title, *(_value(other.get(name)) for other in measured), note)
        for title, name, note in _CALIBRATED
        if name in calibration
    ]
    judge = calibration.get("judge", {})
    title = f"{row['label']}: calibration of the judge {judge.get('model', '')}, rubric {judge.get('rubric', '')}"
    columns = tuple(
        f"{judge.get('model', '')}, a stand-in" if judge.get("stand_in") else judge.get("model", "")
        for judge in (other.get("judge", {}) for other in measured)
    )
    compared = "Only the first is the judge; the others marked a part of the same answers, for comparison."
    yield ResultTable(
        title,
        ("What", *(columns if len(columns) > 1 else ("Value",)), "Meaning"),
        tuple(rows),
        (compared,) if len(columns) > 1 else (),
    )
    if calibration.get("hostile"):
        yield _hostile(row["label"], calibration["hostile"])


def _hostile(label: str, hostile: Facts) -> ResultTable:
    """The table of prompt injections: how often text in an answer that addresses the judge changed its mark."""
    kinds = {"right answers": hostile["right"], "wrong answers": hostile["wrong"]}
    rows = [
        (
            name,
            str(figures["pairs"]),
            *(MISSING if figures[share] is None else f"{figures[share]:.0%}" for share in ("moved", "raised")),
            MISSING if figures["points"] is None else f"{figures['points']:+.1f}",
        )
        for name, figures in kinds.items()
    ]
    # The injections that raised the marks of wrong answers most, largest first.
    worst = sorted((-points, form) for form, points in hostile["forms"].items() if points > 0)
    forms = ", ".join(f"{form} ({-points:+.0f})" for points, form in worst[:8])
    notes = [
        "Answers of known quality with an injection around them (chat markers, verdicts, orders, claims, look-alikes), "
        "compared with the same answer without it. Points: of the overall mark, 0 to 100. A judge that treats answers "
        "as data does not raise the mark of a wrong one.",
        f"Wrong answers that pass (50) only with the injection: {hostile['turned']}. "
        f"Without a mark: {hostile['unscored']}.",
    ]
    if forms:
        notes.append(f"What raised wrong answers most: {forms}.")
    columns = ("Injection around", "Pairs", "Mark moved", "Mark raised", "Mean points")
    return ResultTable(f"{label}: injections against the judge", columns, tuple(rows), tuple(notes))


def _curricula(row: Facts) -> Iterator[LineChart]:
    """The curriculum (paper §4.4): weight of a trace and share of the total weight, by solve rate."""
    rounds = row["facts"].get("checkpoint", {}).get("rounds", [])
    curriculum = rounds[-1].get("curriculum", []) if rounds else []
    total = sum(level["total"] for level in curriculum)
    if not total:
        return
    solved = [level for level in curriculum if level["traces"]]
    series = {
        "weight of a trace": [(level["solve_rate"], level["weight"]) for level in solved],
        "share of all weight": [(level["solve_rate"], level["total"] / total) for level in solved],
    }
    yield LineChart(f"{row['label']}: weight by solve rate", series, "weight", x_label="solve rate of the problem")


def _tokenizer(row: Facts) -> Iterator[ResultTable]:
    if facts := row["facts"].get("tokenizer"):
        columns, rows = bytes_per_token_rows(facts)
        yield ResultTable("Bytes of text in a token", columns, tuple(rows), (_MEASURED_ASIDE,))


_MEASURED_ASIDE = (
    "On documents of the sample that the ranks were not trained on; more bytes in a token are fewer tokens of a text. "
    "The sample is the first rows of each source, not screened for copies or for the benchmarks' questions."
)


def _validation(row: Facts) -> Iterator[ResultTable]:
    """The last validation: by token, and by byte, which can be compared with another tokenizer's."""
    if sources := row["facts"].get("checkpoint", {}).get("validation"):
        names = ("loss", "bits_per_byte")
        rows = tuple((source, *(_number(values.get(name)) for name in names)) for source, values in sources.items())
        yield ResultTable(f"{row['label']}: validation", ("Source", "Nats per token", "Bits per byte"), rows, (_BITS,))


_BITS = "Losses per token can be compared only between runs of one tokenizer, bits per byte between all of them."


def _readings(row: Facts) -> Iterator[ResultTable]:
    if readings := row["facts"].get("checkpoint", {}).get(READING):
        sources = {name: SourceReading(**values) for name, values in readings.items()}
        rows = tuple(tuple(cells) for cells in reading_rows(sources))
        yield ResultTable(f"{row['label']}: its sources", COLUMNS, rows, (_READING,))


_READING = (
    "Shares of the training rows: positions that hold a token, documents cropped to a row, targets that are trained on "
    '(with train_on = "replies" those of the prompts are not). Steps and phases count all positions, padding and '
    "prompts included."
)


def _counts(row: Facts) -> Iterator[ResultTable]:
    """The numbers in the manifest of its checkpoint, else of all that a plug-in's stage made."""
    facts = row["facts"] if row["stage"] not in STAGES.shipped else row["facts"].get("checkpoint", {})
    if counts := tuple(_numbers(facts)):
        yield ResultTable(f"{row['label']}: counts", ("What", "Value"), counts)


def _numbers(facts: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    """The numbers in nested facts, with the path to each as its name; of a list, those of its last member."""
    for name, value in facts.items():
        path = f"{before}{_words(name)}"
        if name in ("curriculum", READING, "validation"):
            continue  # shown as a chart, and as tables of their own
        if isinstance(value, list) and value and isinstance(value[-1], dict):
            value, path = value[-1], f"{path}, last"
        if isinstance(value, dict):
            yield from _numbers(value, f"{path}: ")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield path, _number(value)


def _distillation(row: Facts) -> Iterator[ReportBlock]:
    facts = row["facts"].get("documents")
    if facts is None:
        return
    counts = tuple(_numbers({name: value for name, value in facts.items() if not isinstance(value, dict)}))
    if counts:
        yield ResultTable(f"{row['label']}: counts", ("What", "Value"), counts)
    if teachers := facts.get("teachers"):
        names = ("model", "up_to", "asked", "kept", "tokens_in", "tokens_out")
        rows = tuple((name, *(_value(teacher.get(key)) for key in names)) for name, teacher in teachers.items())
        yield ResultTable(f"{row['label']}: teachers", ("Teacher", *map(_words, names)), rows)
    if rejected := facts.get("rejected"):
        rows = tuple((_words(reason), _number(count)) for reason, count in sorted(rejected.items()))
        yield ResultTable(f"{row['label']}: rejected, by reason", ("Reason", "Replies"), rows)


def _kept_out(screening: Facts) -> Iterator[ReportBlock]:
    """Held-out questions, overlaps with them, copies and filtered documents; nothing if no text was screened."""
    questions, overlaps = screening["questions"], screening["overlaps"]
    if questions:
        notes = (
            f"{questions['too_short']:,} of {questions['questions']:,} questions are shorter than five words and "
            f"{questions['boilerplate']:,} have only their benchmark's boilerplate: these are not searched for.",
            "A text overlaps a question if both share thirteen consecutive words, or if it contains a whole shorter "
            "question; it is left out of training.",
        )
        # A row per benchmark, a column of overlaps for each screened source.
        labels = tuple(overlaps)
        names = sorted({*questions["benchmarks"], *(name for counts in overlaps.values() for name in counts)})
        rows = tuple(
            (
                name,
                _count(questions["benchmarks"].get(name)),
                *(_count(overlaps[label].get(name, 0)) for label in labels),
            )
            for name in names
        )
        columns = ("Benchmark", "Questions", *(f"Overlaps in {label}" for label in labels))
        yield ResultTable("Held-out questions", columns, rows, notes)
    if any(any(counts.values()) for counts in screening["left_out"].values()):
        rows = tuple((label, *map(_count, counts.values())) for label, counts in screening["left_out"].items())
        copies = ("Exact copies", "Near copies", "Exact, of another source", "Near, of another source")
        yield ResultTable("Left out of each source", ("Source", *copies, "Other language", "Low score"), rows)
    if screening["hits"]:
        yield Samples("What overlapped a benchmark", [_overlap(hit) for hit in screening["hits"]])


def _overlap(hit: Facts) -> dict[str, Any]:
    """An overlap as a sample: the common words, and the beginning of the text that was left out."""
    share = f", {100 * hit['share']:.0f} % of it" if "share" in hit else ""
    verdict = f"{hit['label']}: {hit['benchmark']} {hit['example']}{share}"
    return {
        "verdict": visible(verdict, LONGEST_OVERLAP),
        "good": False,
        "prompt": visible(hit["words"], LONGEST_OVERLAP),
        "text": visible(hit.get("begins") or "(not kept)", LONGEST_OVERLAP),
    }


def _count(value: int | None) -> str:
    return "" if value is None else f"{value:,}"


def _cost(total: Facts, calls: Sequence[Facts]) -> Iterator[ReportBlock]:
    # One sentence of totals, of which unknown ones are left out; then a table of the calls.
    parts = [f"{total['calls']:,} calls to endpoints"]
    if "tokens_in" in total and "tokens_out" in total:
        parts.append(f"{total['tokens_in']:,} tokens in and {total['tokens_out']:,} out")
    if "dollars" in total:
        parts.append(f"{total['dollars']:.2f} dollars")
    if total.get("unknown_dollars"):
        parts.append(
            f"at most {total['unknown_dollars']:.2f} dollars more for replies that were cut, late or unreadable"
        )
    if used := chips_text(total.get("chip_hours"), total.get("chip_dollars")):
        parts.append(used)
    if "seconds" in total:
        parts.append(f"{_duration(total['seconds'])} in its steps")
    if "peak_bytes" in total:
        parts.append(f"at most {size(total['peak_bytes'])} of memory in one process")
    yield Paragraph(", ".join(parts) + ".")
    if not calls:
        return
    titles = ["Stage", "Endpoint", "For", "Calls", "Cached", "Failed", "Tokens in", "Tokens out", "Dollars", "Latency"]
    rows = tuple(
        (
            row["label"],
            f"{row['endpoint'] or MISSING} ({row['model'] or MISSING})",
            row["purpose"] or MISSING,
            *(_number(row[name]) for name in ("calls", "cached", "failed", "tokens_in", "tokens_out")),
            MISSING if row["dollars"] is None else f"{row['dollars']:.2f}",
            MISSING if row["mean_latency_s"] is None else f"{row['mean_latency_s']:.2f} s",
        )
        for row in calls
    )
    yield ResultTable(
        "Calls", tuple(titles), rows, ("A call is one attempt; a cached one was answered from the ledger.",)
    )


def _stand_ins(notes: Sequence[Mapping[str, str]]) -> Iterator[ReportBlock]:
    if notes:
        rows = tuple((", ".join(labels), note) for note, labels in stand_ins_by_note(notes).items())
        yield ResultTable("Stand-ins", ("Stage", "What stands in for what"), rows)


def _lineage(rows: Sequence[Facts]) -> Iterator[ReportBlock]:
    cells = [
        (
            *(row["id"], row["label"], ", ".join(row["reads"].values()) or MISSING),
            short_commit(row["commit"]) if row["commit"] else MISSING,
        )
        for row in rows
    ]
    if cells:
        note = "`nautile show ID` prints all about an artifact, `nautile lineage ID` everything that it was made from."
        yield ResultTable("Artifacts", ("Artifact", "Made by", "Read", "Code"), tuple(cells), (note,))


def _duration(seconds: float | None) -> str:
    return MISSING if seconds is None else duration(seconds)


def _number(value: float | None) -> str:
    if value is None:
        return MISSING
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"


def _value(value: Any) -> str:
    return value if isinstance(value, str) else _number(value)


def _words(name: str) -> str:
    return name.replace("_", " ")
