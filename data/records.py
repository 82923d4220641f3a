"""The two record forms, in the schemas of the Hub: FineWeb-Edu's web document and SYNTH's exercise.

A field that a stand-in source does not have is None; no value is invented. Rows are passed on as batches of columns,
because at corpus scale one Python object per row would cost more than the row's content. `RecordBatch.record` builds
the few rows that are needed as objects.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from decimal import Decimal
from typing import Any, Literal

from nautile.data.tokens.losses import RowRejectReason

RecordForm = Literal["web", "synth"]
MAX_CHARACTERS = 4_000_000  # a longer record is rejected; tiktoken would also hold several copies of it in memory
BATCH_ROWS = 512  # rows in a batch, at most
BATCH_CHARACTERS = 8_000_000  # a batch ends early beyond this: bounds memory


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
    """A row that cannot become a record, and why. It stays in the sequence, so that row numbers do not shift."""

    reason: RowRejectReason


@dataclass(frozen=True)
class RecordBatch:
    """Consecutive rows of a source: the usable ones in `columns` and `record`, the others counted by reason.

    columns: `TEXT_COLUMNS` of the form, and those that the source's filters need. `record(i)` is the i-th usable row as
    a record, with the columns that were read. `total`: rows of all batches together, None where unknown.
    """

    form: RecordForm
    rows: int
    columns: Mapping[str, list[Any]]
    rejected: Counter[str]
    record: Callable[[int], Record]
    total: int | None = None

    def __len__(self) -> int:
        return len(self.columns[REQUIRED_COLUMNS[self.form][0]])

    def texts(self) -> list[str]:
        """The trained text of each usable row as one string; the parts of an exercise are joined by NUL."""
        if self.form == "web":
            return self.columns["text"]
        return ["\x00".join(turn) for turn in self.turns()]

    def turns(self) -> Iterator[tuple[str, str, str]]:
        """The user's message, the reasoning and the answer of each usable exercise, as they are trained on.

        In the exercise "rag" the constraints, which are the passages, follow the query.
        """
        columns = self.columns
        for query, exercise, constraints, reasoning, answer in zip(
            *(columns[n] for n in ("query", "exercise", "constraints", "synthetic_reasoning", "synthetic_answer")),
            strict=True,
        ):
            message = f"{query}\n\n{constraints}" if exercise == "rag" and constraints else query
            yield message, reasoning, answer

    def select(self, rows: list[int], reason: str) -> "RecordBatch":
        """Keep only the usable rows numbered `rows`; count the others as rejected for `reason`."""
        columns = {name: [values[i] for i in rows] for name, values in self.columns.items()}
        rejected = self.rejected + Counter({reason: len(self) - len(rows)})
        return RecordBatch(self.form, self.rows, columns, rejected, lambda i: self.record(rows[i]), self.total)


REQUIRED_COLUMNS: dict[RecordForm, tuple[str, ...]] = {"web": ("text",), "synth": ("query", "synthetic_answer")}
TEXT_COLUMNS: dict[RecordForm, tuple[str, ...]] = {
    "web": ("text",),
    "synth": ("query", "synthetic_reasoning", "synthetic_answer", "exercise", "constraints"),
}


def schema_columns(form: RecordForm) -> list[str]:
    return [f.name for f in fields(WebRecord if form == "web" else SynthRecord)]


def to_batch(rows: list[Record | Rejected], form: RecordForm) -> RecordBatch:
    usable = [row for row in rows if not isinstance(row, Rejected)]
    columns = {name: [getattr(row, name) for row in usable] for name in schema_columns(form)}
    rejected: Counter[str] = Counter(row.reason for row in rows if isinstance(row, Rejected))
    return RecordBatch(form, len(rows), columns, rejected, lambda i: usable[i])


def batched(rows: Iterable[Record | Rejected], form: RecordForm) -> Iterator[RecordBatch]:
    """Group rows into batches of at most `BATCH_ROWS` rows, or fewer when they are long."""
    batch: list[Record | Rejected] = []
    characters = 0
    for row in rows:
        batch.append(row)
        if not isinstance(row, Rejected):
            characters += sum(len(getattr(row, name)) for name in REQUIRED_COLUMNS[form])
        if len(batch) == BATCH_ROWS or characters > BATCH_CHARACTERS:
            yield to_batch(batch, form)
            batch, characters = [], 0
    if batch:
        yield to_batch(batch, form)


def to_dict(record: Record) -> dict[str, Any]:
    return asdict(record)


def from_dict(row: object, form: RecordForm) -> Record | Rejected:
    """Validate a parsed row and turn it into a record; unknown columns are dropped.

    The required texts must be present. Every text must be a string without lone surrogates, of at most
    `MAX_CHARACTERS` characters. Fields that are not trained on may have any value, and are None where JSON has no form
    for it.
    """
    if not isinstance(row, Mapping):
        return Rejected("not_an_object")
    values = {name: row[name] for name in _COLUMNS[form] if row.get(name) is not None}
    if form == "synth":
        values.setdefault("synthetic_reasoning", "")
    # In the order of the schema, because a row is counted under its first fault.
    for name in TEXT_COLUMNS[form]:
        if (value := values.get(name)) is None:
            continue
        if not isinstance(value, str):
            return Rejected("wrong_type")
        if len(value) > MAX_CHARACTERS:
            return Rejected("too_long")
        try:
            value.encode()
        except UnicodeEncodeError:  # a lone surrogate, which JSON can contain and UTF-8 cannot
            return Rejected("invalid_utf8")
    for name in values.keys() - TEXT_COLUMNS[form]:
        values[name] = _plain(values[name])
    # `isspace` stops at the first other character, so a long text is not copied.
    if any(not (text := values.get(name)) or text.isspace() for name in REQUIRED_COLUMNS[form]):
        return Rejected("no_text")
    return (WebRecord if form == "web" else SynthRecord)(**values)


def _plain(value: Any) -> str | int | float | None:
    """A value as JSON has it: ids may be UUIDs, times or bytes, and scores decimals."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "replace").decode()
    if isinstance(value, float | Decimal):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, int):
        return value
    return None if isinstance(value, bytes | list | dict) else str(value)


_COLUMNS: dict[RecordForm, list[str]] = {"web": schema_columns("web"), "synth": schema_columns("synth")}
