"""The two record forms, in the schemas of the Hub: FineWeb-Edu's web document and SYNTH's exercise.

A field that a stand-in cannot fill honestly is None, never an invented value. Rows travel in batches of columns, for at
corpus scale an object a row costs more than its content; `RecordBatch.record` makes the few that are wanted whole.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

Form = Literal["web", "synth"]
RejectReason = Literal["no_text", "invalid_utf8", "too_long", "not_json", "not_an_object", "wrong_type"]
MAX_CHARACTERS = 4_000_000  # a record beyond this is no document; tiktoken would also hold it whole several times
BATCH_ROWS = 512  # rows worked at once
BATCH_CHARACTERS = 8_000_000  # or fewer, when they are long: bounds memory


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


@dataclass(frozen=True)
class RecordBatch:
    """Some rows of a source, in order. `columns` and `record` are of the usable ones; `rejected` counts the others.

    columns: web has `text`; synth `query`, `synthetic_reasoning`, `synthetic_answer`, `exercise`, `constraints`; and
    whatever a filter asks for. `record(i)` is the i-th usable row as a record, with the columns that were read.
    `total`: the rows of all batches of the reading, where that is known.
    """

    form: Form
    rows: int
    columns: Mapping[str, list[Any]]
    rejected: Counter[str]
    record: Callable[[int], Record]
    total: int | None = None

    def __len__(self) -> int:
        return len(self.columns[REQUIRED_COLUMNS[self.form][0]])

    def texts(self) -> list[str]:
        """All of each usable row that is text to learn from, as one string; the parts of an exercise joined by NUL."""
        columns = self.columns
        if self.form == "web":
            return columns["text"]
        return list(map("\x00".join, zip(*(columns[name] for name in EXERCISE_COLUMNS), strict=True)))

    def select(self, rows: list[int], reason: str) -> "RecordBatch":
        """Keep only the usable rows numbered `rows`; count the others as rejected for `reason`."""
        columns = {name: [values[i] for i in rows] for name, values in self.columns.items()}
        rejected = self.rejected + Counter({reason: len(self) - len(rows)})
        return RecordBatch(self.form, self.rows, columns, rejected, lambda i: self.record(rows[i]), self.total)


REQUIRED_COLUMNS: dict[Form, tuple[str, ...]] = {"web": ("text",), "synth": ("query", "synthetic_answer")}
EXERCISE_COLUMNS = ("query", "synthetic_reasoning", "synthetic_answer")
TEXT_COLUMNS: dict[Form, tuple[str, ...]] = {"web": ("text",), "synth": (*EXERCISE_COLUMNS, "exercise", "constraints")}


def schema_columns(form: Form) -> list[str]:
    """The columns of the form's schema."""
    return [f.name for f in fields(WebRecord if form == "web" else SynthRecord)]


def to_batch(rows: list[Record | Rejected], form: Form) -> RecordBatch:
    """Rows that were read one by one, as a batch."""
    usable = [row for row in rows if not isinstance(row, Rejected)]
    columns = {name: [getattr(row, name) for row in usable] for name in schema_columns(form)}
    rejected = Counter(row.reason for row in rows if isinstance(row, Rejected))
    return RecordBatch(form, len(rows), columns, rejected, lambda i: usable[i])


def batched(rows: Iterable[Record | Rejected], form: Form) -> Iterator[RecordBatch]:
    """Rows in batches of at most `BATCH_ROWS` rows, or fewer when they are long."""
    held: list[Record | Rejected] = []
    characters = 0
    for row in rows:
        held.append(row)
        if not isinstance(row, Rejected):
            characters += sum(len(getattr(row, name)) for name in REQUIRED_COLUMNS[form])
        if len(held) == BATCH_ROWS or characters > BATCH_CHARACTERS:
            yield to_batch(held, form)
            held, characters = [], 0
    if held:
        yield to_batch(held, form)


def to_dict(record: Record) -> dict[str, Any]:
    """The record as a row of its Hub schema."""
    return asdict(record)


def from_dict(row: object, form: Form) -> Record | Rejected:
    """A record from a row as read; unknown columns are dropped. Text must be there, be text, and be of a sane size."""
    if not isinstance(row, Mapping):
        return Rejected("not_an_object")
    values = {name: row[name] for name in _COLUMNS[form] if row.get(name) is not None}
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
    if any(is_blank(values.get(name)) for name in REQUIRED_COLUMNS[form]):
        return Rejected("no_text")
    return (WebRecord if form == "web" else SynthRecord)(**values)


def is_blank(text: str | None) -> bool:
    """Whether there is nothing to read in `text`; looks no further than its first letter."""
    return not text or text.isspace()


_COLUMNS: dict[Form, list[str]] = {"web": schema_columns("web"), "synth": schema_columns("synth")}
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
