"""A benchmark question ready to be asked and graded, and the choice of its grader."""

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from data.chat_template import ParsedReply
from data.sources.reasoning_gym import ProblemKind
from evals.graders import grading
from evals.graders.equivalence import grade_math
from evals.graders.grading import Verdict
from evals.graders.instructions import grade_instructions
from evals.graders.numbers import parse_number

AnswerKind = ProblemKind | Literal["exact", "instructions"]
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
# "-3", "$1,200", "3/4", "50%": all of the answer, not a number amid words.
_PLAIN_NUMBER = re.compile(r"-?[$€£]?-?[0-9][0-9.,/]*%?")
_LATEX = re.compile(r"\\[A-Za-z]|[$][^$]+[$]|[_^][{0-9A-Za-z]")  # a command, a formula between dollars, an index


@dataclass(frozen=True)
class BenchmarkItem:
    """A question with its expected answer. `index` is the position of the record in the reported split.

    `expected`: the number, letter, LaTeX, first alias or text. `question`: the question in the benchmark's own words,
    without the options and wording of `prompt`. `options`: the options of a "choice"; for other kinds, texts to compare
    by likelihood, `expected` among them, in addition to the generated answer. `own_check`: the scorer of the data set
    (reasoning-gym), recorded beside the verdict.
    """

    benchmark: str
    index: int
    id: str
    prompt: str
    kind: AnswerKind
    expected: str
    options: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    instructions: tuple[str, ...] = ()
    arguments: tuple[Mapping[str, Any], ...] = ()
    category: str | None = None
    question: str = ""
    own_check: Callable[[str], bool] | None = field(default=None, compare=False, repr=False)

    @property
    def letters(self) -> str:
        return LETTERS[: len(self.options)]

    @property
    def chance(self) -> float:
        """Accuracy of guessing among the options in the prompt; 0 without options."""
        return 1 / len(self.options) if self.kind == "choice" and self.options else 0.0

    @property
    def right_letter(self) -> str:
        """The letter of the right option."""
        return self.expected if self.kind == "choice" else self.letters[self.options.index(self.expected)]


@dataclass(frozen=True)
class GradedReply:
    """A verdict with details: `own_scorer` if the item has one, and for IFEval the result of each instruction."""

    verdict: Verdict
    details: dict[str, Any]


def grade(item: BenchmarkItem, reply: ParsedReply) -> GradedReply:
    """Grade `reply` with the grader of the item's answer kind. It raises on no text."""
    details: dict[str, Any] = {}
    match item.kind:
        case "number":
            verdict = grading.grade_number(reply, item.expected)
        case "choice":
            verdict = grading.grade_choice(reply, item.expected, item.letters, item.options)
        case "exact":
            verdict = grading.grade_exact(reply, item.aliases)
        case "text":
            verdict = grading.grade_text(reply, item.expected)
        case "math":
            verdict = grade_math(reply, item.expected)
        case "instructions":
            verdict, results = grade_instructions(reply, item.prompt, item.instructions, item.arguments)
            details["instructions"] = [asdict(result) for result in results]
    # The generator's scorer raises on None, and knows nothing of unfinished thinking.
    if item.own_check is not None:
        details["own_scorer"] = item.own_check(reply.answer) if reply.finished_thinking and reply.answer else False
    return GradedReply(verdict, details)


def answer_kind(answer: str) -> ProblemKind:
    """The kind of an expected answer without options: a number, else "math" if it contains LaTeX, else text."""
    if _PLAIN_NUMBER.fullmatch(answer) and parse_number(answer):
        return "number"
    return "math" if _LATEX.search(answer) else "text"


def multiple_choice(question: str, options: tuple[str, ...]) -> str:
    """Format the zero-shot prompt of a multiple-choice question."""
    lines = [f"{letter}. {option}" for letter, option in zip(LETTERS, options, strict=False)]
    return "\n".join([question, "", *lines, "", "Answer with the letter of the right option alone."])
