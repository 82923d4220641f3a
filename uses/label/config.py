"""The section of `nautile distill --label`: texts for a teacher to label, and rows with known labels to check it."""

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt, field_validator, model_validator

from nautile.configs.base import Operational, Section, Seed, Share
from nautile.configs.endpoint import EndpointConfig, check_fallbacks, check_writer, with_fallbacks
from nautile.uses.tune.config import LabelledDataConfig


class LabelConfig(Section):
    """Labelling by a teacher (paper §1, §6): a cheap way to get training rows for `nautile tune`."""

    data: LabelledDataConfig  # the texts to label; its label column need not exist
    gold: LabelledDataConfig  # rows labelled by people: sent to the teacher first, and not part of the result
    labels: tuple[str, ...] = Field(min_length=2)
    descriptions: dict[str, str] = {}  # label -> explanation, for names that are not self-explanatory
    instructions: str = "Choose the label that fits the text best."
    teacher: str  # of [endpoints]
    max_tokens: PositiveInt = 64  # of a reply
    temperature: NonNegativeFloat = 0.0
    seed: Seed = 0
    longest: PositiveInt = 8000  # characters of a text; longer ones are truncated for the teacher
    least_kappa: Operational[float | None] = Field(default=None, ge=-1, le=1)  # minimum agreement on `gold` to go on
    max_rejected_share: Operational[Share] = 0.5  # of the replies; a larger share fails the stage
    budget_dollars: Operational[NonNegativeFloat] = 0.0  # a hard limit; 0: none
    budget_tokens: Operational[NonNegativeInt] = 0  # a hard limit of prompts and replies together; 0: none

    @field_validator("labels")
    @classmethod
    def _distinct(cls, labels: tuple[str, ...]) -> tuple[str, ...]:
        if wrong := [label for label in labels if not label or label != label.strip() or len(label.splitlines()) > 1]:
            raise ValueError(f"{wrong[0]!r} is empty, has several lines or begins or ends with a space")
        if len({label.casefold() for label in labels}) < len(labels):
            raise ValueError("two labels are equal, or differ only in case")
        return labels

    @model_validator(mode="after")
    def _described(self) -> "LabelConfig":
        if unknown := sorted(set(self.descriptions) - set(self.labels)):
            raise ValueError(f"`descriptions` has {unknown[0]!r}, which is not a label")
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
            check_writer("label.teacher", name, self.endpoints[name])
        return self
