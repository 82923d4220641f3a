"""The cards of models and data sets: a Markdown page with YAML front matter, in which all values are escaped.

The facts of a model's card are collected as plain data, from manifests, evaluations of its checkpoints, and the
catalog; those that are not recorded are None or absent, and listed in `missing`. The figures of a data set come from
the manifest of the documents and, if it exists, from the data card of the run. The wording is in the templates.

A template's `{{ value }}` is shown literally, whatever it contains; None is shown as "not recorded". Intended markup
goes through a filter: `table`, `rows` (which also writes numbers with separators, and yes or no), `code`, `fenced`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nautile.common.files import read_json
from nautile.common.text import dollars, duration, fenced, markdown_table, markdown_text, visible
from nautile.configs.model import ModelConfig
from nautile.configs.readers import is_on_hub
from nautile.data.distill.parquet import COLUMNS
from nautile.data.label_set import read_label_set
from nautile.data.tokens.source_reading import READING, SourceReading, reading_rows
from nautile.evals.benchmarks.registry import BENCHMARKS
from nautile.evals.scoring.scores import Scores, marked_title
from nautile.evals.tables.ladder import gains_in_words, ladder, ladder_table
from nautile.evals.tables.results import ResultTable, table_1, table_2, to_markdown, with_interval
from nautile.rl.problems import TRAINING_SETS
from nautile.store.artifacts import Artifact, Store
from nautile.store.catalog import Catalog
from nautile.store.manifest import short_commit
from nautile.tasks.reporting.data import Input, evaluation_rows, scores, spending, stand_ins, stand_ins_by_note
from nautile.tasks.reporting.render import TEMPLATES, template_environment

Facts = dict[str, Any]
NOT_RECORDED = "not recorded"
UNKNOWN_LICENSE = "unknown"  # an identifier of the Hub
# Tasks of the Hub by the form of a tuning. Entities are written as text, so their task is that of any language model,
# unless a head labels the tokens.
TASKS = {"label": "text-classification", "entities": "text-generation"}
ARMS = {
    "head": "this model: a linear head on the frozen model",
    "verbalised": "this model: the likelihood of each label's text",
    "lora": "this model: tuned by LoRA",
    "full": "this model: all weights tuned",
    "majority": "the most frequent label, whatever the text",
    "tfidf": "logistic regression on TF-IDF of words and pairs",
    "minilm": "logistic regression on sentence vectors of MiniLM",
}
# Facts of a model with a row for each of something.
_LISTS = (
    "stages", "phases", "read", "sources", "problems", "teachers", "prompt_sets", "judges", "stand_ins", "calls",
    "lineage", "commits", "missing",
)  # fmt: skip
_TEACHER = ("name", "model", "license", "asked", "kept", "stand_in")
_PARTS = ("query", "reasoning", "answer")  # of an example
LONGEST_EXAMPLE = 800  # characters of each part
_FACTS = (
    "documents", "prompts", "neighbours", "stand_in", "budget_exhausted", "dollars", "dollars_unknown", "exemplars",
    "held_out",
)  # fmt: skip


class Markup(str):
    """Markdown that is not escaped."""


def card(template: str, front_matter: Mapping[str, Any], facts: Mapping[str, Any], folder: Path = TEMPLATES) -> str:
    """Render a template of `folder` with `facts`, after `front_matter` as YAML."""
    from huggingface_hub.utils import yaml_dump

    environment = template_environment(autoescape=False, folder=folder, finalize=_escaped)
    environment.filters |= {
        "table": _table,
        "rows": _rows,
        # Chr 39 is the apostrophe: a backtick would end the code.
        "code": lambda text: Markup(f"`{' '.join(visible(text).replace('`', chr(39)).split())}`"),
        "fenced": lambda text: Markup(fenced(visible(text))),
        "number": lambda value: None if value is None else f"{value:,}",
        "dollars": lambda value: None if value is None else dollars(value).removeprefix("$") + " dollars",
        "duration": lambda value: None if value is None else duration(value),
        "words": lambda name: str(name).replace("_", " "),
    }
    # `finalize` escapes every `{{ value }}`, so the filters above mark what is already Markdown.
    page = environment.get_template(template).render(facts)
    return f"---\n{yaml_dump(dict(front_matter), sort_keys=False)}---\n\n{page.strip()}\n"


def without_none(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that have a value; a front matter leaves out unknown ones."""
    return {name: value for name, value in fields.items() if value not in (None, [], "")}


def languages(counts: Iterable[Mapping[str, int]], configured: Iterable[str]) -> list[str]:
    """Language codes: the configured ones, and those of at least 1 % of the documents in any of `counts`."""
    codes = set(configured)
    for by_code in counts:
        total = sum(by_code.values())
        codes |= {code for code, count in by_code.items() if code.isalpha() and 100 * count >= total}
    return sorted(codes)


def _escaped(value: Any) -> str:
    if value is None:
        return NOT_RECORDED
    return value if isinstance(value, Markup) else Markup(markdown_text(value))


def _table(table: ResultTable) -> Markup:
    """A table of results with all text escaped."""
    escaped = replace(
        table,
        title=markdown_text(table.title),
        columns=tuple(map(markdown_text, table.columns)),
        rows=tuple(tuple(map(markdown_text, row)) for row in table.rows),
        notes=("\n\n".join(map(markdown_text, table.notes)),),
    )
    return Markup(to_markdown(escaped).strip())


def _rows(rows: Sequence[Sequence[Any]], *columns: str) -> Markup:
    """A table of `rows` under `columns`, every cell escaped unless it is markup."""
    return Markup(markdown_table(columns, [[_escaped(_cell(cell)) for cell in row] for row in rows]))


def _cell(value: Any) -> Any:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else value


def _picked(rows: Iterable[Facts], *names: str) -> list[tuple[Any, ...]]:
    return [tuple(row[name] for name in names) for row in rows]


@dataclass(frozen=True)
class Snippet:
    """A piece of code in a card; `language` is its name in Markdown fences."""

    about: str
    language: str
    code: str


@dataclass(frozen=True)
class Publication:
    """Facts of a publication that are not in the store: the repository, the licence, and how to load the folder."""

    repository: str
    library: str  # the library that loads the folder, by its name on the Hub
    snippets: Sequence[Snippet]
    tags: Sequence[str] = ()
    license: str | None = None  # an identifier of the Hub
    dataset: str | None = None  # the repository of the distilled documents


def model_card(facts: Facts, publication: Publication) -> str:
    """The text of README.md, from `tasks.reporting.cards.model_facts` and the publication."""
    scores, name = own_scores(facts), publication.repository.partition("/")[2]
    language_codes = languages(
        [(facts["documents"] or {}).get("languages", {})],
        [language for source in facts["sources"] for language in source.get("languages", ())],
    )
    compared = table_1(facts["scores"]) if facts["scores"] else None
    # The names below are those of the template; cells that are None are shown as not recorded.
    return card(
        "model_card.md.j2",
        _front_matter(facts, publication, language_codes),
        {
            **facts,
            "name": name,
            "tuned": tuning_facts(facts),
            "threshold": _threshold(facts),
            "not_recorded": Markup(NOT_RECORDED),
            "configuration": _configuration(facts),
            "context": (facts["model"] or {}).get("context"),
            "weights_license": f"{publication.license}, as their publisher states"
            if publication.license
            else f"their licence is {NOT_RECORDED}: ask their publisher before you use them",
            "stages": [
                (
                    *(row["label"], row["id"], row["created"][:19]),
                    None if row["seconds"] is None else duration(row["seconds"]),
                    _commit(row["commit"]),
                )
                for row in facts["stages"]
            ],
            "phases": [(row["name"], row["tokens"], _mixture(row["mixture"])) for row in facts["phases"]],
            "read": [
                (row["source"], row["tokens"], *reading_rows({"": SourceReading(**row["reading"])})[0][1:])
                for row in facts["read"]
            ],
            "sources": [
                (
                    row["name"] or row["label"],
                    row["origin"] or row["reader"],
                    row["license"] or ("see below" if row["reader"] == "distilled documents" else None),
                    *(row["documents"], row["tokens"], row["overlaps"]),
                )
                for row in facts["sources"]
            ],
            "problems": [
                (
                    *(row["label"], row["source"]),
                    " ".join(part for part in (row["hub"], row["revision"]) if part) or "generated here",
                    *(row["license"], row["count"]),
                )
                for row in facts["problems"]
            ],
            "teachers": _picked(facts["teachers"], *_TEACHER),
            "prompt_sets": _prompt_set_rows(facts["prompt_sets"]),
            "stand_ins": [(note, ", ".join(labels)) for note, labels in stand_ins_by_note(facts["stand_ins"]).items()],
            "evaluated": scores is not None,
            "table_1": compared,
            "ladder": ladder_table(facts["ladder"]) if facts["ladder"] else None,
            "gains": gains_in_words(facts["ladder"]) if facts["ladder"] else None,
            "table_2": table_2({name: {**scores, "column": "nautile_370m"}}) if scores else None,
            "likelihood": [
                (
                    marked_title(score),
                    with_interval(score),
                    score["n"],
                    None if score.get("chance") is None else f"{100 * score['chance']:.1f}",
                )
                for score in (scores or {}).get("likelihood", {}).values()
            ],
            "protocol": "; ".join(
                f"{name.replace('_', ' ')} {value}"
                for name, value in (scores or {}).get("protocol", {}).items()
                if isinstance(value, str | int | float)
            ),
            "calls": [
                (
                    row["label"],
                    f"{row['endpoint'] or NOT_RECORDED} ({row['model'] or NOT_RECORDED})",
                    row["purpose"],
                    *(row[field] for field in ("calls", "tokens_in", "tokens_out")),
                    None if row["dollars"] is None else f"{row['dollars']:.4f}",
                )
                for row in facts["calls"]
            ],
            "languages": ", ".join(language_codes),
            "snippets": [
                {"about": Markup(snippet.about), "language": Markup(snippet.language), "code": Markup(snippet.code)}
                for snippet in publication.snippets
            ],
            "lineage": [
                (row["id"], row["label"], row["created"][:19], _commit(row["commit"])) for row in facts["lineage"]
            ],
        },
    )


def _prompt_set_rows(prompt_sets: Sequence[Facts]) -> list[tuple[Any, ...]]:
    """Rows of the table of prompt sets: name, origin, licence. Paths of local files are not published."""
    return [
        (
            row["name"],
            " ".join(part for part in (row["path"], row["subset"], row["revision"][:12]) if part)
            if row["source"] == "hub"
            else row["source"],
            row.get("license") or None,
        )
        for row in prompt_sets
    ]


def _mixture(parts: Mapping[str, float]) -> str:
    return ", ".join(f"{part / sum(parts.values()):.0%} {source}" for source, part in parts.items())


def _front_matter(facts: Facts, publication: Publication, language_codes: list[str]) -> dict[str, Any]:
    # The Hub links these names to the pages of the data sets.
    hubs = [row["hub"] for row in (*facts["sources"], *facts["problems"]) if row["hub"]]
    hubs += [row["path"] for row in facts["prompt_sets"] if row["source"] == "hub"]
    hubs += [
        part["path"] for part in (facts.get("tuning") or {"data": {}})["data"].values() if is_on_hub(part["reader"])
    ]
    datasets = list(dict.fromkeys([*hubs, *filter(None, [publication.dataset])]))
    tags = ["nautile", "reasoning", *publication.tags, *(["stand-in"] if facts["stand_ins"] else [])]
    return without_none(
        {
            "license": publication.license or UNKNOWN_LICENSE,
            "language": language_codes,
            "library_name": publication.library,
            "pipeline_tag": task_of(facts.get("labels") or {}),
            "tags": tags,
            "datasets": datasets,
            "model-index": _model_index(facts, publication),
        }
    )


def task_of(labels: Mapping[str, Any]) -> str:
    """The Hub's name of the task of a checkpoint with these labels; {}: of one that was not tuned."""
    if labels.get("form") == "entities" and labels.get("method") == "head":
        return "token-classification"
    return TASKS.get(labels.get("form", ""), "text-generation")


def _model_index(facts: Facts, publication: Publication) -> list[dict[str, Any]]:
    """The strict accuracy of each benchmark in percent; a stand-in is marked and refers to no data set of the Hub."""
    from huggingface_hub import EvalResult
    from huggingface_hub.repocard_data import eval_results_to_model_index

    results = []
    scores = own_scores(facts) or {"benchmarks": {}}
    for name, score in scores["benchmarks"].items():
        if score["accuracy"] is None:
            continue
        entry = BENCHMARKS.get(name)
        benchmark = entry if entry and entry.hub else None
        low, high = (round(100 * bound, 2) for bound in score["interval"])
        results.append(
            EvalResult(
                task_type="text-generation",
                dataset_type=benchmark.hub if benchmark else name,
                dataset_name=marked_title(score),
                dataset_config=benchmark.subset if benchmark else None,
                dataset_split=benchmark.split if benchmark else None,
                dataset_revision=scores.get("protocol", {}).get("sources", {}).get(name) if benchmark else None,
                metric_type="accuracy",
                metric_name="strict accuracy in percent, zero-shot",
                metric_value=round(100 * score["accuracy"], 2),
                metric_args={"interval_95": [low, high], "questions": score["n"]},
            )
        )
    tuned = tuning_facts(facts)
    if tuned is not None and tuned["score"] is not None:
        # The last named part is the one that was tested: a test set of its own, else a share of all rows.
        *_, part = facts["tuning"]["data"].values()
        source, _, revision = _origin(part)
        interval = tuned["score"]["interval"]
        measured = "whole sets of labels right" if facts["labels"]["multi_label"] else "accuracy"
        results.append(
            EvalResult(
                task_type=TASKS["label"],
                dataset_type=part["path"] if part["reader"] == "hub" else part["reader"],
                dataset_name=str(source),
                dataset_revision=revision or None,
                metric_type="accuracy",
                metric_name=f"{measured} in percent on the test rows, mean over seeds",
                metric_value=round(100 * interval["value"], 2),
                metric_args={
                    "interval_95": [round(100 * interval[bound], 2) for bound in ("low", "high")],
                    "rows": tuned["score"]["rows"],
                },
            )
        )
    return eval_results_to_model_index(publication.repository.partition("/")[2], results) if results else []


def _threshold(facts: Facts) -> str | None:
    """The probability below which a classifier gives no label; None if it always gives one."""
    threshold = (facts["labels"] or {}).get("threshold")
    return None if threshold is None else f"{threshold:.4f}"


def _configuration(facts: Facts) -> list[tuple[str, str]]:
    """The number of parameters, and the fields of the model's and the tokenizer's configuration."""
    rows = [("parameters", f"{facts['parameters']:,}")]
    for part in ("model", "tokenizer"):
        rows += [(f"{part}.{name}", str(value)) for name, value in (facts[part] or {}).items()]
    return rows


def _commit(commit: str | None) -> str | None:
    return commit and short_commit(commit)


def dataset_card(
    store: Store, documents: Artifact, repository: str, snippets: Sequence[Snippet], license_: str | None
) -> str:
    """The text of README.md for the documents of an artifact. `license_`: an identifier of the Hub."""
    # The template shows a fact that is missing as not recorded.
    facts = {name: None for name in _FACTS} | documents.manifest["facts"]
    data_card = store.find("data_card", documents.key)
    # The counts by prompt set are only in the data card, which the same execution wrote.
    counts = ((read_json(data_card.path / "data_card.json") or {}) if data_card else {}).get("counts")
    by_teacher = teachers(documents)
    sets = documents.manifest["config"].get("distill", {}).get("prompt_sets", [])
    inputs, _ = lineage(store, documents)
    notes = [item.facts.get("stand_in") for item in inputs if item.artifact.kind == "exemplars"]
    language_codes = languages([facts.get("languages") or {}], [])
    hubs = [row["path"] for row in sets if row["source"] == "hub"]
    front_matter = {
        "license": license_ or UNKNOWN_LICENSE,
        "language": language_codes,
        "task_categories": ["text-generation"],
        "tags": ["nautile", "synthetic", "reasoning", *(["stand-in"] if facts["stand_in"] else [])],
        "source_datasets": list(dict.fromkeys(hubs)),
        "configs": [{"config_name": "default", "data_files": [{"split": "train", "path": "data/train-*.parquet"}]}],
    }
    commit = documents.manifest["commit"]
    return card(
        "dataset_card.md.j2",
        without_none(front_matter),
        {
            "name": repository.partition("/")[2],
            "not_recorded": Markup(NOT_RECORDED),
            "facts": facts,
            "artifact": {"id": documents.id, "created": documents.manifest["created"][:19]},
            "commit": commit,
            "license": license_ or f"{NOT_RECORDED}; ask their publisher",
            "prompt_sets": [
                (*row, *_of_set(row[0], counts, facts.get("prompt_sets") or {})) for row in _prompt_set_rows(sets)
            ],
            "teachers": _picked(by_teacher, *_TEACHER),
            **{
                name: sum(values) if (values := [row[name] for row in by_teacher if row[name] is not None]) else None
                for name in ("tokens_in", "tokens_out")
            },
            "exemplar_notes": [note for note in notes if note],
            "contaminated": _in_words(facts.get("contaminated") or {}) or "none",
            "rejected": [
                (
                    reason.replace("_", " "),
                    count,
                    f"{count / facts['prompts']:.1%}" if facts["prompts"] else None,
                )
                for reason, count in sorted((facts.get("rejected") or {}).items())
            ],
            "hostile": None if counts is None else _hostile(counts),
            "languages": _in_words(facts.get("languages") or {}) or None,
            "columns": [(Markup(f"`{name}`"), description) for name, description in COLUMNS.items()],
            "examples": [
                "\n\n".join(visible(row[part], LONGEST_EXAMPLE) for part in _PARTS if row.get(part))
                for row in (facts.get("samples") or {}).get("kept", [])
            ],
            "snippets": [
                {"about": snippet.about, "language": Markup(snippet.language), "code": Markup(snippet.code)}
                for snippet in snippets
            ],
        },
    )


def _of_set(name: str, counts: Mapping[str, Any] | None, sets: Mapping[str, Any]) -> tuple[int | str | None, ...]:
    """(prompts, documents, rows left out) of a prompt set; the first two are None without a data card."""
    left_out = (_in_words(sets[name].get("left_out", {})) or "none") if name in sets else None
    return *(None if counts is None else counts[of].get(name, 0) for of in ("sets", "sets_kept")), left_out


def _hostile(counts: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    kept = counts.get("hostile_kept", {})
    return [
        (*name.split("/", 1), count, kept.get(name, 0)) for name, count in sorted(counts.get("hostile", {}).items())
    ]


def _in_words(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {name.replace('?', 'unknown').replace('_', ' ')}" for name, count in counts.items())


def model_facts(store: Store, checkpoint: Artifact | None, folder: Path) -> Facts:
    """All facts for the card of the checkpoint in `folder`. `checkpoint`: its artifact; None: it is not in a store."""
    from nautile.model.capacity.flops import parameter_counts

    saved = read_json(folder / "config.json") or {}
    facts: Facts = {
        "model": saved.get("model"),
        "tokenizer": saved.get("tokenizer"),
        "parameters": sum(parameter_counts(ModelConfig.model_validate(saved["model"])).values()),
        "labels": None if (labels := read_label_set(folder)) is None else labels.model_dump(mode="json"),
        **dict.fromkeys(("artifact", "label", "documents", "ladder", "cost", "tuning")),
        **{name: [] for name in _LISTS},
        "scores": {},
    }
    if checkpoint is None:
        return facts | {"missing": ["The checkpoint is not in a store: how it was made is not known."]}
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
        "tuning": _tuning(store, checkpoint),
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


def _tuning(store: Store, checkpoint: Artifact) -> Facts | None:
    """The report of the tuning that made a checkpoint, and where its rows are from; None if there is none."""
    tuning = store.find("tuning", checkpoint.key)
    if tuning is None or tuning.execution != checkpoint.execution:
        return None
    report = read_json(tuning.path / "tuning.json")
    config = checkpoint.manifest["config"].get("tune")
    if not isinstance(report, dict) or not isinstance(config, dict):
        return None
    parts = {"all rows": config.get("data"), "validation": config.get("validation"), "test": config.get("test")}
    return {"report": report, "data": {name: part for name, part in parts.items() if part}}


def tuning_facts(facts: Facts) -> Facts | None:
    """What the card says of a tuning: rows of tables, and the scores of the method that made the checkpoint."""
    if (tuning := facts.get("tuning")) is None:
        return None
    report = tuning["report"]
    rows, arms, chosen = report["rows"], report["arms"], report["chosen"]
    result: Facts = {
        "data": [(name, *_origin(part)) for name, part in tuning["data"].items()],
        "splits": [(name, rows[name]) for name in ("train", "validation", "test")],
        "left_out": report["data"],
        "arms": [],
        "score": None,
    }
    if report["form"] != "label":
        return result
    result["arms"] = [
        (ARMS.get(arm["arm"], arm["arm"]), _shots(arm), _percent(arm["accuracy"]), _percent(arm["macro_f1"]),
         f"{100 * arm['ece']:.1f}")
        for arm in arms
    ]  # fmt: skip
    own = next(arm for arm in arms if (arm["arm"], arm["shots"]) == (report["method"], chosen["shots"]))
    result["score"] = {
        "accuracy": _percent(own["accuracy"]),
        "of_seed": f"{100 * own['accuracy_by_seed'][chosen['seed']]:.1f}",
        "seeds": own["seeds"],
        "rows": own["rows"],
        "ece": f"{100 * own['ece']:.1f}",
        "ece_uncalibrated": f"{100 * own['ece_uncalibrated']:.1f}",
        # Of one label a text; where there may be several, "accuracy" is that of whole sets.
        "coverage": f"{100 * own.get('coverage', 1):.0f}",
        "accuracy_covered": None if own.get("accuracy_covered") is None else f"{100 * own['accuracy_covered']:.1f}",
        "interval": own["accuracy"],
    }
    result["leads"] = [
        f"{100 * lead['lead']:+.1f} points [{100 * lead['low']:+.1f}, {100 * lead['high']:+.1f}] over "
        f"{ARMS.get(lead['over'], lead['over'])} (p = {lead['p']:.2g})"
        for lead in report.get("leads", [])
    ]
    return result


def _origin(data: Facts) -> tuple[str, str, str]:
    """(from, split, revision) of labelled rows, "" where there is none. Paths of local files are not published."""
    if data["reader"] == "hub":
        return " ".join(filter(None, (data["path"], data["subset"]))), data["split"], data["revision"]
    if data["reader"] == "labels":
        return f"labels by a teacher, {data['path'][:19]}", "", ""
    named = data["reader"] in ("wikipedia_topics", "labelled_sentences")
    return data["reader"].replace("_", " ") if named else f"a local file ({data['reader']})", "", ""


def _shots(arm: Facts) -> str:
    return str(arm["shots"]) if arm["shots"] else "none" if arm["arm"] == "verbalised" else "all"


def _percent(part: Mapping[str, float]) -> str:
    return f"{100 * part['value']:.1f} [{100 * part['low']:.1f}, {100 * part['high']:.1f}]"


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
    hub = config["path"] if is_on_hub(config["reader"]) else None
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
