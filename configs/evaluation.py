"""What an evaluation asks of whom: benchmarks, and models of others beside our own checkpoints."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveInt

from configs.base import Section
from configs.training import ProblemsConfig

MADE_TO_NUMBER = ("gsm_symbolic", "wiki_choice", "wiki_trivia", "instructions")  # stand-ins: as many items as are asked
Way = Literal["generate", "likelihood"]
Column = Literal["", "qwen2.5_0.5b", "granite_350m", "lfm2.5_350m", "smollm2_360m"]


class BenchmarkChoice(Section):
    """One benchmark to evaluate: its name in `evals/benchmarks/catalogue.py` and how many items (None: all).

    Its records come from the Hub at the commit `revision` (empty: the one pinned in `evals/benchmarks/catalogue.py`),
    or from the
    file `path` in the Hub's own schema.
    """

    name: str
    items: PositiveInt | None = None
    revision: str = ""
    path: str = ""


class ModelUnderTest(Section):
    """A model behind one of `[endpoints]`, asked what our checkpoints are asked.

    `column`: the column of the paper's Table 2 whose figures stand beside its own; empty: it has none there.
    """

    endpoint: str
    column: Column = ""


class EvaluateConfig(Section):
    """Paper §5: zero-shot, strict. `ways`: `generate` is the paper's; `likelihood` also weighs each option's text.

    A checkpoint's answer has up to `max_tokens` tokens, or what its context leaves after a prompt of that size
    (`model.decoding.buckets`). A prompt above `prompt_length` tokens is not asked, and counted.
    """

    benchmarks: tuple[BenchmarkChoice, ...]
    ways: Annotated[tuple[Way, ...], Field(min_length=1)] = ("generate",)
    models: tuple[ModelUnderTest, ...] = ()  # besides our checkpoints: an evaluation of its own each
    held_out: ProblemsConfig | None = None  # held-out problems of the reinforcement stages' own kind
    max_tokens: PositiveInt = 512
    prompt_length: PositiveInt = 512
    batch: PositiveInt = 32
    temperature: NonNegativeFloat = 0.0
    budget_dollars: NonNegativeFloat = 0.0  # of each of `models`; 0: none
    tables: bool = True
