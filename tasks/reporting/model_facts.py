"""Collect the facts of a model's card as plain data, from manifests, evaluations of its checkpoints, and the catalog.

The wording is elsewhere. Facts that are not recorded are None or absent, and listed in `missing`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nautile.common.files import read_json
from nautile.configs.model import ModelConfig
from nautile.data.label_set import read_label_set
from nautile.data.tokens.source_reading import READING
from nautile.evals.scoring.scores import Scores
from nautile.evals.tables.ladder import ladder
from nautile.rl.problems import TRAINING_SETS
from nautile.store.artifacts import Artifact, Store
from nautile.store.catalog import Catalog
from nautile.tasks.reporting.data import Input, evaluation_rows, scores, spending, stand_ins

Facts = dict[str, Any]


def model_facts(store: Store, checkpoint: Artifact | None, folder: Path) -> Facts:
    """All facts for the card of the checkpoint in `folder`. `checkpoint`: its artifact; None: it is not in a store."""
    from nautile.model.nautile import parameter_counts  # imports JAX

    saved = read_json(folder / "config.json") or {}
    facts: Facts = {
        "model": saved.get("model"),
        "tokenizer": saved.get("tokenizer"),
        "parameters": sum(parameter_counts(ModelConfig.model_validate(saved["model"])).values()),
        "labels": None if (labels := read_label_set(folder)) is None else labels.model_dump(mode="json"),
        "artifact": None,
        "label": None,
        "missing": [],
    }
    empty: Facts = {"stages": [], "phases": [], "read": [], "sources": [], "problems": [], "documents": None}
    empty |= {"teachers": [], "prompt_sets": [], "judges": [], "stand_ins": [], "scores": {}, "ladder": None}
    empty |= {"calls": [], "cost": None, "lineage": [], "commits": []}
    if checkpoint is None:
        return facts | empty | {"missing": ["The checkpoint is not in a store: how it was made is not known."]}
    inputs, missing = lineage(store, checkpoint)
    evaluations = _evaluations(store, inputs)
    by_stage = scores(evaluations)
    label_of = {item.artifact.recorded_execution: item.label for item in inputs}
    spent, calls, cost = spending(Catalog(store), label_of)
    documents = distilled_documents(store, inputs)
    label = next(item.label for item in inputs if item.artifact.full_id == checkpoint.full_id)
    has_endpoints = any(item.artifact.manifest["config"].get("endpoints") for item in inputs)
    if has_endpoints and not cost["calls"]:
        missing.append("Stages asked endpoints, but no request is in the catalog: what they cost is not known.")
    return facts | {
        "artifact": _about(checkpoint),
        "label": label,
        "missing": missing,
        "stages": [
            {"label": item.label, "seconds": spent.get(item.label, {}).get("seconds"), **_about(item.artifact)}
            for item in inputs
            if item.artifact.kind == "checkpoint"
        ],
        "phases": [row for item in inputs for row in _phases(item)],
        "read": [row for item in inputs for row in _read(item)],
        "sources": [source for item in inputs if (source := _source(item))],
        "problems": [row for item in inputs for row in _problems(item)],
        "documents": documents and {"id": documents.id, **documents.manifest["facts"]},
        "teachers": teachers(documents) if documents else [],
        "prompt_sets": documents.manifest["config"].get("distill", {}).get("prompt_sets", []) if documents else [],
        "judges": [
            {"label": item.label, **item.facts["judge"]} for item in inputs if isinstance(item.facts.get("judge"), dict)
        ],
        "stand_ins": stand_ins([*inputs, *evaluations]),
        "scores": by_stage,
        "ladder": ladder(by_stage, evaluation_rows(evaluations)),
        "calls": calls,
        "cost": cost if cost["calls"] or not has_endpoints else None,
        "lineage": [{"label": item.label, "id": item.artifact.id, **_about(item.artifact)} for item in inputs],
        "commits": sorted({item.artifact.manifest["commit"] or "" for item in inputs} - {""}),
    }


def lineage(store: Store, artifact: Artifact) -> tuple[list[Input], list[str]]:
    """An artifact and all that it was made from, oldest first, and sentences about inputs missing from the store.

    If several steps have the same label, the artifact's id is added to it.
    """
    rows = Catalog(store).lineage(artifact.id)
    artifacts = {row["id"]: store.get(row["id"]) for row in rows}
    ordered = sorted(artifacts.values(), key=lambda item: (item.manifest["created"], item.kind))
    executions: dict[str, set[str]] = {}  # by label, to find labels that several steps share
    for source in ordered:
        executions.setdefault(source.manifest["label"], set()).add(source.execution)
    inputs = []
    for source in ordered:
        label = source.manifest["label"]
        inputs.append(Input(label if len(executions[label]) == 1 else f"{label} ({source.id})", source))
    known_ids = {source.full_id for source in ordered}
    # Garbage collection may have removed what an artifact was made from; the card then says so.
    missing = [
        f"{full_id[: full_id.index('/') + 13]}, the input `{name}` of {item.label}, is no longer in the store: "
        "its content is not known."
        for item in inputs
        for name, full_id in item.artifact.manifest["inputs"].items()
        if full_id not in known_ids
    ]
    return inputs, missing


def distilled_documents(store: Store, inputs: Sequence[Input]) -> Artifact | None:
    """The newest distilled documents whose tokens are in a lineage; the same execution wrote both."""
    for item in reversed(inputs):
        if item.artifact.kind == "tokens" and "documents" in item.artifact.manifest["outputs"]:
            documents = store.find("documents", item.artifact.key)
            if documents is not None and documents.execution == item.artifact.execution:
                return documents
    return None


def teachers(documents: Artifact) -> list[Facts]:
    """The teachers of distilled documents with their counts, licence and whether they are stand-ins."""
    endpoints: Mapping[str, Facts] = documents.manifest["config"].get("endpoints", {})
    return [
        {
            "name": name,
            "license": endpoints.get(name, {}).get("license") or None,
            "stand_in": endpoints.get(name, {}).get("stand_in"),
            **{key: counts.get(key) for key in ("model", "template", "asked", "kept", "tokens_in", "tokens_out")},
        }
        for name, counts in documents.manifest["facts"].get("teachers", {}).items()
    ]


def _about(artifact: Artifact) -> Facts:
    names = ("stage", "commit", "created", "digest")
    return {"id": artifact.id, **{name: artifact.manifest[name] for name in names}}


def _evaluations(store: Store, inputs: Sequence[Input]) -> list[Input]:
    """The newest evaluation of each checkpoint, labelled by the step that wrote the checkpoint."""
    by_checkpoint: dict[tuple[str, str], Artifact] = {}
    for evaluation in store.list("evaluation"):  # oldest first
        manifest = evaluation.manifest
        full_id = manifest["inputs"].get("checkpoint", "")
        # The key alone is not enough: the checkpoint may have been written again since it was evaluated.
        by_checkpoint[full_id, manifest["input_executions"].get("checkpoint", "")] = evaluation
    return [
        Input(f"evaluate:{item.label}", by_checkpoint[item.artifact.full_id, item.artifact.execution])
        for item in inputs
        if (item.artifact.full_id, item.artifact.execution) in by_checkpoint
    ]


def own_scores(facts: Facts) -> Scores | None:
    """The scores of the checkpoint itself; None if it was not evaluated."""
    return facts["scores"].get(facts["label"])


def _phases(item: Input) -> list[Facts]:
    if item.artifact.kind != "checkpoint":
        return []
    phases = item.artifact.manifest["config"].get("pretrain", {}).get("phases", [])
    return [{"label": item.label, **{name: phase[name] for name in ("name", "tokens", "mixture")}} for phase in phases]


def _read(item: Input) -> list[Facts]:
    """The tokens that a pretraining read, by source, with the figures of `SourceReading`."""
    by_source = item.facts.get("tokens_by_source", {}) if item.artifact.kind == "checkpoint" else {}
    return [
        {"label": item.label, "source": source, "tokens": tokens, "reading": item.facts[READING][source]}
        for source, tokens in by_source.items()
    ]


def _source(item: Input) -> Facts | None:
    """The source of a `tokens` artifact: its origin, licence, counts and what was left out; None for other kinds."""
    if item.artifact.kind != "tokens":
        return None
    config = item.artifact.manifest["config"].get("ingest", {}).get("source")
    overlaps = item.facts.get("contaminated")
    about = {
        "label": item.label,
        "name": item.facts.get("source"),
        "documents": item.facts.get("documents"),
        "tokens": item.facts.get("tokens"),
        "overlaps": sum(overlaps.values()) if isinstance(overlaps, dict) else None,
        "stand_in": item.facts.get("stand_in"),
    }
    if config is None:
        return about | {"reader": "distilled documents", "origin": None, "hub": None, "license": None, "languages": []}
    # Paths of local files are not published.
    hub = config["path"] if config["reader"] == "hub" else None
    parts = (hub, config.get("subset"), config.get("revision", "")[:12]) if hub else ()
    return about | {
        "reader": config["reader"],
        "origin": " ".join(part for part in parts if part) or None,
        "hub": hub,
        "license": config.get("license") or None,
        "languages": config.get("languages", []),
    }


def _problems(item: Input) -> list[Facts]:
    """The problems that a reinforcement stage was trained on."""
    if item.artifact.kind != "checkpoint":
        return []
    section = item.artifact.manifest["config"].get(item.artifact.manifest["stage"], {})
    config = section.get("problems") if isinstance(section, dict) else None
    if config is None:
        return []
    rows = []
    for source in config.get("sources") or [config]:
        training_set, prompts = TRAINING_SETS.get(source["source"]), source.get("prompt_set") or {}
        # Paths of local files are not published.
        hub = prompts["path"] if prompts.get("source") == "hub" else None
        revision = prompts.get("revision", "")
        if training_set:
            hub, revision = training_set.parts[0].hub, source.get("revision") or training_set.pinned
        kinds = ", ".join(task["name"] for task in source.get("tasks", []))
        rows.append(
            {
                "label": item.label,
                "source": source["source"] + (f" ({kinds})" if kinds else ""),
                "hub": hub,
                "revision": revision[:12] or None,
                "license": source.get("license") or prompts.get("license") or None,
                "count": config.get("count"),
            }
        )
    return rows
