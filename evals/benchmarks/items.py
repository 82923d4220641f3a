"""A benchmark question ready to be asked and graded, and the choice of its grader."""

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

from nautile.common.errors import ConfigError, Retryable
from nautile.common.processes import time_limit
from nautile.common.text import first_line
from nautile.data.chat_template import ParsedReply
from nautile.data.sources.reasoning_gym import ProblemKind
from nautile.evals.graders import grading
from nautile.evals.graders.answer_forms import is_formula
from nautile.evals.graders.equivalence import grade_math
from nautile.evals.graders.grading import NOT_GRADED, Verdict
from nautile.evals.graders.instructions import grade_instructions
from nautile.evals.graders.notation import tidy, written_number
from nautile.evals.graders.numbers import parse_number

logger = logging.getLogger(__name__)
AnswerKind = ProblemKind | Literal["exact", "instructions"]
KINDS: tuple[AnswerKind, ...] = (*get_args(ProblemKind), "exact", "instructions")
# A benchmark's own grader: of the item and the reply, a verdict, or whether the answer is right (None: no verdict).
Grader = Callable[["BenchmarkItem", ParsedReply], Verdict | bool | None]
GRADER_S = 10.0  # seconds that such a grader may take for a reply
MOST_SHOWN = 120  # characters of an error in a line of the log
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
    (reasoning-gym), recorded beside the verdict. `guess`: accuracy of guessing without options. `grader`: the
    benchmark's own, in place of that of the kind. `screened`: whether the training text of the model that is asked was
    screened for the question; None where that is not asked (a model behind an endpoint, held-out problems). `sample`:
    the number of this answer among several sampled ones, from 0; None: the one answer by `evaluate.temperature`.
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
    rationale: str = ""
    guess: float = 0.0
    grader: Grader | None = field(default=None, compare=False, repr=False)
    own_check: Callable[[str], bool] | None = field(default=None, compare=False, repr=False)
    screened: bool | None = None
    sample: int | None = None

    @property
    def letters(self) -> str:
        return LETTERS[: len(self.options)]

    @property
    def chance(self) -> float:
        """Accuracy of guessing: among the options in the prompt, if there are some."""
        return 1 / len(self.options) if self.kind == "choice" and self.options else self.guess

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
    """Grade `reply` with the benchmark's own grader, else with that of the item's answer kind. It raises on no text.

    A grader that fails gives the verdict `NOT_GRADED`, and a scorer of the data set that fails gives None: what could
    not be graded is not wrong. Raises `ConfigError` and `Retryable`, which concern more than this reply.
    """
    try:
        graded = GradedReply(_own_grade(item.grader, item, reply), {}) if item.grader else _graded(item, reply)
    except (ConfigError, Retryable):
        raise
    except (Exception, SystemExit) as error:  # whatever a library or a plug-in raises on a text is no verdict on it
        logger.warning("%s %s was not graded: %s", item.benchmark, item.id, _reason(error))
        graded = GradedReply(NOT_GRADED, {})
    if item.own_check is not None:
        graded.details["own_scorer"] = _own_verdict(item.own_check, reply, item.id)
    return graded


def _own_verdict(own_check: Callable[[str], bool], reply: ParsedReply, name: str) -> bool | None:
    """The verdict of the data set's own scorer, which raises on None, and knows nothing of unfinished thinking."""
    if not reply.finished_thinking or not reply.answer:
        return False
    try:
        return own_check(reply.answer)
    except Exception as error:  # as in `grade`
        logger.warning("the data set's own scorer failed on %s: %s", name, _reason(error))
        return None


def _own_grade(grader: Grader, item: BenchmarkItem, reply: ParsedReply) -> Verdict:
    """The verdict of a benchmark's own grader, in bounded time. Raises for what is none."""
    with time_limit(GRADER_S):
        verdict = grader(item, reply)
    if isinstance(verdict, bool):
        problem = grading.issue_of(reply, [reply.answer] if reply.answer else [])
        return Verdict(verdict and problem is None, verdict, reply.answer, problem)
    known = get_args(grading.GradeIssue)
    if verdict is None or (
        isinstance(verdict, Verdict)
        and all(value is None or isinstance(value, bool) for value in (verdict.strict, verdict.lenient))
        and (verdict.parsed is None or isinstance(verdict.parsed, str))
        and (verdict.problem is None or verdict.problem in known)
    ):
        return verdict or NOT_GRADED
    raise TypeError(f"its grader returned {verdict!r}, and no verdict")


def _reason(error: BaseException) -> str:
    """An error in a line of the log. Some messages repeat the whole reply: "could not convert string to float"."""
    return f"{type(error).__name__}: {first_line(error)[:MOST_SHOWN]}"


def _graded(item: BenchmarkItem, reply: ParsedReply) -> GradedReply:
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
    return GradedReply(verdict, details)


def answer_kind(answer: str) -> ProblemKind:
    """The kind of an expected answer without options: a number, else "math" for LaTeX or a formula, else text.

    "3 1/2" and "1e3" are numbers, "(3, 4)" and "2x+3" formulas. A list without brackets is text, because the order of
    its parts may matter.
    """
    if _LATEX.search(answer):
        return "math"
    if (_PLAIN_NUMBER.fullmatch(answer) or written_number(tidy(answer)) is not None) and parse_number(answer):
        return "number"
    return "math" if is_formula(answer) else "text"


def multiple_choice(question: str, options: tuple[str, ...]) -> str:
    """Format the zero-shot prompt of a multiple-choice question."""
    lines = [f"{letter}. {option}" for letter, option in zip(LETTERS, options, strict=False)]
    return "\n".join([question, "", *lines, "", "Answer with the letter of the right option alone."])
