"""Forecasts before a run starts: cost of calls to paid endpoints, and what pretraining will read of each source.

Token counts are averages of earlier calls of the same model and purpose in this store, or, without such calls, the
maximum that the configuration allows. Stored replies cost nothing, but are not subtracted here. What is
read follows from a source's tokens in the store; without these only what is certain is known.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from nautile.common.errors import ConfigError
from nautile.common.text import markdown_table
from nautile.configs.endpoint import EndpointConfig
from nautile.configs.schema import DISTILLED, RunConfig
from nautile.data.endpoints.chat_types import reply_cost
from nautile.data.tokens.loader import phase_rows, read_document_lengths
from nautile.data.tokens.shards import packed_lengths, read_index
from nautile.data.tokens.source_reading import COLUMNS, SourceReading, reading_rows, share_text
from nautile.flows.dag import Step, dag_in
from nautile.store.artifacts import Artifact, Store
from nautile.store.catalog import Catalog, CatalogBusy

_MEASURED = """
SELECT model, purpose, count(*) AS calls, avg(tokens_in) AS tokens_in, avg(tokens_out) AS tokens_out,
    quantile_cont(tokens_out, 0.1) AS low_out, quantile_cont(tokens_out, 0.9) AS high_out,
    quantile_cont(tokens_in, 0.1) AS low_in, quantile_cont(tokens_in, 0.9) AS high_in
FROM calls WHERE status = 'ok' AND NOT cached AND tokens_in IS NOT NULL AND tokens_out IS NOT NULL GROUP BY ALL
"""


@dataclass(frozen=True)
class CallForecast:
    """The calls of a step to an endpoint.

    `dollars`: (low, expected, high), at the 10 % quantile, the mean and the 90 % quantile of the measured lengths.
    Without measured replies (`measured` 0) all three use the maximum lengths that the configuration allows.
    """

    label: str
    endpoint: str
    model: str
    purpose: str
    requests: int
    tokens_in: int
    tokens_out: int
    dollars: tuple[float, float, float]
    measured: int
    budget_dollars: float  # of the step; 0: no budget


def forecast_calls(steps: Iterable[Step], store: Store) -> list[CallForecast]:
    """Forecast the calls of every step that uses endpoints."""
    measured = _measured_lengths(store)
    forecasts = []
    for step in steps:
        endpoints = {
            n: EndpointConfig.model_validate(fields) for n, fields in step.section.get("endpoints", {}).items()
        }
        for calls in step.stage.calls(step.section, endpoints) if endpoints else ():
            config = endpoints[calls.endpoint]
            row = measured.get((config.model, calls.purpose))
            lengths = [calls.tokens] * 3  # (tokens in, tokens out) of a request: low, expected, high
            if row is not None:
                lengths = [
                    (row["low_in"], row["low_out"]),
                    (row["tokens_in"], row["tokens_out"]),
                    (row["high_in"], row["high_out"]),
                ]
            # The upper end also takes the highest number of requests: refilled rollout groups ask the judge again.
            requests = (calls.expected, calls.expected, calls.most)
            dollars = [
                reply_cost(config, round(count * tokens_in), round(count * tokens_out)) or 0.0
                for count, (tokens_in, tokens_out) in zip(requests, lengths, strict=True)
            ]
            tokens_in, tokens_out = (round(calls.expected * tokens) for tokens in lengths[1])
            forecasts.append(
                CallForecast(
                    label=step.label,
                    endpoint=calls.endpoint,
                    model=config.model,
                    purpose=calls.purpose,
                    requests=round(calls.expected),
                    tokens_in=tokens_in,
                    tokens_out=tokens_out,
                    dollars=(dollars[0], dollars[1], dollars[2]),
                    measured=row["calls"] if row else 0,
                    budget_dollars=(step.section.get(step.stage.name) or {}).get("budget_dollars", 0.0),
                )
            )
    return forecasts


def asks_paid_endpoints(step: Step) -> bool:
    """Whether the step has an endpoint with a price."""
    endpoints = step.section.get("endpoints", {}).values()
    return any(fields["dollars_per_million_in"] or fields["dollars_per_million_out"] for fields in endpoints)


def forecast_lines(forecasts: Sequence[CallForecast]) -> list[str]:
    """A line for each endpoint that costs money, and the total; empty if none does."""
    paid = [forecast for forecast in forecasts if forecast.dollars[2] > 0]
    if not paid:
        return []
    lines = ["expected calls to paid endpoints (replies that are in the store already cost nothing):"]
    for row in paid:
        budget = f"; the step's budget is ${row.budget_dollars:,.2f}" if row.budget_dollars else ""
        lines.append(
            f"  {row.label}, {row.endpoint} ({row.purpose}): {row.requests:,} requests, {row.tokens_in:,} tokens in, "
            f"{row.tokens_out:,} out: {_cost([row])}{budget}"
        )
    return [*lines, f"  in all {_cost(paid)}"]


def forecast_text(forecasts: Sequence[CallForecast]) -> str:
    """The expected dollars of a step and their basis in a few words; "" if it pays nobody."""
    paid = [forecast for forecast in forecasts if forecast.dollars[2] > 0]
    return _cost(paid) if paid else ""


def _cost(paid: Sequence[CallForecast]) -> str:
    """The dollars of calls in one sentence, with what the figure rests on.

    Without measured replies it is a range from the expected to the highest number of requests, of replies that are all
    as long as they may be; with some, an expected sum and its spread.
    """
    low, expected, high = (sum(row.dollars[index] for row in paid) for index in range(3))
    measured = sum(row.measured for row in paid)
    if not measured:
        spread = f"${low:,.2f}" + ("" if low == high else f" to ${high:,.2f}")
        return f"{spread} if every reply is as long as it may be; none is measured yet"
    spread = f"${expected:,.2f}" + ("" if low == expected == high else f" (${low:,.2f} to ${high:,.2f})")
    longest = "" if all(row.measured for row in paid) else ", others as long as they may be"
    return f"{spread} by {measured:,} measured replies{longest}"


def _measured_lengths(store: Store) -> dict[tuple[str, str], dict[str, Any]]:
    """(model, purpose) -> token counts of earlier replies; empty while another process writes the catalog."""
    try:
        catalog = Catalog(store)
        catalog.ingest(patience=1.0)
        return {(row["model"], row["purpose"]): row for row in catalog.query(_MEASURED, patience=1.0)}
    except (CatalogBusy, ConfigError):
        return {}


MOST_SHARDS = 16  # whose documents are packed anew for rows of another length


def forecast_reading(config: RunConfig, store: Store) -> dict[str, SourceReading]:
    """How pretraining will read its sources; figures of one that is not tokenised in `store` yet are None."""
    drawn = _rows_drawn(config)
    # The largest number of chat records of each source; None where the configuration does not limit it.
    records = {source.name: source.records for source in config.ingest.sources if source.form == "synth"}
    if config.distill is not None:
        records[DISTILLED] = config.distill.accepted or config.distill.prompts
    readings = {}
    for name, tokens in _tokens(config, store).items():
        facts, train_on = tokens.manifest["facts"] if tokens else {}, config.train_on[name]
        trained = facts.get("reply_share") if train_on == "replies" else 1.0
        epochs = drawn[name] / facts["rows"] if facts.get("rows") else None
        # A chat record is in one row, so that there are at most as many rows as records.
        most = records.get(name)
        least = drawn[name] / most if epochs is None and most else None
        readings[name] = SourceReading(
            train_on, facts.get("fill"), facts.get("cropped_share"), trained, epochs, least_epochs=least
        )
    return readings


@dataclass(frozen=True)
class PackedAnew:
    """The rows of a source if they had `row_length` tokens: shares of filled positions and of cropped documents."""

    source: str
    row_length: int
    fill: float
    cropped_share: float


def pack_anew(config: RunConfig, store: Store, row_lengths: Sequence[int]) -> list[PackedAnew]:
    """Pack the documents of each chat source for every one of `row_lengths`, from at most `MOST_SHARDS` shards.

    Left out are sources that are not in the store, and rows longer than those that documents were cropped to.
    """
    return [row for name, tokens in _tokens(config, store).items() for row in _of_source(name, tokens, row_lengths)]


def _of_source(name: str, tokens: Artifact | None, row_lengths: Sequence[int]) -> Iterator[PackedAnew]:
    if tokens is None or not tokens.store.has_files(tokens):
        return
    index = read_index(tokens.folder)
    if index.form != "synth":
        return
    lengths = read_document_lengths(tokens.folder, index, MOST_SHARDS)
    for row_length in row_lengths:
        if row_length <= index.row_length or not index.total("cropped_documents", "train"):
            yield PackedAnew(name, row_length, *packed_lengths(lengths, row_length))


def reading_markdown(readings: dict[str, SourceReading], anew: Sequence[PackedAnew]) -> str:
    """The tables of `forecast_reading` and `pack_anew` as Markdown."""
    parts = [markdown_table(COLUMNS, reading_rows(readings))]
    if anew:
        rows = [(row.source, f"{row.row_length}", share_text(row.fill), share_text(row.cropped_share)) for row in anew]
        parts.append(markdown_table(("Source", "Row length", *COLUMNS[2:4]), rows))
    return "\n\n".join(parts)


def _tokens(config: RunConfig, store: Store) -> dict[str, Artifact | None]:
    """The tokens of each source of the pretraining, if there is one; None for those that are not in the store."""
    try:
        steps = {step.label: step for step in dag_in(store, config)}
    except ConfigError:  # a file or checkpoint that the run will ask for; without it no key is known
        return dict.fromkeys(_rows_drawn(config))
    if "pretrain" not in steps:
        return {}
    ids = {name: steps["pretrain"].inputs[name].partition("/") for name in steps["pretrain"].needs}
    return {name: store.find(kind, key) for name, (kind, _, key) in ids.items()}


def _rows_drawn(config: RunConfig) -> Counter[str]:
    """Rows of each source that all phases together draw."""
    drawn: Counter[str] = Counter()
    for phase in config.pretrain.phases:
        drawn.update(phase_rows(phase, config.pretrain.batch_rows, config.ingest.row_length)[1])
    return drawn
