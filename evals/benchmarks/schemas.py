"""Parse benchmark records in the Hub's schemas into `Question`s.

The error of an invalid record names the benchmark, the record's position and the field.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from nautile.common.errors import ConfigError
from nautile.common.text import has_half_pair
from nautile.evals.graders.instructions import check_known
from nautile.evals.graders.numbers import parse_number

GPQA_COLUMNS = (
    *("Question", "Record ID", "High-level domain"),
    *("Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3"),
)


@dataclass(frozen=True)
class Question:
    """A parsed record. `correct`: index of the right option, if there are options. `rationale`: a worked solution."""

    text: str
    expected: str = ""
    id: str | None = None
    category: str | None = None
    options: tuple[str, ...] = ()
    correct: int | None = None
    aliases: tuple[str, ...] = ()
    instructions: tuple[str, ...] = ()
    arguments: tuple[Mapping[str, Any], ...] = ()
    rationale: str = ""


@dataclass(frozen=True)
class BenchmarkRecord:
    """A raw record with typed access to its fields. All methods raise `ConfigError` for an invalid field."""

    fields: Mapping[str, Any]
    where: str  # the name of the record in errors

    def text(self, name: str) -> str:
        """The field as text, which must not be empty."""
        value = self.value(name, str)
        self._check_encodable(name, value)
        return value.strip() or self.refuse(f"field `{name}` is empty")

    def value(self, name: str, *kinds: type) -> Any:
        """The field, which must be of one of `kinds`; a bool does not count as an int."""
        if name not in self.fields or self.fields[name] is None:
            self.refuse(f"field `{name}` is missing; there are {', '.join(map(str, self.fields)) or 'none'}")
        value = self.fields[name]
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            self.refuse(f"field `{name}` is {type(value).__name__}, not {' or '.join(kind.__name__ for kind in kinds)}")
        return value

    def optional_text(self, name: str) -> str | None:
        value = self.fields.get(name)
        return None if value in (None, "") else str(value)

    def sub(self, name: str) -> "BenchmarkRecord":
        return BenchmarkRecord(self.value(name, dict), f"{self.where}, `{name}`")

    def texts(self, name: str) -> tuple[str, ...]:
        values = list(self.value(name, list, tuple))
        if not values or not all(isinstance(value, str) for value in values):
            self.refuse(f"field `{name}` is not a list of texts")
        self._check_encodable(name, *values)
        return tuple(value.strip() for value in values)

    def option(self, options: Sequence[str], index: int, name: str) -> int:
        """Return `index` if it points into `options`, of which there must be at least two."""
        if len(options) < 2 or not 0 <= index < len(options):
            self.refuse(f"field `{name}` points to option {index}, but there are {len(options)} options")
        return index

    def _check_encodable(self, name: str, *texts: str) -> None:
        if any(map(has_half_pair, texts)):
            self.refuse(f"field `{name}` has half a surrogate pair, which no text in UTF-8 has")

    def refuse(self, reason: str) -> NoReturn:
        raise ConfigError(f"{self.where}: {reason}")


def labelled(record: BenchmarkRecord, question: str) -> Question:
    """Parse OpenBookQA, ARC and CommonsenseQA: `choices` {text, label}; `answerKey` is one of the labels.

    `question`: name of the field with the question.
    """
    choices = record.sub("choices")
    options, labels, key = choices.texts("text"), choices.texts("label"), record.text("answerKey")
    if len(labels) != len(options):
        record.refuse(f"`choices` has {len(labels)} labels for {len(options)} texts")
    if labels.count(key) > 1:
        record.refuse(f"`answerKey` {key!r} is the label of several options")
    if key not in labels:
        record.refuse(f"`answerKey` {key!r} is not among the labels {', '.join(labels)}")
    correct = record.option(options, labels.index(key), "answerKey")
    return Question(record.text(question), id=record.optional_text("id"), options=options, correct=correct)


def gsm8k(record: BenchmarkRecord) -> Question:
    """Parse GSM8K: the expected number follows `####` in `answer`."""
    # "… 2 + 3 = 5 apples. #### 5": without a worked solution before the mark it is no record of GSM8K.
    worked, marker, final = record.text("answer").rpartition("####")
    number = parse_number(final)
    if not marker or not worked or number is None:
        record.refuse("field `answer` does not end in `#### <number>`")
    return Question(record.text("question"), expected=str(number), rationale=worked.strip())


def piqa(record: BenchmarkRecord) -> Question:
    """Parse PIQA: `label` is 0 for `sol1` and 1 for `sol2`."""
    options = (record.text("sol1"), record.text("sol2"))
    return Question(
        record.text("goal"), options=options, correct=record.option(options, record.value("label", int), "label")
    )


def ifeval(record: BenchmarkRecord) -> Question:
    """Parse IFEval: `kwargs` has one mapping per instruction, in which keys of other instructions are None."""
    names, arguments = record.texts("instruction_id_list"), record.value("kwargs", list, tuple)
    check_known(names, arguments, record.where)
    # Arrow gives every mapping the keys of all others, with None where a record has none.
    kwargs_of = tuple({key: value for key, value in kwargs.items() if value is not None} for kwargs in arguments)
    return Question(record.text("prompt"), id=record.optional_text("key"), instructions=names, arguments=kwargs_of)


def trivia_qa(record: BenchmarkRecord) -> Question:
    """Parse TriviaQA: the accepted answers are `value`, `aliases` and `normalized_aliases`."""
    answer = record.sub("answer")
    value = answer.text("value")
    aliases = dict.fromkeys([value, *answer.texts("aliases"), *answer.texts("normalized_aliases")])
    accepted = tuple(alias for alias in aliases if alias)
    return Question(record.text("question"), expected=value, id=record.optional_text("question_id"), aliases=accepted)


def math_500(record: BenchmarkRecord) -> Question:
    """Parse MATH-500: `answer` is LaTeX."""
    return Question(
        record.text("problem"),
        expected=record.text("answer"),
        id=record.optional_text("unique_id"),
        category=record.optional_text("subject"),
    )


def mmlu(record: BenchmarkRecord) -> Question:
    """Parse MMLU: `answer` is an index into `choices`."""
    options = record.texts("choices")
    correct = record.option(options, record.value("answer", int), "answer")
    return Question(record.text("question"), category=record.optional_text("subject"), options=options, correct=correct)


def mmlu_pro(record: BenchmarkRecord) -> Question:
    """Parse MMLU-Pro: up to ten `options`; `answer` must be the letter of `answer_index`."""
    options = record.texts("options")
    correct = record.option(options, record.value("answer_index", int), "answer_index")
    if record.text("answer") != chr(ord("A") + correct):
        record.refuse(f"`answer` {record.text('answer')!r} is not the letter of `answer_index` {correct}")
    identity, category = record.optional_text("question_id"), record.optional_text("category")
    return Question(record.text("question"), id=identity, category=category, options=options, correct=correct)


def gpqa(record: BenchmarkRecord) -> Question:
    """Parse GPQA: the right answer comes first here; the seeded shuffle of the options moves it."""
    question, identity, domain, *answers = GPQA_COLUMNS
    options = tuple(record.text(name) for name in answers)
    return Question(
        record.text(question),
        id=record.optional_text(identity),
        category=record.optional_text(domain),
        options=options,
        correct=0,
    )


# Matches an option that refers to others by position; the options of such a question keep their published order.
POSITIONAL = re.compile(
    # "All of the above", "none of these", "both of them", "see below"
    r"\b(?:all|none|both|neither|any|either|two|some)\s+(?:of\s+)?(?:the|these|those|them)\b|\b(?:above|below)\b|"
    # "A and B", "(B) or (C)", "option D"
    r"(?<!\w)\(?[A-J]\)?,?\s+(?:and|or|nor|&)\s+\(?[A-J]\)?(?!\w)|\b(?:options?|choices?|answers?)\s+\(?[A-J]\b",
    re.IGNORECASE,
)
