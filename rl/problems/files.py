"""Read and check problem files: JSON lines of {question, answer} and optional {task, rationale, kind, options}.

The format is in docs/problems.md. Rows are checked by hand, so that a message can name the file, line and field.
"""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, get_args

from nautile.common.errors import ConfigError
from nautile.common.files import read_bounded_text
from nautile.configs.training import ProblemsConfig, ProblemSource
from nautile.data.distill.prompts import check_prompt_set
from nautile.data.reply_objects import reply_objects
from nautile.data.sources.reasoning_gym import Problem, ProblemKind
from nautile.evals.benchmarks.items import LETTERS, answer_kind
from nautile.evals.graders.choices import plain
from nautile.evals.graders.equivalence import shared
from nautile.evals.graders.numbers import parse_number

KINDS = get_args(ProblemKind)
LARGEST = 2 * 2**30  # bytes of a file
ONLY_ALIGN = "this stage rewards right answers (only [align] takes such problems: its judge reads the question alone)"


def read_problems(source: ProblemSource) -> Iterator[Problem]:
    """Read the problems of a file in order, without repeated questions; `answer` is empty where a row has none.

    Raises `ConfigError` with the line at fault. "math" answers are not parsed here, because that takes some 20 ms each:
    see `check_expressions`.
    """
    if not source.path:
        raise ConfigError("problems.path: source 'jsonl' needs the file to read")
    path, known_questions = Path(source.path), set[str]()
    try:
        lines = read_bounded_text(path, LARGEST).split("\n")  # not `splitlines`: a question may hold U+2028
    except ConfigError as error:
        raise ConfigError(f"problems.path: {error}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        problem = _Row(path, number, line).problem()
        # With the options, because many multiple-choice sets ask the same question with others.
        question = f"{problem.question}\n{problem.options}"
        if question not in known_questions:
            known_questions.add(question)
            yield problem


def refuse_unanswered(source: ProblemSource, problem: Problem) -> NoReturn:
    """Raise the `ConfigError` for a problem without an answer, in a stage that has to check answers."""
    where = f"{source.path}:{problem.index + 1}" if source.source == "jsonl" else source.source
    raise ConfigError(f"problems.path: {where}: no `answer`: {ONLY_ALIGN}")


def check_files(config: ProblemsConfig, stage: str, field: str = "problems") -> None:
    """Validate the problem files of `stage.field` before a run; raises `ConfigError` for the first bad row.

    A prompt set is checked as far as that needs no request, and refused in a stage that rewards right answers.
    """
    for number, source in enumerate(config.sources or (config,)):
        place = f"{stage}.{field}{f'.sources[{number}]' if config.sources else ''}"
        if source.prompt_set is not None:
            if stage != "align":
                raise ConfigError(f"{place}.source: its prompts have no answers: {ONLY_ALIGN}")
            check_prompt_set(source.prompt_set)
        if source.source != "jsonl":
            continue
        try:
            for problem in read_problems(source):
                if not problem.answer and stage != "align":
                    refuse_unanswered(source, problem)
        except ConfigError as error:
            reason = str(error).removeprefix("problems.path: ")
            raise ConfigError(f"{place}.path: {reason}") from None


def check_expressions(source: ProblemSource, problems: Sequence[Problem]) -> None:
    """Raise `ConfigError` for the first "math" answer that cannot be read: no reply could equal it by value."""
    for problem in problems:
        kind = problem.kind or answer_kind(problem.answer)
        if problem.answer and kind == "math" and not shared().reads(problem.answer):
            raise ConfigError(
                f"{source.path}:{problem.index + 1}: `answer` {problem.answer!r} is not an expression; give the row "
                f'`"kind": "text"` to compare its answer as text'
            )


class _Row:
    """One line of a problem file. Its methods raise `ConfigError` with the file and line."""

    def __init__(self, path: Path, number: int, line: str) -> None:
        self._where, self._number = f"{path}:{number}", number
        try:
            self._fields = json.loads(line)
        except (ValueError, RecursionError) as error:
            self._refuse(f"not a line of JSON ({error})")
        if not isinstance(self._fields, dict):
            self._refuse("not an object with `question` and `answer`")
        # The same line read as its writer may have meant it: "\\frac" in JSON is a form feed and "rac".
        # Only a line with a backslash has an escape, and reading a line so takes several times as long.
        objects = reply_objects(line) if "\\" in line else []
        meant = objects[0].value if objects else {}
        for name, value in self._fields.items():
            if isinstance(value, str) and meant.get(name, value) != value:
                self._refuse(f"`{name}` begins an escape of JSON where LaTeX is meant: write its backslashes twice")

    def problem(self) -> Problem:
        """Check the fields and make the problem."""
        question, answer = self._text("question").strip(), self._text("answer").strip()
        if not question:
            self._refuse("no `question`")
        options, kind = self._options(), self._fields.get("kind")
        if kind is not None and kind not in KINDS:
            self._refuse(f"`kind` is {kind!r}, and must be one of {', '.join(KINDS)}")
        if options and kind not in (None, "choice"):
            self._refuse(f"`options` belong to the kind choice, and `kind` is {kind!r}")
        if kind == "choice" and not options:
            self._refuse("no `options`, which a choice is between")
        if options:
            kind, answer = "choice", self._letter(answer, options)
        if answer:
            self._check(kind or answer_kind(answer), answer)
        task, rationale = self._text("task") or "file", self._text("rationale")
        return Problem(task, self._number - 1, question, answer, rationale, kind, options)

    def _text(self, name: str) -> str:
        value = self._fields.get(name)
        # An answer may be a number in the file; true and false are not numbers here.
        if name == "answer" and isinstance(value, int | float) and not isinstance(value, bool):
            return str(value)
        if value is not None and not isinstance(value, str):
            self._refuse(f"`{name}` is {value!r}, and must be text")
        return value or ""

    def _options(self) -> tuple[str, ...]:
        options: Any = self._fields.get("options")
        if options is None:
            return ()
        texts = [option for option in options if isinstance(option, str)] if isinstance(options, list) else []
        if not 2 <= len(texts) <= len(LETTERS) or len({plain(text) for text in texts}) != len(options):
            self._refuse(f"`options` must be two to {len(LETTERS)} different texts")
        return tuple(text.strip() for text in texts)

    def _letter(self, answer: str, options: tuple[str, ...]) -> str:
        """The letter of the right option, which a file gives as the letter or as the text; "" without an answer."""
        letters = dict(zip(map(str.casefold, LETTERS), LETTERS[: len(options)], strict=False))
        texts = {plain(option): letter for option, letter in zip(options, LETTERS, strict=False)}
        stated = plain(answer)
        if answer and stated not in letters and stated not in texts:
            last = LETTERS[len(options) - 1]
            self._refuse(f"`answer` {answer!r} is neither a letter from A to {last} nor the text of an option")
        return letters.get(stated) or texts.get(stated, "") if answer else ""

    def _check(self, kind: ProblemKind, answer: str) -> None:
        """Refuse an answer that does not parse as its kind, because no reply could equal it."""
        if kind == "number" and parse_number(answer) is None:
            self._refuse(f"`answer` {answer!r} is not one number")
        if kind == "text" and not plain(answer):
            self._refuse(f"`answer` {answer!r} has no word or number to compare")
        # A cheap check of each row; `check_expressions` parses those that are used.
        braces = re.sub(r"\\[{}]|[^{}]", "", answer)  # without escaped ones, which LaTeX prints
        if kind == "math" and braces.count("{") != braces.count("}"):
            self._refuse(f"`answer` {answer!r} has unbalanced braces")

    def _refuse(self, reason: str) -> NoReturn:
        raise ConfigError(f"{self._where}: {reason}")
