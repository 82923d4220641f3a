"""Every corpus behind one interface: typed records, from any position on, in the same order each time."""

import itertools
from collections.abc import Iterator

from configs.schema import SourceConfig
from configs.section import ConfigError
from data.files import matching, parquet_rows, read_jsonl, read_parquet
from data.hub import read_hub
from data.reasoning import Problem, problems
from data.records import Record, Rejected, SynthRecord
from data.wikipedia import STAND_IN as WIKIPEDIA_STAND_IN
from data.wikipedia import articles, web_record

REASONING_STAND_IN = "reasoning-gym problems with worked rationales, in place of SYNTH"
STAND_INS = {"wikipedia": WIKIPEDIA_STAND_IN, "reasoning": REASONING_STAND_IN}
_FORMS = {"wikipedia": "web", "reasoning": "synth"}


def read(source: SourceConfig, seed: int) -> Iterator[Record]:
    """The usable records of `source`, at most `source.records` rows of it.

    Raises `ConfigError` for what cannot be read, `Retryable` for what may be readable later.
    """
    for row in itertools.islice(scan(source, seed), source.records):
        if not isinstance(row, Rejected):
            yield row


def scan(source: SourceConfig, seed: int, skip: int = 0) -> Iterator[Record | Rejected]:
    """Rows of `source` from the `skip`-th on, the unusable ones as `Rejected`. Errors as `read`."""
    expected = _FORMS.get(source.reader, source.form)
    if source.form != expected:
        raise ConfigError(
            f"source {source.name!r}: reader {source.reader!r} gives form {expected!r}, not {source.form!r}"
        )
    if source.reader == "wikipedia":
        return (web_record(article) for article in articles(seed)[skip:])
    if source.reader == "reasoning":
        return itertools.islice(map(synth_record, problems(source.tasks, seed, "train")), skip, None)
    if source.reader == "jsonl":
        return read_jsonl(matching(source.path), source.form, skip)
    if source.reader == "parquet":
        return _parquet(source, skip)
    return read_hub(source, skip)


def rows_in(source: SourceConfig, seed: int) -> int | None:
    """How many rows an ingest of `source` will read, where that is cheap to know; for the progress bar."""
    there: int | None = None
    if source.reader == "wikipedia":
        there = len(articles(seed))
    elif source.reader == "parquet":
        there = sum(parquet_rows(path) for path in matching(source.path))
    known = [count for count in (there, source.records) if count is not None]
    return min(known) if known else None


def synth_record(problem: Problem) -> SynthRecord:
    """A generated problem in SYNTH's form: the exercise is its task."""
    return SynthRecord(
        query=problem.question,
        synthetic_reasoning=problem.rationale,
        synthetic_answer=problem.answer,
        exercise=problem.task,
        synth_id=f"{problem.task}/{problem.index}",
        language="en",
    )


def _parquet(source: SourceConfig, skip: int) -> Iterator[Record | Rejected]:
    for path in matching(source.path):
        if skip:
            rows = parquet_rows(path)
            if skip >= rows:
                skip -= rows
                continue
        yield from read_parquet(path, None, source.form, skip)
        skip = 0
