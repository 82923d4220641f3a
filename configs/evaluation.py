"""The sections of evaluation and of the report: benchmarks, how they are asked, and other models to compare with."""

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveInt, model_validator

from configs.base import Operational, Section, Share, refuse_removed
from configs.training import ProblemsConfig

# Stand-ins that generate as many items as they are asked for; the other benchmarks have a fixed number.
GENERATED_BENCHMARKS = ("gsm_symbolic", "wiki_choice", "wiki_trivia", "instructions")
AnswerMode = Literal["generate", "likelihood"]
PaperColumn = Literal["", "qwen2.5_0.5b", "granite_350m", "lfm2.5_350m", "smollm2_360m"]


class BenchmarkChoice(Section):
    """One benchmark to evaluate. Its records come from the Hub, or from a file in the Hub's schema."""

    name: str  # in evals/benchmarks/catalogue.py
    items: PositiveInt | None = None  # how many, from the first; None: all
    revision: str = ""  # a commit of the Hub; empty: the one pinned in the catalogue
    path: str = ""  # a local file instead of the Hub
    bad_rows_share: Operational[Share] = 0.001  # of its records, that may be none: they are left out, counted and named


class ModelUnderTest(Section):
    """A model behind one of `[endpoints]`, evaluated as our checkpoints are."""

    endpoint: str
    column: PaperColumn = ""  # of the paper's Table 2, shown next to the measured figures; empty: the paper has none


class EvaluateConfig(Section):
    """Paper §5: zero-shot, strict.

    A checkpoint's answer has up to `max_tokens` tokens, or what its context leaves after a prompt of that size
    (`model.decoding.buckets`). A prompt above `prompt_length` tokens is skipped, and counted.
    """

    benchmarks: tuple[BenchmarkChoice, ...]
    # "generate" is the paper's; "likelihood" compares the probabilities of the options' texts.
    ways: Annotated[tuple[AnswerMode, ...], Field(min_length=1)] = ("generate",)
    models: tuple[ModelUnderTest, ...] = ()  # besides our checkpoints, each an evaluation of its own
    held_out: ProblemsConfig | None = None  # held-out problems of the kind that the reinforcement stages train on
    max_tokens: PositiveInt = 512
    prompt_length: PositiveInt = 512  # tokens
    batch: Operational[PositiveInt] = 32  # items that a checkpoint answers together
    temperature: NonNegativeFloat = 0.0  # 0: the likeliest token
    budget_dollars: Operational[NonNegativeFloat] = 0.0  # a hard limit for each of `models`; 0: none

    @model_validator(mode="before")
    @classmethod
    def _no_removed_keys(cls, fields: Any) -> Any:
        refuse_removed("evaluate", fields, ("tables",))
        return fields


class ReportConfig(Section):
    """The report of a run."""

    title: str = "Nautile"
    samples: PositiveInt = 12  # of each kind that are shown


class HeldOutPart(Section):
    """The part of the configuration that the questions depend on: the benchmarks and where each is read."""

    benchmarks: tuple[BenchmarkChoice, ...]
