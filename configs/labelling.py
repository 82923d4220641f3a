"""The sections of `nautile extract` and `nautile classify`: the texts, and what is asked about each."""

from typing import Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt, field_validator

from configs.base import Operational, Section, Share


class TextsConfig(Section):
    """A table of texts, a local file; it is in a key by its content."""

    reader: Literal["csv", "jsonl", "parquet"]
    path: str
    text_column: str = "text"


class ExtractConfig(Section):
    """A document of a JSON schema for every text.

    spans: which strings of a document must stand in the text, those that the schema marks with `"x-span": true` or
    all but enumerations and constants.
    """

    texts: TextsConfig
    json_schema: str  # as text, because the order of its properties is that of the documents
    spans: Literal["marked", "all"] = "marked"
    instructions: str = ""  # before every text; empty: those that the checkpoint was tuned with, or the schema
    max_tokens: PositiveInt | None = None  # of a reply; None: what the text leaves of the context
    thinking: NonNegativeInt = 0  # tokens before the answer, at most
    temperature: NonNegativeFloat = 0.0
    seed: NonNegativeInt = 0
    slots: Operational[PositiveInt] = 16  # replies that are decoded at the same time


class ClassifyConfig(Section):
    """A label for every text, by the checkpoint's own labels or, without tuning, by the likelihood of `labels`."""

    texts: TextsConfig
    labels: tuple[str, ...] = ()  # empty: those that the checkpoint was tuned for
    instructions: str = ""  # for `labels`; empty: a question that names them
    longest: PositiveInt = 128  # tokens of a text, for `labels`; what is longer is cut at its end
    gold_column: str = ""  # of the right labels, to score against; empty: there is none
    threshold: Share | None = None  # the model abstains below this probability; None: the checkpoint's own, if any
    rows_at_once: Operational[PositiveInt] = 16  # texts of one forward pass

    @field_validator("labels")
    @classmethod
    def _distinct(cls, labels: tuple[str, ...]) -> tuple[str, ...]:
        if labels and (len(set(labels)) < max(2, len(labels)) or not all(label.strip() for label in labels)):
            raise ValueError(f"{list(labels)}: at least two labels, none empty and no two alike")
        return labels
