"""`labels.json` and the head of a tuned checkpoint: task, reading of texts, calibration of the probabilities."""

import shutil
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt, ValidationError, model_validator
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from nautile.common.errors import ConfigError
from nautile.common.files import atomic_path, read_bounded_json, write_json
from nautile.common.text import first_line
from nautile.configs.base import Section, Share
from nautile.data.chat_template import encode_direct_reply, encode_prompt_end, encode_prompt_start
from nautile.data.tokenizer import Tokenizer

LABELS = "labels.json"
HEAD = "head.safetensors"


class LabelSet(Section):
    """How to prompt a tuned checkpoint and read its answers. Fields about labels are empty or None for other forms."""

    form: Literal["label", "entities", "chat", "opinions"]
    method: Literal["head", "verbalised", "full", "lora"]
    labels: tuple[str, ...] = ()
    instructions: str = ""  # precede the text in the user's turn
    longest: PositiveInt = 128  # tokens of a text; longer texts are cut
    # Method "head": a text may have several of the labels, or none. The probability of each is the sigmoid of its
    # logit, and it is given from its entry of `thresholds` on; False: softmax over the labels, and one is given.
    multi_label: bool = False
    thresholds: tuple[Share, ...] | None = None  # multi_label: by label
    pooling: Literal["last", "mean"] = "last"  # method "head": over the hidden states of a text's tokens
    bias: tuple[float, ...] | None = None  # method "verbalised": each label's mean log-probability, to be subtracted
    temperature: PositiveFloat | None = None  # logits are divided by it to calibrate them; None: not fitted
    # On which temperature and threshold were fitted; None: not recorded. multi_label: decisions, one a row and label.
    validation_rows: PositiveInt | None = None
    validation_errors: NonNegativeInt | None = None  # of them
    calibrated: bool | None = None  # whether these rows show that the probabilities are calibrated
    threshold: Share | None = None  # below this probability the model abstains
    coverage: Share | None = None  # share of the validation rows with at least the threshold

    @property
    def classes(self) -> tuple[str, ...]:
        """What a classifier chooses from: the labels, or BIO tags of tokens. Empty for a form that answers in words."""
        if self.form == "entities" and self.method == "head":
            return ("O", *(f"{prefix}-{label}" for label in self.labels for prefix in "BI"))
        return self.labels if self.form == "label" else ()

    @model_validator(mode="after")
    def _fits(self) -> "LabelSet":
        if self.form == "label" and len(self.labels) < 2:
            raise ValueError("form 'label' needs at least two `labels`")
        if self.multi_label and (self.method != "head" or len(self.thresholds or ()) != len(self.labels)):
            raise ValueError("`multi_label` needs the method 'head' and a number for each label in `thresholds`")
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


class Head(NamedTuple):
    """Weights of a linear head: logits = features · weight + bias; float32 [D, C] and [C]."""

    weight_DC: np.ndarray
    bias_C: np.ndarray

    def logits(self, features_ND: np.ndarray) -> np.ndarray:
        """Logits float32 [N, C] of features [N, D]."""
        return features_ND @ self.weight_DC + self.bias_C


def save_head(path: Path, head: Head) -> None:
    """Write a head as safetensors, atomically."""
    with atomic_path(path) as temporary:
        save_file({"weight": np.ascontiguousarray(head.weight_DC), "bias": head.bias_C}, temporary)


def load_head(path: Path, width: int, labels: int) -> Head:
    """Read a head. Raises `ConfigError` if the file is missing or broken, or if its shape is another."""
    try:
        tensors = load_file(path)
        head = Head(tensors["weight"], tensors["bias"])
    except (OSError, SafetensorError, KeyError) as error:
        raise ConfigError(f"{path}: cannot be read as the head of a classifier ({first_line(error)})") from None
    if head.weight_DC.shape != (width, labels) or head.bias_C.shape != (labels,):
        raise ConfigError(
            f"{path}: has the shape {head.weight_DC.shape}, and model and labels need ({width}, {labels})"
        )
    return head


class Reading(NamedTuple):
    """How a classifier makes token ids of a text, for programs without this project.

    The text is stripped and cut after `longest` tokens, `suffix` is appended, and the ids of the whole stand between
    `before` and `after`. `most` ids are read. `replies`: the ids of each label's text, whose likelihoods are compared;
    None for a head.
    """

    before: list[int]
    suffix: str
    after: list[int]
    longest: int
    most: int
    replies: list[list[int]] | None


def reading_of(labels: LabelSet, tokenizer: Tokenizer, context: int) -> Reading:
    """The reading of a checkpoint tuned for labels, or of one with a head. Raises `ConfigError` if no text fits."""
    if labels.method == "head":
        return Reading([tokenizer.end_of_text], "", [], min(labels.longest, context - 1), context, None)
    before = encode_prompt_start(tokenizer, f"{labels.instructions}\n\n" if labels.instructions else "")
    suffix = "\n"
    after = encode_prompt_end(tokenizer, "")[len(tokenizer.encode(suffix)) :]
    replies = [encode_direct_reply(tokenizer, label) for label in labels.labels]
    most = context - max(map(len, replies))
    if len(before) + len(after) >= most:
        raise ConfigError(
            f"{LABELS}: instructions of {len(before)} tokens and the longest label leave no room for a text in the "
            f"model's context of {context}"
        )
    return Reading(before, suffix, after, labels.longest, most, replies)


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
