"""What pretraining reads of each source: fill of its rows, cropped documents, trained targets, epochs.

One form for the last line of the step, `nautile plan`, the report and the model card.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from nautile.configs.base import TrainOn

READING = "reading_by_source"  # the name of these figures among the facts of a checkpoint
UNKNOWN = "not known"
COLUMNS = ("Source", "Train on", "Rows filled", "Documents cropped", "Targets trained on", "Epochs")


@dataclass(frozen=True)
class SourceReading:
    """Shares of a source's training rows, and the passes over them. None: not known, as before it is tokenised.

    fill: share of the positions that hold a token. cropped_share: of the documents, to a row. trained_share: of the
    targets, those with a weight. least_epochs: a lower bound, where `epochs` is not known.
    """

    train_on: TrainOn
    fill: float | None = None
    cropped_share: float | None = None
    trained_share: float | None = None
    epochs: float | None = None
    least_epochs: float | None = None

    def facts(self) -> dict[str, Any]:
        """The values that are known, for a manifest; numbers to four digits after the point."""
        known = {name: value for name, value in asdict(self).items() if value is not None}
        return {name: round(value, 4) if isinstance(value, float) else value for name, value in known.items()}


def reading_rows(sources: Mapping[str, SourceReading]) -> list[Sequence[str]]:
    """The cells of a table with `COLUMNS`, a row for each source."""
    return [
        (
            name,
            source.train_on,
            share_text(source.fill),
            share_text(source.cropped_share),
            share_text(source.trained_share),
            _epochs(source),
        )
        for name, source in sources.items()
    ]


def reading_line(sources: Mapping[str, SourceReading]) -> str:
    """The same in one line: `synth: rows 89 % full, 0 % cropped, 43 % of targets, 3.2 epochs; ...`."""
    return "; ".join(
        f"{name}: rows {fill} full, {cropped} cropped, {trained} of targets, {epochs} epochs"
        for name, _, fill, cropped, trained, epochs in reading_rows(sources)
    )


def share_text(share: float | None) -> str:
    """A share in per cent; `UNKNOWN` for None."""
    if share is None:
        return UNKNOWN
    # Neither 0 nor 1 where it is only near it.
    return f"{share:.0%}" if share in (0, 1) or 0.005 <= share < 0.995 else f"{share:.2%}"


def _epochs(source: SourceReading) -> str:
    if source.epochs is not None:
        return f"{source.epochs:.2f}"
    return UNKNOWN if source.least_epochs is None else f"at least {source.least_epochs:.1f}"
