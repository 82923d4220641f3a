"""The `label` stage (paper §1, §6): a teacher labels texts, once its agreement with people is known from gold rows."""

import json
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nautile.common.errors import ConfigError
from nautile.common.files import write_atomically, write_json
from nautile.common.text import markdown_table, markdown_text, visible
from nautile.data.endpoints.own_server import stand_in_of
from nautile.data.endpoints.pool import EndpointPool
from nautile.data.screening.contamination import load_contamination_index
from nautile.data.screening.duplicates import text_hash
from nautile.tasks.engine.job import Job
from nautile.tasks.engine.stage import stage
from nautile.uses.label.agreement import agreement
from nautile.uses.label.config import LabelConfig
from nautile.uses.label.teacher import UNANSWERED, UNASKED, TeacherLabel, ask_labels, check_label_share
from nautile.uses.labelled.rows import LabelledRow, read_rows
from nautile.uses.tune.config import LabelledDataConfig

LABELS = "labels.jsonl"
SAMPLES = 24  # texts that become sample rows of the run
LONGEST_SAMPLE = 400  # characters


@stage("label", version=1, outputs=("labels",))
def label(job: Job) -> None:
    """Label the gold rows, report the agreement with people, then label the texts. No reply is paid for twice."""
    # Everything that can be wrong with the data is checked before the first request.
    config = job.part("label", LabelConfig)
    gold = _read(job, config.gold, "label")
    check_gold(config, gold)
    texts = _read(job, config.data, "text")
    # Leave out texts that are gold rows as well, and those that overlap a benchmark.
    gold_hashes = {text_hash(row.text) for row in gold}
    # A gold row among the texts would be labelled by the teacher although people have done so.
    unlabelled = [row for row in texts if text_hash(row.text) not in gold_hashes]
    clean_rows, contaminated = _screen(job, unlabelled)
    if not clean_rows:
        raise ConfigError(
            f"{config.data.label}: none of its {len(texts)} texts is left to be labelled; all are gold rows or overlap "
            "a benchmark"
        )
    with EndpointPool(job.endpoints, job.reply_source, job.emit, config.budget_dollars, config.budget_tokens) as pool:
        pool.check()
        total, rows_done = len(gold) + len(clean_rows), 0

        def count(result: TeacherLabel) -> None:
            nonlocal rows_done
            rows_done += 1
            job.emit("progress", done=rows_done, total=total, unit="texts", note=f"${pool.spent:.4f}")

        # The gold rows first: a teacher that disagrees with people ends the stage before the texts are paid for.
        checked = ask_labels(config, pool, gold, count)
        check_label_share(config, checked, "gold rows")
        measured = _agreement(job, config, checked)
        results = ask_labels(config, pool, clean_rows, count)
        check_label_share(config, results, "texts")
        facts = _facts(config, pool, checked, results)
    facts |= {
        "texts": len(texts),
        "in_gold": len(texts) - len(unlabelled),
        "contaminated": contaminated,
        "agreement": measured,
    }
    _write(job.output("labels"), results, checked, facts)
    job.describe("labels", **facts)
    for name, value in {"labelled": facts["labelled"], "dollars": facts["dollars"], **facts["rejected"]}.items():
        job.emit("metric", name=name if name in ("labelled", "dollars") else f"rejected_{name}", step=0, value=value)


def check_gold(config: LabelConfig, gold: Sequence[LabelledRow]) -> None:
    """Raise `ConfigError` if people gave a gold row a label that the teacher cannot give."""
    if unknown := [row for row in gold if row.target not in config.labels]:
        raise ConfigError(
            f"{config.gold.label}: row {unknown[0].number} has the label {unknown[0].target!r}, which is not in "
            "label.labels"
        )


def _read(job: Job, config: LabelledDataConfig, form: Any) -> list[LabelledRow]:
    work = job.scratch / "hub"
    try:
        return read_rows(config, form, work, job.file_digests)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _screen(job: Job, rows: Sequence[LabelledRow]) -> tuple[list[LabelledRow], dict[str, int] | None]:
    """Returns the texts that overlap no benchmark question, and the counts of the others by benchmark.

    The counts are None for a run without benchmark questions.
    """
    index = load_contamination_index(job.inputs.get("questions"))
    if index is None:
        return list(rows), None
    hits = index.screen([row.text for row in rows])
    counts = Counter(hit[0].benchmark for hit in hits if hit)
    return [row for row, hit in zip(rows, hits, strict=True) if not hit], dict(counts)


def _agreement(job: Job, config: LabelConfig, checked: Sequence[TeacherLabel]) -> dict[str, Any]:
    """Measure and report the teacher's agreement with people. Raises `ConfigError` if it is below `least_kappa`."""
    both = [(result.row.target, result.label) for result in checked if result.label is not None]
    people, teacher = zip(*both, strict=True)
    measured = {**agreement(people, teacher, config.labels, config.seed), "without_label": len(checked) - len(both)}
    for name in ("accuracy", "kappa"):
        job.emit("metric", name=f"gold_{name}", step=0, value=measured[name]["value"])
    if config.least_kappa is not None and measured["kappa"]["value"] < config.least_kappa:
        raise ConfigError(
            f"label.least_kappa is {config.least_kappa:g}, but on {len(both)} gold rows the teacher {config.teacher!r} "
            f"agrees with people by a kappa of {_interval(measured['kappa'])}, so no text is labelled: use another "
            "teacher, or explain the labels in label.descriptions"
        )
    return measured


def _facts(
    config: LabelConfig, pool: EndpointPool, checked: Sequence[TeacherLabel], results: Sequence[TeacherLabel]
) -> dict[str, Any]:
    """The facts for the manifest, from which the card is written."""
    all_labels = [*checked, *results]
    endpoint = pool.config(config.teacher)
    return {
        "labelled": sum(result.label is not None for result in results),
        "rejected": dict(Counter(r.reason for r in results if r.reason and r.reason not in UNANSWERED).most_common()),
        "unanswered": dict(Counter(r.reason for r in results if r.reason in UNANSWERED).most_common()),
        "balance": dict(Counter(result.label for result in results if result.label).most_common()),
        "teacher": endpoint.model,
        "models": sorted({pool.config(result.endpoint).model for result in all_labels if result.label}),
        "dollars": round(pool.spent, 6),
        "dollars_unknown": round(pool.unknown, 6),
        "replies_reused": sum(result.reused for result in all_labels),
        "budget_exhausted": any(result.reason == UNASKED for result in all_labels),
        "hostile": dict(Counter(sign for result in all_labels for sign in result.signs).most_common()),
        "stand_in": stand_in_of(endpoint.kind, endpoint.model) if endpoint.stand_in else None,
    }


def _write(
    folder: Path, results: Sequence[TeacherLabel], checked: Sequence[TeacherLabel], facts: dict[str, Any]
) -> None:
    """Write the labelled rows as `nautile tune` reads them, the gold rows with both labels, and the rejected rows."""
    files: dict[str, list[dict[str, Any]]] = {LABELS: [], "gold.jsonl": [], "rejected.jsonl": []}
    for result in results:
        row: dict[str, Any] = {"text": result.row.text, "row": result.row.number, "teacher": result.endpoint}
        if result.label is not None:
            files[LABELS].append({**row, "label": result.label, "request": result.digest})
        else:
            files["rejected.jsonl"].append({**row, "reason": result.reason, "reply": result.reply})
    for result in checked:
        teacher = {"teacher_label": result.label, "reason": result.reason}
        files["gold.jsonl"].append(
            {"text": result.row.text, "row": result.row.number, "label": result.row.target, **teacher}
        )
    for name, rows in files.items():
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        write_atomically(folder / name, lines.encode("utf-8", "replace"))
    write_json(folder / "agreement.json", facts["agreement"])
    write_atomically(folder / "card.md", label_card(facts).encode())


def label_card(facts: dict[str, Any]) -> str:
    """The card of a `labels` artifact as Markdown, from the facts of its manifest."""
    measured = facts["agreement"]
    stand_in = f" (a stand-in: {facts['stand_in']})" if facts["stand_in"] else ""
    rows: list[tuple[str, Any]] = [("also among the gold rows, not asked", facts["in_gold"])]
    if facts["contaminated"] is not None:
        rows.append(("overlap a benchmark, not asked", sum(facts["contaminated"].values())))
    rows += [
        (f"no label: {reason.replace('_', ' ')}", count)
        for reason, count in (facts["rejected"] | facts["unanswered"]).items()
    ]
    rows += [(f"label {visible(name, 100)}", count) for name, count in facts["balance"].items()]
    signs = ", ".join(f"{count} {name}" for name, count in facts["hostile"].items())
    paragraphs = [
        "# Labels by a teacher",
        f"{facts['labelled']:,} of {facts['texts']:,} texts labelled by {markdown_text(facts['teacher'] + stand_in)}, "
        f"for ${facts['dollars']:.4f}. These labels are a model's, not people's.",
        f"On {measured['rows']} rows that people labelled, the teacher's label is theirs in "
        f"{_interval(measured['accuracy'], 100)} % (95 % interval); Cohen's kappa {_interval(measured['kappa'])}. "
        f"{measured['without_label']} more got no label.",
        markdown_table(("", "texts"), [(markdown_text(name), count) for name, count in rows]),
        f"Signs of text meant for a model that reads it: {signs or 'none'}.",
    ]
    return "\n\n".join(paragraphs) + "\n"


def _interval(value: dict[str, float], scale: float = 1.0) -> str:
    """`value [low, high]`; one decimal for percentages, else two."""
    digits = 1 if scale > 1 else 2
    return (
        f"{scale * value['value']:.{digits}f} [{scale * value['low']:.{digits}f}, {scale * value['high']:.{digits}f}]"
    )
