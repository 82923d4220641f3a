"""What an evaluation asks of whom: benchmarks, and models of others beside our own checkpoints."""

from typing import Literal

from pydantic import PositiveInt

from configs.section import Section

MADE_TO_NUMBER = ("gsm_symbolic", "wiki_choice", "wiki_trivia", "instructions")  # stand-ins: as many items as are asked
Way = Literal["generate", "likelihood"]
Column = Literal["", "qwen2.5_0.5b", "granite_350m", "lfm2.5_350m", "smollm2_360m"]


class BenchmarkChoice(Section):
    """One benchmark to evaluate: its name in `evals/benchmarks.py` and how many items (None: all).

    Its records come from the Hub at the commit `revision` (empty: the one pinned in `evals/benchmarks.py`), or from the
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
