"""What the report says, gathered from the inputs' manifests and files and from the catalog, as plain JSON data.

Nothing here is drawn or worded. What was not measured is absent, never zero.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from common.files import read_json
from common.text import visible
from store.artifacts import Artifact, Store
from store.catalog import Catalog
from tasks.reporting.screening import screening

Row = dict[str, Any]

LONGEST_SAMPLE = 1200
STAGES_OF_TABLE_1 = ("pretrain", "align", "reason", "self_distill")

_SECONDS = """
SELECT execution, sum(seconds) AS seconds, max(peak_bytes) AS peak_bytes, count(*) AS attempts
FROM runs WHERE NOT reused AND list_contains(?, execution) GROUP BY execution
"""
_CALLS = """
SELECT execution, endpoint, model, purpose, count(*) AS calls, count(*) FILTER (cached) AS cached,
    count(*) FILTER (error IS NOT NULL) AS failed, sum(tokens_in) AS tokens_in, sum(tokens_out) AS tokens_out,
    sum(dollars) AS dollars, avg(latency_s) FILTER (NOT coalesce(cached, false)) AS mean_latency_s
FROM calls WHERE list_contains(?, execution) GROUP BY ALL ORDER BY ALL
"""
_METRICS = """
SELECT execution, name, coalesce(source, '') AS source, list([step, value] ORDER BY step) AS points
FROM metrics WHERE list_contains(?, execution) AND isfinite(value) GROUP BY ALL ORDER BY ALL
"""
_ROLLOUTS = """
WITH drawn AS (
    SELECT id, fields, (fields->>'step')::BIGINT AS step, (fields->>'reward')::DOUBLE AS reward
    FROM samples WHERE execution = ? AND "set" = 'rollouts')
SELECT fields FROM drawn WHERE reward IS NOT NULL AND step >= (SELECT max(step) FROM drawn) - 2
ORDER BY reward {order}, md5(id) LIMIT ?
"""


@dataclass(frozen=True)
class Input:
    """One input of the report: the artifact, and the execution of the run (`evaluate:align`) that wrote it."""

    label: str
    artifact: Artifact

    @property
    def facts(self) -> Row:
        return self.artifact.manifest["facts"]


def read_inputs(store: Store, folders: Mapping[str, Path]) -> list[Input]:
    """The inputs by their names, `label.kind`, in the order of their making."""
    found = [
        Input(name.rpartition(".")[0], store.get(f"{folder.parent.name}/{folder.name}"))
        for name, folder in folders.items()
    ]
    return sorted(found, key=lambda one: (one.artifact.manifest["created"], one.label, one.artifact.kind))


def gather(store: Store, inputs: Sequence[Input], samples: int) -> Row:
    """Everything the report shows. `samples`: how many texts, at most, of each sort."""
    catalog = Catalog(store)
    catalog.ingest()
    by_execution = {one.artifact.execution: one.label for one in inputs}
    executions = list(by_execution)
    spent = {by_execution[row["execution"]]: row for row in catalog.query(_SECONDS, [executions])}
    calls = [{"label": by_execution[row.pop("execution")], **row} for row in catalog.query(_CALLS, [executions])]
    return {
        "stages": _stages(inputs, spent),
        "scores": scores(inputs),
        "curves": _curves(catalog.query(_METRICS, [executions]), by_execution),
        "calls": calls,
        "cost": _cost(calls, spent),
        "samples": _samples(catalog, inputs, samples),
        "screening": screening([(one.label, one.artifact.kind, one.artifact.path, one.facts) for one in inputs]),
        "stand_ins": stand_ins(inputs),
        "lineage": [_lineage(one) for one in inputs],
    }


def scores(inputs: Sequence[Input]) -> dict[str, Row]:
    """`scores.json` of each evaluation, by the stage whose checkpoint it asked, in Table 1's order."""
    found = {
        one.label.partition(":")[2] or one.label: read_json(one.artifact.path / "scores.json")
        for one in inputs
        if one.artifact.kind == "evaluation"
    }
    known = {stage: found[stage] for stage in STAGES_OF_TABLE_1 if found.get(stage)}
    return known | {stage: value for stage, value in found.items() if value and stage not in known}


def stand_ins(inputs: Sequence[Input]) -> list[dict[str, str]]:
    """What was not the real thing: as a stage says of itself, else as the configuration says of its endpoints."""
    said: dict[str, list[str]] = {}
    for one in inputs:
        notes = said.setdefault(one.label, [])
        own = (one.facts.get("stand_in"), *(one.facts.get("stand_ins") or ()))
        notes += [visible(note) for note in own if isinstance(note, str) and note]
    for one in inputs:
        if not said[one.label]:
            endpoints = one.artifact.manifest["config"].get("endpoints", {}).values()
            said[one.label] = [f"{e['model']} stands in for a large model" for e in endpoints if e.get("stand_in")]
    return [{"label": label, "note": note} for label, notes in said.items() for note in dict.fromkeys(notes)]


def _stages(inputs: Sequence[Input], spent: Mapping[str, Row]) -> list[Row]:
    """One row an execution: its artifacts with their facts, its time, what it read."""
    rows: dict[str, Row] = {}
    writers = {one.artifact.full_id: one.label for one in inputs}
    for one in inputs:
        manifest = one.artifact.manifest
        row = rows.setdefault(
            one.label,
            {
                "label": one.label,
                "stage": manifest["stage"],
                "reads": sorted({writers[full] for full in manifest["inputs"].values() if full in writers}),
                "artifacts": {},
                "facts": {},
                "seconds": spent.get(one.label, {}).get("seconds"),
                "attempts": spent.get(one.label, {}).get("attempts"),
                "peak_bytes": spent.get(one.label, {}).get("peak_bytes"),
            },
        )
        row["artifacts"][one.artifact.kind] = one.artifact.id
        row["facts"][one.artifact.kind] = one.facts
    return list(rows.values())


def _curves(rows: Sequence[Row], labels: Mapping[str, str]) -> dict[str, dict[str, dict[str, Any]]]:
    """label -> metric -> source ("" for none) -> [[step, value], ...], in the order of `labels`."""
    curves: dict[str, dict[str, dict[str, Any]]] = {label: {} for label in labels.values()}
    for row in rows:
        curves[labels[row["execution"]]].setdefault(row["name"], {})[row["source"]] = row["points"]
    return {label: metrics for label, metrics in curves.items() if metrics}


def _cost(calls: Sequence[Row], spent: Mapping[str, Row]) -> Row:
    """Totals; a sum over calls that did not all tell its figure is left out."""
    seconds = [row["seconds"] for row in spent.values() if row["seconds"] is not None]
    peaks = [row["peak_bytes"] for row in spent.values() if row["peak_bytes"] is not None]
    total: Row = {"calls": sum(row["calls"] for row in calls)}
    for name in ("tokens_in", "tokens_out", "dollars"):
        told = [row[name] for row in calls if row[name] is not None]
        total |= {name: sum(told)} if told else {}
    total |= {"seconds": sum(seconds)} if seconds else {}
    return total | ({"peak_bytes": max(peaks)} if peaks else {})


def _samples(catalog: Catalog, inputs: Sequence[Input], most: int) -> list[Row]:
    """Texts to read, right ones and wrong ones, in groups: {title, rows: [{verdict, prompt, text, expected}]}."""
    groups = []
    for one in inputs:
        if one.artifact.kind == "evaluation":
            rows = read_json(one.artifact.path / "samples.json") or []
            groups.append({"title": f"{one.label}: answers", "rows": _balanced([_answer(r) for r in rows], most)})
        if one.artifact.kind == "rollouts":
            groups.append({"title": f"{one.label}: rollouts of its last steps", "rows": _rollouts(catalog, one, most)})
        if one.artifact.kind == "traces":
            traces = [_trace(row) for row in read_lines(one.artifact.path / "traces.jsonl", most)]
            groups.append({"title": f"{one.label}: traces it was trained on", "rows": traces})
        if one.artifact.kind == "documents":
            groups.append({"title": f"{one.label}: what the teacher wrote", "rows": _documents(one, most)})
    return [group for group in groups if group["rows"]]


def _balanced(rows: Sequence[Row], most: int) -> list[Row]:
    """The first of the right ones and of the wrong ones, half of each where there are enough."""
    right = [row for row in rows if row["good"]]
    wrong = [row for row in rows if not row["good"]]
    few = min(len(right), max(most // 2, most - len(wrong)))
    return right[:few] + wrong[: most - few]


def _answer(row: Row) -> Row:
    verdict = "right" if row["strict"] else f"wrong ({row['problem']})" if row["problem"] else "wrong"
    return _shown(f"{verdict}, {row['benchmark']}", bool(row["strict"]), row["prompt"], row["output"], row["expected"])


def _rollouts(catalog: Catalog, one: Input, most: int) -> list[Row]:
    """The best and the worst rewarded of the last three steps."""
    execution, half = one.artifact.execution, max(1, most // 4)
    ends = [
        (good, json.loads(row["fields"]))
        for good, order in ((True, "DESC"), (False, "ASC"))
        for row in catalog.query(_ROLLOUTS.format(order=order), [execution, half])
    ]
    return [
        _shown(f"reward {row['reward']:.3g}", good, row["question"], row["text"], row["expected"]) for good, row in ends
    ]


def _trace(row: Row) -> Row:
    return _shown(f"advantage {row['advantage']:.3g}", True, row["question"], row["text"], row["expected"])


def _documents(one: Input, most: int) -> list[Row]:
    """The samples of its manifest: kept ones first, then refused ones, a reason after the other."""
    by_reason = one.facts.get("samples", {})
    kept = [_document("kept", True, row) for row in by_reason.get("kept", ())[: max(1, most // 2)]]
    others = [[(reason, row) for row in rows] for reason, rows in sorted(by_reason.items()) if reason != "kept"]
    mixed = [pair for turn in zip_longest(*others) for pair in turn if pair]
    return kept + [_document(f"refused: {reason}", False, row) for reason, row in mixed[: max(0, most - len(kept))]]


def _document(verdict: str, good: bool, row: Row) -> Row:
    text = "\n\n".join(part for part in (row.get("reasoning"), row.get("answer")) if part)
    return _shown(verdict, good, row["query"], text or "(nothing that could be read)", None)


def _shown(verdict: str, good: bool, prompt: Any, text: Any, expected: Any) -> Row:
    row = {"verdict": visible(verdict), "good": good, "prompt": visible(prompt, LONGEST_SAMPLE)}
    row["text"] = visible(text, LONGEST_SAMPLE) if str(text or "").strip() else "(empty)"
    return row | ({"expected": visible(expected, 200)} if expected else {})


def read_lines(path: Path, most: int) -> list[Row]:
    """The first `most` rows of a JSONL file; none if there is no such file."""
    if not path.exists():
        return []
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line, _ in zip(file, range(most), strict=False)]


def _lineage(one: Input) -> Row:
    manifest = one.artifact.manifest
    reads = {name: full[: full.index("/") + 13] for name, full in manifest["inputs"].items()}
    told = {name: manifest[name] for name in ("stage", "version", "commit", "created", "execution", "digest")}
    return {"id": one.artifact.id, "label": one.label, "bytes": one.artifact.bytes, "reads": reads, **told}
