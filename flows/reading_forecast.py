"""What pretraining will read of each source (`nautile plan`): from its tokens in the store, else what is certain."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from nautile.common.errors import ConfigError
from nautile.common.text import markdown_table
from nautile.configs.schema import DISTILLED, RunConfig
from nautile.data.tokens.loader import phase_rows, read_document_lengths
from nautile.data.tokens.shards import packed_lengths, read_index
from nautile.data.tokens.source_reading import COLUMNS, SourceReading, reading_rows, share_text
from nautile.flows.starts import dag_in
from nautile.store.artifacts import Artifact, Store

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
