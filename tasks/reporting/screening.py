"""What the report says of the benchmarks' questions: how many are held out, and what was left out of training."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from common.text import visible
from evals.tables.results import ResultTable

Row = dict[str, Any]

HITS_FILE = "contamination.jsonl"  # of a `tokens` artifact
A_BENCHMARK = 3  # hits shown of each benchmark and artifact
LOOKED_AT = 10_000  # lines of hits read
LONGEST = 160
COPIES = ("duplicate", "near_duplicate", "duplicate_elsewhere", "near_duplicate_elsewhere")


def screening(artifacts: Sequence[tuple[str, str, Path, Mapping[str, Any]]]) -> Row:
    """From (label, kind, folder, facts) of every artifact: the questions, and by label what overlapped them and copies.

    A label is there only where its text was screened: what was not looked for is absent, not zero.
    """
    found: Row = {"questions": {}, "overlaps": {}, "hits": [], "copies": {}}
    for label, kind, folder, facts in artifacts:
        if kind == "questions":
            told = ("questions", "benchmarks", "too_short", "boilerplate")
            found["questions"] = {name: facts[name] for name in told}
        if kind == "tokens" and "rejected" in facts:
            found["copies"][label] = {reason: facts["rejected"].get(reason, 0) for reason in COPIES}
        if isinstance(facts.get("contaminated"), Mapping):
            found["overlaps"][label] = dict(facts["contaminated"])
        if kind == "documents":
            refused = facts.get("samples", {}).get("contaminated", ())
            found["hits"] += [
                {"label": label, **row["said"], "begins": row["query"]} for row in refused if "said" in row
            ]
        elif isinstance(facts.get("contaminated"), Mapping):
            found["hits"] += [{"label": label, **hit} for hit in _some(folder, facts)]
    return found


def tables(found: Row) -> Iterator[ResultTable]:
    """The tables of the section; none where nothing was held out."""
    questions, overlaps = found["questions"], found["overlaps"]
    if questions:
        notes = (
            f"{questions['too_short']:,} of {questions['questions']:,} questions are shorter than five words and "
            f"{questions['boilerplate']:,} hold nothing but their benchmark's boilerplate: those are not searched for.",
            "A text overlaps a question that shares thirteen words in a row with it, or holds the whole of a shorter "
            "one; it is left out of training.",
        )
        labels = tuple(overlaps)
        names = sorted({*questions["benchmarks"], *(name for one in overlaps.values() for name in one)})
        rows = tuple(
            (
                name,
                _count(questions["benchmarks"].get(name)),
                *(_count(overlaps[label].get(name, 0)) for label in labels),
            )
            for name in names
        )
        columns = ("Benchmark", "Questions", *(f"Overlaps in {label}" for label in labels))
        yield ResultTable("Held-out questions", columns, rows, (), notes)
    if any(any(counts.values()) for counts in found["copies"].values()):
        rows = tuple((label, *map(_count, counts.values())) for label, counts in found["copies"].items())
        columns = ("Source", "Exact copies", "Near copies", "Exact, of another source", "Near, of another source")
        yield ResultTable("Copies left out", columns, rows, (), ())


def samples(found: Row) -> list[Row]:
    """The hits as texts to read: what they share, and how the text begins that was left out for it."""
    rows = []
    for hit in found["hits"]:
        share = f", {100 * hit['share']:.0f} % of it" if "share" in hit else ""
        verdict = f"{hit['label']}: {hit['benchmark']} {hit['example']}{share}"
        row = {"verdict": visible(verdict, LONGEST), "good": False, "prompt": visible(hit["words"], LONGEST)}
        rows.append({**row, "text": visible(hit.get("begins") or "(not kept)", LONGEST)})
    return rows


def _some(folder: Path, facts: Mapping[str, Any]) -> list[Row]:
    """The first few hits of each benchmark: from the artifact's file, or from its facts where it has none."""
    path, taken = folder / HITS_FILE, Counter[str]()
    if path.is_file():
        with path.open(encoding="utf-8") as lines:
            every = [json.loads(line) for line in islice(lines, LOOKED_AT)]
    else:
        every = list(facts.get("hits", ()))
    chosen = []
    for hit in every:
        taken[hit["benchmark"]] += 1
        if taken[hit["benchmark"]] <= A_BENCHMARK:
            chosen.append(hit)
    return chosen


def _count(value: int | None) -> str:
    return "" if value is None else f"{value:,}"
