"""The sections of `nautile extract` and `nautile classify`: the texts, and what to predict for each."""

from typing import Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt, field_validator

from nautile.configs.base import Delimiter, Operational, Section, Seed, Share


class TextsConfig(Section):
    """A local file with a table of texts; its content is hashed into the key."""

    reader: Literal["csv", "jsonl", "parquet"]
    path: str
    text_column: str = "text"
    delimiter: Delimiter | None = None  # csv; None: a comma, a tab for .tsv


class ExtractConfig(Section):
    """Extraction of a JSON document with a given schema from every text.

    `spans`: which strings of a document must be copied from the text. "marked": those that the schema marks with
    `"x-span": true`; "all": all except enumerations and constants.
    """

    texts: TextsConfig
    json_schema: str  # as text, to keep the order of the properties, which the documents follow
    spans: Literal["marked", "all"] = "marked"
    instructions: str = ""  # before every text; empty: those that the checkpoint was tuned with, else the schema
    max_tokens: PositiveInt | None = None  # of a reply; None: the rest of the context after the text
    thinking: NonNegativeInt = 0  # maximum tokens of reasoning before the answer
    temperature: NonNegativeFloat = 0.0
    seed: Seed = 0
    slots: Operational[PositiveInt] = 16  # replies decoded concurrently


class ClassifyConfig(Section):
    """Classification of every text, with a tuned checkpoint's labels, or untuned by the likelihood of `labels`."""

    texts: TextsConfig
    labels: tuple[str, ...] = ()  # empty: those that the checkpoint was tuned for
    instructions: str = ""  # for `labels`; empty: a question that names them
    longest: PositiveInt = 128  # tokens of a text, for `labels`; longer ones are truncated at the end
    gold_column: str = ""  # column of the right labels, to compute scores; empty: none
    threshold: Share | None = None  # the model abstains below this probability; None: the checkpoint's own, if any
    rows_at_once: Operational[PositiveInt] = 16  # texts in a forward pass

    @field_validator("labels")
    @classmethod
    def _distinct(cls, labels: tuple[str, ...]) -> tuple[str, ...]:
        if labels and (len(set(labels)) < max(2, len(labels)) or not all(label.strip() for label in labels)):
            raise ValueError(f"{list(labels)}: at least two different labels are needed, and none may be empty")
        return labels
