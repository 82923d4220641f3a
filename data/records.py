"""The two record forms, in the schemas of the Hub: FineWeb-Edu's web document and SYNTH's exercise.

A field that a stand-in cannot fill honestly is None, never an invented value.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

RejectReason = Literal["no_text", "invalid_utf8", "too_long", "not_json", "not_an_object", "wrong_type"]
MAX_CHARACTERS = 4_000_000  # a record beyond this is no document; tiktoken would also hold it whole several times


@dataclass(frozen=True)
class WebRecord:
    """One document of `HuggingFaceFW/fineweb-edu`."""

    text: str
    id: str | None = None
    dump: str | None = None
    url: str | None = None
    file_path: str | None = None
    language: str | None = None
    language_score: float | None = None
    token_count: int | None = None
    score: float | None = None
    int_score: int | None = None


@dataclass(frozen=True)
class SynthRecord:
    """One exercise of `PleIAs/SYNTH`."""

    query: str
    synthetic_reasoning: str
    synthetic_answer: str
    exercise: str | None = None
    constraints: str | None = None
    synth_id: str | None = None
    language: str | None = None
    model: str | None = None
    query_seed_url: str | None = None
    query_seed_text: str | None = None
    seed_license: str | None = None


Record = WebRecord | SynthRecord


@dataclass(frozen=True)
class Rejected:
    """A row that cannot become a record, and why. It keeps its place so that positions in a source stay put."""

    reason: RejectReason


def to_dict(record: Record) -> dict[str, Any]:
    """The record as a row of its Hub schema."""
    return asdict(record)


def from_dict(row: object, form: Literal["web", "synth"]) -> Record | Rejected:
    """A record from a row as read; unknown columns are dropped. Text must be there, be text, and be of a sane size."""
    if not isinstance(row, Mapping):
        return Rejected("not_an_object")
    cls, needed = (WebRecord, ("text",)) if form == "web" else (SynthRecord, ("query", "synthetic_answer"))
    values = {f.name: row[f.name] for f in fields(cls) if row.get(f.name) is not None}
    if form == "synth":
        values.setdefault("synthetic_reasoning", "")
    for name in _TEXT[form] & values.keys():
        value = values[name]
        if not isinstance(value, str):
            return Rejected("wrong_type")
        if len(value) > MAX_CHARACTERS:
            return Rejected("too_long")
        if not value.isascii() and not _encodable(value):
            return Rejected("invalid_utf8")
    if any(not values.get(name, "").strip() for name in needed):
        return Rejected("no_text")
    return cls(**values)


_TEXT: dict[str, set[str]] = {
    "web": {"text"},
    "synth": {"query", "synthetic_reasoning", "synthetic_answer", "constraints", "exercise"},
}


def _encodable(text: str) -> bool:
    """Whether `text` has no lone surrogate (which JSON can smuggle in and UTF-8 cannot hold)."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
