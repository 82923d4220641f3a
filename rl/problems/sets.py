"""Training sets of the Hugging Face Hub as problems: answers are numbers, expressions or choices; and prompts without.

Each training set is prompted and graded like the benchmark of the same name. Only training splits are read; the test
splits are benchmarks.
"""

import random
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from nautile.common.errors import ConfigError
from nautile.configs.training import ProblemSource
from nautile.data.distill.prompts import Prompt, read_prompt_set
from nautile.data.screening.language import detect_language
from nautile.data.sources.reasoning_gym import Problem, ProblemKind, ProblemSplit, problem_split
from nautile.evals.benchmarks.catalogue import BENCHMARKS, Benchmark, items_of
from nautile.evals.benchmarks.items import multiple_choice
from nautile.evals.benchmarks.loading import COMMIT, read_hub
from nautile.evals.benchmarks.schemas import BenchmarkRecord, Question
from nautile.evals.graders.answer_spans import boxed


@dataclass(frozen=True)
class TrainingSet:
    """The training split of a Hub repository, as one or several subsets, and the commit that it is pinned to."""

    parts: tuple[Benchmark, ...]
    pinned: str

    @property
    def ask(self) -> str:
        """The prompt template of a question without options."""
        return self.parts[0].ask


def _solved(record: BenchmarkRecord) -> Question:
    r"""Parse a record of MATH: the expected answer is the content of the last `\boxed{}` in `solution`."""
    answers = boxed(record.text("solution"))
    if not answers or not answers[-1]:
        record.refuse("field `solution` has no `\\boxed{}` with an answer")
    return Question(record.text("problem"), expected=answers[-1], category=record.optional_text("type"))


_SUBJECTS = (
    "algebra", "counting_and_probability", "geometry", "intermediate_algebra", "number_theory", "prealgebra",
    "precalculus",
)  # fmt: skip
_TRAIN = {
    name: replace(BENCHMARKS[name], split="train")
    for name in ("gsm8k", "arc_easy", "arc_challenge", "commonsense_qa", "openbookqa")
}
_MATH = replace(BENCHMARKS["math_500"], name="math", hub="EleutherAI/hendrycks_math", split="train", read=_solved)
# Rows of the training splits: gsm8k 7,473, math 7,500, arc_easy 2,251, arc_challenge 1,119, commonsense_qa 9,741,
# openbookqa 4,957. MATH's commit is the one that several public projects pin; it was recorded without access to the
# Hub.
TRAINING_SETS: dict[str, TrainingSet] = {
    **{name: TrainingSet((part,), part.pinned) for name, part in _TRAIN.items()},
    "math": TrainingSet(
        tuple(replace(_MATH, subset=subject) for subject in _SUBJECTS), "21a5633873b6a120296cce3e2df9d5550074f4a3"
    ),
}
BAD_ROWS = 0.01  # share of a set's records that may lack an answer: MATH has a few boxes without braces


def training_problems(source: ProblemSource, seed: int, split: ProblemSplit) -> list[Problem]:
    """Read the problems of a training set, with the bare question; a hash of it separates the guard problems.

    Raises `ConfigError` for a revision that is not a full commit hash, and the errors of `read_hub` and `items_of`.
    """
    training_set = TRAINING_SETS[source.source]
    hub = training_set.parts[0].hub
    if source.revision and not COMMIT.fullmatch(source.revision):
        raise ConfigError(
            f"problems.revision: {source.revision!r} is not a full commit hash of {hub}; "
            f"leave it out to read {training_set.pinned}"
        )
    problems, first_index = list[Problem](), 0
    for part in training_set.parts:
        rows = list(read_hub(part, source.revision or training_set.pinned))
        for item in items_of(part, rows, seed, BAD_ROWS):
            # Only GSM8K's records have a worked solution separate from the answer.
            rationale = rows[item.index]["answer"].rpartition("####")[0].strip() if part.name == "gsm8k" else ""
            kind = cast(ProblemKind, item.kind)  # these sets have no items of other kinds
            index = first_index + item.index
            problems.append(Problem(part.name, index, item.question, item.expected, rationale, kind, item.options))
        first_index += len(rows)
    if len(training_set.parts) > 1:  # mix the subsets, or the first problems would all be of one subject
        random.Random(f"{source.source}/{seed}").shuffle(problems)
    # By a hash of the question: guard problems stay the same ones however many are asked for.
    return [p for p in problems if (problem_split(p.question) == "guard") == (split == "guard")]


def prompts_without_answers(source: ProblemSource, seed: int, split: ProblemSplit) -> Iterator[Problem]:
    """The prompts of `source.prompt_set` as problems without an answer, in the order of the set; none but for training.

    The file that is being read lies in a temporary folder. Raises the errors of `read_prompt_set`.
    """
    prompt_set = source.prompt_set
    if prompt_set is None or split != "train":
        return
    with tempfile.TemporaryDirectory(prefix="nautile-prompts-") as folder:
        for number, row in enumerate(read_prompt_set(prompt_set, seed, Path(folder))):
            if not isinstance(row, Prompt):
                continue  # the reason why a row has no prompt
            languages = prompt_set.languages
            if not languages or (detect_language(row.query) or languages[0]) in languages:
                yield Problem(prompt_set.name, number, row.query, "", "")


def prompt_of(problem: Problem, source: ProblemSource) -> str:
    """The prompt of a problem: its question as the benchmark of its source words it, with its options if it has any."""
    if problem.options:
        return multiple_choice(problem.question, problem.options)
    training_set = TRAINING_SETS.get(source.source)
    return training_set.ask.format(question=problem.question) if training_set else problem.question
