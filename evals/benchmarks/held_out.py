"""Every question of the benchmarks as text to keep out of training: all of them, however few are asked.

The text is the benchmark's own, with a passage where the question has one, and without options and our prompt.
"""

from collections.abc import Iterator, Sequence

from configs.evaluation import BenchmarkChoice
from data.screening.contamination import HeldOutQuestion
from evals.benchmarks.loading import check, items_for
from evals.benchmarks.stand_ins import GENERATED, STAND_INS


def questions(choices: Sequence[BenchmarkChoice], seed: int) -> Iterator[HeldOutQuestion]:
    """The questions of each benchmark in turn; of a stand-in, which is made to any number, those that are asked.

    Raises `ConfigError` before anything is loaded where a benchmark cannot be had, and as
    `evals.benchmarks.loading.items_for`.
    """
    for choice in choices:
        check(choice)
    for choice in choices:
        every = choice if choice.name in STAND_INS else choice.model_copy(update={"items": None})
        for name, items in items_for(every, seed).items():
            for item in items:
                yield HeldOutQuestion(name, item.id, item.question, whole=name in GENERATED)
