"""The card of published distilled documents: README.md, with the front matter that the Hub reads.

The figures come from the manifest of the documents and, if it exists, from the data card of the run.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from nautile.common.files import read_json
from nautile.common.text import visible
from nautile.data.distill.parquet import COLUMNS
from nautile.store.artifacts import Artifact, Store
from nautile.tasks.reporting.card import NOT_RECORDED, Markup, card, languages, without_none
from nautile.tasks.reporting.model_card import UNKNOWN_LICENSE, Snippet, prompt_set_rows, teacher_rows
from nautile.tasks.reporting.model_facts import lineage, teachers

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
