"""The data card of a distillation: what the documents are, where from, what was refused and why, what it cost.

One composition, drawn three times as the report is: data_card.html, data_card.md, and data_card.json with the numbers.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from common.files import write_json, write_text
from common.text import amount, size, visible
from configs.distill import DistillConfig
from data.distill.stats import BINS, DistillStats
from evals.tables.results import MISSING, ResultTable
from tasks.reporting.charts import Bars, Curve
from tasks.reporting.render import html_page, markdown
from tasks.reporting.sections import Block, Paragraph, ReportSection, Samples

Facts = Mapping[str, Any]
TITLE = "Data card: distilled documents"


def write_card(folder: Path, facts: Facts, tally: DistillStats, config: DistillConfig) -> dict[str, Any]:
    """Write the card into `folder`; returns what its manifest says.

    `facts`: those of the documents, with `prompt_sets`, `retrieval`, `held_out` (None: nothing was held out).
    """
    sections = [
        ReportSection("What it is", tuple(_counts(facts))),
        ReportSection("Prompts", tuple(_prompts(facts, tally, config))),
        ReportSection("Teachers and difficulty", tuple(_teachers(facts, tally, config))),
        ReportSection("Refused", tuple(_refused(facts))),
        ReportSection("Lengths and languages", tuple(_lengths(facts, tally))),
        ReportSection("Cost", tuple(_cost(facts, tally))),
        ReportSection(
            "Kept, for example", (Samples("Kept", [_sample("kept", row) for row in tally.samples.get("kept", [])]),)
        ),
        ReportSection("Refused, for example", tuple(_bad(tally))),
    ]
    shown = [section for section in sections if section.blocks]
    subtitle = f"{amount(facts['documents'])} documents out of {amount(facts['prompts'])} prompts."
    told = {name: value for name, value in tally.plain().items() if name not in ("curve", "samples")}
    write_json(folder / "data_card.json", {**facts, "counts": told, "curve": tally.curve, "samples": tally.samples})
    write_text(folder / "data_card.md", markdown(TITLE, subtitle, shown))
    write_text(folder / "data_card.html", html_page(TITLE, subtitle, shown))
    return {"sections": [section.title for section in shown], "stand_in": facts["stand_in"]}


def _counts(facts: Facts) -> Iterator[Block]:
    if facts["stand_in"]:
        yield Paragraph(f"A stand-in wrote these documents: {facts['stand_in']}.")
    if facts["budget_exhausted"]:
        yield Paragraph("The budget was spent before every prompt was asked about.")
    retrieval, held_out = facts["retrieval"], facts["held_out"]
    checked = "no benchmark was held out: nothing is known of contamination"
    if held_out is not None:
        checked = f"prompts and documents, against {amount(held_out)} questions of the benchmarks"
    rows = {
        "prompts": amount(facts["prompts"]),
        "documents": amount(facts["documents"]),
        "kept share": MISSING if facts["accepted_share"] is None else f"{facts['accepted_share']:.1%}",
        "dollars": f"{facts['dollars']:.2f}",
        "exemplars": f"{amount(retrieval['count'])}, {facts['neighbours']} nearest to each prompt",
        "retrieval": f"{retrieval['kind']} index over {retrieval['model']}, recall@5 {retrieval['recall']:.3f}, "
        f"{size(retrieval['index_bytes'])}",
        "decontaminated": checked,
        "replies without token counts": amount(facts["replies_without_token_counts"]),
    }
    yield ResultTable("Counts", ("What", "Value"), tuple(rows.items()), (), ())


def _prompts(facts: Facts, tally: DistillStats, config: DistillConfig) -> Iterator[Block]:
    rows = []
    for one in config.prompt_sets:
        left = facts["prompt_sets"].get(one.name, {}).get("left_out", {})
        why = ", ".join(f"{amount(count)} {reason.replace('_', ' ')}" for reason, count in left.items()) or "none"
        where = " ".join(part for part in (one.path or one.source, one.subset, one.revision[:12]) if part)
        counts = (amount(tally.sets[one.name]), amount(tally.sets_kept[one.name]))
        rows.append((one.name, visible(where, 120), one.license or MISSING, *counts, why))
    yield ResultTable(
        "Prompt sets", ("Set", "From", "Licence", "Prompts", "Documents", "Rows left out"), tuple(rows), (), ()
    )
    if len(tally.kinds) > 1:
        yield Bars("prompts by kind", {"prompts": tally.kinds}, tuple(dict(tally.kinds.most_common())), "", "prompts")


def _teachers(facts: Facts, tally: DistillStats, config: DistillConfig) -> Iterator[Block]:
    names = ("model", "template", "up_to", "asked", "kept", "tokens_in", "tokens_out")
    rows = tuple(
        (name, *(amount(told[key]) if isinstance(told[key], int) else str(told[key]) for key in names))
        for name, told in facts["teachers"].items()
    )
    yield ResultTable("Teachers", ("Teacher", *(name.replace("_", " ") for name in names)), rows, (), ())
    mix = {"asked": tally.asked, "kept": tally.kept}
    yield Bars("mix by teacher", mix, tuple(facts["teachers"]), "", "prompts")
    edges = tuple(f"{number / BINS:.2f}" for number in range(BINS))
    ranked = sorted(config.teachers, key=lambda teacher: teacher.up_to)
    lines = tuple((teacher.up_to, f"up to {teacher.up_to:g}: {teacher.endpoint}") for teacher in ranked)
    histogram = {"prompts": tally.difficulties}
    yield Bars("difficulty and thresholds", histogram, edges, "difficulty", "prompts", 1 / BINS, lines)
    if config.probe:
        asked = ", ".join(config.probe.endpoints)
        yield Paragraph(
            f"Asked first: {asked}, {config.probe.samples} each; weighed in by {config.probe.weight:g}. "
            f"{amount(tally.unprobed)} prompts got no answer from them."
        )
        found = {"prompts": tally.probes}
        yield Bars("what the probes disagreed by", found, edges, "disagreement", "prompts", 1 / BINS)


def _refused(facts: Facts) -> Iterator[Block]:
    rejected = facts["rejected"]
    if rejected:
        named = {reason.replace("_", " "): count for reason, count in rejected.items()}
        yield Bars("refused, by reason", {"replies": named}, tuple(named), "", "prompts")
        total = sum(rejected.values())
        rows = tuple((name, amount(count), f"{count / facts['prompts']:.1%}") for name, count in named.items())
        yield ResultTable(
            "Refused, by reason", ("Reason", "Prompts", "Share"), (*rows, ("all", amount(total), "")), (), ()
        )


def _lengths(facts: Facts, tally: DistillStats) -> Iterator[Block]:
    for name, counts in (("reasoning", tally.reasoning_words), ("answer", tally.answer_words)):
        if counts:
            named = {f"{low}-{2 * int(low) - 1}": counts[low] for low in sorted(counts, key=int)}
            yield Bars(f"length of the {name}", {"documents": named}, tuple(named), "words", "documents")
    rows = tuple((code.replace("?", "not to be told"), amount(count)) for code, count in facts["languages"].items())
    if rows:
        yield ResultTable("Languages of the documents", ("Language", "Documents"), rows, (), ())


def _cost(facts: Facts, tally: DistillStats) -> Iterator[Block]:
    rows = tuple((purpose, f"{cost:.4f}") for purpose, cost in facts["dollars_by_purpose"].items())
    if rows:
        yield ResultTable("Dollars by purpose", ("Purpose", "Dollars"), rows, (), ())
    total, points = 0.0, []
    for when, spent in sorted(map(tuple, tally.curve)):
        total += spent
        points.append((when, total))
    if points and total:
        yield Curve("cost over time", tuple(points), "dollars")
    elif points:
        yield Paragraph("The endpoints have no price in the configuration: nothing was paid.")


def _bad(tally: DistillStats) -> Iterator[Block]:
    for reason, rows in sorted(tally.samples.items()):
        if reason != "kept":
            yield Samples(f"Refused: {reason.replace('_', ' ')}", [_sample(reason, row) for row in rows[:3]])


def _sample(verdict: str, row: Mapping[str, Any]) -> dict[str, Any]:
    text = "\n\n".join(str(row[part]) for part in ("reasoning", "answer", "reply") if row.get(part))
    head = f"{verdict.replace('_', ' ')}; {row['teacher']}, difficulty {row['difficulty']:g}"
    shown = {"verdict": visible(head), "good": verdict == "kept", "prompt": visible(row["query"], 1000)}
    return shown | {"text": visible(text, 2000) if text.strip() else "(nothing that could be read)"}
