"""The report's sections in order, as blocks that a page or a terminal can draw: paragraphs, tables, charts, samples.

Here is the wording, and the choice of what to show. A block is left out when what it would show was not measured.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from common.text import duration, size
from evals.tables import paper_figures as paper
from evals.tables.breakdown import breakdown
from evals.tables.results import MISSING, ResultTable, table_1, table_2
from evals.tables.svg import picture
from tasks.reporting import screening as report_screening
from tasks.reporting.charts import Bars, Curve

Row = dict[str, Any]
Points = list[tuple[float, float]]


@dataclass(frozen=True)
class Paragraph:
    text: str


@dataclass(frozen=True)
class Picture:
    """The stages as boxes (label, second line) joined by arrows."""

    boxes: tuple[tuple[str, str], ...]
    arrows: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Drawing:
    """A finished `<svg>`, made of numbers and escaped names alone."""

    svg: str


@dataclass(frozen=True)
class Chart:
    title: str
    series: Mapping[str, Points]
    y_label: str
    log_y: bool = False
    x_label: str = "step"


@dataclass(frozen=True)
class Samples:
    """Texts to read; `rows` have verdict, good, prompt, text and sometimes expected."""

    title: str
    rows: Sequence[Row]


Block = Paragraph | Picture | Drawing | ResultTable | Chart | Bars | Curve | Samples


@dataclass(frozen=True)
class ReportSection:
    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class _Plot:
    """Which metrics make one chart. `names` is a pattern of whole names; `stages` empty: any stage."""

    title: str
    names: str
    y_label: str
    stages: tuple[str, ...] = ()


_REINFORCED = ("align", "reason")
TRAINING = (
    _Plot("loss", "loss", "nats per token", ("pretrain",)),
    _Plot("validation bits per byte", "validation_bits_per_byte", "bits per byte", ("pretrain",)),
    _Plot("gradient norm", "gradient_norm", "norm", ("pretrain",)),
    _Plot("speed", "tokens_per_second", "tokens/s", ("pretrain",)),
)
REINFORCEMENT = (
    _Plot("reward", "reward", "judge's reward", ("align",)),
    _Plot("solve rate of what it sampled", "solve_rate", "share right"),
    _Plot("judge's marks", "reward_(reason|answer|follow)", "1 to 5", ("align",)),
    _Plot("accuracy on the guard problems", "guard_accuracy", "share right"),
    _Plot("KL to the start", "kl", "nats per token", _REINFORCED),
    _Plot("entropy", "entropy", "nats per token", _REINFORCED),
    _Plot("norms of g+ and g-", "norm_(positive|negative)", "norm", ("reason",)),
    _Plot("factor on g-", "balance_factor", "factor", ("reason",)),
    _Plot("shares of a step", "(zero_signal|truncated|finished_thinking)_share", "share", _REINFORCED),
    _Plot("length of completions", "length", "tokens", _REINFORCED),
    _Plot("gradient", "(grad|update)_norm", "norm", _REINFORCED),
    _Plot("clipped tokens", "clip_share", "share", _REINFORCED),
    _Plot("unscored completions", "unscored", "completions", ("align",)),
    _Plot("the sampler's log-probabilities against the learner's", "sampler_gap", "nats per token", _REINFORCED),
    _Plot("speed of rollouts and updates", "(rollout|update)_tokens_per_second", "tokens/s"),
    _Plot("advantage-scaled loss", "loss", "nats per token", ("self_distill",)),
)


def compose(found: Row) -> list[ReportSection]:
    """The sections that have anything to say, from what `report_data.gather` found."""
    sections = [
        ReportSection("The run", tuple(_run(found))),
        ReportSection("Results", tuple(_results(found["scores"]))),
        ReportSection("Pretraining", (*_charts(found["curves"], TRAINING), *_counts(found["stages"], ("pretrain",)))),
        ReportSection(
            "Reinforcement and self-distillation",
            (
                *_judge(found["stages"]),
                *_calibrations(found["stages"]),
                *_charts(found["curves"], REINFORCEMENT),
                *_curricula(found["stages"]),
                *_counts(found["stages"], ("align", "reason", "self_distill")),
            ),
        ),
        ReportSection("Distillation", tuple(_distillation(found["stages"]))),
        ReportSection("Kept out of training", tuple(_kept_out(found["screening"]))),
        ReportSection("Cost", tuple(_cost(found))),
        ReportSection("Samples", tuple(Samples(group["title"], group["rows"]) for group in found["samples"])),
        ReportSection("What is a stand-in", tuple(_stand_ins(found["stand_ins"]))),
        ReportSection("Lineage", tuple(_lineage(found["lineage"]))),
    ]
    return [section for section in sections if section.blocks]


def _run(found: Row) -> Iterator[Block]:
    stages = found["stages"]
    if not stages:
        return
    boxes = tuple((row["label"], _took(row["seconds"])) for row in stages)
    yield Picture(boxes, tuple((source, row["label"]) for row in stages for source in row["reads"]))
    rows = tuple((row["label"], _took(row["seconds"]), ", ".join(row["artifacts"].values())) for row in stages)
    yield ResultTable("What ran", ("Stage", "Time", "Artifacts"), rows, (), ())


def _results(scores: Mapping[str, Row]) -> Iterator[Block]:
    if not scores:
        return
    first, second = paper_tables(scores)
    yield first
    yield Drawing(picture(first))
    if "GSM8K" not in first.columns[1]:
        yield Paragraph(
            "The paper's column is GSM8K by its model of 371 million parameters. Ours is this run's model on held-out "
            "reasoning-gym problems: a stand-in that shows the pipeline at work, and not comparable with the paper's."
        )
    names = list(dict.fromkeys(name for one in scores.values() for name in one["benchmarks"]))
    titles = {name: _title(scores, name) for name in names}
    rows = tuple((titles[name], *(_cell(one["benchmarks"].get(name)) for one in scores.values())) for name in names)
    yield ResultTable("Every benchmark after every stage", ("Benchmark", *scores), rows, (_HOW,), ())
    yield second
    yield Drawing(picture(second))
    for name in _last_and_others(scores):
        for table in breakdown(scores[name]):
            yield replace(table, title=f"{name}: {table.title}")


def paper_tables(scores: Mapping[str, Row]) -> tuple[ResultTable, ResultTable]:
    """Table 1 over the stages; Table 2 of the last stage's model and of the models behind endpoints."""
    columns = {f"Ours ({name})" if name in paper.TABLE_1 else name: scores[name] for name in _last_and_others(scores)}
    return table_1(scores), table_2(columns)


def _last_and_others(scores: Mapping[str, Row]) -> list[str]:
    stages = [name for name in scores if name in paper.TABLE_1]
    return [*stages[-1:], *(name for name in scores if name not in paper.TABLE_1)]


_HOW = "Strict accuracy in percent, zero-shot, with the 95 % Wilson interval and the number of questions."


def _title(scores: Mapping[str, Row], name: str) -> str:
    one = next(one["benchmarks"][name] for one in scores.values() if name in one["benchmarks"])
    return one["title"] + (" (stand-in)" if one.get("stand_in") else "")


def _cell(score: Row | None) -> str:
    if not score or score.get("accuracy") is None:
        return MISSING
    low, high = score["interval"]
    return f"{100 * score['accuracy']:.1f} [{100 * low:.1f}, {100 * high:.1f}] of {score['n']:,}"


def _charts(curves: Mapping[str, Mapping[str, Mapping[str, Points]]], plots: Sequence[_Plot]) -> Iterator[Chart]:
    for label, metrics in curves.items():
        for plot in plots:
            if plot.stages and label.partition(":")[0] not in plot.stages:
                continue
            chosen = {name: metrics[name] for name in metrics if re.fullmatch(plot.names, name)}
            series = {
                _series(name, source, several=len(chosen) > 1): points
                for name, by_source in chosen.items()
                for source, points in by_source.items()
            }
            if any(len(points) > 1 for points in series.values()):
                yield Chart(f"{label}: {plot.title}", series, plot.y_label)


def _series(name: str, source: str, several: bool) -> str:
    parts = [name.replace("_", " ")] if several else []
    return ", ".join([*parts, source]) if source else (parts or ["all"])[0]


def _judge(stages: Sequence[Row]) -> Iterator[Paragraph]:
    """How far the judge's marks can be believed."""
    for row in stages:
        facts = row["facts"].get("checkpoint", {})
        judge, auc = facts.get("judge"), facts.get("calibration", {}).get("auc", {}).get("overall")
        if judge and judge.get("stand_in"):
            measured = (
                f"; on answers of known quality its AUC was {auc:.2f}, where 0.5 is chance" if auc is not None else ""
            )
            yield Paragraph(
                f"{row['label']}: the judge is {judge['model']}, a small stand-in{measured}. Its rewards are real "
                "plumbing and a weak signal."
            )


_CALIBRATED = (
    ("answers marked", "items", ""),
    ("of them unscored", "unscored", ""),
    ("agreement with what is known", "agreement", "share of right and wrong answers on their side of 50"),
    ("mark of right answers", "mean_right", "overall, 0 to 100"),
    ("mark of wrong answers", "mean_wrong", "overall, 0 to 100"),
    ("spread", "spread", "standard deviation of the overall mark"),
    ("different marks", "distinct", ""),
    ("bias by length", "length_bias", "points that words which say nothing add to a right answer"),
    ("bias by position", "position_bias", "points that the result at the front adds to a right answer"),
)


def _calibrations(stages: Sequence[Row]) -> Iterator[ResultTable]:
    """The judge on answers of known quality, beside its rewards."""
    for row in stages:
        found = row["facts"].get("calibration")
        if not found:
            continue
        rows = [(f"chance to mark right above wrong: {mark}", _value(auc), "0.5 is chance")
                for mark, auc in found.get("auc", {}).items()]  # fmt: skip
        rows += [(title, _value(found.get(name)), said) for title, name, said in _CALIBRATED if name in found]
        asked = found.get("judge", {})
        title = f"{row['label']}: the judge {asked.get('model', '')} measured, rubric {asked.get('rubric', '')}"
        yield ResultTable(title, ("What", "Value", "Meaning"), tuple(rows), (), ())


def _curricula(stages: Sequence[Row]) -> Iterator[Chart]:
    """The curriculum of §4.4: what a trace weighs, and what its kind weighs together, by how often it was solved."""
    for row in stages:
        rounds = row["facts"].get("checkpoint", {}).get("rounds", [])
        curriculum = rounds[-1].get("curriculum", []) if rounds else []
        total = sum(one["total"] for one in curriculum)
        if not total:
            continue
        solved = [one for one in curriculum if one["traces"]]
        series = {
            "weight of a trace": [(one["solve_rate"], one["weight"]) for one in solved],
            "share of all weight": [(one["solve_rate"], one["total"] / total) for one in solved],
        }
        yield Chart(f"{row['label']}: weight by solve rate", series, "weight", x_label="solve rate of the problem")


def _counts(stages: Sequence[Row], chosen: tuple[str, ...]) -> Iterator[ResultTable]:
    """What each stage wrote of itself in its checkpoint's manifest, as far as it is numbers."""
    for row in stages:
        if row["stage"] in chosen:
            counts = tuple(_numbers(row["facts"].get("checkpoint", {})))
            if counts:
                yield ResultTable(f"{row['label']}: as counted", ("What", "Value"), counts, (), ())


def _numbers(facts: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    """The numbers of nested facts, with the path to each as its name; in a list, those of its last member."""
    for name, value in facts.items():
        path = f"{before}{_words(name)}"
        if name == "curriculum":
            continue  # it is drawn
        if isinstance(value, list) and value and isinstance(value[-1], dict):
            value, path = value[-1], f"{path}, last"
        if isinstance(value, dict):
            yield from _numbers(value, f"{path}: ")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield path, _number(value)


def _distillation(stages: Sequence[Row]) -> Iterator[Block]:
    for row in stages:
        facts = row["facts"].get("documents")
        if facts is None:
            continue
        counts = tuple(_numbers({name: value for name, value in facts.items() if not isinstance(value, dict)}))
        if counts:
            yield ResultTable(f"{row['label']}: counts", ("What", "Value"), counts, (), ())
        if teachers := facts.get("teachers"):
            names = ("model", "up_to", "asked", "kept", "tokens_in", "tokens_out")
            rows = tuple((name, *(_value(told.get(key)) for key in names)) for name, told in teachers.items())
            yield ResultTable(f"{row['label']}: teachers", ("Teacher", *map(_words, names)), rows, (), ())
        if rejected := facts.get("rejected"):
            rows = tuple((_words(reason), _number(count)) for reason, count in sorted(rejected.items()))
            yield ResultTable(f"{row['label']}: refused, by reason", ("Reason", "Replies"), rows, (), ())


def _kept_out(found: Row) -> Iterator[Block]:
    yield from report_screening.tables(found)
    if rows := report_screening.samples(found):
        yield Samples("What overlapped a benchmark", rows)


def _cost(found: Row) -> Iterator[Block]:
    total = found["cost"]
    said = [f"{total['calls']:,} calls to endpoints"]
    if "tokens_in" in total and "tokens_out" in total:
        said.append(f"{total['tokens_in']:,} tokens in and {total['tokens_out']:,} out")
    if "dollars" in total:
        said.append(f"{total['dollars']:.2f} dollars")
    if "seconds" in total:
        said.append(f"{_took(total['seconds'])} of work")
    if "peak_bytes" in total:
        said.append(f"at most {size(total['peak_bytes'])} of memory in one process")
    yield Paragraph(", ".join(said) + ".")
    if found["calls"]:
        columns = (
            "Stage",
            "Endpoint",
            "For",
            "Calls",
            "Cached",
            "Failed",
            "Tokens in",
            "Tokens out",
            "Dollars",
            "Latency",
        )
        rows = tuple(
            (
                row["label"],
                f"{row['endpoint'] or MISSING} ({row['model'] or MISSING})",
                row["purpose"] or MISSING,
                *(_number(row[name]) for name in ("calls", "cached", "failed", "tokens_in", "tokens_out")),
                MISSING if row["dollars"] is None else f"{row['dollars']:.2f}",
                MISSING if row["mean_latency_s"] is None else f"{row['mean_latency_s']:.2f} s",
            )
            for row in found["calls"]
        )
        yield ResultTable(
            "Calls", columns, rows, ("A call is one attempt; a cached one was answered from the ledger.",), ()
        )


def _stand_ins(notes: Sequence[Mapping[str, str]]) -> Iterator[Block]:
    if notes:
        by_note: dict[str, list[str]] = {}
        for note in notes:
            by_note.setdefault(note["note"], []).append(note["label"])
        rows = tuple((", ".join(labels), note) for note, labels in by_note.items())
        yield ResultTable("Not the real thing", ("Stage", "What stands in for what"), rows, (), ())


def _lineage(rows: Sequence[Row]) -> Iterator[Block]:
    shown = tuple(
        (row["id"], row["label"], ", ".join(row["reads"].values()) or MISSING, _code(row["commit"])) for row in rows
    )
    if shown:
        note = "`nautile show ID` tells everything about an artifact, `nautile lineage ID` all that it was made from."
        yield ResultTable("Artifacts", ("Artifact", "Made by", "Read", "Code"), shown, (note,), ())


def _code(commit: str | None) -> str:
    """The commit in short, with the mark of a tree that differed from it."""
    return MISSING if commit is None else commit[:12] + ("-dirty" if commit.endswith("-dirty") else "")


def _took(seconds: float | None) -> str:
    return MISSING if seconds is None else duration(seconds)


def _number(value: float | None) -> str:
    if value is None:
        return MISSING
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"


def _value(value: Any) -> str:
    return value if isinstance(value, str) else _number(value)


def _words(name: str) -> str:
    return name.replace("_", " ")
