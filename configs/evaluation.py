"""The sections of what is held out, of evaluation and of the report.

Benchmarks, how models answer them, and other models to compare with.
"""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from nautile.configs.base import Operational, Section, Share, Worker
from nautile.configs.training import ProblemsConfig

AnswerMode = Literal["generate", "likelihood"]
PaperColumn = Literal["", "qwen2.5_0.5b", "granite_350m", "lfm2.5_350m", "smollm2_360m"]


class BenchmarkChoice(Section):
    """A benchmark to evaluate. Its records come from the Hub, or from a local file with the same schema."""

    name: str  # of the registry of benchmarks, evals/benchmarks/registry.py
    items: PositiveInt | None = None  # only so many of them; None: all
    revision: str = ""  # a commit of the Hub; empty: the one pinned in the catalogue
    path: Worker[str] = ""  # a local file instead of the Hub
    bad_rows_share: Operational[Share] = 0.001  # share of invalid records to tolerate: they are skipped and reported


class HeldOutConfig(Section):
    """The benchmarks whose questions are kept out of training text: what is ingested, distilled, and drawn as problems.

    All questions of a benchmark are held out, whatever `items` says; of a generated one so many as `items`. The
    order of the list changes nothing. A configuration without this section holds out what `[evaluate]` asks. A
    benchmark that is asked and not held out is evaluated, and its scores say that training text was not screened for
    it.
    """

    benchmarks: tuple[BenchmarkChoice, ...]


class ModelUnderTest(Section):
    """A model of one of `[endpoints]`, evaluated like our checkpoints."""

    endpoint: Worker[str]
    column: PaperColumn = ""  # column of the paper's Table 2 to show beside the results; empty: none


class EvaluateConfig(Section):
    """Zero-shot evaluation with strict grading (paper §5).

    A checkpoint's answer has at most `max_tokens` tokens, fewer if the context is too short for them after the prompt
    (`model.decoding.cache`). A prompt of more than `prompt_length` tokens is skipped and counted.
    """

    benchmarks: tuple[BenchmarkChoice, ...]
    # "generate" is the paper's way; "likelihood" compares the probabilities of the options' texts.
    ways: Annotated[tuple[AnswerMode, ...], Field(min_length=1)] = ("generate",)
    models: tuple[ModelUnderTest, ...] = ()  # further models, each a separate evaluation
    held_out: ProblemsConfig | None = None  # held-out problems of the same kind as the reinforcement stages' problems
    max_tokens: PositiveInt = 512
    prompt_length: PositiveInt = 512  # tokens
    batch: Operational[PositiveInt] = 32  # items that a checkpoint answers together
    temperature: NonNegativeFloat = 0.0  # 0: greedy decoding
    # Sampled answers to each question besides the one above, for mean@k and pass@k; None: none. Their temperature is
    # `sample_temperature`, or 1.
    samples: int | None = Field(default=None, ge=1, le=4096)
    sample_temperature: PositiveFloat | None = None
    budget_dollars: Operational[Worker[NonNegativeFloat]] = 0.0  # a hard limit for each of `models`; 0: none

    @model_validator(mode="after")
    def _samples_are_generated(self) -> "EvaluateConfig":
        if self.samples and "generate" not in self.ways:
            raise ValueError('samples: sampled answers are generated: add "generate" to `ways`, or leave `samples` out')
        if self.sample_temperature and not self.samples:
            raise ValueError("sample_temperature: it is that of `samples`, which is not set")
        return self

    @property
    def answers(self) -> int:
        """Generated answers to a question: the one by `temperature` and the samples."""
        return (1 + (self.samples or 0)) if "generate" in self.ways else 0

    def sampling(self) -> "EvaluateConfig":
        """The settings by which the samples are drawn."""
        return self.model_copy(update={"temperature": self.sample_temperature or 1.0})


class ReportConfig(Section):
    """The report of a run."""

    samples: PositiveInt = 12  # samples of each kind to show
