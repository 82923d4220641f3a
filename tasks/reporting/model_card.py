"""The card of a published model: README.md, with the front matter that the Hub reads.

All figures come from `tasks.reporting.model_facts`; the wording is in model_card.md.j2.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nautile.common.text import duration
from nautile.data.tokens.source_reading import SourceReading, reading_rows
from nautile.evals.benchmarks.catalogue import BENCHMARKS
from nautile.evals.scoring.scores import marked_title
from nautile.evals.tables.ladder import gains_in_words, ladder_table
from nautile.evals.tables.results import table_1, table_2, with_interval
from nautile.tasks.reporting.card import NOT_RECORDED, Markup, card, languages, without_none
from nautile.tasks.reporting.data import stand_ins_by_note
from nautile.tasks.reporting.model_facts import own_scores

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
