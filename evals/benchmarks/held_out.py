"""The benchmarks' questions, to keep their text out of training: all of them, even if only some are evaluated.

The text is that of the benchmark, with its passage if it has one, but without options and without the prompt.
"""

from collections.abc import Iterator, Sequence

from nautile.configs.evaluation import BenchmarkChoice
from nautile.data.screening.contamination import HeldOutQuestion
from nautile.evals.benchmarks.loading import check_benchmark, items_for
from nautile.evals.benchmarks.stand_ins import GENERATED, STAND_INS


def questions(
    choices: Sequence[BenchmarkChoice], seed: int, bad_rows: dict[str, list[str]] | None = None
) -> Iterator[HeldOutQuestion]:
    """Yield the questions of each benchmark; of a generated stand-in only those that are evaluated.

    The messages of records that are left out are added to `bad_rows`, by benchmark. Raises `ConfigError` before
    anything is loaded if a benchmark is unavailable, and as `evals.benchmarks.loading.items_for`.
    """
    for choice in choices:
        check_benchmark(choice)
    for choice in choices:
        complete = choice if choice.name in STAND_INS else choice.model_copy(update={"items": None})
        for name, items in items_for(complete, seed, bad_rows).items():
            for item in items:
                yield HeldOutQuestion(name, item.id, item.question, whole=name in GENERATED)
