"""What a benchmark is, and the paper's eleven (§5, Table 2): Hub id, reported split, size, prompt, answer kind.

The split is the one that is usually reported; no training stage reads it. Each benchmark is read at a pinned commit
(`PINNED`) unless the configuration names another (`evaluate.benchmarks[].revision`).
"""

import logging
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from hashlib import sha256
from itertools import islice
from typing import Any

from nautile.common.errors import ConfigError, Retryable
from nautile.common.text import first_line
from nautile.evals.benchmarks import schemas
from nautile.evals.benchmarks.items import (
    KINDS,
    LETTERS,
    AnswerKind,
    BenchmarkItem,
    Grader,
    answer_kind,
    multiple_choice,
)
from nautile.evals.benchmarks.schemas import BenchmarkRecord, Question
from nautile.evals.benchmarks.titles import PARTS, TITLES

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Benchmark:
    """A benchmark: where its records come from, and all that is shown of it; the name is that of its registry.

    Its records are those of the Hub's `hub`, `subset` and `split` at `commit`, or of a local file `path` (of JSON
    lines, Parquet or CSV), and `read` parses one; or `build(seed, count)` makes its questions, the same for the same
    arguments, and `size` is how many without `items`. A composite has `parts` instead, and scores their mean.

    - `size`: the number of records of the split. `chance`: the accuracy of guessing (0..1).
    - `kind`: of its answers; None: of each answer by itself (`answer_kind`). A question with options is a choice.
    - `grade`: a grader of its own in place of the one of the kind, see `items.Grader`.
    - `ask`: prompt of a question without options.
    - `gated`: the Hub requires users to accept an agreement. `csv_texts`: the columns that are read, of a benchmark
      whose files are CSV: they are texts, whatever they look like.
    - `similar`: its questions share a template, so a text is screened for whole questions.
    - `stand_in`: what it is made of, if it stands in for another; `like`: for which.
    - `listed`: whether `[evaluate] benchmarks` and `[held_out] benchmarks` may name it.
    - Of no plug-in: `train`, the split of problems to reinforce on (`rl.problems`); `open_point`, what the paper does
      not specify.
    - `version`: of its questions, its prompt and its own grader (`evals.benchmarks.versions`).
    """

    name: str = ""
    title: str = ""
    hub: str = ""
    subset: str = "default"
    split: str = "test"
    size: int = 0
    kind: AnswerKind | None = None
    chance: float = 0.0
    read: Callable[[BenchmarkRecord], Question] | None = None
    ask: str = "{question}"
    _: KW_ONLY
    commit: str = ""
    path: str = ""
    build: Callable[[int, int], Iterable[BenchmarkItem | Question]] | None = None
    parts: tuple[str, ...] = ()
    grade: Grader | None = None
    gated: bool = False
    csv_texts: tuple[str, ...] = ()
    similar: bool = False
    stand_in: str = ""
    like: str = ""
    listed: bool = True
    train: str = ""
    open_point: str = ""
    version: int | None = None

    def __post_init__(self) -> None:
        origins = [bool(origin) for origin in (self.hub, self.path, self.build, self.parts)]
        if sum(origins) != self.listed:
            raise ValueError("a benchmark has one of `hub`, `path`, `build` and `parts`")
        if (self.hub or self.path) and not self.read:
            raise ValueError("`read` is missing, which parses a record")
        if self.listed and not self.parts and self.size < 1:
            raise ValueError("`size` is missing, the number of its questions")
        if self.kind not in (None, *KINDS):
            raise ValueError(f"no answer kind {self.kind!r}; there are {', '.join(KINDS)}")

    @property
    def source(self) -> str:
        """Where its records come from, for messages."""
        return f"{self.hub} {self.split}" if self.hub else self.path or "its generator"


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

SEEDED_ORDER = "options in a seeded order; the paper does not give its prompt"

# Each entry: where the records are and how many; how they are graded, guessed, parsed and asked; what the paper leaves
# open. Its figures are in `evals.tables.paper_figures`.
PAPER: tuple[Benchmark, ...] = (
    Benchmark("openbookqa", TITLES["openbookqa"], "allenai/openbookqa", "main", "test", 500,
              "choice", 1 / 4, partial(schemas.labelled, question="question_stem"), train="train",
              open_point=SEEDED_ORDER),
    Benchmark("arc_easy", TITLES["arc_easy"], "allenai/ai2_arc", "ARC-Easy", "test", 2376,
              "choice", 1 / 4, partial(schemas.labelled, question="question"), train="train",
              open_point=SEEDED_ORDER),
    Benchmark("arc_challenge", TITLES["arc_challenge"], "allenai/ai2_arc", "ARC-Challenge", "test", 1172,
              "choice", 1 / 4, partial(schemas.labelled, question="question"), train="train",
              open_point=SEEDED_ORDER),
    Benchmark("arc", TITLES["arc"], parts=PARTS["arc"],
              open_point="one figure in the paper; here the mean of Easy and Challenge"),
    Benchmark("commonsense_qa", TITLES["commonsense_qa"], "tau/commonsense_qa", "default", "validation", 1221,
              "choice", 1 / 5, partial(schemas.labelled, question="question"), train="train",
              open_point=SEEDED_ORDER),
    Benchmark("gsm8k", TITLES["gsm8k"], "openai/gsm8k", "main", "test", 1319,
              "number", 0.0, schemas.gsm8k, NUMBER_PROMPT, train="train"),
    Benchmark("piqa", TITLES["piqa"], "ybisk/piqa", "default", "validation", 1838,
              "choice", 1 / 2, schemas.piqa,
              open_point=SEEDED_ORDER),
    Benchmark("ifeval", TITLES["ifeval"], "google/IFEval", "default", "train", 541,
              "instructions", 0.0, schemas.ifeval,
              open_point="prompt-level strict accuracy; the paper does not say which of IFEval's four"),
    Benchmark("trivia_qa", TITLES["trivia_qa"], "mandarjoshi/trivia_qa", "rc.nocontext", "validation", 17_944,
              "exact", 0.0, schemas.trivia_qa, ALIAS_PROMPT,
              open_point="closed book, exact match with any alias, rc.nocontext validation; the paper does not name "
                         "the split"),
    Benchmark("math_500", TITLES["math_500"], "HuggingFaceH4/MATH-500", "default", "test", 500,
              "math", 0.0, schemas.math_500, MATH_PROMPT,
              open_point="equivalence by value, with SymPy; the paper does not name its checker"),
    Benchmark("mmlu_pro", TITLES["mmlu_pro"], "TIGER-Lab/MMLU-Pro", "default", "test", 12_032,
              "choice", 1 / 10, schemas.mmlu_pro,
              open_point=SEEDED_ORDER),
    Benchmark("mmlu", TITLES["mmlu"], "cais/mmlu", "all", "test", 14_042,
              "choice", 1 / 4, schemas.mmlu,
              open_point=SEEDED_ORDER),
    Benchmark("gpqa_diamond", TITLES["gpqa_diamond"], "Idavidrein/gpqa", "gpqa_diamond", "train", 198,
              "choice", 1 / 4, schemas.gpqa, gated=True, csv_texts=schemas.GPQA_COLUMNS,
              open_point="options in a seeded order"),
)  # fmt: skip
"""The benchmarks of the paper, in the order of its Table 2."""
PAPER = tuple(replace(entry, commit=PINNED.get(entry.hub, "")) for entry in PAPER)


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
            items.append(item_of(benchmark, index, _question(benchmark, index, record), seed))
        except ConfigError as error:
            bad.append(str(error))
    if len(bad) > bad_rows_share * (index + 1):
        counts = f"; of {index + 1:,} records {len(bad):,} are bad, and `bad_rows_share` allows {bad_rows_share:.2%}"
        raise ConfigError(bad[0] + (counts if len(bad) > 1 or bad_rows_share else ""))
    if not items:
        raise ConfigError(f"{benchmark.name}: {benchmark.source} has no records")
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


def built(benchmark: Benchmark, seed: int, count: int | None) -> list[BenchmarkItem]:
    """Make `count` questions (None: as many as its size) by its generator. Raises `ConfigError` if that fails."""
    assert benchmark.build
    count = count or benchmark.size
    made: list[BenchmarkItem] = []
    try:
        for index, question in enumerate(islice(benchmark.build(seed, count), count)):
            if isinstance(question, Question):
                question = item_of(benchmark, index, question, seed)
            made.append(replace(question, benchmark=benchmark.name, index=index, grader=benchmark.grade))
    except (ConfigError, Retryable):
        raise
    except Exception as error:  # the code of a plug-in may raise anything
        what = f"{type(error).__name__}: {first_line(error)}"
        raise ConfigError(f"{benchmark.name}: its generator failed after {len(made):,} questions ({what})") from error
    if not made:
        raise ConfigError(f"{benchmark.name}: its generator made no question")
    return made


def item_of(benchmark: Benchmark, index: int, question: Question, seed: int) -> BenchmarkItem:
    """Convert a question to the item that is asked: with its options in a seeded order, and with its prompt."""
    identity = question.id or str(index)
    options, expected = question.options, question.expected
    # By the question's id where it has one: a record that is left out then changes no other question.
    if question.correct is not None:  # multiple choice: the expected answer is a letter
        options, correct = shuffled(options, question.correct, seed, benchmark.name, identity)
        kind: AnswerKind = "choice"
        expected = LETTERS[correct]
        prompt = multiple_choice(question.text, options)
    else:
        kind = benchmark.kind or answer_kind(expected)
        prompt = benchmark.ask.format(question=question.text)
    return BenchmarkItem(
        benchmark=benchmark.name,
        index=index,
        id=identity,
        prompt=prompt,
        kind=kind,
        expected=expected,
        options=options,
        aliases=question.aliases,
        instructions=question.instructions,
        arguments=question.arguments,
        category=question.category,
        question=question.text,
        rationale=question.rationale,
        guess=benchmark.chance,
        grader=benchmark.grade,
    )


def _question(benchmark: Benchmark, index: int, record: Mapping[str, Any] | ConfigError) -> Question:
    """Parse a record. Raises `ConfigError` for a bad one, also for what the parser of a plug-in raises."""
    if isinstance(record, ConfigError):
        raise record
    where = f"{benchmark.name}: record {index} of {benchmark.source}"
    try:
        assert benchmark.read
        question = benchmark.read(BenchmarkRecord(record, where))
        if isinstance(question, Question):
            return question
    except (ConfigError, Retryable):
        raise
    except Exception as error:
        raise ConfigError(f"{where}: {type(error).__name__}: {first_line(error)}") from error
    raise ConfigError(f"{where}: its parser returned {type(question).__name__}, and no Question")
