"""The section of `nautile distill --label`: texts that a teacher labels, and rows with known labels to check it by."""

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt, field_validator, model_validator

from configs.base import Operational, Section, Share
from configs.endpoint import EndpointConfig, check_fallbacks, with_fallbacks
from configs.tune import LabelledDataConfig


class LabelConfig(Section):
    """Labels by a teacher (paper §1, §6): the cheap way to rows that `nautile tune` learns from."""

    data: LabelledDataConfig  # the texts; its label column need not exist
    gold: LabelledDataConfig  # rows labelled by people: asked first, and kept out of what is labelled
    labels: tuple[str, ...] = Field(min_length=2)
    descriptions: dict[str, str] = {}  # of labels whose names do not say all
    instructions: str = "Choose the label that fits the text best."
    teacher: str  # of [endpoints]
    max_tokens: PositiveInt = 64  # of a reply
    temperature: NonNegativeFloat = 0.0
    seed: NonNegativeInt = 0
    longest: PositiveInt = 8000  # characters of a text that the teacher is sent; the rest is cut
    least_kappa: Operational[float | None] = Field(default=None, ge=-1, le=1)  # with less agreement nothing is labelled
    max_rejected_share: Operational[Share] = 0.5  # of the replies; more than this fails the stage
    budget_dollars: Operational[NonNegativeFloat] = 0.0  # a hard limit; 0: none
    budget_tokens: Operational[NonNegativeInt] = 0  # the same, of prompts and replies together

    @field_validator("labels")
    @classmethod
    def _distinct(cls, labels: tuple[str, ...]) -> tuple[str, ...]:
        if wrong := [label for label in labels if not label or label != label.strip() or len(label.splitlines()) > 1]:
            raise ValueError(f"{wrong[0]!r} is empty, has several lines or begins or ends with a space")
        if len({label.casefold() for label in labels}) < len(labels):
            raise ValueError("no two may be alike, nor differ only in their case")
        return labels

    @model_validator(mode="after")
    def _described(self) -> "LabelConfig":
        if unknown := sorted(set(self.descriptions) - set(self.labels)):
            raise ValueError(f"`descriptions` has {unknown[0]!r}, which is none of the labels")
        return self


class LabelRun(Section):
    """The tables of a file that `nautile distill --label` reads."""

    label: LabelConfig
    endpoints: dict[str, EndpointConfig] = {}

    @model_validator(mode="after")
    def _names_agree(self) -> "LabelRun":
        check_fallbacks(self.endpoints)
        if self.label.teacher not in self.endpoints:
            raise ValueError(
                f"label.teacher: no endpoint {self.label.teacher!r}; [endpoints] has {sorted(self.endpoints)}"
            )
        for name in with_fallbacks([self.label.teacher], self.endpoints):
            if self.endpoints[name].kind == "checker":
                raise ValueError(f"label.teacher: {name!r} is of kind 'checker', which marks answers and writes none")
        return self
