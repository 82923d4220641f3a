"""Render the cards of models and data sets: a Markdown page with YAML front matter, in which all values are escaped.

A template's `{{ value }}` is shown literally, whatever it contains; None is shown as "not recorded". Intended markup
goes through a filter: `table`, `rows`, `code`, `fenced`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nautile.common.files import read_json
from nautile.common.text import dollars, duration, fenced, markdown_table, markdown_text, visible
from nautile.data.distill.parquet import COLUMNS
from nautile.data.tokens.source_reading import SourceReading, reading_rows
from nautile.evals.benchmarks.catalogue import BENCHMARKS
from nautile.evals.scoring.scores import marked_title
from nautile.evals.tables.ladder import gains_in_words, ladder_table
from nautile.evals.tables.results import ResultTable, table_1, table_2, to_markdown, with_interval
from nautile.store.artifacts import Artifact, Store
from nautile.tasks.reporting.data import stand_ins_by_note
from nautile.tasks.reporting.model_facts import lineage, own_scores, teachers
from nautile.tasks.reporting.render import TEMPLATES, template_environment

NOT_RECORDED = "not recorded"


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
    return Markup(markdown_table(columns, [[_escaped(cell) for cell in row] for row in rows]))


Facts = dict[str, Any]

UNKNOWN_LICENSE = "unknown"  # an identifier of the Hub
TASKS = {"label": "text-classification", "entities": "token-classification"}  # of the Hub, by the form of the tuning


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
    """The text of README.md, from `tasks.reporting.model_facts.model_facts` and the publication."""
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
            "not_recorded": Markup(NOT_RECORDED),
            "configuration": _configuration(facts),
            "context": (facts["model"] or {}).get("context"),
            "weights_license": f"{publication.license}, as their publisher states"
            if publication.license
            else f"their licence is {NOT_RECORDED}: ask their publisher before you use them",
            "code_license": "The code that comes with them is Apache-2.0.",
            "stages": [
                (
                    row["label"],
                    row["id"],
                    row["created"][:19],
                    None if row["seconds"] is None else duration(row["seconds"]),
                    _commit(row["commit"]),
                )
                for row in facts["stages"]
            ],
            "phases": [
                (
                    row["name"],
                    f"{row['tokens']:,}",
                    ", ".join(
                        f"{share / sum(row['mixture'].values()):.0%} {source}"
                        for source, share in row["mixture"].items()
                    ),
                )
                for row in facts["phases"]
            ],
            "read": [
                (
                    row["source"],
                    f"{row['tokens']:,}",
                    *reading_rows({"": SourceReading(**row["reading"])})[0][1:],
                )
                for row in facts["read"]
            ],
            "sources": [
                (
                    row["name"] or row["label"],
                    row["origin"] or row["reader"],
                    row["license"] or ("see below" if row["reader"] == "distilled documents" else None),
                    _number(row["documents"]),
                    _number(row["tokens"]),
                    _number(row["overlaps"]),
                )
                for row in facts["sources"]
            ],
            "problems": [
                (
                    row["label"],
                    row["source"],
                    " ".join(part for part in (row["hub"], row["revision"]) if part) or "generated here",
                    row["license"],
                    _number(row["count"]),
                )
                for row in facts["problems"]
            ],
            "teachers": teacher_rows(facts["teachers"]),
            "prompt_sets": prompt_set_rows(facts["prompt_sets"]),
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
                    f"{score['n']:,}",
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
                    *(_number(row[field]) for field in ("calls", "tokens_in", "tokens_out")),
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


def teacher_rows(teachers: Sequence[Facts]) -> list[tuple[Any, ...]]:
    """Rows of the table of teachers: name, model, licence or terms, prompts asked, documents kept, stand-in."""
    yes_or_no = {True: "yes", False: "no", None: None}
    return [
        (
            row["name"],
            row["model"],
            row["license"],
            _number(row["asked"]),
            _number(row["kept"]),
            yes_or_no[row["stand_in"]],
        )
        for row in teachers
    ]


def prompt_set_rows(prompt_sets: Sequence[Facts]) -> list[tuple[Any, ...]]:
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


def task_of(facts: Facts) -> str:
    """The Hub's name of what the model does."""
    return TASKS.get((facts.get("labels") or {}).get("form", ""), "text-generation")


def _front_matter(facts: Facts, publication: Publication, language_codes: list[str]) -> dict[str, Any]:
    # The Hub links these names to the pages of the data sets.
    hubs = [row["hub"] for row in (*facts["sources"], *facts["problems"]) if row["hub"]]
    hubs += [row["path"] for row in facts["prompt_sets"] if row["source"] == "hub"]
    datasets = list(dict.fromkeys([*hubs, *filter(None, [publication.dataset])]))
    tags = ["nautile", "reasoning", *publication.tags, *(["stand-in"] if facts["stand_ins"] else [])]
    return without_none(
        {
            "license": publication.license or UNKNOWN_LICENSE,
            "language": language_codes,
            "library_name": publication.library,
            "pipeline_tag": task_of(facts),
            "tags": tags,
            "datasets": datasets,
            "model-index": _model_index(facts, publication),
        }
    )


def _model_index(facts: Facts, publication: Publication) -> list[dict[str, Any]]:
    """The strict accuracy of each benchmark in percent; a stand-in is marked and refers to no data set of the Hub."""
    from huggingface_hub import EvalResult
    from huggingface_hub.repocard_data import eval_results_to_model_index

    results = []
    scores = own_scores(facts) or {"benchmarks": {}}
    for name, score in scores["benchmarks"].items():
        if score["accuracy"] is None:
            continue
        benchmark = BENCHMARKS.get(name)  # None: a stand-in
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
    return eval_results_to_model_index(publication.repository.partition("/")[2], results) if results else []


def _configuration(facts: Facts) -> list[tuple[str, str]]:
    """The number of parameters, and the fields of the model's and the tokenizer's configuration."""
    rows = [("parameters", f"{facts['parameters']:,}")]
    for part in ("model", "tokenizer"):
        rows += [(f"{part}.{name}", str(value)) for name, value in (facts[part] or {}).items()]
    return rows


def _commit(commit: str | None) -> str | None:
    return commit and commit[:12] + ("-dirty" if commit.endswith("-dirty") else "")


def _number(value: int | None) -> str | None:
    return None if value is None else f"{value:,}"


_PARTS = ("query", "reasoning", "answer")  # of an example
LONGEST_EXAMPLE = 800  # characters of each part
_FACTS = (
    "documents", "prompts", "neighbours", "stand_in", "budget_exhausted", "dollars", "dollars_unknown", "exemplars",
    "held_out",
)  # fmt: skip


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
                (*row, *_of_set(row[0], counts, facts.get("prompt_sets") or {})) for row in prompt_set_rows(sets)
            ],
            "teachers": teacher_rows(by_teacher),
            **{
                name: sum(values) if (values := [row[name] for row in by_teacher if row[name] is not None]) else None
                for name in ("tokens_in", "tokens_out")
            },
            "exemplar_notes": [note for note in notes if note],
            "contaminated": _in_words(facts.get("contaminated") or {}) or "none",
            "rejected": [
                (
                    reason.replace("_", " "),
                    f"{count:,}",
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


def _of_set(
    name: str, counts: Mapping[str, Any] | None, sets: Mapping[str, Any]
) -> tuple[str | None, str | None, str | None]:
    """(prompts, documents, rows left out) of a prompt set as text; the first two are None without a data card."""
    left_out = (_in_words(sets[name].get("left_out", {})) or "none") if name in sets else None
    if counts is None:
        return None, None, left_out
    return f"{counts['sets'].get(name, 0):,}", f"{counts['sets_kept'].get(name, 0):,}", left_out


def _hostile(counts: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    document_counts = counts.get("hostile_kept", {})
    return [
        (*name.split("/", 1), f"{count:,}", f"{document_counts.get(name, 0):,}")
        for name, count in sorted(counts.get("hostile", {}).items())
    ]


def _in_words(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {name.replace('?', 'unknown').replace('_', ' ')}" for name, count in counts.items())
