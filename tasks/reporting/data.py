"""Collect the data of the report as plain JSON, from the inputs' manifests and files and from the catalog.

Formatting and wording are elsewhere. What was not measured is absent, never zero.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

from nautile.common.files import read_json
from nautile.common.text import visible
from nautile.configs.vendors import is_judge
from nautile.data.endpoints.own_server import program_of
from nautile.evals.benchmarks.titles import TABLE_1
from nautile.evals.running.rows import SampleRow, read_rows
from nautile.evals.tables.ladder import Ladder, RowsByStage, common_problems, ladder
from nautile.store.artifacts import Artifact, Store
from nautile.store.catalog import Catalog, CatalogRow
from nautile.store.manifest import short_commit
from nautile.store.views import SPENT, run_seconds
from nautile.tasks.engine.stage import stages_with
from nautile.tasks.reporting.other_seeds import accuracies_by_seed, ladder_over_seeds

Facts = dict[str, Any]

LONGEST_SAMPLE = 1200
OVERLAPS_FILE = "contamination.jsonl"  # of a `tokens` artifact
OVERLAPS_SHOWN = 3  # per benchmark and artifact
OVERLAPS_READ = 10_000  # at most so many lines of the file
# Of a source's documents: its copies, and what its filters drop.
LEFT_OUT = (
    "duplicate", "near_duplicate", "duplicate_elsewhere", "near_duplicate_elsewhere", "language", "score",
)  # fmt: skip

_CALLS = """
SELECT execution, endpoint, model, purpose, count(*) AS calls, count(*) FILTER (cached) AS cached,
    count(*) FILTER (error IS NOT NULL) AS failed, sum(tokens_in) AS tokens_in, sum(tokens_out) AS tokens_out,
    sum(dollars) AS dollars, sum(TRY_CAST(fields->>'unknown_dollars' AS DOUBLE)) AS unknown_dollars,
    avg(latency_s) FILTER (NOT coalesce(cached, false)) AS mean_latency_s
FROM calls WHERE list_contains(?, execution) GROUP BY ALL ORDER BY ALL
"""
_METRICS = """
SELECT execution, name, coalesce(source, '') AS source, list([step, value] ORDER BY step) AS points
FROM metrics WHERE list_contains(?, execution) AND isfinite(value) AND NOT starts_with(name, 'system/')
GROUP BY ALL ORDER BY ALL
"""
# The last run that wrote or reused artifacts of these executions, with the name of its configuration, its time, and
# whether it had ended. (executions)
_NEWEST_RUN = """
SELECT r.run, r.config, r.begun, r.seconds, r.state = 'running' AS live
FROM runs r JOIN attempts a USING (run) WHERE list_contains(?, a.execution) ORDER BY a.started DESC LIMIT 1
"""
_ROLLOUTS = """
WITH drawn AS (
    SELECT id, fields, TRY_CAST(fields->>'step' AS BIGINT) AS step, TRY_CAST(fields->>'reward' AS DOUBLE) AS reward
    FROM samples WHERE execution = ? AND "set" = 'rollouts')
SELECT fields, reward FROM drawn WHERE isfinite(reward) AND fields->>'question' <> '' AND fields->>'text' IS NOT NULL
    AND step >= (SELECT max(step) FROM drawn) - 2
ORDER BY reward {order}, md5(id) LIMIT ?
"""
LONGEST_PROMPT, LONGEST_REASONING, LONGEST_ANSWER = 1200, 800, 400  # characters


@dataclass(frozen=True)
class Input:
    """An input of the report: an artifact, and the label of the step (`evaluate:align`) that wrote it."""

    label: str
    artifact: Artifact

    @property
    def facts(self) -> Facts:
        return self.artifact.manifest["facts"]


def read_inputs(store: Store, folders: Mapping[str, Path]) -> list[Input]:
    """The inputs, whose names are `label.kind`, oldest first."""
    inputs = [
        Input(name.rpartition(".")[0], store.get(f"{folder.parent.name}/{folder.name}"))
        for name, folder in folders.items()
    ]
    return sorted(inputs, key=lambda item: (item.artifact.manifest["created"], item.label, item.artifact.kind))


def collect(store: Store, inputs: Sequence[Input], samples: int) -> Facts:
    """All data of the report. `samples`: the largest number of texts in each group."""
    catalog = Catalog(store)
    catalog.ingest()
    # Every figure from the catalog is asked for by execution: other runs of the same stages do not count.
    labels = {item.artifact.recorded_execution: item.label for item in inputs}
    spent, calls, cost = spending(catalog, labels)
    newest = next(iter(catalog.query(_NEWEST_RUN, [list(labels)])), None)
    if newest and (seconds := run_seconds(newest, newest["live"])) is not None:
        cost |= {"run_seconds": seconds, "run_ended": not newest["live"]}
    by_stage, rows = scores(inputs), evaluation_rows(inputs)
    ladder_data = ladder(by_stage, rows)
    about = _about(newest, inputs)
    other_seeds = accuracies_by_seed(lambda sql, *values: catalog.query(sql, values), about.get("run"))
    return {
        "about": about,
        "ladder": ladder_data,
        "ladder_over_seeds": ladder_over_seeds(other_seeds, ladder_data) if ladder_data else [],
        "problems": changed_problems(ladder_data, rows) if ladder_data else [],
        "stages": _stages(inputs, spent),
        "scores": by_stage,
        "curves": _curves(catalog.query(_METRICS, [list(labels)]), labels),
        "calls": calls,
        "cost": cost,
        "samples": _samples(catalog, inputs, samples),
        "screening": screening([(item.label, item.artifact.kind, item.artifact.path, item.facts) for item in inputs]),
        "stand_ins": stand_ins(inputs),
        "lineage": [_lineage(item) for item in inputs],
    }


def _about(newest: CatalogRow | None, inputs: Sequence[Input]) -> Facts:
    """Configuration, run, seeds, commits and machines. Unknown values are absent; differing ones are all listed.

    `seeds` has a list for each name: "data", "weights", "sampling", "evaluation".
    """
    manifests = [item.artifact.manifest for item in inputs]
    lists = {
        "commits": [short_commit(row["commit"]) for row in manifests if row["commit"]],
        "machines": [row["host"] for row in manifests if row.get("host")],
    }
    about: Facts = {name: list(dict.fromkeys(values)) for name, values in lists.items() if values}
    seeds: dict[str, list[int]] = {}
    for name, seed in (entry for row in manifests for entry in row["config"].get("seeds", {}).items()):
        if seed not in seeds.setdefault(name, []):
            seeds[name].append(seed)
    about |= {"seeds": seeds} if seeds else {}
    if newest:
        about |= {"run": newest["run"]} | ({"configuration": newest["config"]} if newest["config"] else {})
    return about | {"artifacts": len(inputs), "newest": max(row["created"] for row in manifests)[:19].replace("T", " ")}


def spending(catalog: Catalog, labels: Mapping[str, str]) -> tuple[dict[str, Facts], list[Facts], Facts]:
    """Time and memory by label, endpoint calls, and totals. `labels`: execution -> label."""
    executions = list(labels)
    spent = {labels[row["execution"]]: row for row in catalog.query(SPENT, [executions])}
    calls = [{"label": labels[row.pop("execution")], **row} for row in catalog.query(_CALLS, [executions])]
    return spent, calls, _cost(calls, spent)


def screening(artifacts: Sequence[tuple[str, str, Path, Mapping[str, Any]]]) -> Facts:
    """Benchmark questions, and by label the overlaps with them, the copies, and what filters dropped.

    `artifacts`: (label, kind, folder, facts) of each.

    A label is present only if its text was screened: what was not searched for is absent, not zero.
    """
    result: Facts = {"questions": {}, "overlaps": {}, "hits": [], "left_out": {}}
    for label, kind, folder, facts in artifacts:
        if kind == "questions":
            names = ("questions", "benchmarks", "too_short", "boilerplate")
            result["questions"] = {name: facts[name] for name in names}
        if kind == "tokens" and "rejected" in facts:
            result["left_out"][label] = {reason: facts["rejected"].get(reason, 0) for reason in LEFT_OUT}
        if isinstance(facts.get("contaminated"), Mapping):
            result["overlaps"][label] = dict(facts["contaminated"])
        if kind == "documents":
            rejected = facts.get("samples", {}).get("contaminated", ())
            result["hits"] += [
                {"label": label, **evidence, "begins": row["query"]}
                for row in rejected
                if (evidence := row.get("evidence"))
            ]
        elif isinstance(facts.get("contaminated"), Mapping):
            result["hits"] += [{"label": label, **hit} for hit in _shown_overlaps(folder, facts)]
    return result


def _shown_overlaps(folder: Path, facts: Mapping[str, Any]) -> list[Facts]:
    """The first few overlaps with each benchmark, from the artifact's file, or from its facts if it has no file."""
    path, counts = folder / OVERLAPS_FILE, Counter[str]()
    if path.is_file():
        with path.open(encoding="utf-8") as lines:
            hits = [json.loads(line) for line in islice(lines, OVERLAPS_READ)]
    else:
        hits = list(facts.get("hits", ()))
    first_hits = []
    for hit in hits:
        counts[hit["benchmark"]] += 1
        if counts[hit["benchmark"]] <= OVERLAPS_SHOWN:
            first_hits.append(hit)
    return first_hits


def scores(inputs: Sequence[Input]) -> dict[str, Facts]:
    """`scores.json` of each evaluation, by the stage whose checkpoint it evaluated, those that train first."""
    by_stage = {stage: read_json(folder / "scores.json") for stage, folder in _evaluations(inputs).items()}
    # The stages that train in their order, then whatever else was evaluated, such as endpoints.
    trained = {stage: by_stage[stage] for stage in stages_with(lambda stage: stage.trains) if by_stage.get(stage)}
    return trained | {stage: value for stage, value in by_stage.items() if value and stage not in trained}


def evaluation_rows(inputs: Sequence[Input]) -> dict[str, list[SampleRow]]:
    """The evaluation rows of the stages that train, for Table 1's benchmarks; a stage without a file is absent."""
    trained, asked = stages_with(lambda stage: stage.trains), TABLE_1
    paths = {stage: folder / "rows.jsonl" for stage, folder in _evaluations(inputs).items()}
    return {
        stage: [row for row in read_rows(path) if row["benchmark"] in asked]
        for stage, path in paths.items()
        if stage in trained and path.exists()
    }


def _evaluations(inputs: Sequence[Input]) -> dict[str, Path]:
    """The folder of each evaluation by the stage whose checkpoint it evaluated."""
    return {
        item.label.partition(":")[2] or item.label: item.artifact.path
        for item in inputs
        if item.artifact.kind == "evaluation"
    }


def stand_ins(inputs: Sequence[Input]) -> list[dict[str, str]]:
    """The stand-ins of each step, from its facts, else from the configuration of its endpoints."""
    by_label: dict[str, list[str]] = {}
    for item in inputs:
        notes = by_label.setdefault(item.label, [])
        recorded = (item.facts.get("stand_in"), *(item.facts.get("stand_ins") or ()))
        notes += [visible(note) for note in recorded if isinstance(note, str) and note]
    # A step whose facts name none may still have used an endpoint that the configuration marks as a stand-in.
    for item in inputs:
        if not by_label[item.label]:
            endpoints = item.artifact.manifest["config"].get("endpoints", {}).values()
            by_label[item.label] = [
                program_of(e["kind"]).stand_in
                if is_judge(e.get("kind"))
                else f"{e['model']} stands in for a large model"
                for e in endpoints
                if e.get("stand_in")
            ]
    return [{"label": label, "note": note} for label, notes in by_label.items() for note in dict.fromkeys(notes)]


def stand_ins_by_note(notes: Sequence[Mapping[str, str]]) -> dict[str, list[str]]:
    """Group the result of `stand_ins`: note -> labels."""
    by_note: dict[str, list[str]] = {}
    for note in notes:
        by_note.setdefault(note["note"], []).append(note["label"])
    return by_note


def _stages(inputs: Sequence[Input], spent: Mapping[str, Facts]) -> list[Facts]:
    """One row per step: its artifacts with their facts, its time, and the steps it read from."""
    rows: dict[str, Facts] = {}
    writers = {item.artifact.full_id: item.label for item in inputs}
    for item in inputs:
        manifest = item.artifact.manifest
        row = rows.setdefault(
            item.label,
            {
                "label": item.label,
                "stage": manifest["stage"],
                "reads": sorted({writers[full] for full in manifest["inputs"].values() if full in writers}),
                "artifacts": {},
                "facts": {},
                **{name: spent.get(item.label, {}).get(name) for name in ("seconds", "attempts", "peak_bytes")},
            },
        )
        row["artifacts"][item.artifact.kind] = item.artifact.id
        row["facts"][item.artifact.kind] = item.facts
    return list(rows.values())


def _curves(rows: Sequence[Facts], labels: Mapping[str, str]) -> dict[str, dict[str, dict[str, Any]]]:
    """label -> metric -> source ("" for none) -> [[step, value], ...], in the order of `labels`."""
    curves: dict[str, dict[str, dict[str, Any]]] = {label: {} for label in labels.values()}
    for row in rows:
        curves[labels[row["execution"]]].setdefault(row["name"], {})[row["source"]] = row["points"]
    return {label: metrics for label, metrics in curves.items() if metrics}


def _cost(calls: Sequence[Facts], spent: Mapping[str, Facts]) -> Facts:
    """Totals. A sum leaves out calls without that figure, and is absent if no call has it."""
    seconds = [row["seconds"] for row in spent.values() if row["seconds"] is not None]
    peaks = [row["peak_bytes"] for row in spent.values() if row["peak_bytes"] is not None]
    total: Facts = {"calls": sum(row["calls"] for row in calls)}
    for name in ("tokens_in", "tokens_out", "dollars", "unknown_dollars"):
        values = [row[name] for row in calls if row[name] is not None]
        total |= {name: sum(values)} if values else {}
    for name in ("chip_hours", "chip_dollars"):
        values = [row[name] for row in spent.values() if row[name] is not None]
        total |= {name: sum(values)} if values else {}
    total |= {"seconds": sum(seconds)} if seconds else {}
    return total | ({"peak_bytes": max(peaks)} if peaks else {})


def _samples(catalog: Catalog, inputs: Sequence[Input], most: int) -> list[Facts]:
    """Sample texts, right and wrong, in groups: {title, rows: [{verdict, prompt, text, expected}]}."""
    groups = []
    for item in inputs:
        label, kind, folder = item.label, item.artifact.kind, item.artifact.path
        if kind == "evaluation":
            answers = []
            for row in read_json(folder / "samples.json") or []:
                verdict = "right" if row["strict"] else f"wrong ({row['problem']})" if row["problem"] else "wrong"
                verdict += f", {row['benchmark']}"
                answers.append(_sample(verdict, bool(row["strict"]), row["prompt"], row["output"], row["expected"]))
            groups.append({"title": f"{label}: answers", "rows": _balanced(answers, most)})
        if kind == "rollouts":
            groups.append({"title": f"{label}: rollouts of its last steps", "rows": _rollouts(catalog, item, most)})
        if kind == "traces":
            traces = [
                _sample(f"advantage {row['advantage']:.3g}", True, row["question"], row["text"], row["expected"])
                for row in read_lines(folder / "traces.jsonl", most)
            ]
            groups.append({"title": f"{label}: traces it was trained on", "rows": traces})
        if kind == "documents":
            groups.append({"title": f"{label}: what the teacher wrote", "rows": _documents(item, most)})
    return [group for group in groups if group["rows"]]


def _balanced(rows: Sequence[Facts], most: int) -> list[Facts]:
    """The first right and the first wrong rows, half of each if there are enough."""
    right_rows = [row for row in rows if row["good"]]
    wrong_rows = [row for row in rows if not row["good"]]
    # If one side has too few rows, the other fills the places.
    right_count = min(len(right_rows), max(most // 2, most - len(wrong_rows)))
    return right_rows[:right_count] + wrong_rows[: most - right_count]


def _rollouts(catalog: Catalog, item: Input, most: int) -> list[Facts]:
    """The rollouts with the highest and the lowest reward of the last three steps."""
    execution, half = item.artifact.recorded_execution, max(1, most // 4)
    ends = [
        (good, row["reward"], json.loads(row["fields"]))
        for good, order in ((True, "DESC"), (False, "ASC"))
        for row in catalog.query(_ROLLOUTS.format(order=order), [execution, half])
    ]
    return [
        _sample(f"reward {reward:.3g}", good, row["question"], row["text"], row.get("expected"))
        for good, reward, row in ends
    ]


def _documents(item: Input, most: int) -> list[Facts]:
    """The samples in the manifest: accepted documents first, then rejected ones, alternating between the reasons."""
    by_reason = item.facts.get("samples", {})
    accepted = [_document("kept", True, row) for row in by_reason.get("kept", ())[: max(1, most // 2)]]
    rejected = [[(reason, row) for row in rows] for reason, rows in sorted(by_reason.items()) if reason != "kept"]
    mixed = [pair for pairs in zip_longest(*rejected) for pair in pairs if pair][: max(0, most - len(accepted))]
    return accepted + [_document(f"rejected: {reason}", False, row) for reason, row in mixed]


def _document(verdict: str, good: bool, row: Facts) -> Facts:
    text = "\n\n".join(part for part in (row.get("reasoning"), row.get("answer")) if part)
    return _sample(verdict, good, row["query"], text or "(unreadable)", None)


def _sample(verdict: str, good: bool, prompt: Any, text: Any, expected: Any) -> Facts:
    row = {"verdict": visible(verdict), "good": good, "prompt": visible(prompt, LONGEST_SAMPLE)}
    row["text"] = visible(text, LONGEST_SAMPLE) if str(text or "").strip() else "(empty)"
    return row | ({"expected": visible(expected, 200)} if expected else {})


def read_lines(path: Path, most: int) -> list[Facts]:
    """The first `most` rows of a JSONL file; empty if there is no such file."""
    if not path.exists():
        return []
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line, _ in zip(file, range(most), strict=False)]


def _lineage(item: Input) -> Facts:
    manifest = item.artifact.manifest
    reads = {name: full[: full.index("/") + 13] for name, full in manifest["inputs"].items()}
    names = ("stage", "version", "commit", "created", "execution", "digest")
    about = {"id": item.artifact.id, "label": item.label, "bytes": item.artifact.bytes, "reads": reads}
    return about | {name: manifest[name] for name in names}


def changed_problems(ladder: Ladder, rows: RowsByStage) -> list[dict[str, Any]]:
    """At most one problem per stage that could be compared: one that became right, else one that became wrong.

    None for a stage at which no verdict changed. `of`: the number of problems that changed in the same way.
    """
    names = [stage["stage"] for stage in ladder["stages"]]
    problems: list[dict[str, Any]] = []
    for entry in ladder["stages"]:
        # The comparison of the ladder is repeated, because the ladder has only its counts.
        comparison = common_problems(rows[entry["over"]], rows[entry["stage"]]) if entry["test"] else None
        changed = comparison["changed"] if comparison else []
        changed = [row for row in changed if row["benchmark"] == ladder["benchmark"]]
        # A problem is shown once, even if its verdict changed at several stages.
        used_problems = {(problem["index"], problem["prompt"]) for problem in problems}
        for change, words in (("gained", "became right"), ("lost", "became wrong")):
            candidates = [row for row in changed if row["change"] == change]
            unused = [
                row for row in candidates if (row["index"], visible(row["prompt"], LONGEST_PROMPT)) not in used_problems
            ]
            if unused:
                chosen = min(unused, key=lambda row: hashlib.sha256(row["prompt"].encode(errors="replace")).digest())
                facts = {"stage": entry["stage"], "change": words, "of": len(candidates)}
                problems.append(_with_replies(chosen, names, rows) | facts)
                break
    return problems


def _with_replies(chosen: Mapping[str, Any], names: Sequence[str], rows: RowsByStage) -> dict[str, Any]:
    """The problem of a changed row with the replies after every stage."""
    fields = ("benchmark", "index", "prompt")
    row_by_stage = {
        stage: row
        for stage, stage_rows in rows.items()
        for row in stage_rows
        if all(row[field] == chosen[field] for field in fields)
    }
    return {
        "id": chosen["id"],
        "index": chosen["index"],
        "prompt": visible(chosen["prompt"], LONGEST_PROMPT),
        "expected": visible(chosen["expected"], LONGEST_ANSWER),
        "replies": [_reply(name, row_by_stage.get(name)) for name in names],
    }


def _reply(stage: str, row: SampleRow | None) -> dict[str, Any]:
    """A reply for display; `good` is None if the problem was not asked, or its reply could not be graded."""
    if row is None or row["left_out"] is not None:
        verdict = "not evaluated" if row is None else row["left_out"].replace("_", " ")
        if row is not None and row.get("output") is None:
            verdict = f"not asked ({verdict})"
        return {"name": stage, "good": None, "verdict": verdict, "reasoning": "", "answer": ""}
    problem = f" ({row['problem'].replace('_', ' ')})" if row["problem"] else ""
    return {
        "name": stage,
        "good": bool(row["strict"]),
        "verdict": "right" if row["strict"] else f"wrong{problem}",
        "reasoning": visible(row["reasoning"] or "", LONGEST_REASONING).strip() or "(none)",
        "answer": visible(row["answer"] or "", LONGEST_ANSWER).strip() or "(none)",
    }
