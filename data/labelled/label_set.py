"""`labels.json` of a tuned checkpoint: what it was tuned for, and how its answers become calibrated probabilities."""

from pathlib import Path
from typing import Literal

from pydantic import PositiveFloat, PositiveInt, ValidationError, model_validator

from common.errors import ConfigError
from common.files import read_bounded_json, write_json
from configs.base import Section, Share

LABELS = "labels.json"
HEAD = "head.safetensors"


class LabelSet(Section):
    """How to ask a tuned checkpoint. Fields about labels are empty or None for the other forms."""

    form: Literal["label", "entities", "chat", "opinions"]
    method: Literal["head", "verbalised", "full", "lora"]
    labels: tuple[str, ...] = ()
    instructions: str = ""  # what stands before the text in the user's turn
    longest: PositiveInt = 128  # tokens of a text
    pooling: Literal["last", "mean"] = "last"  # head: of the hidden states of a text's tokens
    bias: tuple[float, ...] | None = None  # verbalised: nats that each label's text gets whatever the text
    temperature: PositiveFloat | None = None  # logits over this are calibrated; None: never fitted
    threshold: Share | None = None  # below this probability the model abstains
    coverage: Share | None = None  # share of the validation rows that the threshold lets through

    @model_validator(mode="after")
    def _fits(self) -> "LabelSet":
        if self.form == "label" and len(self.labels) < 2:
            raise ValueError("form 'label' needs at least two `labels`")
        if self.bias is not None and len(self.bias) != len(self.labels):
            raise ValueError(f"{len(self.bias)} numbers in `bias` for {len(self.labels)} labels")
        return self


def write_label_set(folder: Path, labels: LabelSet) -> None:
    """Write `labels.json` into a checkpoint's folder."""
    write_json(folder / LABELS, labels.model_dump(mode="json"))


def read_label_set(folder: Path) -> LabelSet | None:
    """The label set of a checkpoint's folder; None for one that was not tuned. Raises `ConfigError` if it is broken."""
    path = folder / LABELS
    if not path.is_file():
        return None
    try:
        return LabelSet.model_validate(read_bounded_json(path))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ConfigError(f"{path}: `{'.'.join(map(str, first['loc']))}`: {first['msg']}") from None
