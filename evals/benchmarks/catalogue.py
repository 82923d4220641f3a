"""Catalogue of the paper's eleven benchmarks (§5, Table 2): Hub id, reported split, size, prompt, answer kind.

The split is the one that is usually reported; no training stage reads it. Each benchmark is read at a pinned commit
(`PINNED`) unless the configuration names another (`evaluate.benchmarks[].revision`).
"""

import logging
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from typing import Any

from nautile.common.errors import ConfigError
from nautile.evals.benchmarks import schemas
from nautile.evals.benchmarks.items import LETTERS, AnswerKind, BenchmarkItem, multiple_choice
from nautile.evals.benchmarks.schemas import BenchmarkRecord, Question

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Benchmark:
    """A benchmark. `size`: number of records of the split. `chance`: accuracy of guessing (0..1). `gated`: the Hub
    requires users to accept an agreement. `read`: parses a record. `ask`: prompt of a question without options.
    `csv_texts`: the columns that are read, of a benchmark whose files are CSV: they are texts, whatever they look like.
    `version`: of `read` and the prompt (`evals.benchmarks.versions`).
    """

    name: str
    title: str
    hub: str
    subset: str
    split: str
    size: int
    kind: AnswerKind
    chance: float
    read: Callable[[BenchmarkRecord], Question]
    ask: str = "{question}"
    gated: bool = False
    csv_texts: tuple[str, ...] = ()
    version: int = 1

    @property
    def pinned(self) -> str:
        """The default commit of `hub`."""
        return PINNED[self.hub]


NUMBER_PROMPT = "{question} Give the result as your final answer. Do not include units."
ALIAS_PROMPT = "{question}\n\nAnswer with the name or phrase alone."
MATH_PROMPT = "{question}\n\nGive the final answer once, in \\boxed{{}}."

# Commits that several published harnesses and papers pin. They were recorded without access to the Hub; a wrong commit
# is refused and never read as other data. PIQA's repository has a loading script, which the client no longer runs, so
# its commit is the Hub's own conversion to Parquet. Such a branch has no card, so its only configuration is `default`.
PINNED: dict[str, str] = {
    "allenai/openbookqa": "388097ea7776314e93a529163e0fea805b8a6454",
    "allenai/ai2_arc": "210d026faf9955653af8916fad021475a3f00453",
    "tau/commonsense_qa": "94630fe30dad47192a8546eb75f094926d47e155",
    "openai/gsm8k": "e53f048856ff4f594e959d75785d2c2d37b678ee",
    "ybisk/piqa": "142c51238b3ca2bc61e9a075913871b8b600e8e1",
    "google/IFEval": "966cd89545d6b6acfd7638bc708b98261ca58e84",
    "mandarjoshi/trivia_qa": "0f7faf33a3908546c6fd5b73a660e0f8ff173c2f",
    "HuggingFaceH4/MATH-500": "6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be",
    "TIGER-Lab/MMLU-Pro": "b189ec765aa7ed75c8acfea42df31fdae71f97be",
    "cais/mmlu": "c30699e8356da336a370243923dbaf21066bb9fe",
    "Idavidrein/gpqa": "633f5ee89ab8ad4522a9f850766b73f62147ffdd",
}

# Each entry: where the records are and how many; then how they are graded, guessed, parsed and asked.
BENCHMARKS: dict[str, Benchmark] = {
    benchmark.name: benchmark
    for benchmark in (
        Benchmark("openbookqa", "OpenBookQA", "allenai/openbookqa", "main", "test", 500,
                  "choice", 1 / 4, partial(schemas.labelled, question="question_stem")),
        Benchmark("arc_easy", "ARC Easy", "allenai/ai2_arc", "ARC-Easy", "test", 2376,
                  "choice", 1 / 4, partial(schemas.labelled, question="question")),
        Benchmark("arc_challenge", "ARC Challenge", "allenai/ai2_arc", "ARC-Challenge", "test", 1172,
                  "choice", 1 / 4, partial(schemas.labelled, question="question")),
        Benchmark("commonsense_qa", "CommonsenseQA", "tau/commonsense_qa", "default", "validation", 1221,
                  "choice", 1 / 5, partial(schemas.labelled, question="question")),
        Benchmark("gsm8k", "GSM8K (0-shot)", "openai/gsm8k", "main", "test", 1319,
                  "number", 0, schemas.gsm8k, NUMBER_PROMPT),
        Benchmark("piqa", "PIQA", "ybisk/piqa", "default", "validation", 1838,
                  "choice", 1 / 2, schemas.piqa),
        Benchmark("ifeval", "IFEval", "google/IFEval", "default", "train", 541,
                  "instructions", 0, schemas.ifeval),
        Benchmark("trivia_qa", "TriviaQA", "mandarjoshi/trivia_qa", "rc.nocontext", "validation", 17_944,
                  "exact", 0, schemas.trivia_qa, ALIAS_PROMPT),
        Benchmark("math_500", "MATH500", "HuggingFaceH4/MATH-500", "default", "test", 500,
                  "math", 0, schemas.math_500, MATH_PROMPT),
        Benchmark("mmlu_pro", "MMLU-Pro", "TIGER-Lab/MMLU-Pro", "default", "test", 12_032,
                  "choice", 1 / 10, schemas.mmlu_pro),
        Benchmark("mmlu", "MMLU", "cais/mmlu", "all", "test", 14_042,
                  "choice", 1 / 4, schemas.mmlu),
        Benchmark("gpqa_diamond", "GPQA Diamond", "Idavidrein/gpqa", "gpqa_diamond", "train", 198,
                  "choice", 1 / 4, schemas.gpqa, gated=True, csv_texts=schemas.GPQA_COLUMNS),
    )
}  # fmt: skip

# Rows of Table 2 that are the mean of several benchmarks.
COMPOSITES: dict[str, tuple[str, ...]] = {"arc": ("arc_easy", "arc_challenge")}


def items_of(
    benchmark: Benchmark,
    records: Iterable[Mapping[str, Any] | ConfigError],
    seed: int,
    bad_rows_share: float = 0.0,
    bad_rows: list[str] | None = None,
) -> list[BenchmarkItem]:
    """Convert the records of a split to items, in order. A record that could not be read is passed as its error.

    If more than `bad_rows_share` of the records are bad, raises `ConfigError` that names the first and its field.
    Otherwise bad records are left out, and their messages are added to `bad_rows`.
    """
    # A bad record fails the whole benchmark if there are too many of them, which only the last record tells.
    items, bad = [], []  # `bad`: messages of invalid records
    index = -1
    for index, record in enumerate(records):
        try:
            if isinstance(record, ConfigError):
                raise record
            row = BenchmarkRecord(record, f"{benchmark.name}: record {index} of {benchmark.hub} {benchmark.split}")
            items.append(_item(benchmark, index, benchmark.read(row), seed))
        except ConfigError as error:
            bad.append(str(error))
    if len(bad) > bad_rows_share * (index + 1):
        counts = f"; of {index + 1:,} records {len(bad):,} are bad, and `bad_rows_share` allows {bad_rows_share:.2%}"
        raise ConfigError(bad[0] + (counts if len(bad) > 1 or bad_rows_share else ""))
    if not items:
        raise ConfigError(f"{benchmark.name}: {benchmark.hub} {benchmark.split} has no records")
    for message in bad:
        logger.warning("left out: %s", message)
    if bad_rows is not None:
        bad_rows += bad
    return items


def choose(items: Sequence[BenchmarkItem], count: int | None, seed: int) -> list[BenchmarkItem]:
    """Select `count` of the items (None: all) by `seed`, in their order. A larger selection contains the smaller."""
    if count is None or count >= len(items):
        return list(items)
    # By a hash of each item's own name: a larger count adds items to the smaller selection, and never exchanges them.
    by_hash = sorted(items, key=lambda item: sha256(f"{seed}/{item.benchmark}/{item.index}".encode()).digest())
    return sorted(by_hash[:count], key=lambda item: item.index)


def shuffled(options: Sequence[str], correct: int, *identity: object) -> tuple[tuple[str, ...], int]:
    """Shuffle the options by `identity`; return them and the new index of the correct one.

    Options that refer to each other by position ("all of the above", "A and B") keep their published order.
    """
    if any(schemas.POSITIONAL.search(option) for option in options):
        return tuple(options), correct
    order = list(range(len(options)))
    random.Random("/".join(map(str, identity))).shuffle(order)
    return tuple(options[i] for i in order), order.index(correct)


def _item(benchmark: Benchmark, index: int, question: Question, seed: int) -> BenchmarkItem:
    identity = question.id or str(index)
    options, expected = question.options, question.expected
    # By the question's id where it has one: a record that is left out then changes no other question.
    if question.correct is not None:  # multiple choice: the expected answer is a letter
        options, correct = shuffled(options, question.correct, seed, benchmark.name, identity)
        expected = LETTERS[correct]
        prompt = multiple_choice(question.text, options)
    else:
        prompt = benchmark.ask.format(question=question.text)
    return BenchmarkItem(
        benchmark=benchmark.name,
        index=index,
        id=identity,
        prompt=prompt,
        kind=benchmark.kind,
        expected=expected,
        options=options,
        aliases=question.aliases,
        instructions=question.instructions,
        arguments=question.arguments,
        category=question.category,
        question=question.text,
    )
