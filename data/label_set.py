"""`labels.json` of a tuned checkpoint: the task it was tuned for, and the calibration of its probabilities."""

import shutil
from pathlib import Path
from typing import Literal

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt, ValidationError, model_validator

from nautile.common.errors import ConfigError
from nautile.common.files import read_bounded_json, write_json
from nautile.configs.base import Section, Share

LABELS = "labels.json"
HEAD = "head.safetensors"


class LabelSet(Section):
    """How to prompt a tuned checkpoint and read its answers. Fields about labels are empty or None for other forms."""

    form: Literal["label", "entities", "chat", "opinions"]
    method: Literal["head", "verbalised", "full", "lora"]
    labels: tuple[str, ...] = ()
    instructions: str = ""  # precede the text in the user's turn
    longest: PositiveInt = 128  # tokens of a text; longer texts are cut
    pooling: Literal["last", "mean"] = "last"  # method "head": over the hidden states of a text's tokens
    bias: tuple[float, ...] | None = None  # method "verbalised": each label's mean log-probability, to be subtracted
    temperature: PositiveFloat | None = None  # logits are divided by it to calibrate them; None: not fitted
    validation_rows: PositiveInt | None = None  # on which temperature and threshold were fitted; None: not recorded
    validation_errors: NonNegativeInt | None = None  # of them
    calibrated: bool | None = None  # whether these rows show that the probabilities are calibrated
    threshold: Share | None = None  # below this probability the model abstains
    coverage: Share | None = None  # share of the validation rows with at least the threshold

    @model_validator(mode="after")
    def _fits(self) -> "LabelSet":
        if self.form == "label" and len(self.labels) < 2:
            raise ValueError("form 'label' needs at least two `labels`")
        if self.bias is not None and len(self.bias) != len(self.labels):
            raise ValueError(f"{len(self.bias)} numbers in `bias` for {len(self.labels)} labels")
        return self


def write_label_set(folder: Path, labels: LabelSet) -> None:
    write_json(folder / LABELS, labels.model_dump(mode="json"))


def copy_label_set(checkpoint: Path, out: Path) -> None:
    """Copy what makes a tuned checkpoint more than its weights, labels and head, into an export; nothing if untuned."""
    if (labels := read_label_set(checkpoint)) is not None:
        for name in (LABELS, HEAD) if labels.method == "head" else (LABELS,):
            shutil.copyfile(checkpoint / name, out / name)


def refuse_head(checkpoint: Path, format_: str) -> None:
    """Raise `ConfigError` for a checkpoint with a classification head, which a format cannot hold."""
    labels = read_label_set(checkpoint)
    if labels is not None and labels.method == "head":
        raise ConfigError(
            f"--format {format_}: {checkpoint} is a classifier, and its head has no place in this format: it would be "
            "the model before the tuning; use --format nautile or onnx"
        )


def read_label_set(folder: Path) -> LabelSet | None:
    """Read the label set in a checkpoint's folder; None if it was not tuned. Raises `ConfigError` if it is invalid."""
    path = folder / LABELS
    if not path.is_file():
        return None
    try:
        return LabelSet.model_validate(read_bounded_json(path))
    except ValidationError as error:
        first_error = error.errors(include_url=False)[0]
        field = ".".join(map(str, first_error["loc"]))
        raise ConfigError(f"{path}: `{field}`: {first_error['msg']}") from None
